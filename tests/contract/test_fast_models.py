"""Decoding with whole models: layers that run the launch of an earlier layer say what each would say by itself."""

from __future__ import annotations

import copy
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

import isentrope as ise
from isentrope.core import compile as compiled
from isentrope.hf import decoding, layer
from isentrope.recipe import Recipe
from tests.contract.test_fast import interprets
from tests.fixtures.turns import first_of, in_turns

RECIPES = (
    "rerope:window=6+infoscale",
    "rerope:window=6+logn:keys=far+share:beta=0.75",
    "selfextend:window=6,group=3",
    "infoscale",
)
LAYERS, VOCABULARY = 2, 40


def make_model(text=None, seed=0, layers=LAYERS, heads=(3, 1)):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=48, intermediate_size=24, num_hidden_layers=layers, head_dim=32,
        num_attention_heads=heads[0], num_key_value_heads=heads[1], max_position_embeddings=16, bos_token_id=1,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    return model if text is None else ise.extend(model, text)


def make_ids(batch, length, seed=1):
    return torch.randint(2, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def count_launches(monkeypatch):
    """Count the layers that prepare a launch, and all that run one."""
    counts = {"prepared": 0, "run": 0}
    for name, key in (("prepare_launch", "prepared"), ("run_launch", "run"), ("run_earlier", "run")):
        function = getattr(decoding, name)

        def counted(*given, function=function, key=key):
            result = function(*given)
            counts[key] += result is not None and result is not False
            return result

        monkeypatch.setattr(layer, name, counted)
    return counts


def run_alone(monkeypatch):
    """Have every layer work out its call by itself."""
    monkeypatch.setattr(layer, "takes_launch", lambda *given: False)


@contextmanager
def without_kernels():
    """Leave prompts, and what steps are compared with, to other backends: the interpreter is slow."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "TRITON_INTERPRETED", False)
        yield


def read_prompt(model, ids, steps, cache, **options):
    """Fill a cache with all but the last tokens; a prompt prepares no launch, so that runs start from copies of it."""
    prompt = {key: mask[:, :-steps] for key, mask in options.items()}
    with without_kernels():
        model(ids[:, :-steps], past_key_values=cache, **prompt)
    return cache


def decode(model, ids, steps, filled, **options):
    """Logits of the last tokens, one by one after a copy of a cache with those before."""
    outputs, cache = [], copy.deepcopy(filled)
    for n in range(ids.shape[1] - steps, ids.shape[1]):
        grown = {key: mask[:, : n + 1] for key, mask in options.items()}
        outputs.append(model(ids[:, n : n + 1], past_key_values=cache, **grown).logits[:, -1])
    return torch.stack(outputs, 1)


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


@interprets
@pytest.mark.parametrize(("text", "cache"), in_turns(RECIPES, ["dynamic", "static"]))
def test_interpreted_layers_share_a_launch(text, cache, monkeypatch):
    model, ids = make_model(text), make_ids(2, 24)
    made = DynamicCache(config=model.config) if cache == "dynamic" else StaticCache(model.config, max_cache_len=32)
    counts = count_launches(monkeypatch)
    filled = read_prompt(model, ids, 3, made)
    together = decode(model, ids, 3, filled)
    assert counts == {"prepared": 3, "run": 3 * LAYERS}
    run_alone(monkeypatch)
    assert torch.equal(together, decode(model, ids, 3, filled))
    with without_kernels():
        whole = model(ids, use_cache=False).logits
    torch.testing.assert_close(together, whole[:, 21:], rtol=1e-4, atol=1e-4)


@interprets
@pytest.mark.parametrize("text", first_of(1, RECIPES[1::-1]))
def test_interpreted_padded_rows_share_a_launch(text, monkeypatch):
    model, ids = make_model(text), make_ids(2, 24)
    mask = torch.ones(2, 24, dtype=torch.int64)
    mask[0, :5] = 0
    filled = read_prompt(model, ids, 2, DynamicCache(config=model.config), attention_mask=mask)
    counts = count_launches(monkeypatch)
    together = decode(model, ids, 2, filled, attention_mask=mask)
    assert counts["run"] == 2 * LAYERS
    run_alone(monkeypatch)
    assert torch.equal(together, decode(model, ids, 2, filled, attention_mask=mask))


@interprets
def test_interpreted_models_and_batches_take_turns(monkeypatch):
    """Two models, other batches, other lengths, step by step: none sees what another has prepared."""
    models = [make_model(text, seed) for seed, text in enumerate(RECIPES[:2])]
    models.append(copy.deepcopy(models[0]))
    models.append(make_model(RECIPES[0], 3, heads=(4, 4)))
    sizes = ((1, 20), (3, 20), (1, 23), (2, 20))

    texts = [make_ids(batch, length, n) for n, (batch, length) in enumerate(sizes)]
    prompts = [
        read_prompt(model, ids, 2, DynamicCache(config=model.config)) for model, ids in zip(models, texts, strict=True)
    ]

    def step(model, cache, ids, n):
        return model(ids[:, n - 2 :][:, :1], past_key_values=cache).logits[:, -1]

    turns = list(zip(models, copy.deepcopy(prompts), texts, strict=True))
    mixed = [[step(*turn, n) for turn in turns] for n in range(2)]
    run_alone(monkeypatch)
    for n, turn in enumerate(zip(models, prompts, texts, strict=True)):
        assert all(torch.equal(row[n], step(*turn, m)) for m, row in enumerate(mixed))


@interprets
def test_interpreted_cropped_caches_and_changed_frequencies(monkeypatch):
    """The same tokens at the same length once more, after the cache was cropped and after frequencies have changed."""
    model, ids = make_model(RECIPES[0]), make_ids(1, 21)

    filled = read_prompt(model, ids, 1, DynamicCache(config=model.config))

    def run(change):
        cache, outputs = copy.deepcopy(filled), []
        for factor in (1.0, 1.0, change):
            model.model.rotary_emb.inv_freq *= factor
            outputs.append(model(ids[:, 20:], past_key_values=cache).logits)
            cache.crop(-1)
        model.model.rotary_emb.inv_freq /= change
        return outputs

    first, again, changed = run(0.5)
    assert torch.equal(first, again) and not torch.allclose(first, changed)
    run_alone(monkeypatch)
    assert all(map(torch.equal, (first, again, changed), run(0.5)))


@interprets
def test_interpreted_layers_with_recipes_of_their_own(monkeypatch):
    """Laws with a table of layers: each prepares a launch of its own, and none runs another's."""
    betas = tuple((0.1 * (1 + n),) * 6 for n in range(LAYERS))
    recipe = Recipe.parse("rerope:window=6", train_length=16)
    recipe = ise.Recipe(position=recipe.position, share=ise.Share(beta=betas, reference=4))
    model, ids = make_model(recipe, heads=(6, 2)), make_ids(1, 22)
    counts = count_launches(monkeypatch)
    filled = read_prompt(model, ids, 2, DynamicCache(config=model.config))
    together = decode(model, ids, 2, filled)
    assert counts == {"prepared": 2 * LAYERS, "run": 2 * LAYERS}
    run_alone(monkeypatch)
    assert torch.equal(together, decode(model, ids, 2, filled))


@interprets
@pytest.mark.parametrize("how", ["beams", "assisted", "static"])
def test_interpreted_generation_is_the_same(how, monkeypatch):
    model, ids = make_model(RECIPES[1]), make_ids(2 if how == "static" else 1, 18)
    options = {
        "beams": {"num_beams": 3},
        "assisted": {"assistant_model": make_model(RECIPES[0], 5, layers=1)},
        "static": {"cache_implementation": "static", "disable_compile": True},
    }[how]

    def run():
        options_now = copy.copy(options)
        return model.generate(ids, max_new_tokens=3, do_sample=False, **options_now)

    counts = count_launches(monkeypatch)
    together = run()
    assert counts["run"] > counts["prepared"] > 0
    run_alone(monkeypatch)
    assert torch.equal(together, run())


@interprets
def test_interpreted_layers_that_stop_halfway_leave_nothing_behind(monkeypatch):
    model, ids = make_model(RECIPES[0]), make_ids(1, 21)
    cache = read_prompt(model, ids, 1, DynamicCache(config=model.config))
    counts = count_launches(monkeypatch)
    hook = model.model.layers[1].register_forward_pre_hook(lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(ids[:, 20:], past_key_values=cache)
    hook.remove()
    assert counts == {"prepared": 1, "run": 1}
    cache.layers[0].crop(-1)
    model(ids[:, 20:], past_key_values=cache)
    assert counts == {"prepared": 2, "run": 1 + LAYERS}


def test_a_launch_is_kept_only_for_layers_in_their_order():
    entries = []
    layouts = layer.LayoutCache(9)
    shape, compute = (1, 1, 20), object
    for index in (0, 1, 2, 2, 4, 1, 3):
        entry = layouts.get((index, "kind"), shape, None, None, compute)
        entries.append((len(entry.launches), entry))
        entry.launches[index] = index
    assert [count for count, _ in entries] == [0, 1, 2, 0, 1, 0, 1]
    assert all(one is other for (_, one), (_, other) in pairwise(entries))
    assert not layouts.get((4, "kind"), (1, 1, 21), None, None, compute).launches
    assert not layouts.get((5, "other kind"), (1, 1, 21), None, None, compute).launches
