"""Ours equals theirs: transformers' own rotary embeddings, ALiBi, windows and temperatures, on tiny random models.

Every model runs eagerly in fp32 on a CPU.
"""

import math

import pytest
import torch
from isentrope.fold import angles

import isentrope as ise
from isentrope import Recipe

transformers = pytest.importorskip("transformers")

from transformers.masking_utils import sliding_window_causal_mask_function  # noqa: E402
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # noqa: E402
from transformers.models.bloom.modeling_bloom import BloomModel, build_alibi_tensor  # noqa: E402
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXModel  # noqa: E402
from transformers.models.llama.modeling_llama import (  # noqa: E402
    LlamaModel,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)
from transformers.models.llama4.modeling_llama4 import Llama4TextModel  # noqa: E402
from transformers.models.mistral.modeling_mistral import MistralModel  # noqa: E402
from transformers.models.modernbert.modeling_modernbert import ModernBertModel  # noqa: E402
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor  # noqa: E402

CPU = torch.device("cpu")
HEAD_DIMS = (16, 64, 96, 128)
BASES = (10000.0, 500000.0)
HEADS = (6, 8, 12, 16)
# measured: at most 4.8e-7 of a frequency (theirs is always fp32) and 1e-6 of an output
FREQUENCIES = 1e-6
ATTENTION = 2e-6
TINY = {
    "vocab_size": 32,
    "num_hidden_layers": 1,
    "intermediate_size": 32,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def assert_near(ours, theirs, bound):
    """The largest difference, in units of the largest entry."""
    assert ours.shape == theirs.shape
    error = ((ours - theirs).abs().max() / theirs.abs().max()).item()
    assert error <= bound


def assert_relative(ours, theirs, bound):
    """The largest difference, each in units of its own entry."""
    error = (ours / theirs - 1).abs().max().item()
    assert error <= bound


def llama_config(head_dim, base, rope_type, length=64, heads=4, kv_heads=2, **rope):
    return transformers.LlamaConfig(
        **TINY,
        hidden_size=heads * head_dim,
        head_dim=head_dim,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=length,
        rope_parameters={"rope_type": rope_type, "rope_theta": base, **rope},
        attn_implementation="eager",
    )


def eager(q, k, v, visible=None, bias=0.0):
    """Attention as transformers' eager functions spell it: grouped heads repeated, one additive mask."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT / math.sqrt(q.shape[-1]) + bias
    if visible is not None:
        scores = scores.masked_fill(~visible, -math.inf)
    return torch.softmax(scores, -1) @ v


def causal(n):
    return torch.ones(n, n, dtype=torch.bool).tril()


class Watched:
    """A tiny model run once, with what went into and out of the linear maps `names` around one of its attentions."""

    def __init__(self, model, inputs, *names, **arguments):
        self.values = {}
        hooks = [model.get_submodule(name).register_forward_hook(self._keep(name)) for name in names]
        with torch.no_grad():
            model.eval()(input_ids=inputs, **arguments)
        for hook in hooks:
            hook.remove()

    def _keep(self, name):
        def hook(module, inputs, output):
            self.values[name] = (inputs[0], output)

        return hook

    def projected(self, name, size):
        """(batch, length, heads · size) as (batch, heads, length, size)."""
        return self.values[name][1].unflatten(-1, (-1, size)).transpose(1, 2)

    def attended(self, name, size):
        """What attention gave to its output projection, as (batch, heads, length, size)."""
        return self.values[name][0].unflatten(-1, (-1, size)).transpose(1, 2)


def tokens(batch, length, seed=0):
    return torch.randint(1, 32, (batch, length), generator=torch.Generator().manual_seed(seed))


def watch_llama(model, inputs, **arguments):
    """Raw q, k, v of the first layer, and what its attention made of them."""
    names = [f"layers.0.self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
    seen = Watched(model, inputs, *names, **arguments)
    size = model.config.head_dim
    return *(seen.projected(name, size) for name in names[:3]), seen.attended(names[3], size)


def sharpened(model):
    """Weights ten times as large, so that attention is far from uniform."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(10)
    return model


# --- frequencies ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_default_frequencies_are_llamas(head_dim, base):
    theirs = LlamaRotaryEmbedding(llama_config(head_dim, base, "default")).inv_freq
    assert torch.equal(ise.RoPE(base).frequencies(head_dim, 64, torch.float32, CPU), theirs)
    wide = ise.RoPE(base).frequencies(head_dim, 64, torch.float64, CPU)
    assert_relative(wide.float(), theirs, FREQUENCIES)


@pytest.mark.parametrize("factor", [1.0, 2.0, 4.0, 7.5])
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_linear_frequencies_are_pi(head_dim, base, factor):
    theirs, attention_factor = ROPE_INIT_FUNCTIONS["linear"](
        llama_config(head_dim, base, "linear", factor=factor), device=CPU
    )
    assert attention_factor == 1
    assert torch.equal(ise.PI(factor, base=base).frequencies(head_dim, 64, torch.float32, CPU), theirs)


@pytest.mark.parametrize("original", [64, 2048, 8192])
@pytest.mark.parametrize("factor", [1.0, 2.0, 8.0])
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_dynamic_frequencies_are_ntk(head_dim, base, factor, original):
    config = llama_config(head_dim, base, "dynamic", length=original, factor=factor)
    ours = ise.NTK(factor, dynamic=True, original_length=original, base=base)
    for length in (1, original - 1, original, original + 1, 2 * original, 5 * original + 3, 64 * original):
        theirs, attention_factor = ROPE_INIT_FUNCTIONS["dynamic"](config, device=CPU, seq_len=length)
        assert attention_factor == 1
        assert_relative(ours.frequencies(head_dim, length, torch.float32, CPU), theirs, FREQUENCIES)
        wide = ours.frequencies(head_dim, length, torch.float64, CPU)
        assert_relative(wide.float(), theirs, FREQUENCIES)


@pytest.mark.parametrize("original", [64, 512, 4096])
@pytest.mark.parametrize("factor", [1.0, 4.0, 16.0, 32.0])
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_yarn_frequencies_and_temperature(head_dim, base, factor, original):
    config = llama_config(
        head_dim,
        base,
        "yarn",
        length=int(original * factor),
        factor=factor,
        original_max_position_embeddings=original,
    )
    theirs, attention_factor = ROPE_INIT_FUNCTIONS["yarn"](config, device=CPU)
    ours = ise.YaRN(factor, original, base=base).frequencies(head_dim, 64, torch.float32, CPU)
    assert_relative(ours, theirs, FREQUENCIES)
    # theirs multiplies cos and sin, and so both q and k; ours multiplies the score once
    tau = ise.YaRNTemperature(factor=factor).scale(torch.tensor(10.0, dtype=torch.float64), head_dim)
    assert tau.item() == pytest.approx(attention_factor**2, rel=1e-14)


@pytest.mark.parametrize(("beta_fast", "beta_slow"), [(32.0, 1.0), (16.0, 2.0), (64.0, 0.5)])
def test_yarn_betas(beta_fast, beta_slow):
    rope = {"factor": 8.0, "original_max_position_embeddings": 2048, "beta_fast": beta_fast, "beta_slow": beta_slow}
    theirs, _ = ROPE_INIT_FUNCTIONS["yarn"](llama_config(64, 10000.0, "yarn", length=16384, **rope), device=CPU)
    ours = ise.YaRN(8.0, 2048, beta_fast=beta_fast, beta_slow=beta_slow)
    assert_relative(ours.frequencies(64, 64, torch.float32, CPU), theirs, FREQUENCIES)


# --- cos, sin and attention -------------------------------------------------------------------------------------------

ROTARY = {
    "default": ({}, lambda base: Recipe(position=ise.RoPE(base))),
    "linear": ({"factor": 4.0}, lambda base: Recipe(position=ise.PI(4.0, base=base))),
    "dynamic": (
        {"factor": 2.0},
        lambda base: Recipe(position=ise.NTK(2.0, dynamic=True, original_length=32, base=base)),
    ),
    "yarn": (
        {"factor": 4.0, "original_max_position_embeddings": 32},
        lambda base: Recipe(position=ise.YaRN(4.0, 32, base=base), temperature=ise.YaRNTemperature(factor=4.0)),
    ),
}


@pytest.mark.parametrize("length", [24, 100])
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("head_dim", [16, 64])
@pytest.mark.parametrize("rope_type", ROTARY)
def test_rotary_attention(rope_type, head_dim, base, length):
    rope, recipe = ROTARY[rope_type]
    q, k, v = normal(2, 4, length, head_dim), normal(2, 2, length, head_dim, seed=1), normal(2, 2, length, 24, seed=2)
    embedding = LlamaRotaryEmbedding(llama_config(head_dim, base, rope_type, length=32, **rope))
    position_ids = torch.arange(length)[None]
    cos, sin = embedding(q, position_ids)

    position = recipe(base).position
    ours = angles(position_ids, position.frequencies(head_dim, length, torch.float32, CPU), torch.float32)
    for mine, theirs in zip(ours, (cos, sin), strict=True):
        assert_near(torch.cat((mine[:, 0], mine[:, 0]), -1) * embedding.attention_scaling, theirs, ATTENTION)

    expected = eager(*apply_rotary_pos_emb(q, k, cos, sin), v, causal(length))
    for backend in ("reference", "sdpa", "chunked"):
        out = ise.attention(q, k, v, recipe(base), causal=True, backend=backend)
        assert_near(out, expected, ATTENTION)


@pytest.mark.parametrize("rope_type", ["default", "linear", "yarn"])
def test_keys_rotated_by_transformers_serve_as_a_cache(rope_type):
    rope, recipe = ROTARY[rope_type]
    q, k, v = normal(2, 4, 3, 32), normal(2, 2, 40, 32, seed=1), normal(2, 2, 40, 32, seed=2)
    embedding = LlamaRotaryEmbedding(llama_config(32, 10000.0, rope_type, length=32, **rope))
    cos, sin = embedding(k, torch.arange(40)[None])
    # their cache holds the temperature's square root as well: only a plain rotation is ours
    rotated = apply_rotary_pos_emb(k, k, cos, sin)[1] / embedding.attention_scaling
    cached = ise.attention(q, rotated, v, recipe(10000.0), causal=True, rotated_keys=True)
    assert_near(cached, ise.attention(q, k, v, recipe(10000.0), causal=True), ATTENTION)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
def test_llama_layer(heads, kv_heads):
    torch.manual_seed(0)
    model = sharpened(LlamaModel(llama_config(32, 10000.0, "default", heads=heads, kv_heads=kv_heads)))
    q, k, v, theirs = watch_llama(model, tokens(2, 50))
    assert (q.shape[1], k.shape[1]) == (heads, kv_heads)
    assert_near(ise.attention(q, k, v, "rope", causal=True), theirs, ATTENTION)


@pytest.mark.parametrize("rope_type", ["linear", "yarn"])
def test_llama_layer_with_scaled_rope(rope_type):
    rope, recipe = ROTARY[rope_type]
    torch.manual_seed(0)
    model = sharpened(LlamaModel(llama_config(32, 10000.0, rope_type, length=128, **rope)))
    q, k, v, theirs = watch_llama(model, tokens(2, 100))
    assert_near(ise.attention(q, k, v, recipe(10000.0), causal=True), theirs, ATTENTION)


@pytest.mark.parametrize("side", ["right", "left"])
def test_llama_layer_with_padding(side):
    torch.manual_seed(0)
    model = sharpened(LlamaModel(llama_config(16, 10000.0, "default")))
    lengths = torch.tensor([20, 13])
    slots = torch.arange(20)
    real = slots < lengths[:, None] if side == "right" else slots >= 20 - lengths[:, None]
    position_ids = (real.cumsum(-1) - 1).clamp_min(0)
    q, k, v, theirs = watch_llama(model, tokens(2, 20), attention_mask=real.long(), position_ids=position_ids)
    out = ise.attention(q, k, v, "rope", causal=True, mask=ise.Padding(lengths, side))
    for row in range(2):
        assert_near(out[row][:, real[row]], theirs[row][:, real[row]], ATTENTION)


@pytest.mark.parametrize("partial", [0.25, 0.5, 1.0])
def test_gpt_neox_turns_a_part_of_each_head(partial):
    torch.manual_seed(0)
    config = transformers.GPTNeoXConfig(
        **TINY,
        hidden_size=128,
        num_attention_heads=4,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": partial},
        attn_implementation="eager",
    )
    model = sharpened(GPTNeoXModel(config))
    names = [f"layers.0.attention.{name}" for name in ("query_key_value", "dense")]
    seen = Watched(model, tokens(2, 40), *names)
    q, k, v = seen.projected(names[0], 96).chunk(3, -1)
    recipe = Recipe(position=ise.RoPE(rotary_dim=int(32 * partial)))
    assert_near(ise.attention(q, k, v, recipe, causal=True), seen.attended(names[1], 32), ATTENTION)


# --- ALiBi ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", HEADS)
def test_alibi_slopes(heads):
    slopes = ise.ALiBi().slopes(heads)
    bloom = build_alibi_tensor(torch.ones(1, 5, dtype=torch.long), heads, torch.float32)
    assert_relative(slopes.float(), bloom[:, 0, 1], FREQUENCIES)
    mpt = build_mpt_alibi_tensor(heads, 5)
    assert_relative(slopes.float(), -mpt[:, 0, -2], FREQUENCIES)


@pytest.mark.parametrize("heads", HEADS)
def test_alibi_attention(heads):
    n = 50
    q, k, v = (normal(2, heads, n, 16, seed=s) for s in range(3))
    ones = torch.ones(2, n, dtype=torch.long)
    # BLOOM adds m·j and MPT m·(j - n + 1): in a causal row both differ from -m·(i - j) by a constant
    bloom = build_alibi_tensor(ones, heads, torch.float32).view(2, heads, 1, n)
    mpt = build_mpt_alibi_tensor(heads, n)[None]
    for backend in ("reference", "sdpa", "chunked", "flex"):
        out = ise.attention(q, k, v, "alibi", causal=True, backend=backend)
        for bias in (bloom, mpt):
            assert_near(out, eager(q, k, v, causal(n), bias), ATTENTION)


def test_bloom_layer():
    torch.manual_seed(0)
    config = transformers.BloomConfig(
        vocab_size=32, hidden_size=96, n_layer=1, n_head=6, attn_implementation="eager", pad_token_id=0
    )
    model = sharpened(BloomModel(config))
    names = [f"h.0.self_attention.{name}" for name in ("query_key_value", "dense")]
    seen = Watched(model, tokens(2, 40), *names, attention_mask=torch.ones(2, 40, dtype=torch.long))
    q, k, v = seen.projected(names[0], 48).chunk(3, -1)
    assert_near(ise.attention(q, k, v, "alibi", causal=True), seen.attended(names[1], 16), ATTENTION)


# --- windows ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 7, 30, 64])
def test_causal_window_is_transformers_sliding_window(size):
    n = 30
    rule = sliding_window_causal_mask_function(size)
    index = torch.arange(n)
    theirs = rule(0, 0, index[:, None], index).expand(n, n)
    q, k = normal(1, 1, n, 8), normal(1, 1, n, 8, seed=1)
    weights = ise.attention(q, k, torch.eye(n)[None, None], Recipe(mask=ise.Window(size)), causal=True)
    assert torch.equal(weights[0, 0] > 0, theirs)
    assert theirs.sum(-1).max() == min(size, n)


@pytest.mark.parametrize("size", [3, 8])
def test_mistral_layer(size):
    torch.manual_seed(0)
    config = transformers.MistralConfig(
        **TINY,
        hidden_size=64,
        head_dim=16,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        sliding_window=size,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        attn_implementation="eager",
    )
    model = sharpened(MistralModel(config))
    q, k, v, theirs = watch_llama(model, tokens(2, 40))
    out = ise.attention(q, k, v, f"rope+window:size={size}", causal=True)
    assert_near(out, theirs, ATTENTION)


@pytest.mark.parametrize("local", [4, 12])
def test_modernbert_layer(local):
    """ModernBERT's `local_attention` counts both sides: |Δ| ≤ local / 2, our bidirectional Window(local / 2)."""
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    config = transformers.ModernBertConfig(
        **(TINY | {"num_hidden_layers": 2}),
        cls_token_id=0,
        sep_token_id=0,
        hidden_size=64,
        num_attention_heads=4,
        max_position_embeddings=64,
        local_attention=local,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={"sliding_attention": rope, "full_attention": rope},
        attn_implementation="eager",
    )
    model = sharpened(ModernBertModel(config))
    names = [f"layers.{layer}.attn.{name}" for layer in range(2) for name in ("Wqkv", "Wo")]
    seen = Watched(model, tokens(2, 40), *names, attention_mask=torch.ones(2, 40, dtype=torch.long))
    for layer, recipe in enumerate((f"rope+window:size={local // 2}", "rope")):
        q, k, v = seen.projected(names[2 * layer], 16).chunk(3, 1)
        assert_near(ise.attention(q, k, v, recipe), seen.attended(names[2 * layer + 1], 16), ATTENTION)


# --- Llama 4 ----------------------------------------------------------------------------------------------------------


def test_llama4_temperature_around_multiples_of_its_floor():
    positions = torch.cat([8192 * m + torch.arange(-3, 4) for m in range(1, 129)] + [torch.arange(8)])
    # modeling_llama4.Llama4TextAttention, with attn_scale = 0.1 and floor_scale = 8192
    theirs = torch.log1p(torch.floor((positions.float() + 1.0) / 8192)) * 0.1 + 1.0
    assert_relative(ise.Llama4().scale(positions + 1, 128), theirs, FREQUENCIES)


def test_llama4_layer():
    torch.manual_seed(0)
    config = transformers.Llama4TextConfig(
        **TINY,
        hidden_size=64,
        head_dim=16,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size_mlp=32,
        num_local_experts=1,
        moe_layers=[],
        no_rope_layers=[0],
        layer_types=["full_attention"],
        attn_temperature_tuning=True,
        floor_scale=4,
        attn_scale=0.5,
        attention_chunk_size=64,
        max_position_embeddings=64,
        attn_implementation="eager",
    )
    model = sharpened(Llama4TextModel(config))
    q, k, v, theirs = watch_llama(model, tokens(2, 40))
    recipe = Recipe(temperature=ise.Llama4(floor=4, coefficient=0.5))
    assert_near(ise.attention(q, k, v, recipe, causal=True), theirs, ATTENTION)


# --- GAU-α ------------------------------------------------------------------------------------------------------------


def gau_rotated(x, positions, base=10000.0):
    """GAU-α's rotary embedding: pairs (2m, 2m + 1) are turned and written back as two halves."""
    d = x.shape[-1]
    angle = positions[:, None].to(x.dtype) * base ** (-torch.arange(0, d, 2, dtype=x.dtype) / d)
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)


def gau_plain(x):
    """The operand that is left unrotated, permuted like the rotated one."""
    return torch.cat((x[..., 0::2], x[..., 1::2]), -1)


@pytest.mark.parametrize("is_causal", [False, True])
def test_gau_alpha_layout(is_causal):
    n = 37
    q, k = normal(1, 1, n, 16, dtype=torch.float64), normal(1, 1, n, 16, seed=1, dtype=torch.float64)
    v = torch.eye(n, dtype=torch.float64)[None, None]  # the output is then the weights
    at = torch.arange(n)
    visible = causal(n) if is_causal else torch.ones(n, n, dtype=torch.bool)
    expected = eager(gau_rotated(q, at), gau_rotated(k, at), v, visible)
    recipe = Recipe(position=ise.RoPE(layout="interleaved"))
    assert_near(ise.attention(q, k, v, recipe, causal=is_causal), expected, 2e-15)  # measured: 5e-16


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("window", [1, 5, 16, 36, 64])
def test_gau_alpha_layout_with_rerope(window, is_causal):
    n = 37
    q, k = normal(1, 1, n, 16, dtype=torch.float64), normal(1, 1, n, 16, seed=1, dtype=torch.float64)
    at = torch.arange(n)
    distance = at[:, None] - at
    near = gau_rotated(q, at) @ gau_rotated(k, at).mT
    behind, ahead = (gau_rotated(q, torch.full((n,), w)) @ gau_plain(k).mT for w in (window, -window))
    scores = torch.where(distance.abs() < window, near, torch.where(distance > 0, behind, ahead)) / 4
    if is_causal:
        scores = scores.masked_fill(distance < 0, -math.inf)
    recipe = Recipe(position=ise.ReRoPE(window, layout="interleaved"))
    out = ise.attention(q, k, torch.eye(n, dtype=torch.float64)[None, None], recipe, causal=is_causal)
    assert_near(out, torch.softmax(scores, -1)[None, None].view_as(out), 2e-15)  # measured: 5e-16
