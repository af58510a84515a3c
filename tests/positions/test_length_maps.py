"""Maps that depend on the length of the row: how far keys are at most, and when the map is frozen."""

import pytest
import torch
from torch.testing import assert_close

import isentrope as ise
from isentrope import Recipe, attention
from isentrope.positions.branch import ModelRotary
from tests.fixtures.models import llama

WIDE = torch.float64
FROZEN = [
    ise.LeakyReRoPE(4, reach=0.5, length=40, train_length=16),
    ise.SelfExtend(4, reach=0.5, length=40, train_length=16),
    ise.JetLong(4, length=40, train_length=16),
    ise.LaMPE(2, reach=0.5, tail=3, length=40, train_length=16),
]


def find_distance(position, i, j, length):
    """Return the distance of query i and key j, in a row of so many keys."""
    query, key = torch.tensor([[i]]), torch.tensor([[j]])
    (distance,) = (
        float(branch.query) - float(0 if branch.key is None else branch.key)
        for branch in position.branches(query, key, 1, (length, length))
        for span in branch.region.spans
        if span.low <= j - i < span.high
    )
    return distance


@pytest.mark.parametrize(
    ("length", "group"), [(1, 1), (13, 1), (14, 2), (21, 2), (22, 3), (29, 3), (30, 4), (101, 12), (102, 13)]
)
def test_the_group_by_hand(length, group):
    """Distances up to ¾ · 16 = 12, of which 4 are the window's: 8 are left for n - 5."""
    assert ise.SelfExtend(4, train_length=16).group_at(length) == group
    assert ise.SelfExtend(4, train_length=16).group_at(torch.tensor([[length]])).tolist() == [[group]]
    assert ise.SelfExtend(4, length=length, train_length=16).group_at(7) == group


def test_the_leak_by_hand():
    position = ise.LeakyReRoPE(4, reach=0.5, train_length=16)
    assert [position.leak_at(n) for n in (1, 9, 11, 45)] == [1, 1, 1.5, 10]
    assert position.leak_at(torch.tensor([1, 9, 11, 45])).tolist() == [1, 1, 1.5, 10]


@pytest.mark.parametrize("reach", [0.3, 0.5, 0.57, 0.75, 1.0])
@pytest.mark.parametrize("make", [ise.LeakyReRoPE, ise.SelfExtend])
def test_no_distance_exceeds_reach(make, reach):
    position = make(20, reach=reach, train_length=100)
    for length in (1, 20, 21, 30, 31, 57, 58, 76, 100, 101, 137, 1000, 4321):
        farthest = find_distance(position, length - 1, 0, length)
        assert farthest <= round(reach * 100) + 1e-9
        assert farthest == find_distance(position, 0, length - 1, length) * -1
        assert position.idle(length) == (length - 1 <= max(round(reach * 100), 19))


@pytest.mark.parametrize("position", FROZEN, ids=str)
def test_frozen_maps_do_not_depend_on_the_row(position):
    q, k, v = (torch.randn(1, 2, 40, 8, generator=torch.Generator().manual_seed(s), dtype=WIDE) for s in range(3))
    recipe = Recipe(position=position)
    whole = attention(q, k, v, recipe, causal=True)
    for first, last in ((0, 11), (11, 39), (39, 40)):
        part = attention(q[:, :, first:last], k[:, :, :last], v[:, :, :last], recipe, causal=True)
        assert_close(part, whole[:, :, first:last], rtol=0, atol=1e-13)
    opened = Recipe(position=ise.SelfExtend(4, reach=0.5, train_length=16))
    assert not torch.allclose(
        attention(q, k, v, opened, causal=True)[:, :, :20],
        attention(*(x[:, :, :20] for x in (q, k, v)), opened, causal=True),
    )


def test_training_lengths_come_from_the_recipe_and_the_model():
    recipe = Recipe.parse("selfextend:window=4+infoscale:train_length=16")
    assert recipe.resolve().position == ise.SelfExtend(4, train_length=16)
    assert Recipe.parse("selfextend:window=4,group=2+infoscale:train_length=16").resolve().position.train_length is None
    assert str(recipe.fill_train_length(64).position) == "selfextend:window=4,train_length=16"
    assert str(ise.LeakyReRoPE(4, reach=0.5).resolve(64)) == "leakyrerope:window=4,reach=0.5,train_length=64"
    assert Recipe.from_dict(recipe.resolve().to_dict()) == recipe.resolve()
    q = torch.randn(1, 1, 8, 8)
    with pytest.raises(ValueError, match="expected the length the model was trained at, got None"):
        attention(q, q, q, "selfextend:window=4")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ise.SelfExtend(4, 2, reach=0.5), "expected group or reach, got group=2 and reach=0.5"),
        (lambda: ise.LeakyReRoPE(4, 8.0, reach=0.5), "expected leak or reach, got leak=8 and reach=0.5"),
        (lambda: ise.SelfExtend(4, 2, length=50), "no effect without reach; leave length out"),
        (lambda: ise.LeakyReRoPE(4, length=50), "no effect without reach; leave length out"),
        (lambda: ise.SelfExtend(4, reach=1.5), "expected a number > 0 and ≤ 1"),
        (lambda: ise.SelfExtend(12, train_length=16).group_at(99), "lie within the window of 12; use a window of at m"),
    ],
)
def test_what_excludes_each_other(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_describe_says_which_length_distances_are_for():
    model = ise.extend(llama(), "selfextend:window=16")
    page = str(ise.describe(model))
    assert "selfextend:window=16,train_length=64" in page and "in a row of 1024 keys" in page
    ise.restore(model)
    frozen = ise.describe(ise.extend(model, "selfextend:window=16,reach=1,length=112")).layers[0]
    assert frozen.rows == () and frozen.distances[:2] == (1, 64 // 2 + 16 - 8)
    ise.restore(model)
    with pytest.raises(ValueError, match="use a window of at most 47"):
        ise.extend(model, "selfextend:window=64")


@pytest.mark.parametrize(("length", "group"), [(1, 1), (64, 1), (65, 2), (128, 2), (129, 3), (640, 10), (641, 11)])
def test_jetlong_groups_by_hand(length, group):
    assert ise.JetLong(8, train_length=64).group_at(length) == group
    assert ise.JetLong(8, train_length=64).group_at(torch.tensor(length)) == group
    assert ise.JetLong(8, train_length=64).idle(length) == (group == 1)


def test_jetlong_takes_the_smallest_group_within_reach():
    position = ise.JetLong(8, reach=0.5, train_length=64)
    for length in (1, 33, 34, 66, 67, 500):
        group = position.group_at(length)
        assert (length - 1) // group <= 32 and (group == 1 or (length - 1) // (group - 1) > 32)


@pytest.mark.parametrize(
    ("train_length", "window"), [(2, 1), (64, 32), (2048, 512), (8192, 512), (32768, 2048), (1 << 20, 4096)]
)
def test_jetlong_default_window(train_length, window):
    assert ise.JetLong(train_length=train_length).window == window
    assert ise.JetLong().resolve(train_length).window == window
    recipe = Recipe.parse("jetlong+share", train_length=train_length)
    assert recipe.share.reference == train_length - window


LAMPE = [(65, 8, 4), (100, 8, 4), (333, 8, 4), (200, 4, 12), (150, 8, 0), (700, None, None)]


@pytest.mark.parametrize(("length", "window", "tail"), LAMPE)
def test_lampe_distances_rise_by_0_or_1(length, window, tail):
    """For every query, from key to key, in both directions."""
    position = ise.LaMPE(window, tail=tail, train_length=64)
    rows = torch.arange(length)[None]
    distances = torch.full((length, length), 1 << 30)
    ahead = rows - rows.T
    for branch in position.branches(rows, rows, 1, (length, length)):
        for span in branch.region.spans:
            inside = (ahead >= span.low) & (ahead < span.high)
            assert bool((distances[inside] == 1 << 30).all())
            distances[inside] = (branch.query.T - branch.key)[inside]
    assert set((distances[:, :-1] - distances[:, 1:]).unique().tolist()) <= {0, 1}
    assert torch.equal(distances, -distances.T) and distances.max() < 64
    start = position.tail_start(length)
    assert (start < length) == (tail != 0 and length < 700)
    if start < length:  # the first keys keep their distances to each other
        assert (distances[-1, : length - start].diff() == -1).all()
    for i in {0, min(start, length // 2), length - 1}:  # a single query, as in decoding, has no branch for it
        near, behind, in_front = position.branches(rows[:, i : i + 1], rows, 1, (length, length))
        alone = torch.where(ahead[i] <= -position.window, behind.query - behind.key, near.query - near.key)
        alone = torch.where(ahead[i] >= position.window, in_front.query - in_front.key, alone)
        assert torch.equal(alone[0], distances[i])


@pytest.mark.parametrize(
    ("position", "extents"),
    [
        (
            ise.LaMPE(reach=2489 / 4096, slope=8.673e-5, intercept=-0.648, train_length=4096),
            {8192: 1283, 1 << 20: 2489},
        ),
        (ise.LaMPE(reach=6204 / 8192, slope=1.0493e-4, intercept=-2.4666, train_length=8192), {16384: 1993}),
        (ise.LaMPE(train_length=8192), {100: 99, 8192: 8191, 16384: 2392, 65536: 5808, 1 << 20: 6144}),
    ],
)
def test_lampe_extents(position, extents):
    for length, extent in extents.items():
        assert position.extent_at(length) == extent
        assert position.extent_at(torch.tensor([length])).tolist() == [extent]


def test_lampe_tails_of_rows_with_lengths_of_their_own():
    q, k, v = (torch.randn(2, 1, 40, 8, generator=torch.Generator().manual_seed(s), dtype=WIDE) for s in range(3))
    recipe = Recipe(position=ise.LaMPE(2, reach=0.5, tail=3, train_length=16))
    with pytest.raises(ValueError, match=r"tails of their own.*set tail=0, or length="):
        attention(q, k, v, recipe, causal=True, lengths=[40, 30])
    last = attention(q[:, :, -1:], k, v, recipe, causal=True, lengths=[40, 30])  # decoding has them
    for row, length in ((0, 40), (1, 30)):
        alone = attention(q[row, None, :, -1:], k[row, None, :, :length], v[row, None, :, :length], recipe, causal=True)
        assert_close(last[row], alone[0], rtol=0, atol=1e-13)
    with pytest.raises(ValueError, match="of at most the training length 16, got 12 \\+ 2 \\+ 3; lower one of them"):
        attention(q, k, v, Recipe(position=ise.LaMPE(2, tail=3, train_length=16)))
    with pytest.raises(ValueError, match="expected the length the model was trained at"):
        attention(q, k, v, "lampe")


@pytest.mark.parametrize("text", ["jetlong:length=32", "lampe:length=32", "selfextend:window=4,length=9"])
def test_lengths_that_change_nothing_are_refused(text):
    model = ModelRotary("llama", torch.ones(4))
    with pytest.raises(ValueError, match=r"length=…\): rows of .* keep their positions"):
        Recipe.parse(text).fill_train_length(32).position.fit(model)
