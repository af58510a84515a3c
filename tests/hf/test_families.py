"""Every supported family: short inputs untouched, all of it undone by restore, described as it is."""

from __future__ import annotations

import copy
from math import log, pi

import pytest
import torch

import isentrope as ise
from isentrope.hf.layer import Layer
from isentrope.hf.sink_logits import attend_with_sink_logits
from tests.fixtures.dense import infoscale
from tests.fixtures.families import (
    FAMILIES,
    IDLE,
    LONG,
    STREAM,
    WINDOW,
    at_rest,
    close,
    idle_recipe,
    logits,
    rotary_module,
    snapshot,
    unchanged,
)
from tests.fixtures.models import TRAINED, tokens
from tests.fixtures.turns import in_turns


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("name", "length"), in_turns(FAMILIES, (40, TRAINED)))
def test_idle_recipe_is_bit_identical(name, dtype, length):
    family = FAMILIES[name]
    model = family.model(dtype=dtype)
    ids = tokens(2, length)
    plain = logits(model, ids)
    with ise.extended(model, idle_recipe(family)):
        assert torch.equal(logits(model, ids), plain)
    assert torch.equal(logits(model, ids), plain)


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "gemma3"])
def test_idle_recipe_is_bit_identical_with_rounded_frequencies(name):
    """`model.to(bfloat16)` rounds the frequencies too, which `from_pretrained` does not."""
    model = FAMILIES[name].model().to(torch.bfloat16)
    ids = tokens(2, TRAINED)
    plain = logits(model, ids)
    with ise.extended(model, IDLE):
        assert torch.equal(logits(model, ids), plain)


@pytest.mark.parametrize(
    ("name", "recipe"),
    in_turns(
        ["llama", "mistral-windowed", "gemma3", "gpt_neox", "smollm3", "glm", "modernbert"],
        ["selfextend:window=64,group=4", "leakyrerope:window=64", "sink:sinks=4,size=60"],
    ),
)
def test_other_idle_recipes_are_bit_identical(name, recipe):
    model = FAMILIES[name].model()
    ids = tokens(2, TRAINED)
    plain = logits(model, ids)
    with ise.extended(model, recipe):
        assert torch.equal(logits(model, ids), plain)


def forget_eager(model):
    """Attend as where a recipe is not idle."""
    for layer in (layer for layer in model.modules() if isinstance(layer, Layer)):
        layer.eager_attention = None


@pytest.mark.parametrize("length", [40, TRAINED])
def test_idle_recipe_keeps_sink_logits(length):
    """GPT-OSS without its own function: in fp64 the same, in fp32 as near to that as transformers itself."""
    model = FAMILIES["gpt_oss"].model()
    precise = copy.deepcopy(model).double()
    ids = tokens(2, length)
    plain, exact = logits(model, ids), logits(precise, ids)
    with ise.extended(precise, "infoscale:train_length=64"):
        forget_eager(precise)
        close(logits(precise, ids), exact, 1e-9)
    with ise.extended(model, IDLE):
        forget_eager(model)
        error = (logits(model, ids) - exact).abs().max()
    assert error < 5 * (plain - exact).abs().max() < 1e-3 * exact.abs().max()


def test_sink_logits_go_without_gradients_of_what_a_recipe_learns():
    recipe = ise.Recipe.parse("ssmax:heads=4")
    q, k, sinks = torch.randn(1, 4, 6, 16), torch.randn(1, 2, 6, 16), torch.zeros(4)
    with pytest.raises(ValueError, match="without gradients only"):
        attend_with_sink_logits(q, k, k, recipe, sinks, {"causal": True})
    with torch.no_grad():
        assert attend_with_sink_logits(q, k, k, recipe, sinks, {"causal": True}).isfinite().all()


# --- undoing and describing -----------------------------------------------------------------------------------------

CHANGES = ["rerope:window=32+infoscale:train_length=64", "yarn:factor=4", "ntk:factor=4,dynamic=true", STREAM]
KEPT = ["infoscale:train_length=32", "window:size=24+logn:train_length=32"]


def changes(family):
    if family.rope is None:
        return KEPT
    return [CHANGES[0], "pi:factor=4", STREAM] if "factor" in family.rope else CHANGES


CASES = [(name, text) for name, family in FAMILIES.items() for text in changes(family)]


def every_other(first):
    """Half the changes of each family, from the first or the second one on; the others are for `-m slow`."""
    return [pytest.param(*case, marks=() if i % 2 == first else pytest.mark.slow) for i, case in enumerate(CASES)]


@pytest.mark.parametrize(("name", "text"), every_other(0))
def test_restore_is_complete(name, text):
    model = FAMILIES[name].model()
    ids = tokens(2, LONG)
    plain, config = logits(model, ids), model.config
    before = snapshot(model)
    ise.extend(model, text)
    assert not torch.equal(logits(model, ids), plain)
    assert ise.restore(model) is model
    assert torch.equal(logits(model, ids), plain)
    assert model.config is config
    unchanged(model, before)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss", "modernbert"])
def test_a_block_that_fails_restores(name):
    model = FAMILIES[name].model()
    ids = tokens(2, LONG)
    plain, before = logits(model, ids), snapshot(model)
    with pytest.raises(RuntimeError, match="inside"), ise.extended(model, CHANGES[0]):
        raise RuntimeError("inside")
    assert torch.equal(logits(model, ids), plain)
    unchanged(model, before)


@pytest.mark.parametrize("name", ["llama", "gemma3", "bert"])
def test_models_that_share_a_config_are_extended_apart(name):
    family = FAMILIES[name]
    config = family.config()
    first, second, third = (family.model(config) for _ in range(3))
    ids = tokens(2, LONG)
    plain = logits(third, ids)
    expected = []
    for text in KEPT:
        with ise.extended(family.model(), text) as model:
            expected.append(logits(model, ids))
    ise.extend(first, KEPT[0])
    ise.extend(second, KEPT[1])
    assert torch.equal(logits(first, ids), expected[0])
    assert torch.equal(logits(second, ids), expected[1])
    assert torch.equal(logits(third, ids), plain)


@pytest.mark.parametrize(("name", "text"), every_other(1))
def test_describe_reads(name, text):
    family = FAMILIES[name]
    with ise.extended(family.model(), text) as model:
        described = ise.describe(model)
    page = str(described)
    assert family.model_type in page and text.split(":")[0] in page
    assert [layer.index for layer in described.layers] == list(range(model.config.num_hidden_layers))
    for layer in described.layers:
        turns = family.rope is not None and layer.index not in family.unrotated
        assert (layer.slowest is not None) == turns
        assert (layer.cache == "rotated keys") <= turns
        if "window" not in text.split("+")[0] and text != STREAM:
            width = f"{WINDOW // 2} keys behind" if family.bidirectional else f"{WINDOW} keys up to the query"
            windowed = family.is_windowed(model.config, layer.index)
            assert (width in layer.mask) == windowed and ("every key" in layer.mask) != windowed


def test_describe_says_what_is_done():
    """Numbers worked out by hand: distances 1, 64, … behind, τ over 1024 keys, wavelengths of first and last pair."""
    slowest = 2 * pi * 10000 ** (14 / 16)

    def layer(name, text):
        with ise.extended(FAMILIES[name].model(), text) as model:
            return ise.describe(model).layers[0]

    both = layer("llama", "rerope:window=32+infoscale:train_length=64")
    assert both.distances == (1, 32, 32, 32, 32, 32)
    assert both.tau[0] == pytest.approx([infoscale(64)(torch.tensor(1024.0), 16).item()])
    assert (both.fastest, both.slowest) == pytest.approx((2 * pi, slowest))
    assert layer("llama", "leakyrerope:window=32,leak=8").distances[:2] == (1, 36)
    assert layer("llama", "selfextend:window=32,group=4").distances[:2] == (1, 64 // 4 + 32 - 8)
    interpolated = layer("llama", "pi:factor=4")
    assert (interpolated.fastest, interpolated.slowest) == pytest.approx((8 * pi, 4 * slowest))
    windowed = layer("mistral-windowed", "logn:train_length=32")
    assert windowed.distances == (1, None, None, None, None, None)
    assert [tau for (tau,) in windowed.tau] == pytest.approx([log(WINDOW) / log(32)] * 5)
    assert layer("bert", "window:size=24").distances[:2] == (1, None)
    assert both.far_tau == both.tau and both.far_bias == ((0.0,),) * 5 and windowed.far_tau is windowed.far_bias is None
    far = layer("llama", "rerope:window=32+logn:train_length=64,keys=far+share:beta=(1,0,0.5,-1)")
    assert far.tau[0] == (1.0,) and far.far_tau[0] == pytest.approx([10 / 6])
    assert far.far_bias[0] == pytest.approx([-beta * log((1024 - 32) / 32) for beta in (1, 0, 0.5, -1)])
    assert (
        "near τ    1024→1 " in str(far) and "far τ     1024→1.667 " in str(far) and "far bias  1024→-3.43–" in str(far)
    )


CAUSAL = [name for name, family in FAMILIES.items() if not family.bidirectional]


def cached_keys(model, ids):
    """Values too, which no recipe here changes: caches of latents have the entries that rotate in their place."""
    with torch.no_grad():
        layers = model(ids, use_cache=True).past_key_values.layers
    return [torch.cat((layer.keys, layer.values), -1) for layer in layers]


@pytest.mark.parametrize(
    ("name", "text"), in_turns(CAUSAL, [IDLE, "sink:sinks=4,size=60", "infoscale:train_length=64"])
)
def test_the_cache_holds_what_describe_says(name, text):
    """An idle recipe leaves hidden states alone, so that keys are the plain model's where they are rotated."""
    family = FAMILIES[name]
    model = family.model()
    ids = tokens(1, TRAINED)
    before = cached_keys(model, ids)
    with ise.extended(model, text):
        after, described = cached_keys(model, ids), ise.describe(model).layers
    for old, new, layer in zip(before, after, described, strict=True):
        same = torch.allclose(old, new, atol=1e-3)
        if layer.index in family.unrotated:
            assert same and layer.cache != "rotated keys"
        else:
            assert layer.cache == ("rotated keys" if same else "raw keys")
            local = family.is_local(model.config, layer.index)
            assert same == (local or text.startswith("infoscale"))


@pytest.mark.parametrize(
    ("name", "text"),
    in_turns(
        [name for name in CAUSAL if name != "gpt_oss" and FAMILIES[name].local is None],
        ["pi:factor=4", "ntk:factor=4,dynamic=true", "rerope:window=16"],
    ),
)
def test_methods_with_one_angle_a_position_cache_rotated_keys(name, text):
    """In the first layer, whose input no recipe changes."""
    model = FAMILIES[name].model()
    ids = tokens(1, TRAINED - 1)
    rest = rotary_module(model).register_forward_hook(lambda module, args, output: at_rest(output))
    raw = cached_keys(model, ids)[0]
    rest.remove()
    with ise.extended(model, text):
        keys, described = cached_keys(model, ids)[0], ise.describe(model).layers[0]
    assert torch.allclose(keys, raw, atol=1e-5) == (text != "pi:factor=4")
    assert described.cache == ("rotated keys" if text == "pi:factor=4" else "raw keys")
