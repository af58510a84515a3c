"""Each position method at points worked out by hand."""

import math

import pytest
import torch
from torch.testing import assert_close

import isentrope as ise
from isentrope import Recipe, attention
from tests.contract.matrix import CPU_BACKENDS

CPU = torch.device("cpu")
WIDE = torch.float64


def theta(position, d, length=1):
    return position.frequencies(d, length, WIDE, CPU)


def wide(*values):
    return torch.tensor(values, dtype=WIDE)


# --- frequencies ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("position", "expected"),
    [
        (ise.RoPE(), [1, 1e-2]),
        (ise.RoPE(100.0), [1, 1e-1]),
        (ise.PI(4.0), [1 / 4, 1 / 400]),
        (ise.NTK(4.0), [1, 1 / 400]),  # d / (d - 2) = 2, so the base is 16 times as large
        (ise.YaRN(4.0, 10**9), [1, 1e-2]),  # every pair turns often within a billion tokens
        (ise.ReRoPE(4), [1, 1e-2]),
    ],
    ids=str,
)
def test_two_pairs_by_hand(position, expected):
    assert_close(theta(position, 4), wide(*expected), rtol=1e-15, atol=0)


def test_ntk_leaves_the_fastest_pair_and_interpolates_the_slowest():
    for d in (4, 64, 128):
        plain, scaled = theta(ise.RoPE(), d), theta(ise.NTK(8.0), d)
        assert scaled[0] == plain[0]
        assert (plain[-1] / scaled[-1]).item() == pytest.approx(8, rel=1e-14)


@pytest.mark.parametrize(("length", "stretch"), [(1, 1), (100, 1), (101, 1.02), (200, 3), (400, 7)])
def test_dynamic_ntk_stretches_with_the_row(length, stretch):
    dynamic = ise.NTK(2.0, dynamic=True, original_length=100)
    assert_close(theta(dynamic, 8, length), theta(ise.NTK(float(stretch)), 8), rtol=1e-14, atol=0)
    rows = torch.tensor([[length, 100]])
    assert_close(theta(dynamic, 8, rows)[0], torch.stack((theta(dynamic, 8, length), theta(ise.RoPE(), 8))))


def test_yarn_ramp():
    # corr(32) = 16.1 and corr(1) = 40.2: pairs 0 … 16 are kept, 41 … 63 are interpolated
    plain, scaled = theta(ise.RoPE(), 128), theta(ise.YaRN(16.0, 2048), 128)
    ratio = scaled / plain
    assert bool((ratio[:17] == 1).all())
    assert_close(ratio[41:], torch.full((23,), 1 / 16, dtype=WIDE), rtol=1e-15, atol=0)
    kept = 1 - (torch.arange(17, 41, dtype=WIDE) - 16) / 25
    assert_close(ratio[17:41], kept + (1 - kept) / 16, rtol=1e-14, atol=0)


def test_yarn_of_a_short_training_length():
    # corr(32) is negative, corr(1) = 16.1: the ramp begins at the first pair
    ratio = theta(ise.YaRN(16.0, 64), 128) / theta(ise.RoPE(), 128)
    kept = 1 - torch.arange(17, dtype=WIDE) / 17
    assert_close(ratio[:17], kept + (1 - kept) / 16, rtol=1e-14, atol=0)
    assert_close(ratio[17:], torch.full((47,), 1 / 16, dtype=WIDE), rtol=1e-15, atol=0)


def test_yarn_without_a_ramp_is_a_step():
    # d = 4: corr(32) and corr(1) both fall on pair 0
    ratio = theta(ise.YaRN(8.0, 6), 4) / theta(ise.RoPE(), 4)
    assert_close(ratio, wide(1, 1 / 8))


def test_the_training_length_comes_from_the_temperature():
    recipe = Recipe.parse("yarn:factor=16+infoscale:train_length=64").resolve()
    assert recipe.position.original_length == 64
    assert (
        Recipe.parse("yarn:factor=16,original_length=32+logn:train_length=64").resolve().position.original_length == 32
    )
    assert Recipe.parse("ntk:factor=2,dynamic=True+logn:train_length=64").resolve().position.original_length == 64
    q = torch.randn(1, 1, 9, 128)
    assert torch.equal(
        attention(q, q, q, "yarn:factor=16+infoscale:train_length=64"),
        attention(q, q, q, "yarn:factor=16,original_length=64+infoscale:train_length=64"),
    )


@pytest.mark.parametrize(
    "make",
    [
        ise.RoPE,
        lambda **o: ise.ReRoPE(3, **o),
        lambda **o: ise.SelfExtend(3, 2, **o),
        lambda **o: ise.YaRN(4.0, 32, **o),
    ],
)
@pytest.mark.parametrize("rotary_dim", [None, 8])
def test_the_two_layouts_differ_by_a_permutation(make, rotary_dim):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 11, 12, generator=generator, dtype=WIDE) for _ in range(3))
    turning = rotary_dim or 12
    order = [*range(0, turning, 2), *range(1, turning, 2), *range(turning, 12)]
    half = attention(q[..., order], k[..., order], v, Recipe(position=make(rotary_dim=rotary_dim)))
    pairs = attention(q, k, v, Recipe(position=make(rotary_dim=rotary_dim, layout="interleaved")))
    assert_close(pairs, half, rtol=0, atol=1e-14)


# --- near and far -----------------------------------------------------------------------------------------------------

DISTANCES = {
    # (i, j): the distance at which they meet
    "rerope": (ise.ReRoPE(4), {(5, 5): 0, (8, 5): 3, (9, 5): 4, (20, 5): 4, (5, 8): -3, (5, 9): -4, (5, 20): -4}),
    "leaky": (ise.LeakyReRoPE(4, 2.0), {(8, 5): 3, (9, 5): 4, (11, 5): 5, (20, 5): 9.5, (5, 9): -4, (5, 11): -5}),
    "selfextend": (
        ise.SelfExtend(4, 2),
        {(8, 5): 3, (9, 5): 4, (9, 1): 6, (10, 1): 7, (10, 0): 7, (5, 9): -4, (1, 9): -6, (0, 10): -7},
    ),
    # chunks of 4: within one and to the chunk before, to older ones, and ahead
    "dualchunk": (ise.DualChunk(6, 2), {(3, 0): 3, (4, 0): 4, (4, 3): 1, (5, 3): 2, (6, 0): 6, (7, 0): 6, (7, 3): 3}),
    "dualchunk-older": (ise.DualChunk(6, 2), {(8, 0): 6, (8, 3): 3, (11, 1): 5, (23, 2): 4, (11, 4): 6, (8, 7): 1}),
    "dualchunk-ahead": (ise.DualChunk(6, 2), {(0, 3): -3, (3, 4): -1, (3, 7): -3, (0, 7): -6, (3, 8): -3, (2, 23): -4}),
    # without local keys a chunk sees all of the one before from its end
    "dualchunk-no-local": (ise.DualChunk(4, 0), {(3, 0): 3, (4, 3): 1, (7, 3): 1, (7, 0): 4, (8, 3): 1, (9, 0): 4}),
    # chunks of 3, twice which is less than the cap
    "dualchunk-half": (ise.DualChunk(6, 3), {(3, 0): 3, (5, 0): 5, (5, 2): 3, (6, 2): 3, (6, 0): 5, (23, 1): 4}),
    "dualchunk-default": (ise.DualChunk(12), {(9, 0): 9, (12, 0): 12, (19, 0): 12, (20, 0): 12, (20, 9): 3}),
    "string": (
        ise.STRING(5, 2),
        {(8, 5): 3, (9, 5): 4, (10, 5): 2, (12, 5): 4, (20, 5): 12, (5, 9): -4, (5, 10): -2, (5, 20): -12},
    ),
    "string-default": (ise.STRING(10), {(9, 0): 9, (10, 0): 2, (23, 0): 15}),
    "jetlong": (ise.JetLong(4, train_length=8), {(7, 4): 3, (9, 5): 2, (20, 5): 5, (23, 0): 7, (5, 8): -3, (5, 9): -2}),
    # m is 0 up to 5, 1 up to 11, 2 up to 17, 3 up to 22; the tail begins at 18
    "lampe": (
        ise.LaMPE(2, reach=0.5, slope=0, intercept=0, tail=3, train_length=16),
        {(6, 5): 1, (7, 5): 2, (8, 6): 1, (20, 6): 3, (20, 3): 4, (20, 2): 4, (20, 0): 6, (23, 6): 4, (23, 5): 4}
        | {(23, 0): 9, (0, 23): -9, (2, 20): -4, (6, 8): -1},
    ),
    "dpe-one": (ise.DPE(4, (2,)), {(8, 5): 3, (9, 5): 4, (9, 1): 6, (10, 0): 7, (5, 9): -4, (0, 10): -7}),
    "selfextend-wide": (ise.SelfExtend(3, 8), {(2, 0): 2, (3, 0): 3, (8, 5): 4, (16, 0): 5, (5, 8): -4}),
}


def side(at, index):
    """Where one query or key stands in a branch."""
    return 0 if at is None else at[0, index].item() if isinstance(at, torch.Tensor) else at


@pytest.mark.parametrize("name", DISTANCES)
def test_distances_by_hand(name):
    position, points = DISTANCES[name]
    query = key = torch.arange(24)[None]
    for (i, j), expected in points.items():
        met = [
            side(branch.query, i) - side(branch.key, j)
            for branch in position.branches(query, key, 1, (24, 24))
            for span in branch.region.spans
            if span.contains(i, j)
        ]
        assert met == [expected], (i, j)
        alone = [
            side(branch.query, 0) - side(branch.key, j)
            for branch in position.branches(query[:, i : i + 1], key, 1, (24, 24))
            for span in branch.region.spans
            if span.contains(i, j)
        ]
        assert alone == [expected], "one query is as far from a key as it is among others"


def test_cacheable_keys():
    cacheable = [ise.RoPE(), ise.PI(2.0), ise.NTK(2.0), ise.YaRN(2.0, 64), ise.ALiBi(), ise.NoPE()]
    cacheable += [ise.CoPE(2), ise.Resonance(), ise.Resonance(2.0, 64), ise.LongRoPE((1.0, 2.0))]
    raw = [ise.NTK(2.0, True, 64), ise.ReRoPE(4), ise.LeakyReRoPE(4), ise.SelfExtend(4, 2), ise.CLEX(8, 64)]
    raw += [ise.DualChunk(8), ise.STRING(8)]
    raw += [ise.DPE(4, (2, 1)), ise.LongRoPE(), ise.LongRoPE((1.0,), (1.0,)), ise.LongRoPE((1.0,), original_length=4)]
    assert all(position.keys_cacheable for position in cacheable)
    assert not any(position.keys_cacheable for position in raw)


# --- ALiBi ------------------------------------------------------------------------------------------------------------


def test_alibi_slopes_of_powers_of_two():
    assert ise.ALiBi().slopes(8).tolist() == [2.0**-h for h in range(1, 9)]
    assert ise.ALiBi().slopes(1).tolist() == [2.0**-8]
    assert_close(ise.ALiBi().slopes(16), 2.0 ** (-torch.arange(1, 17, dtype=WIDE) / 2), rtol=1e-15, atol=0)


def test_alibi_slopes_between_powers_of_two():
    slopes = ise.ALiBi().slopes(12)
    assert_close(slopes[:8], ise.ALiBi().slopes(8))
    assert_close(slopes[8:], 2.0 ** -wide(0.5, 1.5, 2.5, 3.5))
    assert len(set(slopes.tolist())) == 12


def test_alibi_is_a_distance_bias_both_ways():
    zero = torch.zeros(1, 8, 5, 4, dtype=WIDE)
    one_hot = torch.eye(5, dtype=WIDE).expand(1, 8, 5, 5)
    weights = attention(zero, zero, one_hot, "alibi")
    distance = (torch.arange(5)[:, None] - torch.arange(5)).abs()
    slopes = 2.0 ** -torch.arange(1, 9, dtype=WIDE)
    assert_close(weights[0], torch.softmax(-slopes[:, None, None] * distance, -1))


@pytest.mark.parametrize("backend", ["auto", *CPU_BACKENDS])
def test_alibi_bias_is_not_rounded_to_half_precision(backend):
    """At a distance of 400 a bias rounded to bf16 is wrong by up to a half, and a weight by a factor."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 8, n, 64, generator=generator).bfloat16() for n in (64, 512, 512))
    q = 10 * q
    exact = attention(q.double(), k.double(), v.double(), "alibi", causal=True, backend="reference")
    errors = {
        name: (attention(q, k, v, "alibi", causal=True, backend=name).double() - exact).abs().max().item()
        for name in ("reference", backend)
    }
    assert errors[backend] <= 2 * errors["reference"]


# --- PoSE -------------------------------------------------------------------------------------------------------------


def test_pose_makes_two_chunks_with_one_gap():
    ids = ise.PoSE(4096).sample(500, 64, torch.Generator().manual_seed(0))
    assert ids.shape == (500, 64) and ids.dtype == torch.int64
    steps = ids.diff(dim=1)
    assert bool((ids[:, 0] == 0).all())
    assert bool((steps >= 1).all())
    assert bool(((steps > 1).sum(1) <= 1).all())
    assert ids.max() < 4096
    split, skip = (steps > 1).int().argmax(1) + 1, ids[:, -1] - 63
    # 500 draws over 63 places and 4033 skips: ends of both ranges come near
    assert split.min() <= 2 and split.max() >= 61
    assert skip.min() < 100 and skip.max() > 3900 and skip.max() <= 4096 - 64
    assert skip.double().mean().item() == pytest.approx(2016, rel=0.1)


def test_pose_reaches_every_split_and_skip():
    ids = ise.PoSE(6).sample(2000, 4, torch.Generator().manual_seed(0))
    rows = {tuple(row) for row in ids.tolist()}
    expected = {tuple(n + skip * (n >= split) for n in range(4)) for split in (1, 2, 3) for skip in (0, 1, 2)}
    assert rows == expected


def test_pose_draws_anew_and_follows_its_seed():
    pose = ise.PoSE(4096)
    generator = torch.Generator().manual_seed(1)
    first, second = pose.sample(4, 64, generator), pose.sample(4, 64, generator)
    assert not torch.equal(first, second)
    assert torch.equal(first, pose.sample(4, 64, torch.Generator().manual_seed(1)))
    assert not torch.equal(first, pose.sample(4, 64, torch.Generator().manual_seed(2)))
    torch.manual_seed(3)
    loose = pose.sample(4, 64)
    assert not torch.equal(loose, pose.sample(4, 64))
    assert len({tuple(row) for row in pose.sample(8, 64, generator).tolist()}) == 8  # each row its own


def test_pose_at_its_target_is_the_plain_row():
    assert torch.equal(ise.PoSE(64).sample(3, 64), torch.arange(64).expand(3, 64))
    assert ise.PoSE(1).sample(2, 1).tolist() == [[0], [0]]


def test_pose_positions_go_into_attention():
    ids = ise.PoSE(256).sample(2, 16, torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, 1, 16, 8, generator=generator, dtype=WIDE) for _ in range(3))
    out = attention(q, k, v, "rope", causal=True, position_ids=ids)
    for row in range(2):
        turn = torch.polar(torch.ones(16, 4, dtype=WIDE), ids[row, :, None] * theta(ise.RoPE(), 8))
        a, b = (torch.complex(x[row, 0, :, :4], x[row, 0, :, 4:]) * turn for x in (q, k))
        scores = (a @ b.conj().T).real / math.sqrt(8)
        weights = torch.softmax(scores.masked_fill(torch.ones(16, 16).triu(1).bool(), -math.inf), -1)
        assert_close(out[row, 0], weights @ v[row, 0])
