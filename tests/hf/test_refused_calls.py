"""Calls of an extended model, and files, that are refused with the reason."""

from __future__ import annotations

import copy
import json
import warnings

import pytest
import torch
from peft import PrefixTuningConfig, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

import isentrope as ise
from tests.fixtures.families import FAMILIES, logits
from tests.fixtures.models import TRAINED, llama, tokens
from tests.fixtures.refusals import LONG, refused_at_call


class Wrapper(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args, **options):
        return self.module(*args, **options)


CALLED = ["infoscale:train_length=64", "rerope:window=32", "window:size=16"]


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.int64], ids=str)
@pytest.mark.parametrize("length", [3, 20, LONG])
@pytest.mark.parametrize("recipe", CALLED)
def test_mask_for_each_pair(recipe, length, dtype):
    mask = torch.ones(1, 1, length, length).tril().to(dtype)
    model = ise.extend(llama(), recipe)
    refused_at_call(model, r"attention_mask: expected .*\(batch, tokens\)", tokens(1, length), attention_mask=mask)


def test_mask_for_each_pair_of_an_encoder():
    model = ise.extend(FAMILIES["bert"].model(), "infoscale:train_length=64")
    mask = torch.ones(1, 1, 20, 20).bool()
    refused_at_call(model, r"attention_mask: expected .*\(batch, tokens\)", tokens(1, 20), attention_mask=mask)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64], ids=str)
@pytest.mark.parametrize("length", [20, LONG])
@pytest.mark.parametrize("recipe", CALLED)
def test_padding_between_tokens(recipe, length, dtype):
    mask = torch.ones(2, length, dtype=dtype)
    mask[1, 7:9] = 0
    model = ise.extend(llama(), recipe)
    refused_at_call(model, "attention_mask: .*between tokens", tokens(2, length), attention_mask=mask)


@pytest.mark.parametrize("step", [0, -5])
@pytest.mark.parametrize("masked", [False, True])
def test_positions_that_do_not_go_up(step, masked):
    """Of two tokens at one position the first would see the second; rows are packed only without a cache and a mask."""
    model, ids = ise.extend(llama(), "rerope:window=32"), tokens(1, 20)
    positions = torch.arange(20)[None] + (step - 1) * (torch.arange(20) >= 10)
    given = {"attention_mask": torch.ones_like(ids)} if masked else {}
    refused_at_call(model, "position_ids: .*use_cache=False", ids, position_ids=positions, **given)
    logits(model, ids, position_ids=positions, use_cache=False)


def test_positions_that_jump_where_layers_have_windows():
    """transformers' windows count tokens; positions would make them another window."""
    model, ids = FAMILIES["mistral-windowed"].model(), tokens(1, 20)
    positions = torch.arange(20)[None] + 9 * (torch.arange(20) >= 10)
    ise.extend(model, "rerope:window=32")
    refused_at_call(model, "position_ids: .*a window, which counts tokens", ids, position_ids=positions)
    logits(model, ids, position_ids=positions, use_cache=False)  # two packed texts, to transformers


def test_generating_from_prompts_padded_on_the_right():
    """The first new token comes after padding; the error says where padding belongs."""
    mask = torch.ones(2, 20, dtype=torch.int64)
    mask[1, 15:] = 0
    model = ise.extend(llama(), "rerope:window=32")
    with pytest.raises(ValueError, match="padding_side='left'"):
        model.generate(tokens(2, 20), attention_mask=mask, max_new_tokens=3, pad_token_id=0)


REROTATING = ["rerope:window=32", "yarn:factor=4"]  # raw keys, other frequencies


@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
@pytest.mark.parametrize("recipe", REROTATING)
def test_a_cache_of_the_plain_model(recipe, kind):
    """Its keys are rotated by the plain model; read as the recipe's they would be rotated twice."""
    model, ids = llama(), tokens(1, 20)
    cache = kind(config=model.config, **({"max_cache_len": 30} if kind is StaticCache else {}))
    logits(model, ids, past_key_values=cache)
    ise.extend(model, recipe)
    refused_at_call(model, "past_key_values: .* got 20 tokens cached elsewhere", ids[:, :1], past_key_values=cache)
    cache.reset()
    logits(model, ids, past_key_values=cache)


def test_a_cache_of_another_recipe():
    model, ids = ise.extend(llama(), REROTATING[0]), tokens(1, 21)
    with torch.no_grad():
        cache = model(ids[:, :20]).past_key_values
    expected = logits(model, ids)[:, -1]
    ise.restore(model)
    for other in (REROTATING[1], "infoscale"):
        with ise.extended(model, other):
            refused_at_call(model, "cached under rerope:window=32", ids[:, 20:], past_key_values=cache)
    with ise.extended(model, REROTATING[0]):  # the same again; copies serve several prompts
        for one in (copy.deepcopy(cache), cache):
            torch.testing.assert_close(logits(model, ids[:, 20:], past_key_values=one)[:, -1], expected)


def test_a_cache_made_of_the_keys_of_another():
    """It cannot be told from one with keys of the plain model, until it says whose they are."""
    model, ids = ise.extend(llama(), REROTATING[0]), tokens(1, 21)
    with torch.no_grad():
        cache = model(ids[:, :20]).past_key_values
    made = DynamicCache([(layer.keys, layer.values) for layer in cache.layers])
    refused_at_call(model, "copy isentrope_recipe of the cache", ids[:, 20:], past_key_values=made)
    made.isentrope_recipe = cache.isentrope_recipe
    torch.testing.assert_close(logits(model, ids[:, 20:], past_key_values=made), logits(model, ids)[:, -1:])


def test_a_cache_of_the_plain_model_where_rotation_is_the_same():
    model, ids = llama(), tokens(1, 21)
    with torch.no_grad():
        cache = model(ids[:, :20]).past_key_values
    expected = logits(model, ids)
    ise.extend(model, "infoscale")
    torch.testing.assert_close(logits(model, ids[:, 20:], past_key_values=cache), expected[:, -1:])


def test_a_cache_that_a_compiled_model_filled():
    model, ids = ise.extend(llama(), REROTATING[0]), tokens(1, 21)
    with torch.no_grad():
        cache = torch.compile(model, backend="eager")(ids[:, :20]).past_key_values
    torch.testing.assert_close(logits(model, ids[:, 20:], past_key_values=cache), logits(model, ids)[:, -1:])


@pytest.mark.parametrize("recipe", REROTATING)
def test_keys_learned_for_the_plain_model(recipe):
    """Prefix tuning learns keys as they are cached; prompt tuning learns embeddings, and works."""
    ids, options = tokens(1, 20), {"num_virtual_tokens": 5, "task_type": "CAUSAL_LM"}
    model = ise.extend(get_peft_model(llama(), PrefixTuningConfig(**options)), recipe)
    with pytest.raises(ValueError, match=r"past_key_values: .* use prompt tuning"):
        logits(model, ids)
    model = get_peft_model(llama(), PromptTuningConfig(**options)).eval()
    plain = logits(model, ids)
    ise.extend(model, "rerope:window=32")
    assert torch.equal(logits(model, ids), plain)


@pytest.mark.parametrize("recipe", CALLED)
def test_attention_dropout_where_a_recipe_acts(recipe):
    model = ise.extend(llama(attention_dropout=0.5), recipe)
    refused_at_call(model, "attention dropout: .*0.5.*attention_dropout=0", tokens(1, LONG), training=True)


@pytest.mark.parametrize("recipe", ["rerope:window=64+infoscale:train_length=64", "sink:sinks=4,size=60"])
def test_attention_dropout_where_a_recipe_rests(recipe):
    """Then it is the plain model's: the same mask from the same seed."""
    model, ids = llama(attention_dropout=0.5).train(), tokens(1, TRAINED)

    def drawn():
        torch.manual_seed(1)
        return logits(model, ids)

    plain = drawn()
    assert not torch.equal(plain, logits(model, ids))
    with ise.extended(model, recipe):
        assert torch.equal(drawn(), plain)


@pytest.mark.parametrize("recipe", CALLED)
def test_direction_turned_after_extending(recipe):
    """Transformers lets a causal model look ahead, for a call or in its config; masks were read before that."""
    ids = tokens(1, 20)
    model = llama()
    assert not torch.allclose(logits(model, ids), logits(model, ids, is_causal=False))
    ise.extend(model, recipe)
    refused_at_call(model, "is_causal", ids, is_causal=False)
    assert torch.equal(logits(model, ids, is_causal=True), logits(model, ids))
    model.config.is_causal = False
    with pytest.raises(ValueError, match="is_causal"):
        model(ids)


def test_direction_turned_before_extending():
    model, ids = llama(), tokens(1, 40)
    model.config.is_causal = False
    plain = logits(model, ids)
    assert not torch.allclose(plain, logits(llama(), ids))
    with ise.extended(model, "rerope:window=64+infoscale:train_length=64"):
        assert torch.equal(logits(model, ids), plain)
        assert "every key" in str(ise.describe(model))
        refused_at_call(model, "is_causal", ids, is_causal=True)


# --- files ----------------------------------------------------------------------------------------------------------


def test_load_without_a_recipe(tmp_path):
    llama().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="isentrope recipe"):
        ise.load(tmp_path)
    ise.restore(ise.extend(llama(), "infoscale")).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="isentrope recipe"):
        ise.load(tmp_path)
    assert torch.equal(
        logits(AutoModelForCausalLM.from_pretrained(tmp_path), tokens(1, 20)), logits(llama(), tokens(1, 20))
    )


@pytest.mark.parametrize(
    ("written", "match"),
    [
        ({"recipe": {"temperature": {"name": "infoscal", "train_length": 64}}}, "did you mean 'infoscale'"),
        ({"recipe": {"position": {"name": "rerope"}}}, "window"),
        ({"recipe": {"temperature": {"name": "rerope", "window": 32}}}, "temperature"),
        ({"backend": "auto"}, "isentrope recipe"),
        ("rerope:window=32", "isentrope recipe"),
        (None, "isentrope recipe"),
    ],
)
def test_recipe_that_was_edited(written, match, tmp_path):
    ise.extend(llama(), "rerope:window=32").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    if isinstance(written, dict):
        written = {"base_model_type": "llama"} | written
    path.write_text(json.dumps(config | {"isentrope": written}))
    with pytest.raises(ValueError, match=match):
        ise.load(tmp_path)


@pytest.mark.parametrize("recipe", ["ssmax", "clex"])
def test_learned_parameters_that_are_missing(recipe, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        ise.extend(llama(), recipe, allow_untrained=True).save_pretrained(tmp_path)
        path = tmp_path / "model.safetensors"
        weights = load_file(path)
        kept = {name: x for name, x in weights.items() if "isentrope" not in name}
        assert len(kept) < len(weights)
        save_file(kept, path, metadata={"format": "pt"})
        with pytest.raises(ValueError, match=r"the recipe's parameter .*got none"):
            ise.load(tmp_path)


@torch.no_grad()
def test_a_layer_that_takes_the_place_of_an_extended_one():
    """It would attend by itself, to queries and keys that were left unrotated."""
    model, ids = ise.extend(llama(), "rerope:window=32"), tokens(1, LONG)
    expected = model(ids).logits
    layers = model.model.layers
    layers[0], kept = llama().model.layers[0], layers[0]
    with pytest.raises(RuntimeError, match=r"layers\.0\.self_attn: was replaced after isentrope"):
        model(ids)
    layers[0] = kept
    torch.testing.assert_close(model(ids).logits, expected)
    layers[0] = Wrapper(kept)  # as FSDP and checkpointing do
    torch.testing.assert_close(model(ids).logits, expected)
    del layers[1]
    assert model(ids).logits.shape == expected.shape
