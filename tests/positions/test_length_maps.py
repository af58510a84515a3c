"""Maps that depend on the length of the row: how far keys are at most, and when the map is frozen."""

import pytest
import torch
from torch.testing import assert_close

import isentrope as ise
from isentrope import Recipe, attention
from tests.fixtures.models import llama

WIDE = torch.float64
FROZEN = [
    ise.LeakyReRoPE(4, reach=0.5, length=40, train_length=16),
    ise.SelfExtend(4, reach=0.5, length=40, train_length=16),
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
    assert "selfextend:window=16,train_length=64" in page and "in a row of 1048577 keys" in page
    ise.restore(model)
    frozen = ise.describe(ise.extend(model, "selfextend:window=16,reach=1,length=112")).layers[0]
    assert frozen.row_length is None and frozen.distances[:2] == (1, 64 // 2 + 16 - 8)
    ise.restore(model)
    with pytest.raises(ValueError, match="use a window of at most 47"):
        ise.extend(model, "selfextend:window=64")
