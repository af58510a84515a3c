"""Ours equals theirs: transformers' own ALiBi, windows and temperatures, on tiny random models.

Every model runs eagerly in fp32 on a CPU.
"""

import math

import pytest
import torch
import transformers
from transformers.masking_utils import sliding_window_causal_mask_function
from transformers.models.bloom.modeling_bloom import BloomModel, build_alibi_tensor
from transformers.models.llama4.modeling_llama4 import Llama4TextModel
from transformers.models.mistral.modeling_mistral import MistralModel
from transformers.models.modernbert.modeling_modernbert import ModernBertModel
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

import isentrope as ise
from isentrope import Recipe
from tests.fixtures.parity import (
    ATTENTION,
    FREQUENCIES,
    HEADS,
    TINY,
    Watched,
    assert_near,
    assert_relative,
    causal,
    eager,
    normal,
    sharpened,
    tokens,
    watch_llama,
)
from tests.fixtures.recipes import TRAINABLE


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
    for backend in (*TRAINABLE, "flex"):
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
