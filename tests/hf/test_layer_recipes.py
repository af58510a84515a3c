"""Models with a recipe per layer: each layer as its own recipe says, in all that models do."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

import isentrope as ise
from isentrope.hf.capture import capture_attention
from isentrope.hf.layer import get_layer
from tests.fixtures.dense import Dense, dense, infoscale, rerope, window_of
from tests.fixtures.dense_llama import (
    dense_logits,
    first_and_near,
    leaky,
    logn,
    selfextend,
    streaming,
    theta,
    yarn_theta,
)
from tests.fixtures.dense_llama import infoscale as dense_infoscale
from tests.fixtures.dense_llama import rerope as dense_rerope
from tests.fixtures.families import FAMILIES, LONG, close, logits
from tests.fixtures.generation import EXACT, LENGTH, ROUNDED, extended, greedy, in_chunks, padded, rows_of, whole
from tests.fixtures.models import llama, tokens

FOUR = {"num_hidden_layers": 4}
MIXED = "layers:0=infoscale;1=rerope:window=32+logn;2=yarn:factor=4;3=sink:sinks=4,size=24"
# each with what the dense oracle is given for the four layers
RECIPES = {
    MIXED: [
        {"theta": theta(), "tau": dense_infoscale},
        {"theta": theta(), "distance": dense_rerope(32), "tau": logn},
        {"theta": yarn_theta()},
        {"theta": theta(), "distance": streaming, "seen": first_and_near(4, 24)},
    ],
    "layers:0,2=pi:factor=2;*=plain": [{"theta": theta() / (2 - i % 2)} for i in range(4)],
    "layers:0=pi:factor=2+infoscale;1-=pi:factor=2": [
        {"theta": theta() / 2, "tau": dense_infoscale},
        *[{"theta": theta() / 2}] * 3,
    ],
    "layers:0=nope+window:size=24;1=cosine:alpha=16;2-3=leakyrerope:window=32": [
        {"seen": first_and_near(0, 24)},
        {"theta": theta(), "alpha": 16},
        *[{"theta": theta(), "distance": leaky}] * 2,
    ],
    "layers:0-1=selfextend:window=32,group=4;2=plain;3=rerope:window=48": [
        *[{"theta": theta(), "distance": selfextend}] * 2,
        {"theta": theta()},
        {"theta": theta(), "distance": dense_rerope(48)},
    ],
}
some_recipes = pytest.mark.parametrize("text", [MIXED, "layers:0,2=pi:factor=2;*=plain"])


def four_layers(text):
    return extended(text, llama(**FOUR))


@pytest.mark.parametrize("text", RECIPES)
@pytest.mark.filterwarnings("ignore:.*not trained with")
def test_layers_against_pairs_written_out(text):
    ids = tokens(1, LENGTH)
    plain = llama(**FOUR).double()
    with torch.no_grad():
        expected = dense_logits(plain, ids, by_layer=RECIPES[text])
    model = four_layers(text)
    assert_close(whole(model, ids), expected, **ROUNDED)
    ise.restore(model)
    assert torch.equal(whole(model, ids), whole(plain, ids))


def test_gradients_against_pairs_written_out():
    ids = tokens(1, 80)
    model, plain = four_layers(MIXED), llama(**FOUR).double()
    model(ids).logits.square().sum().backward()
    dense_logits(plain, ids, by_layer=RECIPES[MIXED]).square().sum().backward()
    for ours, theirs in zip(model.model.layers, plain.model.layers, strict=True):
        expected = theirs.self_attn.k_proj.weight.grad
        assert_close(ours.self_attn.k_proj.weight.grad, expected, rtol=0, atol=1e-4 * expected.abs().max().item())


@some_recipes
def test_prefill_in_chunks_and_token_by_token(text):
    model, ids = four_layers(text), tokens(2, LENGTH)
    sizes = (1, 1, 25, 40, 20, *(1,) * (LENGTH - 87))
    assert_close(in_chunks(model, ids, sizes), whole(model, ids), **ROUNDED)


@some_recipes
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows(text, side):
    model, rows = four_layers(text), rows_of(70, 110, 90)
    ids, mask, positions = padded(rows, side)
    with torch.no_grad():
        together = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    for out, seen, row in zip(together, mask.bool(), rows, strict=True):
        assert_close(out[seen], whole(model, row[None])[0], **ROUNDED)


def test_generation_with_and_without_a_cache():
    model, ids = four_layers(MIXED), tokens(2, 60)
    assert torch.equal(greedy(model, ids, 8), greedy(model, ids, 8, use_cache=False))


@pytest.mark.parametrize("text", ["layers:0=rerope:window=16;1=infoscale", "layers:0=rerope:window=16;*=plain"])
def test_short_texts_are_the_plain_models_bit_for_bit(text):
    model, ids = llama().bfloat16(), tokens(1, 12)
    before = whole(model, ids)
    ise.extend(model, text)
    assert torch.equal(whole(model, ids), before)
    assert not torch.equal(whole(model, tokens(1, 90)), whole(ise.restore(copy.deepcopy(model)), tokens(1, 90)))


def test_the_same_recipe_everywhere_is_that_recipe():
    ids = tokens(1, LENGTH)
    one = extended("rerope:window=32+share:beta=1", llama(**FOUR))
    each = four_layers("layers:0=rerope:window=32+share:beta=1;1-=rerope:window=32+share:beta=1")
    assert torch.equal(whole(one, ids), whole(each, ids))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("dualchunk", "rerope:window=16+retrieve:blocks=1,size=8"),
        ("jetlong", "adaptive"),
        ("lampe", "scaleinvariant"),
        ("resonance", "cope"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*not trained with")
def test_layers_put_together_by_hand(first, second):
    """Each layer as in a model where it is the only one, beside a layer that has it cache raw keys."""
    ids, other = tokens(1, LENGTH), "rerope:window=9"
    both = extended(f"layers:0={first};1={second}")
    by_hand = extended(f"layers:0={other};1=rerope:window=8")
    for index, text in enumerate((f"layers:0={first};1={other}", f"layers:0={other};1={second}")):
        own, donor = (get_layer(model.model.layers[index].self_attn) for model in (by_hand, extended(text)))
        own.recipe, own.parts = donor.recipe, donor.parts
    assert_close(whole(both, ids), whole(by_hand, ids), **EXACT)


def test_layers_with_windows_of_their_own():
    """Gemma's windowed layers keep their frequencies and windows; temperatures and masks are theirs to take."""
    family = FAMILIES["gemma3"]
    text = "layers:0=window:size=24+infoscale:train_length=16;1=rerope:window=32+infoscale:train_length=64"
    recipes = [Dense(sees=window_of(24), tau=infoscale(16)), Dense(rerope(32), tau=infoscale(64))]
    model, ids = family.model().double(), tokens(1, LONG)
    with dense(family, copy.deepcopy(model), recipes) as oracle:
        expected = logits(oracle, ids)
    ise.extend(model, text)
    close(logits(model, ids), expected, 1e-6)
    windowed, full = ise.describe(model).layers
    assert windowed.position == "the model's own" and windowed.cache == "rotated keys"
    assert windowed.mask == "24 keys up to the query" and full.mask == "every key up to the query"
    assert full.position == "rerope:window=32" and full.cache == "raw keys"
    close(in_chunks(model, ids, (60, 30, *(1,) * (LONG - 90))), expected, 1e-6)


def test_description_groups_equal_layers():
    page = str(ise.describe(four_layers("layers:0,1,3=rerope:window=32+infoscale;2=plain")))
    assert "llama under layers:0-1,3=rerope:window=32+infoscale:train_length=64;2=plain" in page
    assert "layers 0 … 1, 3:\n  position  rerope:window=32;" in page
    assert "layer 2:\n  position  the model's own;" in page and page.count("raw keys in the cache") == 2
    pages = str(ise.describe(four_layers("layers:0=pi:factor=2+infoscale;1-=pi:factor=2")))
    assert pages.count("position  pi:factor=2") == 2 and pages.count("rotated keys in the cache") == 2


def test_saved_and_loaded(tmp_path):
    ids, model = tokens(1, LENGTH), ise.extend(llama(**FOUR), MIXED)
    expected, recipe = whole(model, ids), str(ise.describe(model).recipe)
    assert recipe == (
        "layers:0=infoscale:train_length=64;1=rerope:window=32+logn:train_length=64;"
        "2=yarn:factor=4,original_length=64;3=sink:size=24"
    )
    model.save_pretrained(tmp_path)
    card = (tmp_path / "README.md").read_text()
    assert recipe in card and "| `yarn:factor=4,original_length=64` |" in card and "| `logn:train_length=64` |" in card
    for loaded in (ise.load(tmp_path), AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)):
        assert torch.equal(whole(loaded, ids), expected) and ise.describe(loaded).recipe == recipe
    with pytest.raises(ValueError, match=r"has no form of its own in transformers: its layers differ; save it"):
        ise.export(model, tmp_path / "native")
    folder = ise.export(model, tmp_path / "remote", remote_code=True)
    assert torch.equal(whole(ise.load(folder), ids), expected)


@pytest.mark.filterwarnings("ignore:.*not trained with")
def test_learned_parts_belong_to_their_layers(tmp_path):
    text = "layers:0=ssmax;1-2=clex+infoscale;3=plain"
    model, ids = four_layers(text), tokens(1, LENGTH)
    learned = {name for name, _ in model.named_parameters() if "isentrope" in name}
    assert {name.partition("isentrope")[0] for name in learned} == {"", "model.layers.0.self_attn."}
    model(ids).logits.square().sum().backward()
    assert all(x.grad.abs().max() > 0 for name, x in model.named_parameters() if name in learned and "bias" not in name)
    model.save_pretrained(tmp_path)
    assert_close(whole(ise.load(tmp_path, dtype=torch.float64), ids), whole(model, ids), **EXACT)


def test_streaming_keeps_what_the_widest_layer_needs():
    model, ids = four_layers("layers:0=sink:sinks=2,size=24;1=sink:sinks=4,size=16+infoscale:train_length=8;*=" + (
        "rerope:window=12+lambda:sinks=3,window=20"
    )), tokens(1, LENGTH)  # fmt: skip
    cache = ise.StreamingCache(model)
    streamed = in_chunks(model, ids, (20, 50, *(1,) * (LENGTH - 70)), cache)
    assert_close(streamed, whole(model, ids), **ROUNDED)
    assert {layer.keys.shape[2] for layer in cache.layers} == {4 + 24 - 1}
    with pytest.raises(ValueError, match="in every layer, got 'layers:0=sink"):
        ise.StreamingCache(four_layers("layers:0=sink:sinks=2,size=24;*=plain"))


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("layers:0=rope", "layers without a recipe: 1; add them"),
        ("layers:0-1=rope;2-=nope", "layers that the model does not have: 2-; its own are 0 … 1"),
        ("layers:0=clex;1=clex", "expected one position method that learns"),
        ("layers:0=nope;1=rope", r"was not trained with nope,"),
        (ise.LayerRecipes({"*": ise.Recipe(temperature=ise.Power(64, (0.1, 0.2)))}), "has 4 attention heads"),
        (ise.Recipe(temperature=ise.Fitted((64, 128), [[[1, 2]]] * 3)), "has 2 layers, the table of fitted.* has more"),
        (ise.Recipe(temperature=ise.Power(64, [[0.1] * 4] * 3)), "has 2 layers, the table of power.* has more"),
        (ise.Recipe(position=ise.ReRoPE(9), share=ise.Share([[1.0] * 4] * 3)), "has 2 layers, the table of share"),
        (ise.Recipe(temperature=ise.Power(64, [[0.1] * 4])), "expected a layer in 0 … 0, got 1"),
    ],
)
def test_refusals(recipe, message):
    model = llama()
    with pytest.raises(ValueError, match=message):
        ise.extend(model, recipe)
    assert torch.equal(whole(model, tokens(1, 70)), whole(llama(), tokens(1, 70)))


def test_adapters_keep_the_recipe(tmp_path):
    ids = tokens(1, LENGTH)
    llama(**FOUR).save_pretrained(tmp_path / "base")
    base = ise.extend(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), MIXED)
    lora = LoraConfig(r=2, task_type="CAUSAL_LM", target_modules=["q_proj"], init_lora_weights=False)
    model = get_peft_model(base, lora).eval()
    model.save_pretrained(tmp_path / "adapter")
    assert torch.equal(whole(ise.load(tmp_path / "adapter"), ids), whole(model, ids))


def test_inspection_sees_each_layer_as_it_attends():
    seen = {}
    model = four_layers(MIXED)
    with capture_attention(model, lambda call: seen.setdefault(call.index, call)):
        whole(model, tokens(1, LENGTH))
    assert [str(seen[i].recipe.without_far_keys()) for i in range(4)] == [
        "infoscale:train_length=64", "logn:train_length=64", "plain", "sink:size=24"
    ]  # fmt: skip
    assert all(call.applied_rope is None for call in seen.values())


def test_the_guide_runs(capsys):
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "extend.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"## A recipe per layer\n\n```python\n(.*?)```", guide, re.DOTALL)
    exec(code, {})
    page = capsys.readouterr().out
    assert "layers 0 … 2:" in page and "layers 3 … 5:\n  position  rerope:window=128" in page
