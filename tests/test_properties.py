"""What must hold for every recipe: the oracle against two nested loops, and laws that no input may break.

Equalities are checked in fp64, where both sides differ by rounding alone.
"""

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.testing import assert_close

import isentrope as ise
from isentrope import Recipe, attention
from isentrope.recipe import KINDS
from tests.contract.matrix import takes
from tests.fixtures.oracle import brute, brute_sees, brute_theta
from tests.fixtures.recipes import (
    CPU,
    EXACT,
    SMALL_FAR_LAWS,
    SMALL_MASKS,
    SMALL_POSITIONS,
    SMALL_TEMPERATURES,
    TRAINABLE,
    TRAINED,
    D,
    examples,
    few_on_flex,
    named,
    qkv,
    seeds,
)


@pytest.mark.parametrize(
    ("kind", "parts", "where"),
    [
        ("position", SMALL_POSITIONS.values(), "SMALL_POSITIONS"),
        ("temperature", SMALL_TEMPERATURES.values(), "SMALL_TEMPERATURES"),
        ("share", [share for _, share in SMALL_FAR_LAWS.values()], "SMALL_FAR_LAWS"),
    ],
)
def test_every_method_has_a_small_example(kind, parts, where):
    missing = set(KINDS[kind]) - set(map(type, parts))
    assert not missing, f"add {missing} to {where} of tests/fixtures/recipes.py"


def assert_oracle(recipe, seed, queries, causal):
    q, k, v = qkv(seed, batch=1, queries=queries, keys=11)
    out, aux = attention(q, k, v, recipe, causal=causal, backend="reference", return_lse=True, return_entropy=True)
    expected, lse, entropy = brute(q, k, v, recipe, causal)
    assert_close(out, expected, **EXACT)
    assert_close(torch.where(lse.isnan(), lse, aux.lse), lse, equal_nan=True, **EXACT)
    assert_close(aux.entropy, entropy, **EXACT)


ORACLE = {name: p for name, p in SMALL_POSITIONS.items() if name != "clex"} | {
    "pi-interleaved": ise.PI(3.0, layout="interleaved"),
    "ntk-interleaved": ise.NTK(3.0, layout="interleaved", rotary_dim=4),
    "yarn-interleaved": ise.YaRN(4.0, 64, layout="interleaved", base=100.0),
    "rerope-interleaved": ise.ReRoPE(3, layout="interleaved"),
    "rerope-partial": ise.ReRoPE(3, rotary_dim=6, layout="interleaved"),
    "leaky-interleaved": ise.LeakyReRoPE(3, 2.0, layout="interleaved"),
    "leaky-thirds": ise.LeakyReRoPE(4, 3.0),
    "selfextend-interleaved": ise.SelfExtend(4, 2, layout="interleaved", base=50.0),
}
FAR_POSITIONS = [name for name, position in ORACLE.items() if position is not None and position.near_window is not None]


@pytest.mark.parametrize("name", ORACLE)
@examples(4)
@given(seeds, named([11, 11, 4]), st.booleans(), named(sorted(SMALL_MASKS)), named([None, ise.Cosine(3.0)]))
def test_reference_is_the_definition_for_every_position(name, seed, queries, causal, mask, score):
    assert_oracle(Recipe(score, ORACLE[name], None, SMALL_MASKS[mask]), seed, queries, causal)


@pytest.mark.parametrize("name", SMALL_TEMPERATURES)
@examples(4)
@given(seeds, named([11, 11, 4]), st.booleans(), named(sorted(SMALL_MASKS)), named(["rope", "rerope", "alibi", "none"]))
def test_reference_is_the_definition_for_every_temperature(name, seed, queries, causal, mask, position):
    assert_oracle(
        Recipe(None, SMALL_POSITIONS[position], SMALL_TEMPERATURES[name], SMALL_MASKS[mask]), seed, queries, causal
    )


@pytest.mark.parametrize("name", SMALL_FAR_LAWS)
@examples(4)
@given(seeds, named([11, 11, 4, 14]), st.booleans(), named(sorted(SMALL_MASKS)), named(FAR_POSITIONS))
def test_reference_is_the_definition_for_near_and_far_keys(name, seed, queries, causal, mask, position):
    temperature, share = SMALL_FAR_LAWS[name]
    recipe = Recipe(None, ORACLE[position], temperature, SMALL_MASKS[mask], share).resolve()
    assert_oracle(recipe, seed, queries, causal)


@pytest.mark.parametrize("count", ["visible", "sequence", "position"])
@examples(4)
@given(seeds, named([11, 4]), st.booleans(), named(sorted(SMALL_MASKS)))
def test_reference_is_the_definition_for_every_count(count, seed, queries, causal, mask):
    law = ise.InfoScale(6, count=count)
    assert_oracle(Recipe(None, SMALL_POSITIONS["rope"], law, SMALL_MASKS[mask]), seed, queries, causal)


@pytest.mark.parametrize("count", ["visible", "sequence", "position"])
def test_unclamped_laws_follow_their_formula_from_the_first_query(count):
    """With n = i + 1 the first query of a bidirectional row has n = 1 however many keys it sees: ln 1 = 0."""
    assert_oracle(Recipe(None, SMALL_POSITIONS["rope"], ise.LogN(6, clamp=False, count=count)), 0, 11, False)


def test_clex_at_its_start_is_ntk():
    clex = ise.CLEX(D, TRAINED).eval()
    for length in (1, 8, 9, 16, 17, 100, 250):
        t = -(-length // TRAINED)
        expected = torch.tensor(brute_theta(ise.NTK(2 * t - 1.0), length), dtype=torch.float64)
        theta = clex.frequencies(D, length, torch.float64, CPU)
        # nothing is learned yet, and the NTK part is not integrated but known
        assert_close(theta, expected, rtol=1e-14, atol=0)


# --- weights ----------------------------------------------------------------------------------------------------------

one_law = st.builds(
    Recipe,
    named([None, ise.Cosine(8.0)]),
    named(list(SMALL_POSITIONS.values())),
    named(list(SMALL_TEMPERATURES.values())),
    named(list(SMALL_MASKS.values())),
)
far_laws = st.builds(
    lambda position, laws, mask: Recipe(None, SMALL_POSITIONS[position], laws[0], mask, laws[1]),
    named(["rerope", "leaky", "selfextend"]),
    named(list(SMALL_FAR_LAWS.values())),
    named(list(SMALL_MASKS.values())),
)
recipes = one_law | far_laws


def check_weights(backend, seed, recipe, causal, lengths):
    assume(takes(backend, recipe))
    q, k, _ = qkv(seed)
    v = torch.ones(2, 2, 20, 3, dtype=torch.float64)
    out, aux = attention(
        q, k, v, recipe, causal=causal, lengths=lengths, backend=backend, return_lse=True, return_entropy=True
    )
    visible = count_visible(recipe, causal, lengths)[:, None].expand(-1, 4, -1)
    assert_close(out, (visible > 0).double()[..., None].expand_as(out), **EXACT)
    assert bool((out[visible == 0] == 0).all())
    assert torch.equal(aux.lse == -math.inf, visible == 0)
    assert bool((aux.entropy[visible == 0] == 0).all())
    # a difference of scores: where one key takes everything, it is zero up to their rounding
    assert bool((aux.entropy >= -1e-13).all())
    assert bool((aux.entropy <= visible.clamp_min(1).log() + 1e-13).all())


row_lengths = st.lists(st.integers(0, 20), min_size=2, max_size=2)


@pytest.mark.parametrize("backend", TRAINABLE)
@examples(16)
@given(seeds, recipes, st.booleans(), row_lengths)
def test_weights_sum_to_one_over_visible_keys(backend, seed, recipe, causal, lengths):
    check_weights(backend, seed, recipe, causal, lengths)


@few_on_flex
@given(seeds, recipes, st.booleans(), row_lengths)
def test_weights_sum_to_one_over_visible_keys_on_flex(seed, recipe, causal, lengths):
    check_weights("flex", seed, recipe, causal, lengths)


def count_visible(recipe, causal, lengths, keys=20):
    """Keys that each query of a right-padded row sees, by looking at every pair: (batch, queries)."""
    causal = causal or (recipe.mask is not None and recipe.mask.causal)
    return torch.tensor(
        [[sum(brute_sees(recipe.mask, i, j, causal) for j in range(length)) for i in range(keys)] for length in lengths]
    )


@pytest.mark.parametrize("backend", TRAINABLE)
@examples(10)
@given(seeds, named(["none", "rope", "rerope", "leaky"]), named(sorted(SMALL_MASKS)), st.booleans())
def test_zero_queries_spread_evenly(backend, seed, position, mask, causal):
    _, k, v = qkv(seed)
    q = torch.zeros(2, 4, 20, D, dtype=torch.float64)
    recipe = Recipe(None, SMALL_POSITIONS[position], ise.InfoScale(TRAINED), SMALL_MASKS[mask])
    _, aux = attention(q, k, v, recipe, causal=causal, backend=backend, return_entropy=True)
    expected = count_visible(recipe, causal, [20, 20])[:, None].expand(-1, 4, -1).double().log()
    assert_close(aux.entropy, expected, **EXACT)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", TRAINABLE)
def test_zero_vectors_have_a_cosine_of_zero(backend, dtype):
    q, k, v = qkv(0, dtype=dtype)
    q, k = q.index_fill(2, torch.tensor([3]), 0), k.index_fill(2, torch.tensor([5]), 0)
    for x in (q, k, v):
        x.requires_grad_()
    out = attention(q, k, v, "rope+cosine:alpha=16", backend=backend)
    assert bool(out.isfinite().all())
    mean = v.detach().repeat_interleave(2, 1).double().mean(2)
    assert_close(out[:, :, 3].detach().double(), mean, rtol=0, atol=1e-13 if dtype == torch.float64 else 4e-3)
    out.float().square().sum().backward()
    for x in (q, k, v):
        assert bool(x.grad.isfinite().all())


def check_entropy(backend, dtype, seed, recipe, causal):
    assume(takes(backend, recipe))
    q, k, _ = qkv(seed, dtype=dtype)
    one_hot = torch.eye(20, dtype=torch.float64).expand(2, 2, 20, 20)
    weights, exact = attention(
        q.double(), k.double(), one_hot, recipe, causal=causal, backend="reference", return_lse=True
    )
    _, aux = attention(q, k, k, recipe, causal=causal, backend=backend, return_entropy=True)
    assert aux.lse is None and aux.backend == backend
    expected = -(weights * weights.clamp_min(1e-300).log()).sum(-1)
    # measured in fp32: 3.9e-6, from scores of size ten
    bound = 1e-13 if dtype == torch.float64 else 2e-5
    if backend == "dense":  # multiplies values by e^{s - L}: off by eps/2 |L|, and so is L minus the mean score, of |L|
        bound += torch.finfo(dtype).eps / 2 * exact.lse[exact.lse.isfinite()].square().max().item()
    assert_close(aux.entropy.double(), expected, rtol=0, atol=bound)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("backend", TRAINABLE)
@examples(10)
@given(seeds, recipes, st.booleans())
def test_entropy_is_that_of_the_weights(backend, dtype, seed, recipe, causal):
    check_entropy(backend, dtype, seed, recipe, causal)


@few_on_flex
@given(seeds, recipes, st.booleans())
def test_entropy_is_that_of_the_weights_on_flex(seed, recipe, causal):
    check_entropy("flex", torch.float64, seed, recipe, causal)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", TRAINABLE)
@pytest.mark.parametrize("recipe", ["rope", "alibi", "rerope:window=5", "rope+cosine:alpha=128"])
def test_entropy_is_never_negative_nor_more_than_even(recipe, backend, dtype):
    q, k, v = qkv(0, keys=64, dtype=dtype)
    for sharpness in (0, 1, 10):
        _, aux = attention(sharpness * q, k, v, recipe, causal=True, backend=backend, return_entropy=True)
        assert aux.entropy.min() >= 0
        # half-precision kernels approximate the exponential; measured: 6e-5
        assert bool((aux.entropy <= torch.arange(1, 65).log() + 2e-4).all())


def test_flex_on_a_cpu_takes_recipes_in_any_order():
    q, k, v = qkv(0, dtype=torch.float32)
    for recipe, entropy in (("nope", False), ("alibi", True), ("nope", True), ("alibi", False)):
        attention(q, k, v, recipe, backend="flex", return_entropy=entropy)


# --- rows that see nothing --------------------------------------------------------------------------------------------


def no_keys_by_lengths():
    return {"lengths": [0, 7]}, torch.tensor([[True] * 10, [False] * 10])


def no_keys_by_left_padding():
    return {"mask": ise.Padding(torch.tensor([4, 0]), "left"), "causal": True}, torch.tensor(
        [[True] * 6 + [False] * 4, [True] * 10]
    )


def no_keys_by_distance():
    query = torch.cat((torch.arange(5), 1000 + torch.arange(5)))
    return {"mask": ise.Window(3), "position_ids": (query, torch.arange(10))}, torch.tensor(
        [[False] * 5 + [True] * 5] * 2
    )


def check_no_keys(position, how, backend, dtype):
    arguments, no_keys = how()
    recipe = Recipe(None, SMALL_POSITIONS[position], ise.InfoScale(TRAINED))
    q, k, v = (x.requires_grad_(backend != "flex") for x in qkv(3, keys=10, dtype=dtype))
    out, aux = attention(q, k, v, recipe, **arguments, backend=backend, return_lse=True, return_entropy=True)
    no_keys = no_keys[:, None].expand(2, 4, 10)
    assert bool((out[no_keys] == 0).all())
    assert torch.equal(aux.lse == -math.inf, no_keys)
    assert bool((aux.entropy[no_keys] == 0).all())
    assert not bool(torch.stack([x.isnan().any() for x in (out, aux.lse, aux.entropy)]).any())
    if backend != "flex":
        out.float().square().sum().backward()
        for x in (q, k, v):
            assert bool(x.grad.isfinite().all())
        assert bool((q.grad[no_keys] == 0).all())


@pytest.mark.parametrize("backend", TRAINABLE)
@pytest.mark.parametrize("how", [no_keys_by_lengths, no_keys_by_left_padding, no_keys_by_distance])
@pytest.mark.parametrize(
    ("position", "dtype"),
    [*((name, torch.float32) for name in SMALL_POSITIONS), *((x, torch.bfloat16) for x in ("rope", "rerope", "alibi"))],
)
def test_a_query_that_sees_nothing_gives_zeros(position, how, backend, dtype):
    check_no_keys(position, how, backend, dtype)


@pytest.mark.parametrize("how", [no_keys_by_lengths, no_keys_by_left_padding, no_keys_by_distance])
@pytest.mark.parametrize("position", ["rope", "rerope", "alibi"])
def test_a_query_that_sees_nothing_gives_zeros_on_flex(position, how):
    check_no_keys(position, how, "flex", torch.float32)
