"""Dual Chunk Attention and STRING: options, limits of distances, and the kernels that take them."""

from __future__ import annotations

import pytest
import torch

import isentrope as ise
from isentrope import Recipe, attention
from isentrope.backends import sdpa
from isentrope.builder import Inputs, build_call
from tests.fixtures.recipes import qkv


def distances(position, length):
    """The distance of every pair, from the branches."""
    at = torch.arange(length)[None]
    measured = torch.full((length, length), torch.nan)
    for branch in position.branches(at, at, 1, (length, length)):
        query, key = (torch.as_tensor(x).expand(1, length) for x in (branch.query, branch.key))
        for i in range(length):
            for j in range(length):
                if any(span.contains(i, j) for span in branch.region.spans):
                    assert measured[i, j].isnan()
                    measured[i, j] = query[0, i] - key[0, j]
    return measured


@pytest.mark.parametrize(("chunk", "local"), [(12, 2), (12, 6), (9, 0), (11, None)])
def test_local_distances_are_true_and_none_exceeds_the_chunk(chunk, local):
    position = ise.DualChunk(chunk, local)
    local = chunk // 6 if local is None else local
    measured = distances(position, 50)
    true = torch.arange(50)[:, None] - torch.arange(50)
    assert torch.equal(measured, -measured.T)
    assert torch.equal(measured[true.abs() <= local], true[true.abs() <= local].float())
    assert measured.max() == (chunk if local < chunk - local else chunk - 1)
    assert bool((measured[true > 0] > 0).all()), "no key behind is ahead or at the query"
    assert position.idle(chunk) and torch.equal(measured[:chunk, :chunk], true[:chunk, :chunk].float())


def test_options_follow_from_the_training_length():
    assert ise.DualChunk().resolve(8192) == ise.DualChunk(6144)
    assert ise.DualChunk(6144).near_window == 6144 - 1024 == ise.DualChunk(6144, 1024).near_window
    assert ise.DualChunk(local=100).resolve(8192) == ise.DualChunk(6144, 100)
    assert ise.DualChunk(50).resolve(8192) == ise.DualChunk(50)
    assert ise.STRING().resolve(6144) == ise.STRING(2048)
    assert ise.STRING(7, 3).resolve(6144) == ise.STRING(7, 3)
    at = torch.tensor([[9000]])
    far = [ise.STRING(shift).branches(at, at, 1, (1, 1))[1].query.item() for shift in (10_000, 100)]
    assert far == [9000 - (10_000 - 128), 9000 - (100 - 20)]
    recipe = Recipe.parse("dualchunk+share+logn:train_length=64,keys=far")
    assert recipe.resolve().position == ise.DualChunk(48)
    assert recipe.resolve().share.reference == 64 - 40
    assert Recipe.parse("string+share", train_length=60).share.reference == 40
    assert str(recipe) == "dualchunk+logn:train_length=64,keys=far+share"


@pytest.mark.parametrize("name", ["dualchunk", "string"])
def test_missing_lengths_are_refused(name):
    q, k, v = qkv(0)
    with pytest.raises(ValueError, match=r"got neither; write .*=… or add a temperature"):
        attention(q, k, v, name)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ise.DualChunk(10, 6), "at most half of the chunk of 10, got 6"),
        (lambda: ise.DualChunk(local=25).resolve(64), "at most half of the chunk of 48, got 25"),
        (lambda: ise.DualChunk(1), "an integer ≥ 2"),
        (lambda: ise.STRING(10, 11), "at most the shift of 10, got 11"),
        (lambda: ise.STRING(0), "an integer ≥ 1"),
    ],
)
def test_impossible_options_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("queries", [64, 30])
@pytest.mark.parametrize("causal", [True, False])
def test_no_mask_is_made_for_unpadded_rows(queries, causal, monkeypatch):
    monkeypatch.setattr(sdpa, "_masked_tiles", None)
    q, k, v = (x.requires_grad_() for x in qkv(0, queries=queries, keys=64))
    recipe = "dualchunk:chunk=6,local=2+share:reference=3"
    out = attention(q, k, v, recipe, causal=causal, backend="sdpa")
    out.sum().backward()
    call = build_call(Inputs(q, k, v, causal=causal), Recipe.parse(recipe))
    assert [branch.far for branch in call.branches] == [False, False, True, False, True][: 3 if causal else 5]
    assert sdpa.has_triangular_branch(call)
    folded = call.fold()
    assert folded[0].k is folded[1].k is folded[2].k, "keys are rotated once"


def test_one_query_has_two_branches_and_one_rotation_of_keys():
    q, k, v = qkv(0, queries=1, keys=64)
    call = build_call(Inputs(q, k, v, causal=True), Recipe.parse("dualchunk:chunk=6,local=2"))
    assert [branch.far for branch in call.branches] == [False, True]
    assert call.branches[0].key_angles[0] is call.branches[1].key_angles[0]


def test_far_keys_by_choice_need_a_window():
    q, k, v = qkv(0)
    with pytest.raises(ValueError, match="use rerope:window=…"):
        attention(q, k, v, "dualchunk:chunk=6+retrieve:blocks=1,size=2,queries=2", causal=True)


@pytest.mark.parametrize("side", ["right", "left", "documents"])
@pytest.mark.parametrize("length", [10, 20, 33])
def test_keys_ahead_in_the_next_chunk_of_a_padded_row(length, side):
    """Fewer queries than keys end with their row, not with the keys of the longest one."""
    q, k, v = (torch.randn(1, 1, n, 8, dtype=torch.float64) for n in (5, 33, 33))
    own = slice(0, length) if side == "right" else slice(33 - length, 33)
    if side == "documents":
        options = {"mask": ise.masks.Document((torch.arange(33)[None] >= 33 - length).long())}
    else:
        options = {"mask": ise.masks.Padding(torch.tensor([length]), side)}
    out = attention(q, k, v, "dualchunk:chunk=9,local=2", **options)
    alone = attention(q, k[:, :, own], v[:, :, own], "dualchunk:chunk=9,local=2")
    torch.testing.assert_close(out, alone, atol=1e-12, rtol=0)
