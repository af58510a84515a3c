"""Ours equals theirs: transformers' own rotary embeddings, their attention and layers, on tiny random models.

Every model runs eagerly in fp32 on a CPU.
"""

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXModel
from transformers.models.llama.modeling_llama import LlamaModel, LlamaRotaryEmbedding, apply_rotary_pos_emb

import isentrope as ise
from isentrope import Recipe
from isentrope.core.rotation import compute_angles
from tests.fixtures.parity import (
    ATTENTION,
    BASES,
    CPU,
    FREQUENCIES,
    HEAD_DIMS,
    TINY,
    Watched,
    assert_near,
    assert_relative,
    causal,
    eager,
    llama_config,
    normal,
    sharpened,
    tokens,
    watch_llama,
)
from tests.fixtures.recipes import TRAINABLE


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
    ours = compute_angles(position_ids, position.frequencies(head_dim, length, torch.float32, CPU), torch.float32)
    for mine, theirs in zip(ours, (cos, sin), strict=True):
        assert_near(torch.cat((mine[:, 0], mine[:, 0]), -1) * embedding.attention_scaling, theirs, ATTENTION)

    expected = eager(*apply_rotary_pos_emb(q, k, cos, sin), v, causal(length))
    for backend in TRAINABLE:
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
