"""Every supported family: short inputs untouched, long ones as a dense computation has them, frequencies too."""

from __future__ import annotations

import copy
from contextlib import contextmanager
from dataclasses import dataclass
from math import log, pi

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

import isentrope as ise
from isentrope.hf.layer import Layer, _with_sinks
from tests.fixtures.families import (
    FAMILIES,
    ROTATING,
    WINDOW,
    logits,
    rotary_module,
    snapshot,
    unchanged,
    write_scaling,
)
from tests.fixtures.models import TRAINED, tokens

LONG = 100
IDLE = "rerope:window=64+infoscale:train_length=64"
DENSE = "dense_oracle"


def close(a, b, tolerance):
    """Equal to a share of the largest logit."""
    assert a.isfinite().all()
    torch.testing.assert_close(a, b, rtol=0, atol=tolerance * b.abs().max().item())


def idle_recipe(family):
    return IDLE if family.rope is not None else "infoscale:train_length=64"


# --- short inputs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [40, TRAINED])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", FAMILIES)
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


@pytest.mark.parametrize("recipe", ["selfextend:window=64,group=4", "leakyrerope:window=64", "sink:sinks=4,size=60"])
@pytest.mark.parametrize("name", ["llama", "mistral-windowed", "gemma3", "gpt_neox", "smollm3", "glm", "modernbert"])
def test_other_idle_recipes_are_bit_identical(name, recipe):
    model = FAMILIES[name].model()
    ids = tokens(2, TRAINED)
    plain = logits(model, ids)
    with ise.extended(model, recipe):
        assert torch.equal(logits(model, ids), plain)


def forget_eager(model):
    """Attend as where a recipe is not idle."""
    for layer in (layer for layer in model.modules() if isinstance(layer, Layer)):
        layer.eager = None


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
        _with_sinks(q, k, k, recipe, sinks, {"causal": True})
    with torch.no_grad():
        assert _with_sinks(q, k, k, recipe, sinks, {"causal": True}).isfinite().all()


# --- long inputs ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Dense:
    """A recipe written out: the distance of each pair, the pairs that see each other, τ over n keys.

    distance(i, j, seen): None leaves the model's own rotation.
    bias(i, j): added where the distance counts. alpha: cosines times alpha in place of products.
    """

    distance: object = None
    sees: object = lambda i, j, causal: torch.ones_like(i - j, dtype=torch.bool)
    tau: object = lambda n, d: torch.ones_like(n)
    bias: object = None
    alpha: float | None = None


def rerope(window):
    return lambda i, j, seen: (i - j).clamp(-window, window)


def leaky(window, leak):
    def distance(i, j, seen):
        delta = i - j
        far = delta.sign() * (window + (delta.abs() - window) / leak)
        return torch.where(delta.abs() < window, delta, far)

    return distance


def grouped(window, group):
    def distance(i, j, seen):
        delta = i - j
        far = i // group - j // group + delta.sign() * (window - window // group)
        return torch.where(delta.abs() < window, delta, far)

    return distance


def in_cache(i, j, seen):
    """Places in the row of keys that are still there: what StreamingLLM calls positions within the cache."""
    place = seen.cumsum(-1) - 1
    return place.amax(-1, keepdim=True) - place


def first_and_window(sinks, size):
    def sees(i, j, causal):
        return window_of(size)(i, j, causal) | (j < sinks)

    return sees


def window_of(size):
    return lambda i, j, causal: i - j < size if causal else (i - j).abs() <= size


def infoscale(trained):
    def tau(n, d):
        longer = n.clamp_min(trained)
        return ((1 - longer ** (-2 / d)) / (1 - trained ** (-2 / d))).sqrt()

    return tau


def logn(trained):
    return lambda n, d: n.clamp_min(trained).log() / log(trained)


POSITIONS = {
    "rerope:window=32+infoscale:train_length=64": Dense(rerope(32), tau=infoscale(64)),
    "leakyrerope:window=32,leak=8": Dense(leaky(32, 8)),
    "selfextend:window=33,group=5": Dense(grouped(33, 5)),
    "rerope:window=24+lambda:sinks=5,window=24": Dense(rerope(24), first_and_window(5, 24)),
}
STREAM = "sink:sinks=4,size=24"
OTHERS = {
    "window:size=24": Dense(sees=window_of(24)),
    "infoscale:train_length=32": Dense(tau=infoscale(32)),
    "yarntemperature:factor=4": Dense(tau=lambda n, d: torch.full_like(n, (0.1 * log(4) + 1) ** 2)),
    "logn:train_length=32+window:size=40": Dense(sees=window_of(40), tau=logn(32)),
}


def pairs(x, count, interleaved):
    """The first 2 · count entries as complex numbers."""
    head = x[..., : 2 * count]
    a, b = (head[..., 0::2], head[..., 1::2]) if interleaved else head.chunk(2, -1)
    return torch.complex(a, b)


@contextmanager
def dense(family, model, recipe):
    """The model with attention written out pair by pair; raw queries and keys come from a rotary module that rests."""
    rotary = rotary_module(model) if recipe.distance is not None else None
    theta, scaling = {}, {}
    if rotary is not None:
        for layer in range(model.config.num_hidden_layers):
            kind = model.config.layer_types[layer] if family.local is not None else None
            if layer in family.unrotated or family.is_local(model.config, layer):
                continue
            theta[layer] = getattr(rotary, family.frequencies_of(kind)).double()
            scaling[layer] = getattr(rotary, "attention_scaling" if kind is None else f"{kind}_attention_scaling")

    def rest(module, args, kwargs, output):
        kind = kwargs.get("layer_type", args[2] if len(args) > 2 else None)
        if kind == "sliding_attention" and family.local is not None:
            return output
        return torch.ones_like(output[0]), torch.zeros_like(output[1])

    def attend(module, query, key, value, attention_mask, scaling_factor, s_aux):
        layer = module.layer_idx
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        length, size = query.shape[2:]
        if recipe.alpha is not None:
            query, key = (x / x.norm(dim=-1, keepdim=True) for x in (query, key))
            scaling_factor = recipe.alpha
        i, j = torch.arange(length)[:, None], torch.arange(length)[None]
        seen = attention_mask & recipe.sees(i, j, not family.bidirectional)
        if layer in theta:
            count = theta[layer].numel()
            distance = recipe.distance(i, j, seen).double()
            turn = torch.polar(torch.ones(()).double(), -distance[..., None] * theta[layer])
            products = pairs(query, count, family.interleaved).conj()[..., None, :] * pairs(
                key, count, family.interleaved
            ).unsqueeze(-3)
            score = (products * turn).real.sum(-1)
            if recipe.alpha is None:
                score = score * scaling[layer] ** 2
            score = score + query[..., 2 * count :] @ key[..., 2 * count :].mT
        else:
            score = query @ key.mT
        n = seen.sum(-1, keepdim=True).double()
        score = score * scaling_factor * recipe.tau(n, size)
        if recipe.bias is not None and layer in theta:
            score = score + recipe.bias(i, j)
        score = score.masked_fill(~seen, float("-inf"))
        if s_aux is not None:
            score = torch.cat((score, s_aux[:, None, None].expand(*score.shape[:3], 1)), -1)
        weights = score.exp() / score.exp().sum(-1, keepdim=True)
        return (weights[..., :length] @ value).transpose(1, 2).contiguous(), None

    def entry(module, query, key, value, attention_mask, scaling=None, s_aux=None, **unused):
        return attend(module, query, key, value, attention_mask, scaling, s_aux)

    AttentionInterface.register(DENSE, entry)
    AttentionMaskInterface.register(
        DENSE, lambda **o: sdpa_mask(**o | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})
    )
    model.config._attn_implementation = DENSE
    handle = rotary.register_forward_hook(rest, with_kwargs=True) if rotary is not None else None
    try:
        yield model
    finally:
        if handle is not None:
            handle.remove()


def against_dense(name, text, recipe, **options):
    """In fp64, where nothing but the meaning can differ; the recipe must matter, too."""
    family = FAMILIES[name]
    model = family.model().double()
    ids = tokens(1, LONG)
    plain = logits(model, ids)
    with dense(family, copy.deepcopy(model), recipe) as oracle:
        expected = logits(oracle, ids)
    with ise.extended(model, text, **options):
        close(logits(model, ids), expected, 1e-6)
    assert (expected - plain).abs().max() > 1e-3 * plain.abs().max()


@pytest.mark.parametrize("name", FAMILIES)
def test_the_oracle_is_the_model(name):
    """With nothing changed, the dense computation gives the plain model's logits."""
    family = FAMILIES[name]
    model = family.model()
    expected = logits(model, tokens(1, LONG))
    whole = Dense(lambda i, j, seen: i - j) if family.rope is not None else Dense()
    with dense(family, copy.deepcopy(model).double(), whole) as oracle:
        close(logits(oracle, tokens(1, LONG)).float(), expected, 1e-4)


@pytest.mark.parametrize("text", POSITIONS)
@pytest.mark.parametrize("name", ROTATING)
def test_position_recipes_match_dense(name, text):
    against_dense(name, text, POSITIONS[text])


def test_position_recipe_reaches_windowed_layers_where_there_are_no_others():
    family = FAMILIES["gemma3"]
    model = family.model(family.config(layer_types=["sliding_attention"] * 2))
    ids = tokens(2, LONG)
    plain = logits(model, ids)
    with ise.extended(model, "rerope:window=16"):
        assert (logits(model, ids) - plain).abs().max() > 1e-3 * plain.abs().max()


@pytest.mark.parametrize("text", OTHERS)
@pytest.mark.parametrize("name", FAMILIES)
def test_temperatures_and_windows_match_dense(name, text):
    against_dense(name, text, OTHERS[text])


@pytest.mark.parametrize("name", FAMILIES)
def test_sink_recipe_matches_dense(name):
    """Distances within the cache for causal models; a model that looks ahead has no cache, and keeps its own."""
    measured = None if FAMILIES[name].bidirectional else in_cache
    against_dense(name, STREAM, Dense(measured, first_and_window(4, 24)))


UNTRAINED = {
    "nope": Dense(lambda i, j, seen: 0 * (i - j)),
    "alibi": Dense(
        lambda i, j, seen: 0 * (i - j),
        bias=lambda i, j: -torch.tensor([1 / 4, 1 / 16, 1 / 64, 1 / 256])[:, None, None] * (i - j).abs(),
    ),
    "cosine:alpha=16": Dense(alpha=16),
    "cosine:alpha=16+rerope:window=32+infoscale:train_length=32": Dense(rerope(32), tau=infoscale(32), alpha=16),
}


@pytest.mark.parametrize("text", UNTRAINED)
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_neox", "granite", "glm", "modernbert"])
def test_untrained_parts_match_dense(name, text):
    with pytest.warns(UserWarning, match="was not trained with"):
        against_dense(name, text, UNTRAINED[text], allow_untrained=True)


# --- frequencies ----------------------------------------------------------------------------------------------------

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": TRAINED}
SCALED = {
    "pi:factor=4": {"rope_type": "linear", "factor": 4.0},
    "yarn:factor=4": YARN | {"attention_factor": 1.0},
    "ntk:factor=4,dynamic=true": {"rope_type": "dynamic", "factor": 4.0},
}
UNSCALED = [name for name in ROTATING if name != "gpt_oss"]  # GPT-OSS has YaRN already
# families whose attention_factor reaches every score, as a temperature does: all entries of all layers rotate alike
ALL_ROTATES = [
    name
    for name in UNSCALED
    if FAMILIES[name].local is None
    and not FAMILIES[name].unrotated
    and "partial_rotary_factor" not in FAMILIES[name].rope
]


def scaled_by_transformers(family, scaling, length=LONG):
    if family.model_type == "phi3":
        return write_scaling(family.model(), length, **scaling)
    return family.model(family.config(scaling))


def against_transformers(name, text, scaling):
    """In fp64, so that nothing but the rounding of the frequencies, which is fp32, is left."""
    family = FAMILIES[name]
    ids = tokens(2, LONG)
    expected = logits(scaled_by_transformers(family, scaling).double(), ids)
    model = family.model().double()
    plain = logits(model, ids)
    with ise.extended(model, text):
        close(logits(model, ids), expected, 1e-4)
    assert (expected - plain).abs().max() > 0.01 * plain.abs().max()


@pytest.mark.parametrize("text", SCALED)
@pytest.mark.parametrize("name", UNSCALED)
def test_frequencies_are_those_of_transformers(name, text):
    against_transformers(name, text, SCALED[text])


@pytest.mark.parametrize("name", ALL_ROTATES)
def test_yarn_with_its_temperature_is_that_of_transformers(name):
    """Transformers puts YaRN's temperature on cos and sin, we put it on the score."""
    against_transformers(name, "yarn:factor=4+yarntemperature:factor=4", YARN)


@pytest.mark.parametrize("name", [name for name in UNSCALED if FAMILIES[name].model_type != "phi3"])
def test_static_ntk_is_a_larger_base(name):
    family = FAMILIES[name]
    dim = 2 * getattr(rotary_module(family.model()), family.frequencies_of("full_attention")).numel()
    against_transformers(name, "ntk:factor=4", {"rope_theta": family.rope["rope_theta"] * 4 ** (dim / (dim - 2))})


def test_interpolation_of_frequencies_that_are_scaled_already():
    model = FAMILIES["gpt_oss"].model()
    other = copy.deepcopy(model)
    rotary_module(other).inv_freq /= 4
    ids = tokens(2, LONG)
    with ise.extended(model, "pi:factor=4"):
        close(logits(model, ids), logits(other, ids), 1e-4)


# --- undoing and describing -----------------------------------------------------------------------------------------

CHANGES = ["rerope:window=32+infoscale:train_length=64", "yarn:factor=4", "ntk:factor=4,dynamic=true", STREAM]
KEPT = ["infoscale:train_length=32", "window:size=24+logn:train_length=32"]


def changes(family):
    if family.rope is None:
        return KEPT
    return [CHANGES[0], "pi:factor=4", STREAM] if "factor" in family.rope else CHANGES


CASES = [(name, text) for name, family in FAMILIES.items() for text in changes(family)]


@pytest.mark.parametrize(("name", "text"), CASES)
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


@pytest.mark.parametrize(("name", "text"), CASES)
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


CAUSAL = [name for name, family in FAMILIES.items() if not family.bidirectional]


def cached_keys(model, ids):
    with torch.no_grad():
        return [layer.keys for layer in model(ids, use_cache=True).past_key_values.layers]


@pytest.mark.parametrize("text", [IDLE, "sink:sinks=4,size=60", "infoscale:train_length=64"])
@pytest.mark.parametrize("name", CAUSAL)
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


@pytest.mark.parametrize("text", ["pi:factor=4", "ntk:factor=4,dynamic=true", "rerope:window=16"])
@pytest.mark.parametrize("name", [name for name in CAUSAL if name != "gpt_oss" and FAMILIES[name].local is None])
def test_methods_with_one_angle_a_position_cache_rotated_keys(name, text):
    """In the first layer, whose input no recipe changes."""
    model = FAMILIES[name].model()
    ids = tokens(1, TRAINED - 1)
    rest = rotary_module(model).register_forward_hook(lambda m, a, out: (torch.ones_like(out[0]), 0 * out[1]))
    raw = cached_keys(model, ids)[0]
    rest.remove()
    with ise.extended(model, text):
        keys, described = cached_keys(model, ids)[0], ise.describe(model).layers[0]
    assert torch.allclose(keys, raw, atol=1e-5) == (text != "pi:factor=4")
    assert described.cache == ("rotated keys" if text == "pi:factor=4" else "raw keys")
