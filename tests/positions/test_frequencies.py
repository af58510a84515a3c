"""Methods that differ by frequency, at points worked out by hand: LongRoPE, CoPE, Resonance, DPE."""

import cmath
import math
from functools import cache

import pytest
import torch
import transformers
from torch.testing import assert_close
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import isentrope as ise
from isentrope import Recipe, attention
from isentrope.core.rotation import compute_angles
from tests.fixtures.errors import refused
from tests.fixtures.recipes import TRAINABLE, normal

CPU = torch.device("cpu")
WIDE = torch.float64


def theta(position, d, length=1, dtype=WIDE):
    return position.frequencies(d, length, dtype, CPU)


def wide(*values):
    return torch.tensor(values, dtype=WIDE)


# --- LongRoPE ---------------------------------------------------------------------------------------------------------


def test_longrope_divides_each_pair():
    position = ise.LongRoPE((1.0, 4.0))
    assert_close(theta(position, 4), wide(1, 1 / 400), rtol=1e-15, atol=0)
    assert_close(theta(ise.LongRoPE([2, 5], base=100.0), 4), wide(1 / 2, 1 / 50), rtol=1e-15, atol=0)


@pytest.mark.parametrize(("short", "near"), [(None, wide(1, 1e-2)), ((1.0, 2.0), wide(1, 1 / 200))])
def test_longrope_by_the_length_of_the_row(short, near):
    position, far = ise.LongRoPE((2.0, 4.0), short, 10), wide(1 / 2, 1 / 400)
    for length, expected in ((1, near), (10, near), (11, far), (1000, far)):
        assert_close(theta(position, 4, length), expected, rtol=1e-15, atol=0)
    assert_close(theta(position, 4, torch.tensor([[10, 11]]))[0], torch.stack((near, far)), rtol=1e-15, atol=0)


def test_longrope_takes_the_training_length_from_a_temperature():
    recipe = Recipe.parse("longrope:factors=(2,4),short=(1,1)+logn:train_length=8").resolve()
    assert recipe.position.original_length == 8
    # without short factors there is nothing to choose by the length
    assert Recipe.parse("longrope:factors=(2,4)+logn:train_length=8").resolve().position.original_length is None


@pytest.mark.parametrize("seq_len", [None, 64, 65])
def test_longrope_is_that_of_transformers(seq_len):
    lists = {"long_factor": [1.0 + 0.37 * m for m in range(8)], "short_factor": [1.0 + 0.01 * m for m in range(8)]}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "factor": 8.0} | lists
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 512, "pad_token_id": 0}
    config = transformers.Phi3Config(**sizes, original_max_position_embeddings=64, rope_parameters=rope)
    frequencies, scaling = ROPE_INIT_FUNCTIONS["longrope"](config, CPU, seq_len=seq_len)
    ours = ise.LongRoPE(lists["long_factor"], lists["short_factor"], 64)
    assert torch.equal(theta(ours, 16, seq_len or 1, torch.float32), frequencies)
    # its attention factor is on queries and keys both: a temperature of its square, that of LogN at 512 keys
    tau = ise.LogN(64).scale(wide(512), 16).item()
    assert scaling**2 == pytest.approx(tau, rel=1e-12)
    assert scaling**2 == pytest.approx(1 + math.log(8) / math.log(64), rel=1e-12)


# --- CoPE and Resonance -----------------------------------------------------------------------------------------------


def test_cope_fades_the_slowest_pairs():
    plain = theta(ise.RoPE(), 16)
    # of three pairs the first stays, the last stands still, and the one between is halved
    assert_close(theta(ise.CoPE(3), 16) / plain, wide(1, 1, 1, 1, 1, 1, 0.5, 0), rtol=1e-14, atol=1e-15)
    quarter = (1 + math.sqrt(0.5)) / 2
    faded = wide(1, 1, 1, 1, quarter, 0.5, 1 - quarter, 0)
    assert_close(theta(ise.CoPE(5), 16) / plain, wide(1, 1, 1, *faded[3:]), rtol=1e-14, atol=1e-15)
    for clip in (0, 1):
        assert torch.equal(theta(ise.CoPE(clip), 16), plain)
    assert_close(theta(ise.CoPE(99), 4), theta(ise.CoPE(2), 4))


def test_cope_clips_what_does_not_turn_within_the_training_length():
    # wavelengths 6.3, 19.9, 62.8, 199, 628, …
    for length, clip in ((62, 6), (63, 5), (199, 4), (198, 5), (10**6, 0)):
        assert torch.equal(theta(ise.CoPE(original_length=length), 16), theta(ise.CoPE(clip), 16))
    assert Recipe.parse("cope+logn:train_length=64").resolve().position == ise.CoPE(original_length=64)
    assert Recipe.parse("cope:clip=2+logn:train_length=64").resolve().position == ise.CoPE(2)
    refused(lambda: theta(ise.CoPE(), 16), "CoPE(original_length=…)", "got None", "set it")


def test_resonance_rounds_wavelengths():
    # 6.28, 19.87, 62.83, 198.69
    expected = 2 * math.pi / wide(6, 20, 63, 199)
    assert_close(theta(ise.Resonance(), 16)[:4], expected, rtol=1e-14, atol=0)
    # a turn later, the same angle
    angles = compute_angles(torch.tensor([[5, 5 + 6 * 20 * 63 * 199]]), theta(ise.Resonance(), 16)[:4], WIDE)
    assert_close(angles[0][0, 0, 0], angles[0][0, 0, 1], rtol=0, atol=1e-9)


def test_resonance_of_yarn():
    wavelengths = 2 * math.pi / theta(ise.YaRN(4.0, 64), 16)
    ours = 2 * math.pi / theta(ise.Resonance(4.0, 64), 16)
    assert_close(ours, wavelengths.round(), rtol=1e-13, atol=0)
    assert not torch.equal(ours, (2 * math.pi / theta(ise.Resonance(), 16)))
    refused(lambda: theta(ise.Resonance(4.0), 16), "Resonance(original_length=…)", "got None")


# --- DPE --------------------------------------------------------------------------------------------------------------

# window 4, scales 1, 2 and 3: the distances of the three groups
DPE_DISTANCES = {
    (8, 5): (3, 3, 3),
    (9, 5): (4, 4, 5),  # 9, 4 + 2, 3 + 3 against 5, 2, 1
    (10, 1): (9, 7, 6),
    (20, 5): (15, 10, 8),
    (5, 8): (-3, -3, -3),
    (5, 9): (-4, -4, -5),
    (1, 10): (-9, -7, -6),
}


def test_dpe_distances_by_hand():
    position = ise.DPE(4, (1, 2, 3))
    query = key = torch.arange(24)[None]
    for (i, j), expected in DPE_DISTANCES.items():
        for branch in position.branches(query, key, 1, (24, 24)):
            if any(span.low <= j - i < span.high for span in branch.region.spans):
                at = branch.query[0, i] - branch.key[0, j]
                assert at.expand(3).tolist() == list(expected), (i, j)
                assert branch.far == (abs(i - j) >= 4)


@pytest.mark.parametrize(("pairs", "groups"), [(8, [0, 0, 0, 1, 1, 1, 2, 2]), (6, [0, 0, 1, 1, 2, 2]), (3, [0, 1, 2])])
def test_groups_are_as_even_as_they_can_be(pairs, groups):
    frequencies = torch.rand(pairs, dtype=WIDE)
    at = torch.tensor([[[1, 10, 100], [2, 20, 200]]])
    cos, sin = compute_angles(at, frequencies, WIDE)
    assert cos.shape == (1, 1, 2, pairs)
    assert_close(sin[0, 0, 1], torch.sin(at[0, 1, groups] * frequencies))


def test_a_group_for_every_pair_is_all():
    q = torch.randn(1, 1, 4, 4)
    refused(lambda: attention(q, q, q, "dpe:window=2,scales=(1,2,3)"), "DPE(scales=…)", "at most 2", "got 3")


def loops(q, k, v, window, scales, interleaved, sees):
    """Attention of one head by loops over queries, keys and pairs."""
    length, d = q.shape
    pairs = [(2 * m, 2 * m + 1) if interleaved else (m, m + d // 2) for m in range(d // 2)]
    out = torch.zeros_like(v)
    for i in range(length):
        seen = [j for j in range(length) if sees(i, j)]
        scores = []
        for j in seen:
            score = 0.0
            for m, (a, b) in enumerate(pairs):
                s = scales[m * len(scales) // len(pairs)]
                sign = 1 if i > j else -1
                distance = i - j if abs(i - j) < window else i // s - j // s + sign * (window - window // s)
                turn = cmath.exp(1j * distance * 10000 ** (-2 * m / d))
                x, y = (complex(z[a].item(), z[b].item()) for z in (q[i], k[j]))
                score += (x * y.conjugate() * turn).real
            scores.append(score / math.sqrt(d))
        for j, weight in zip(seen, torch.tensor(scores, dtype=WIDE).softmax(0), strict=True):
            out[i] += weight * v[j]
    return out


LOOPED = [normal(seed, 1, heads, 18, 8) for seed, heads in ((0, 2), (1, 1), (2, 1))]


@cache  # the same for every backend
def dpe_by_loops(start, end, head, layout, causal):
    q, k, v = LOOPED
    arguments = q[0, head, start:end], k[0, 0, start:end], v[0, 0, start:end]
    sees = (lambda i, j: j <= i) if causal else (lambda i, j: True)
    return loops(*arguments, 3, (1, 4, 2), layout == "interleaved", sees)


@pytest.mark.parametrize("backend", TRAINABLE)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_dpe_by_loops(layout, causal, backend):
    """With GQA, padding and packed documents."""
    q, k, v = LOOPED
    recipe = Recipe(position=ise.DPE(3, (1, 4, 2), layout=layout))
    ids = torch.tensor([0] * 11 + [1] * 7)
    whole = attention(q, k, v, recipe, causal=causal, backend=backend)
    short = attention(q, k, v, recipe, causal=causal, backend=backend, lengths=[13])
    packed = attention(q, k, v, recipe, causal=causal, backend=backend, mask=ise.Document(ids))
    for head in range(2):
        given = head, layout, causal
        assert_close(whole[0, head], dpe_by_loops(0, 18, *given), rtol=0, atol=1e-12)
        assert_close(short[0, head, :13], dpe_by_loops(0, 13, *given), rtol=0, atol=1e-12)
        documents = torch.cat((dpe_by_loops(0, 11, *given), dpe_by_loops(11, 18, *given)))
        assert_close(packed[0, head], documents, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("action", "words"),
    [
        (lambda: ise.DPE(4, ()), ["DPE(scales", "a list of integers from 1 to 1e+09", "()"]),
        (lambda: ise.DPE(4, 2), ["DPE(scales", "a list of integers", "got 2"]),
        (lambda: ise.DPE(4, (2, 0)), ["DPE(scales", "(2, 0)"]),
        (lambda: ise.DPE(4, (2, 1.5)), ["DPE(scales", "(2, 1.5)"]),
        (lambda: ise.DPE(4, (True, 2)), ["DPE(scales", "(True, 2)"]),
        (lambda: ise.DPE(4, (math.nan,)), ["DPE(scales", "(nan,)"]),
        (lambda: ise.LongRoPE("12"), ["LongRoPE(factors", "a list of numbers from 0.001 to 1e+09", "'12'"]),
        (lambda: ise.LongRoPE((1.0, 0.0)), ["LongRoPE(factors", "(1.0, 0.0)"]),
        (lambda: ise.LongRoPE((1.0, math.inf)), ["LongRoPE(factors", "inf"]),
        (lambda: ise.LongRoPE((1.0, 2.0), (1.0,)), ["LongRoPE(short", "2 numbers", "got 1"]),
        (lambda: ise.LongRoPE(short=(1.0,)), ["LongRoPE(factors", "beside short", "None"]),
        (lambda: ise.LongRoPE(original_length=4), ["LongRoPE(factors", "beside short and original_length", "None"]),
        (lambda: theta(ise.LongRoPE(), 4), ["LongRoPE(factors", "for each pair", "None", "extend a model"]),
        (lambda: theta(ise.LongRoPE((1.0,)), 4), ["LongRoPE(factors", "2 numbers", "got 1"]),
        (lambda: theta(ise.LongRoPE((1.0,), (1.0,)), 2), ["LongRoPE(original_length", "got None"]),
    ],
)
def test_bad_options(action, words):
    refused(action, *words)
