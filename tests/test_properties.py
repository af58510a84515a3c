"""What must hold for every recipe: the oracle against two nested loops, and laws that no input may break.

Equalities are checked in fp64, where both sides differ by rounding alone.
"""

import cmath
import json
import math
from functools import cache
from itertools import accumulate

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from isentrope.backends.call import Call
from isentrope.layout import Layout
from isentrope.region import CAUSAL, EVERYTHING, Region, Span
from torch.testing import assert_close

import isentrope as ise
from isentrope import Recipe, attention
from isentrope.attention import BACKENDS
from isentrope.masks import And, Or

CPU = torch.device("cpu")
EXACT = {"rtol": 0, "atol": 1e-13}  # measured: at most 1.6e-14, an entropy
D = 8  # head size
TRAINED = 8  # training length of everything that has one: most rows below are longer
TRAINABLE = ("reference", "sdpa", "chunked")


def examples(count, **options):
    return settings(max_examples=count, deadline=None, derandomize=True, **options)


# on a CPU a call of FlexAttention takes a tenth of a second: few examples, and none to shrink a failure
few_on_flex = examples(8, phases=(Phase.explicit, Phase.generate))


@cache
def learned(kind):
    """CLEX and SSMax with weights that are not those of their start."""
    generator = torch.Generator().manual_seed(7)
    module = ise.CLEX(D, TRAINED, hidden=5).eval() if kind == "clex" else ise.SSMax(4, TRAINED, bias=True)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return module.requires_grad_(False)


POSITIONS = {
    "none": None,
    "nope": ise.NoPE(),
    "rope": ise.RoPE(),
    "rope-interleaved": ise.RoPE(500.0, layout="interleaved"),
    "rope-partial": ise.RoPE(rotary_dim=4),
    "pi": ise.PI(3.0),
    "ntk": ise.NTK(3.0),
    "ntk-dynamic": ise.NTK(2.0, dynamic=True, original_length=TRAINED),
    "yarn": ise.YaRN(4.0, 64),
    "rerope": ise.ReRoPE(5),
    "leaky": ise.LeakyReRoPE(5, 4.0),
    "selfextend": ise.SelfExtend(5, 3),
    "alibi": ise.ALiBi(),
    "clex": learned("clex"),
}
TEMPERATURES = {
    "none": None,
    "constant": ise.Constant(),
    "loglength": ise.LogLength(),
    "softmaxplus": ise.SoftmaxPlus(6.0),
    "logn": ise.LogN(TRAINED),
    "yarn": ise.YaRNTemperature(TRAINED),
    "yarn-static": ise.YaRNTemperature(factor=4.0),
    "infoscale": ise.InfoScale(TRAINED),
    "infoscale-epsilon": ise.InfoScale(TRAINED, 0.5),
    "infoscale-unclamped": ise.InfoScale(TRAINED, clamp=False),
    "infoscaleexact": ise.InfoScaleExact(TRAINED),
    "llama4": ise.Llama4(floor=5),
    "fitted": ise.Fitted((TRAINED, 16, 32), (1.0, 1.3, 1.4)),
    "ssmax": learned("ssmax"),
}
MASKS = {
    "none": None,
    "window": ise.Window(4),
    "sink": ise.Sink(2, 3),
    "lambda": ise.Lambda(1, 6),
    "causal": ise.Causal(),
    "either": ise.Window(2) | ise.Sink(1, 1),
    "both": ise.Window(7) & ise.Sink(2, 3),
}

seeds = st.integers(0, 2**20)
named = st.sampled_from


def normal(seed, *shape, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def qkv(seed, batch=2, queries=None, keys=20, heads=4, kv_heads=2, dtype=torch.float64):
    """Queries twice as large, so that attention is far from uniform."""
    q = 2 * normal(seed, batch, heads, keys if queries is None else queries, D, dtype=dtype)
    return (
        q,
        normal(seed + 1, batch, kv_heads, keys, D, dtype=dtype),
        normal(seed + 2, batch, kv_heads, keys, 5, dtype=dtype),
    )


# --- the oracle -------------------------------------------------------------------------------------------------------


def brute_theta(position, length):
    """Angles a step, from methods.md."""
    base, d = position.base, getattr(position, "rotary_dim", None) or D
    plain = [base ** (-2 * m / d) for m in range(d // 2)]
    match position:
        case ise.PI():
            return [x / position.factor for x in plain]
        case ise.NTK():
            s = position.factor
            if position.dynamic:
                s = max(s * length / position.original_length - (s - 1), 1)
            return [(base * s ** (d / (d - 2))) ** (-2 * m / d) for m in range(d // 2)]
        case ise.YaRN():
            low, high = (
                d * math.log(position.original_length / (2 * math.pi * r)) / (2 * math.log(base)) for r in (32, 1)
            )
            low, high = min(max(math.floor(low), 0), d - 1), min(max(math.ceil(high), 0), d - 1)
            kept = [1 - min(max((m - low) / (high - low), 0), 1) for m in range(d // 2)]
            return [x / position.factor * (1 - m) + x * m for x, m in zip(plain, kept, strict=True)]
        case _:
            return plain


def brute_distance(position, i, j):
    """The distance at which query i and key j meet."""
    delta, w = i - j, getattr(position, "window", math.inf)
    if abs(delta) < w:
        return delta
    sign = 1 if delta > 0 else -1
    match position:
        case ise.ReRoPE():
            return sign * w
        case ise.LeakyReRoPE():
            return sign * (w + (abs(delta) - w) / position.leak)
        case ise.SelfExtend():
            g = position.group
            return i // g + sign * (w - w // g) - j // g


def brute_tau(law, n, head):
    """The table of methods.md."""
    if law is None:
        return 1.0
    if law.clamp and n <= {ise.LogLength: math.e}.get(type(law), getattr(law, "train_length", None) or 0):
        return 1.0
    log = math.log(n)
    match law:
        case ise.Constant():
            return 1.0
        case ise.LogLength():
            return log
        case ise.SoftmaxPlus():
            return 1.0 if law.clamp and n <= law.base else log / math.log(law.base)
        case ise.LogN():
            return log / math.log(law.train_length)
        case ise.YaRNTemperature():
            return (0.1 * math.log(law.factor or n / law.train_length) + 1) ** 2
        case ise.InfoScaleExact():
            y, y_trained = (math.exp(-2 * (math.log(m) - law.epsilon) / D) for m in (n, law.train_length))
            return math.sqrt(1 - y) / y / (math.sqrt(1 - y_trained) / y_trained)
        case ise.InfoScale():
            f, f_trained = (1 - math.exp(2 * law.epsilon / D) * m ** (-2 / D) for m in (n, law.train_length))
            return math.sqrt(f / f_trained)
        case ise.Llama4():
            return 1 + law.coefficient * math.log(1 + n // law.floor)
        case ise.SSMax():
            return law.slope[head].item() * log + law.offset[head].item()
        case ise.Fitted():
            if n <= law.lengths[0]:
                return 1.0
            right = next((r for r, m in enumerate(law.lengths) if m >= n), len(law.lengths) - 1)
            a, b = (math.log(m) for m in law.lengths[right - 1 : right + 1])
            return law.table[right - 1] + (log - a) / (b - a) * (law.table[right] - law.table[right - 1])


def brute_sees(mask, i, j, causal):
    delta = i - j
    match mask:
        case None | ise.Full():
            return not causal or delta >= 0
        case ise.Causal():
            return delta >= 0
        case ise.Window():
            return 0 <= delta < mask.size if causal else abs(delta) <= mask.size
        case ise.Sink():
            return (j < mask.sinks and (not causal or delta >= 0)) or brute_sees(ise.Window(mask.size), i, j, causal)
        case ise.Lambda():
            return brute_sees(ise.Sink(mask.sinks, mask.window), i, j, causal)
        case And():
            return all(brute_sees(part, i, j, causal) for part in mask.masks)
        case Or():
            return any(brute_sees(part, i, j, causal) for part in mask.masks)


def brute(q, k, v, recipe, causal):
    """Attention, log-sum-exp and entropy by loops over batch, head, query and key."""
    batch, heads, queries, d = q.shape
    keys = k.shape[2]
    causal = causal or (recipe.mask is not None and recipe.mask.causal)
    position, law = recipe.position, recipe.temperature
    rotates = position is not None and position.rotates
    theta = brute_theta(position, keys) if rotates else []
    pairs = len(theta)
    if rotates and position.layout == "interleaved":
        first, second = range(0, 2 * pairs, 2), range(1, 2 * pairs, 2)
    else:
        first, second = range(pairs), range(pairs, 2 * pairs)
    turns = {}

    def inner(a, b, distance):
        if distance not in turns:
            turns[distance] = [cmath.exp(1j * distance * x) for x in theta]
        total = sum(
            (complex(a[m], a[n]) * complex(b[m], b[n]).conjugate() * turn).real
            for m, n, turn in zip(first, second, turns[distance], strict=True)
        )
        return total + sum(x * y for x, y in zip(a[2 * pairs :], b[2 * pairs :], strict=True))

    def alike(a, b, distance):
        if isinstance(recipe.score, ise.Cosine):
            norm = math.sqrt(sum(x * x for x in a) * sum(y * y for y in b))
            return recipe.score.alpha * inner(a, b, distance) / norm if norm else 0.0
        return inner(a, b, distance) / math.sqrt(d)

    out, lse, entropy = (
        q.new_zeros(batch, heads, queries, v.shape[-1]),
        q.new_zeros(q.shape[:3]),
        q.new_zeros(q.shape[:3]),
    )
    query, key, value = q.tolist(), k.tolist(), v.tolist()
    for b in range(batch):
        for h in range(heads):
            shared = h // (heads // k.shape[1])
            slope = 2 ** (-8 * (h + 1) / heads) if isinstance(position, ise.ALiBi) else 0.0  # heads is a power of two
            for index in range(queries):
                i = index + keys - queries
                seen = [j for j in range(keys) if brute_sees(recipe.mask, i, j, causal)]
                n = {"visible": len(seen), "sequence": keys, "position": i + 1}[getattr(law, "count", "visible")]
                tau = brute_tau(law, n, h) if len(seen) > 1 else 1.0
                scores = [
                    tau * alike(query[b][h][index], key[b][shared][j], brute_distance(position, i, j))
                    - slope * abs(i - j)
                    for j in seen
                ]
                if len(seen) == 1:  # any temperature gives the same weights, not the same score
                    lse[b, h, index] = math.nan
                    out[b, h, index] = torch.tensor(value[b][shared][seen[0]], dtype=q.dtype)
                    continue
                top = max(scores)
                total = sum(math.exp(s - top) for s in scores)
                weights = [math.exp(s - top) / total for s in scores]
                lse[b, h, index] = top + math.log(total)
                entropy[b, h, index] = -sum(p * math.log(p) for p in weights if p)
                for p, j in zip(weights, seen, strict=True):
                    out[b, h, index] += p * torch.tensor(value[b][shared][j], dtype=q.dtype)
    return out, lse, entropy


def assert_oracle(recipe, seed, queries, causal):
    q, k, v = qkv(seed, batch=1, queries=queries, keys=11)
    out, aux = attention(q, k, v, recipe, causal=causal, backend="reference", return_lse=True, return_entropy=True)
    expected, lse, entropy = brute(q, k, v, recipe, causal)
    assert_close(out, expected, **EXACT)
    assert_close(torch.where(lse.isnan(), lse, aux.lse), lse, equal_nan=True, **EXACT)
    assert_close(aux.entropy, entropy, **EXACT)


ORACLE = {name: p for name, p in POSITIONS.items() if name != "clex"} | {
    "pi-interleaved": ise.PI(3.0, layout="interleaved"),
    "ntk-interleaved": ise.NTK(3.0, layout="interleaved", rotary_dim=4),
    "yarn-interleaved": ise.YaRN(4.0, 64, layout="interleaved", base=100.0),
    "rerope-interleaved": ise.ReRoPE(3, layout="interleaved"),
    "rerope-partial": ise.ReRoPE(3, rotary_dim=6, layout="interleaved"),
    "leaky-interleaved": ise.LeakyReRoPE(3, 2.0, layout="interleaved"),
    "leaky-thirds": ise.LeakyReRoPE(4, 3.0),
    "selfextend-interleaved": ise.SelfExtend(4, 2, layout="interleaved", base=50.0),
}


@pytest.mark.parametrize("name", ORACLE)
@examples(12)
@given(seeds, named([11, 11, 4]), st.booleans(), named(sorted(MASKS)), named([None, ise.Cosine(3.0)]))
def test_reference_is_the_definition_for_every_position(name, seed, queries, causal, mask, score):
    assert_oracle(Recipe(score, ORACLE[name], None, MASKS[mask]), seed, queries, causal)


@pytest.mark.parametrize("name", TEMPERATURES)
@examples(12)
@given(seeds, named([11, 11, 4]), st.booleans(), named(sorted(MASKS)), named(["rope", "rerope", "alibi", "none"]))
def test_reference_is_the_definition_for_every_temperature(name, seed, queries, causal, mask, position):
    assert_oracle(Recipe(None, POSITIONS[position], TEMPERATURES[name], MASKS[mask]), seed, queries, causal)


@pytest.mark.parametrize("count", ["visible", "sequence", "position"])
@examples(12)
@given(seeds, named([11, 4]), st.booleans(), named(sorted(MASKS)))
def test_reference_is_the_definition_for_every_count(count, seed, queries, causal, mask):
    law = ise.InfoScale(6, count=count)
    assert_oracle(Recipe(None, POSITIONS["rope"], law, MASKS[mask]), seed, queries, causal)


@pytest.mark.parametrize("count", ["visible", "sequence", "position"])
def test_unclamped_laws_follow_their_formula_from_the_first_query(count):
    """With n = i + 1 the first query of a bidirectional row has n = 1 however many keys it sees: ln 1 = 0."""
    assert_oracle(Recipe(None, POSITIONS["rope"], ise.LogN(6, clamp=False, count=count)), 0, 11, False)


def test_clex_at_its_start_is_ntk():
    clex = ise.CLEX(D, TRAINED).eval()
    for length in (1, 8, 9, 16, 17, 100, 250):
        t = -(-length // TRAINED)
        expected = torch.tensor(brute_theta(ise.NTK(2 * t - 1.0), length), dtype=torch.float64)
        theta = clex.frequencies(D, length, torch.float64, CPU)
        # nothing is learned yet, and the NTK part is not integrated but known
        assert_close(theta, expected, rtol=1e-14, atol=0)


# --- short inputs are untouched ---------------------------------------------------------------------------------------

CLAMPED = {
    "softmaxplus": lambda n: ise.SoftmaxPlus(float(n)),
    "logn": ise.LogN,
    "yarn": ise.YaRNTemperature,
    "infoscale": ise.InfoScale,
    "infoscale-epsilon": lambda n: ise.InfoScale(n, 0.5),
    "infoscaleexact": ise.InfoScaleExact,
    "llama4": lambda n: ise.Llama4(floor=n + 1),
    "fitted": lambda n: ise.Fitted((n, 2 * n), (1.2, 1.5)),
    "fitted-heads": lambda n: ise.Fitted((n, 2 * n), ((1.2, 1.5),) * 4),
    "constant": lambda n: ise.Constant(),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", CLAMPED)
@examples(20)
@given(st.integers(2, 100_000), st.integers(2, 512))
def test_clamped_laws_are_exactly_one_up_to_the_training_length(name, dtype, train_length, d):
    n = torch.cat((torch.arange(1, 65), torch.tensor([train_length - 1, train_length]))).clamp(1, train_length)
    tau = CLAMPED[name](train_length).scale(n.to(dtype), d)
    assert tau.dtype == dtype
    assert bool((tau == 1).all())


def test_log_length_is_one_up_to_e():
    assert ise.LogLength().scale(torch.tensor([1, 2]), 64).tolist() == [1, 1]


@pytest.mark.parametrize("backend", ["sdpa", "chunked"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CLAMPED)
@examples(6)
@given(seeds, st.integers(2, 20), named(sorted(POSITIONS)), named(["visible", "sequence", "position"]))
def test_short_inputs_are_bit_identical(name, dtype, causal, backend, seed, keys, position, count):
    law = CLAMPED[name](20)
    law = type(law)(**{key: getattr(law, key) for key in law.options()} | {"count": count})
    q, k, v = qkv(seed, keys=keys, dtype=dtype)
    tempered = attention(q, k, v, Recipe(None, POSITIONS[position], law), causal=causal, backend=backend)
    assert torch.equal(tempered, attention(q, k, v, Recipe(None, POSITIONS[position]), causal=causal, backend=backend))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("far", [ise.ReRoPE, ise.LeakyReRoPE, lambda w: ise.SelfExtend(w, 3)])
@examples(15)
@given(seeds, st.integers(1, 30), st.integers(0, 5))
def test_branches_are_bit_identical_to_rope_inside_the_window(far, causal, dtype, seed, keys, more):
    q, k, v = qkv(seed, keys=keys, dtype=dtype)
    near = attention(q, k, v, Recipe(position=far(keys + more)), causal=causal)
    assert torch.equal(near, attention(q, k, v, "rope", causal=causal))


# --- laws over n ------------------------------------------------------------------------------------------------------

RISING = {
    "constant": ise.Constant(),
    "loglength": ise.LogLength(),
    "softmaxplus": ise.SoftmaxPlus(),
    "logn": ise.LogN(64),
    "yarn": ise.YaRNTemperature(64),
    "yarn-static": ise.YaRNTemperature(factor=16.0),
    "infoscale": ise.InfoScale(64),
    "infoscale-epsilon": ise.InfoScale(64, 1.0),
    "infoscaleexact": ise.InfoScaleExact(64),
    "llama4": ise.Llama4(),
    "llama4-odd": ise.Llama4(floor=1000),
    "fitted": ise.Fitted((64, 512, 4096), (1.0, 1.2, 1.3)),
    "loglength-unclamped": ise.LogLength(clamp=False),
    "softmaxplus-unclamped": ise.SoftmaxPlus(clamp=False),
    "logn-unclamped": ise.LogN(64, clamp=False),
    "yarn-unclamped": ise.YaRNTemperature(64, clamp=False),
    "infoscale-unclamped": ise.InfoScale(64, clamp=False),
    "infoscaleexact-unclamped": ise.InfoScaleExact(64, clamp=False),
    "llama4-unclamped": ise.Llama4(clamp=False),
    "fitted-unclamped": ise.Fitted((64, 512, 4096), (1.0, 1.2, 1.3), clamp=False),
}


@pytest.mark.parametrize("name", RISING)
@examples(20)
@given(st.lists(st.integers(3, 10_000_000), min_size=2, max_size=40), st.integers(2, 512))
def test_laws_never_fall_and_stay_finite_in_fp32(name, lengths, d):
    lengths = torch.tensor(sorted({2, *lengths, 10_000_000}), dtype=torch.float32)
    tau = RISING[name].scale(lengths, d)
    assert bool(tau.isfinite().all())
    # no fall was seen over every n up to 3 million; another machine's logarithm may round its last bit otherwise
    assert bool((tau[1:] >= tau[:-1] * (1 - 2**-22)).all())
    wide = RISING[name].scale(lengths.double(), d)
    assert bool((wide[1:] >= wide[:-1]).all())


# --- weights ----------------------------------------------------------------------------------------------------------

recipes = st.builds(
    Recipe,
    named([None, ise.Cosine(8.0)]),
    named(list(POSITIONS.values())),
    named(list(TEMPERATURES.values())),
    named(list(MASKS.values())),
)


def check_weights(backend, seed, recipe, causal, lengths):
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
@examples(40)
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
@given(seeds, named(["none", "rope", "rerope", "leaky"]), named(sorted(MASKS)), st.booleans())
def test_zero_queries_spread_evenly(backend, seed, position, mask, causal):
    _, k, v = qkv(seed)
    q = torch.zeros(2, 4, 20, D, dtype=torch.float64)
    recipe = Recipe(None, POSITIONS[position], ise.InfoScale(TRAINED), MASKS[mask])
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
    q, k, _ = qkv(seed, dtype=dtype)
    one_hot = torch.eye(20, dtype=torch.float64).expand(2, 2, 20, 20)
    weights = attention(q.double(), k.double(), one_hot, recipe, causal=causal, backend="reference")
    _, aux = attention(q, k, k, recipe, causal=causal, backend=backend, return_entropy=True)
    assert aux.lse is None and aux.backend == backend
    expected = -(weights * weights.clamp_min(1e-300).log()).sum(-1)
    # measured in fp32: 3.9e-6, from scores of size ten
    assert_close(aux.entropy.double(), expected, rtol=0, atol=1e-13 if dtype == torch.float64 else 2e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("backend", TRAINABLE)
@examples(25)
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


def blind_by_lengths():
    return {"lengths": [0, 7]}, torch.tensor([[True] * 10, [False] * 10])


def blind_by_left_padding():
    return {"mask": ise.Padding(torch.tensor([4, 0]), "left"), "causal": True}, torch.tensor(
        [[True] * 6 + [False] * 4, [True] * 10]
    )


def blind_by_distance():
    query = torch.cat((torch.arange(5), 1000 + torch.arange(5)))
    return {"mask": ise.Window(3), "position_ids": (query, torch.arange(10))}, torch.tensor(
        [[False] * 5 + [True] * 5] * 2
    )


def check_blind(position, how, backend, dtype):
    arguments, blind = how()
    recipe = Recipe(None, POSITIONS[position], ise.InfoScale(TRAINED))
    q, k, v = (x.requires_grad_(backend != "flex") for x in qkv(3, keys=10, dtype=dtype))
    out, aux = attention(q, k, v, recipe, **arguments, backend=backend, return_lse=True, return_entropy=True)
    blind = blind[:, None].expand(2, 4, 10)
    assert bool((out[blind] == 0).all())
    assert torch.equal(aux.lse == -math.inf, blind)
    assert bool((aux.entropy[blind] == 0).all())
    assert not bool(torch.stack([x.isnan().any() for x in (out, aux.lse, aux.entropy)]).any())
    if backend != "flex":
        out.float().square().sum().backward()
        for x in (q, k, v):
            assert bool(x.grad.isfinite().all())
        assert bool((q.grad[blind] == 0).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", TRAINABLE)
@pytest.mark.parametrize("how", [blind_by_lengths, blind_by_left_padding, blind_by_distance])
@pytest.mark.parametrize("position", POSITIONS)
def test_a_query_that_sees_nothing_gives_zeros(position, how, backend, dtype):
    check_blind(position, how, backend, dtype)


@pytest.mark.parametrize("how", [blind_by_lengths, blind_by_left_padding, blind_by_distance])
@pytest.mark.parametrize("position", ["rope", "rerope", "alibi"])
def test_a_query_that_sees_nothing_gives_zeros_on_flex(position, how):
    check_blind(position, how, "flex", torch.float32)


# --- padding, packing, decoding ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", ["visible", "sequence", "position"])
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("position", POSITIONS)
@examples(4)
@given(
    seeds,
    st.lists(st.integers(1, 20), min_size=2, max_size=2),
    st.booleans(),
    named(TRAINABLE),
    named(sorted(MASKS)),
    named([1.0, 1e20]),
)
def test_padding_never_changes_real_rows(position, side, count, seed, lengths, causal, backend, mask, size):
    recipe = Recipe(None, POSITIONS[position], ise.InfoScale(TRAINED, count=count), MASKS[mask])
    q, k, v = qkv(seed)
    real = [slice(0, n) if side == "right" else slice(20 - n, 20) for n in lengths]
    for row, kept in enumerate(real):
        for x in (k, v):
            x[row] = torch.full_like(x[row], size).index_copy(1, torch.arange(20)[kept], x[row][:, kept])
    padding = {"lengths": lengths} if side == "right" else {"mask": ise.Padding(torch.tensor(lengths), "left")}
    out, aux = attention(
        q, k, v, recipe, causal=causal, backend=backend, return_lse=True, return_entropy=True, **padding
    )
    for row, kept in enumerate(real):
        alone, alone_aux = attention(
            *(x[row : row + 1, :, kept] for x in (q, k, v)),
            recipe,
            causal=causal,
            backend=backend,
            return_lse=True,
            return_entropy=True,
        )
        assert_close(out[row, :, kept], alone[0], **EXACT)
        assert_close(aux.lse[row, :, kept], alone_aux.lse[0], **EXACT)
        assert_close(aux.entropy[row, :, kept], alone_aux.entropy[0], **EXACT)


@st.composite
def packings(draw, keys=20):
    """Documents as (start, stop), and their ids: runs of equal numbers, which may come back later in the row."""
    cuts = sorted(draw(st.sets(st.integers(1, keys - 1), max_size=4)))
    spans = list(zip([0, *cuts], [*cuts, keys], strict=True))
    ids = [n % 3 if draw(st.booleans()) else n + 3 for n in range(len(spans))]
    return spans, torch.tensor([i for i, (a, b) in zip(ids, spans, strict=True) for _ in range(a, b)])


@pytest.mark.parametrize("count", ["visible", "sequence", "position"])
@pytest.mark.parametrize("position", POSITIONS)
@examples(5)
@given(seeds, st.data(), st.booleans(), named(TRAINABLE), named(sorted(MASKS)), st.booleans())
def test_packed_documents_equal_separate_calls(position, count, seed, data, causal, backend, mask, padded):
    recipe = Recipe(None, POSITIONS[position], ise.InfoScale(4, count=count), MASKS[mask])
    q, k, v = qkv(seed)
    rows = [data.draw(packings()) for _ in range(2)]
    ids = torch.stack([ids for _, ids in rows])
    lengths = data.draw(st.lists(st.integers(0, 20), min_size=2, max_size=2)) if padded else None
    out = attention(q, k, v, recipe, causal=causal, mask=ise.Document(ids), lengths=lengths, backend=backend)
    for row, (spans, _) in enumerate(rows):
        for start, stop in spans:
            stop = min(stop, lengths[row]) if padded else stop
            if start < stop:
                alone = attention(
                    *(x[row : row + 1, :, start:stop] for x in (q, k, v)), recipe, causal=causal, backend=backend
                )
                assert_close(out[row, :, start:stop], alone[0], **EXACT)


# angles of dynamic NTK and CLEX, and n = the row's length, change while a row grows: no cache can follow them
GROWING = {name: p for name, p in POSITIONS.items() if name not in ("ntk-dynamic", "clex")}


@pytest.mark.parametrize("position", GROWING)
@examples(6)
@given(
    seeds,
    named(sorted(TEMPERATURES)),
    named(sorted(MASKS)),
    named([None, ise.Cosine(8.0)]),
    named([1, 7]),
    named(TRAINABLE),
)
def test_decoding_equals_the_full_forward(position, seed, temperature, mask, score, step, backend):
    recipe = Recipe(score, GROWING[position], TEMPERATURES[temperature], MASKS[mask])
    q, k, v = qkv(seed)
    full = attention(q, k, v, recipe, causal=True, backend=backend)
    prefill = 6
    for stop in (prefill, *range(prefill + step, 21, step)):
        start = 0 if stop == prefill else stop - step
        part = attention(q[:, :, start:stop], k[:, :, :stop], v[:, :, :stop], recipe, causal=True, backend=backend)
        assert_close(part, full[:, :, start:stop], **EXACT)


@pytest.mark.parametrize("position", GROWING)
@examples(5)
@given(
    seeds,
    st.lists(st.integers(1, 20), min_size=3, max_size=3),
    named(["infoscale", "llama4", "none"]),
    named(sorted(MASKS)),
    named([1, 3]),
    named(TRAINABLE),
)
def test_ragged_decoding_equals_the_full_forward(position, seed, lengths, temperature, mask, step, backend):
    """Rows of different lengths in one cache: the queries are each row's last tokens."""
    recipe = Recipe(None, GROWING[position], TEMPERATURES[temperature], MASKS[mask])
    q, k, v = qkv(seed, batch=3)
    last = torch.stack([q[row, :, [max(n - step + s, 0) for s in range(step)]] for row, n in enumerate(lengths)])
    out = attention(last, k, v, recipe, causal=True, lengths=lengths, backend=backend)
    for row, n in enumerate(lengths):
        full = attention(*(x[row : row + 1, :, :n] for x in (q, k, v)), recipe, causal=True, backend=backend)
        held = min(step, n)
        assert_close(out[row, :, step - held :], full[0, :, n - held :], **EXACT)


# --- regions ----------------------------------------------------------------------------------------------------------

N = 9
edges = st.one_of(st.integers(-3, N + 3), named([-math.inf, math.inf]))
offsets = st.one_of(st.integers(-N - 2, N + 2), named([-math.inf, math.inf]))
spans = st.builds(
    Span,
    st.one_of(st.just(-math.inf), edges),
    st.one_of(st.just(math.inf), edges),
    st.one_of(st.just(-math.inf), offsets),
    st.one_of(st.just(math.inf), offsets),
)


def joined(parts):
    region = Region(())
    for span in parts:
        region = region | Region(() if span.empty else (span,))
    return region


regions = st.lists(spans, max_size=3).map(joined)


def inside(span, i, j):
    return (span.start <= j) & (j < span.stop) & (span.low <= j - i) & (j - i < span.high)


def layers(region, i, j):
    """In how many spans each pair lies."""
    return sum(
        (inside(span, i, j).long() for span in region.spans), torch.zeros(torch.broadcast_shapes(i.shape, j.shape))
    )


@examples(300)
@given(st.lists(spans, max_size=3), st.lists(spans, max_size=3))
def test_region_algebra_is_that_of_sets(first, second):
    # queries and keys beyond every edge above
    i, j = torch.arange(-4, N + 5)[:, None], torch.arange(-4, N + 5)
    a, b = joined(first), joined(second)
    dense = [
        torch.stack([inside(s, i, j) for s in parts]).any(0) if parts else torch.zeros(len(i), len(i), dtype=torch.bool)
        for parts in (first, second)
    ]
    results = {
        "a": (a, dense[0]),
        "a | b": (a | b, dense[0] | dense[1]),
        "a & b": (a & b, dense[0] & dense[1]),
        "a - b": (a - b, dense[0] & ~dense[1]),
    }
    for name, (region, expected) in results.items():
        times = layers(region, i, j)
        assert bool((times <= 1).all()), f"{name} overlaps"
        assert torch.equal(times > 0, expected), name


@examples(300)
@given(regions, st.integers(1, N + 4), st.integers(1, N + 4))
def test_within_keeps_the_pairs_and_only_drops_bounds(region, keys, queries):
    queries = min(queries, keys)
    i, j = torch.arange(keys - queries, keys)[:, None], torch.arange(keys)
    simple = region.within(queries, keys)
    assert torch.equal(layers(simple, i, j), layers(region, i, j))
    assert len(simple.spans) <= len(region.spans)
    for span in simple.spans:
        assert span.start == -math.inf or 0 < span.start < keys
        assert span.stop == math.inf or 0 < span.stop < keys
        assert span.low == -math.inf or -keys < span.low < queries
        assert span.high == math.inf or -keys < span.high < queries


def test_within_recognises_everything():
    assert Region((Span(-5, N, -N, N),)).within(N, N) == EVERYTHING
    assert Region((Span(low=N),)).within(N, N) == Region(())
    assert CAUSAL.within(1, N) == EVERYTHING  # one query at the end sees all
    assert CAUSAL.within(2, N) == CAUSAL


def seen(mask, causal=False):
    """Visible pairs among ten tokens."""
    x = torch.zeros(1, 1, 10, 4)
    return attention(x, x, torch.eye(10)[None, None], Recipe(mask=mask), causal=causal)[0, 0] > 0


@pytest.mark.parametrize("causal", [False, True])
def test_either_mask_allows_what_each_alone_allows(causal):
    masks = [*filter(None, MASKS.values()), ise.Causal() & ise.Window(3), ise.Full()]
    for a in masks:
        for b in masks:
            assert torch.equal(seen(a | b, causal), seen(a, causal) | seen(b, causal)), f"{a} | {b}"


@st.composite
def layouts(draw):
    """A random layout, and for each row its frame and position by slot, worked out one slot at a time."""
    keys = draw(st.integers(1, N))
    queries = draw(st.sampled_from([keys, draw(st.integers(1, keys)), draw(st.integers(1, N))]))
    batch = draw(st.integers(1, 2))
    lengths = draw(st.none() | st.lists(st.integers(0, keys), min_size=batch, max_size=batch))
    left = draw(st.booleans()) and lengths is not None
    rows = batch if draw(st.booleans()) else 1
    documents = draw(
        st.none() | st.lists(st.lists(st.integers(0, 2), min_size=keys, max_size=keys), min_size=rows, max_size=rows)
    )
    frames, aligned = [], []
    for row in range(batch):
        count = keys if lengths is None else lengths[row]
        low, high = (keys - count, keys) if left else (0, count)
        of_slots = []
        for slot in range(keys):
            a, b = slot, slot
            if documents is None:
                a, b = 0, keys
            else:
                ids = documents[row % rows]
                while a > 0 and ids[a - 1] == ids[slot]:
                    a -= 1
                while b < keys and ids[b] == ids[slot]:
                    b += 1
            of_slots.append((max(a, low), min(b, high)))
        frames.append(of_slots)
        last = count if queries != keys and lengths is not None and not left else keys
        aligned.append([last - queries + q for q in range(queries)])
    position_ids, positions = None, None
    if draw(st.booleans()):
        positions = []
        for row in range(batch):
            steps = draw(st.lists(st.integers(0, 3), min_size=keys, max_size=keys))
            ids, at = [], 0
            for slot in range(keys):
                fresh = slot and frames[row][slot][0] != frames[row][slot - 1][0]
                at = steps[slot] if fresh else at + steps[slot]
                ids.append(at)
            positions.append(ids)
        given_queries = [
            draw(st.lists(st.integers(0, 2 * N), min_size=queries, max_size=queries)) for _ in range(batch)
        ]
        position_ids = (torch.tensor(given_queries), torch.tensor(positions))
    layout = Layout(
        batch,
        queries,
        keys,
        CPU,
        lengths=lengths,
        left_padded=left,
        documents=None if documents is None else torch.tensor(documents),
        position_ids=position_ids,
    )
    frame, query, key = [], [], []
    for row in range(batch):
        at = [frames[row][min(max(slot, 0), keys - 1)] for slot in aligned[row]]
        frame.append(at)
        query.append([slot - low for slot, (low, _) in zip(aligned[row], at, strict=True)])
        key.append([slot - low for slot, (low, _) in enumerate(frames[row])])
    if position_ids is not None:
        query, key = given_queries, positions
    return layout, torch.tensor(frame), torch.tensor(query), torch.tensor(key)


@examples(400)
@given(layouts(), regions)
def test_layout_against_every_pair(case, region):
    layout, frame, query, key = case
    slots = torch.arange(layout.keys)
    framed = (slots >= frame[..., :1]) & (slots < frame[..., 1:])
    dense = framed & (layers(region, query[..., None], key[:, None]) > 0)
    batch = layout.batch

    low, high = layout.bounds(region)
    covered = (slots >= low[..., None]) & (slots < high[..., None])
    assert bool((covered.sum(2) <= 1).all()), "intervals of one query overlap"
    assert torch.equal(covered.any(2).expand(batch, -1, -1), dense)
    assert torch.equal(layout.count("visible", region).expand(batch, -1), dense.sum(-1))
    assert torch.equal(layout.count("position", region).expand(batch, -1), query + 1)
    held = (frame[..., 1] - frame[..., 0]).clamp_min(0)
    assert torch.equal(layout.count("sequence", region).clamp_min(0).expand(batch, -1), held)

    simple = layout.simplify(region)
    low, high = layout.bounds(simple)
    covered = ((slots >= low[..., None]) & (slots < high[..., None])).any(2)
    assert torch.equal(covered.expand(batch, -1, -1), dense), "simplify changed what is visible"
    for first in range(layout.queries):
        for last in (first + 1, layout.queries):
            a, b = layout.key_range(region, first, last)
            assert 0 <= a <= b <= layout.keys
            reached = dense[:, first:last].flatten(0, 1).any(0).nonzero()
            assert len(reached) == 0 or (a <= reached.min() and reached.max() < b)


def check_split(backend, seed, whole, cuts, biased):
    q, k, v = (x.requires_grad_(backend != "flex") for x in qkv(seed, keys=N))
    layout = Layout(2, N, N, CPU)
    slopes = ise.ALiBi().slopes(4) if biased else None
    pieces = [whole]
    for cut in cuts:
        pieces = [part for piece in pieces for part in (piece & cut, piece - cut)]
    results = []
    for parts in ([whole], pieces):
        calls = [Call(q, k, v, D**-0.5, part, layout, slopes) for part in parts]
        out, lse = BACKENDS[backend].attend(calls, True)
        gradients = torch.autograd.grad(out.square().sum(), (q, k, v)) if backend != "flex" else ()
        results.append((out, lse, *gradients))
    for mine, expected in zip(*results, strict=True):
        assert_close(mine, expected, **EXACT)


@pytest.mark.parametrize("backend", TRAINABLE)
@examples(30)
@given(seeds, regions, st.lists(regions, min_size=1, max_size=2), st.booleans())
def test_attention_over_a_split_region_is_attention_over_the_whole(backend, seed, whole, cuts, biased):
    check_split(backend, seed, whole, cuts, biased)


@few_on_flex
@given(seeds, regions, st.lists(regions, min_size=1, max_size=1), st.booleans())
def test_attention_over_a_split_region_on_flex(seed, whole, cuts, biased):
    check_split("flex", seed, whole, cuts, biased)


# --- recipes as text and data -----------------------------------------------------------------------------------------

counts = named(["visible", "sequence", "position"])
lengths_st = st.integers(4, 10**7)
factors = st.floats(1, 1e9) | st.integers(1, 64)
rotary = {
    "base": st.floats(1.5, 1e9),
    "layout": named(["half", "interleaved"]),
    "rotary_dim": st.none() | st.integers(1, 64).map(lambda m: 2 * m),
}
law = {"clamp": st.booleans(), "count": counts}
originals = st.none() | st.integers(1, 10**6)
position_parts = st.one_of(
    st.builds(ise.RoPE, **rotary),
    st.builds(ise.PI, factors, **rotary),
    st.builds(ise.NTK, factors, st.booleans(), originals, **rotary),
    st.builds(ise.YaRN, factors, originals, beta_fast=st.floats(1, 64), beta_slow=st.floats(0.1, 2), **rotary),
    st.builds(ise.ReRoPE, st.integers(1, 5000), **rotary),
    st.builds(ise.LeakyReRoPE, st.integers(1, 5000), factors, **rotary),
    st.builds(ise.SelfExtend, st.integers(1, 5000), st.integers(1, 64), **rotary),
    st.builds(ise.ALiBi),
    st.builds(ise.NoPE),
)


@st.composite
def fitted(draw):
    steps = draw(st.lists(st.integers(1, 10**3), min_size=1, max_size=4))
    grid = list(accumulate(steps, lambda n, step: n + max(n // 1000 + 1, step)))
    values = st.floats(0, 1e3, allow_subnormal=False) | st.integers(0, 3)
    table = st.lists(values, min_size=len(grid), max_size=len(grid))
    for _ in range(draw(st.integers(0, 2))):
        table = st.lists(table, min_size=2, max_size=2)
    return ise.Fitted(grid, draw(table), clamp=draw(st.booleans()), count=draw(counts))


temperature_parts = st.one_of(
    st.builds(ise.Constant, **law),
    st.builds(ise.LogLength, **law),
    st.builds(ise.SoftmaxPlus, st.floats(1.1, 1e6), **law),
    st.builds(ise.LogN, lengths_st, **law),
    st.builds(ise.YaRNTemperature, lengths_st, **law),
    st.builds(ise.YaRNTemperature, factor=factors, **law),
    st.builds(ise.InfoScale, lengths_st, st.floats(-20, 1), **law),
    st.builds(ise.InfoScaleExact, lengths_st, st.floats(-20, 1), **law),
    st.builds(ise.Llama4, st.integers(1, 10**5), st.floats(0, 2), **law),
    fitted(),
)
mask_parts = st.recursive(
    st.one_of(
        st.builds(ise.Full),
        st.builds(ise.Causal),
        st.builds(ise.Window, st.integers(1, 10**6)),
        st.builds(ise.Sink, st.integers(0, 9), st.integers(1, 10**6)),
        st.builds(ise.Lambda, st.integers(0, 9), st.integers(1, 10**6)),
    ),
    lambda part: st.tuples(part, part, st.booleans()).map(lambda x: x[0] & x[1] if x[2] else x[0] | x[1]),
    max_leaves=6,
)
any_recipe = st.builds(
    Recipe,
    st.none() | st.builds(ise.Dot) | st.builds(ise.Cosine, st.floats(1e-3, 1e4)),
    st.none() | position_parts,
    st.none() | temperature_parts,
    st.none() | mask_parts,
)


@examples(400)
@given(any_recipe)
def test_recipes_survive_text_and_json(recipe):
    assert Recipe.parse(str(recipe)) == recipe
    assert str(Recipe.parse(str(recipe))) == str(recipe)
    assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict(), allow_nan=False))) == recipe


@examples(40)
@given(
    st.builds(
        ise.CLEX, st.integers(2, 8).map(lambda m: 2 * m), st.integers(1, 99), st.integers(1, 9), st.none() | st.just(3)
    ),
    st.builds(ise.SSMax, st.integers(1, 9), st.integers(4, 99), st.booleans(), count=counts),
)
def test_recipes_with_learned_parts_survive_text_and_json(clex, ssmax):
    recipe = Recipe(position=clex, temperature=ssmax)
    for back in (Recipe.parse(str(recipe)), Recipe.from_dict(json.loads(json.dumps(recipe.to_dict())))):
        assert back.to_dict() == recipe.to_dict()
        for name, value in back.position.state_dict().items():
            assert value.shape == clex.state_dict()[name].shape
        assert [p.shape for p in back.temperature.parameters()] == [p.shape for p in ssmax.parameters()]


@pytest.mark.parametrize(
    "text",
    [
        "plain",
        "yarn:factor=16+infoscale:train_length=64+cosine:alpha=128",
        "selfextend:window=1024,group=8+logn:train_length=2048",
        "rope+window:size=64&sink:size=8|lambda:window=16",
        "rope+(window:size=64|causal)&sink:size=8",
    ],
)
def test_recipe_text_comes_back_unchanged(text):
    written = str(Recipe.parse(text))
    if "|" in text and "&" in text:  # brackets are written wherever & and | meet
        assert Recipe.parse(written) == Recipe.parse(text)
    else:
        assert written == text


def test_and_binds_tighter_than_or():
    mask = Recipe.parse("window:size=4&causal|sink:size=2").mask
    assert mask == (ise.Window(4) & ise.Causal()) | ise.Sink(4, 2)
    assert mask != ise.Window(4) & (ise.Causal() | ise.Sink(4, 2))


# --- positions --------------------------------------------------------------------------------------------------------

RELATIVE = [name for name in POSITIONS if name not in ("none", "selfextend")]


@pytest.mark.parametrize("position", RELATIVE)
@examples(6)
@given(seeds, st.integers(-3000, 3000), st.booleans(), named(TRAINABLE))
def test_only_distances_matter(position, seed, shift, causal, backend):
    q, k, v = qkv(seed)
    at = torch.arange(20)
    plain = attention(q, k, v, Recipe(position=POSITIONS[position]), causal=causal, position_ids=at, backend=backend)
    moved = attention(
        q, k, v, Recipe(position=POSITIONS[position]), causal=causal, position_ids=at + shift, backend=backend
    )
    # an angle of 3000 is rounded to 5e-13, and so was the largest difference
    assert_close(moved, plain, rtol=0, atol=3e-12)
    implicit = attention(q, k, v, Recipe(position=POSITIONS[position]), causal=causal, backend=backend)
    assert_close(plain, implicit, **EXACT)


@pytest.mark.parametrize("causal", [False, True])
@examples(10)
@given(seeds, st.integers(1, 25), st.integers(-50, 50))
def test_selfextend_moves_by_whole_groups(causal, seed, window, groups):
    q, k, v = qkv(seed)
    recipe = Recipe(position=ise.SelfExtend(window, 3))
    moved = attention(q, k, v, recipe, causal=causal, position_ids=torch.arange(20) + 3 * groups)
    assert_close(moved, attention(q, k, v, recipe, causal=causal), **EXACT)


SAME_AS_ROPE = {
    "rerope": lambda w: ise.ReRoPE(20 + w),
    "leaky": lambda w: ise.LeakyReRoPE(w, 1.0),
    "selfextend": lambda w: ise.SelfExtend(w, 1),
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
