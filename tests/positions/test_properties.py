"""Position methods depend on distances alone, and equal RoPE at the edge of their range."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

import isentrope as ise
from isentrope import Recipe, attention
from tests.fixtures.recipes import EXACT, SMALL_POSITIONS, TRAINABLE, D, examples, named, qkv, seeds


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "far",
    [
        ise.ReRoPE,
        ise.LeakyReRoPE,
        lambda w: ise.SelfExtend(w, 3),
        lambda w: ise.DPE(w, (3, 2)),
        lambda w: ise.DualChunk(w + 1, 0),
        ise.STRING,
    ],
)
@examples(6)
@given(seeds, st.integers(1, 30), st.integers(0, 5))
def test_branches_are_bit_identical_to_rope_inside_the_window(far, causal, dtype, seed, keys, more):
    q, k, v = qkv(seed, keys=keys, dtype=dtype)
    near = attention(q, k, v, Recipe(position=far(keys + more)), causal=causal)
    assert torch.equal(near, attention(q, k, v, "rope", causal=causal))


GROUPED = ("none", "selfextend", "jetlong", "lampe", "dpe", "dualchunk")
RELATIVE = [name for name in SMALL_POSITIONS if not name.startswith(GROUPED)]


@pytest.mark.parametrize("position", RELATIVE)
@examples(6)
@given(seeds, st.integers(-3000, 3000), st.booleans(), named(TRAINABLE))
def test_only_distances_matter(position, seed, shift, causal, backend):
    q, k, v = qkv(seed)
    at = torch.arange(20)
    plain = attention(
        q, k, v, Recipe(position=SMALL_POSITIONS[position]), causal=causal, position_ids=at, backend=backend
    )
    moved = attention(
        q, k, v, Recipe(position=SMALL_POSITIONS[position]), causal=causal, position_ids=at + shift, backend=backend
    )
    # an angle of 3000 is rounded to 5e-13, and so was the largest difference
    assert_close(moved, plain, rtol=0, atol=3e-12)
    implicit = attention(q, k, v, Recipe(position=SMALL_POSITIONS[position]), causal=causal, backend=backend)
    assert_close(plain, implicit, **EXACT)


@pytest.mark.parametrize("causal", [False, True])
@examples(5)
@given(seeds, st.integers(1, 25), st.integers(-50, 50))
def test_selfextend_moves_by_whole_groups(causal, seed, window, groups):
    q, k, v = qkv(seed)
    recipe = Recipe(position=ise.SelfExtend(window, 3))
    moved = attention(q, k, v, recipe, causal=causal, position_ids=torch.arange(20) + 3 * groups)
    assert_close(moved, attention(q, k, v, recipe, causal=causal), **EXACT)


@pytest.mark.parametrize("causal", [False, True])
@examples(5)
@given(seeds, st.integers(2, 25), st.integers(-50, 50))
def test_dualchunk_moves_by_whole_chunks(causal, seed, chunk, steps):
    q, k, v = qkv(seed)
    recipe, step = Recipe(position=ise.DualChunk(chunk)), chunk - chunk // 6
    moved = attention(q, k, v, recipe, causal=causal, position_ids=torch.arange(20) + step * steps)
    assert_close(moved, attention(q, k, v, recipe, causal=causal), **EXACT)


SAME_AS_ROPE = {
    "rerope": lambda w: ise.ReRoPE(20 + w),
    "leaky": lambda w: ise.LeakyReRoPE(w, 1.0),
    "selfextend": lambda w: ise.SelfExtend(w, 1),
    "dualchunk": lambda w: ise.DualChunk(20 + w, w // 2),
    "string": lambda w: ise.STRING(w, w),
    "dpe": lambda w: ise.DPE(w, (1, 1, 1)),
    "longrope": lambda w: ise.LongRoPE((2.0,) * (D // 2), original_length=20 + w),
    "cope": lambda w: ise.CoPE(original_length=10**6),
    "pi": lambda w: ise.PI(1.0),
    "yarn": lambda w: ise.YaRN(1.0, 10 * w),
    "ntk": lambda w: ise.NTK(1.0),
    "ntk-dynamic": lambda w: ise.NTK(4.0, dynamic=True, original_length=20 + w),
    "clex": lambda w: ise.CLEX(D, 20 + w).eval(),
}


@pytest.mark.parametrize("backend", TRAINABLE)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", SAME_AS_ROPE)
@examples(4)
@given(seeds, st.integers(1, 25))
def test_methods_that_are_rope_at_the_edge_of_their_range(name, causal, backend, seed, w):
    q, k, v = qkv(seed)
    with torch.no_grad():
        out = attention(q, k, v, Recipe(position=SAME_AS_ROPE[name](w)), causal=causal, backend=backend)
        assert_close(out, attention(q, k, v, "rope", causal=causal, backend=backend), **EXACT)
