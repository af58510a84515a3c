"""Padding: what stands in padded slots is never read, and queries stand at the last keys that are not padding."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from torch.testing import assert_close

import isentrope as ise
from isentrope import attention
from isentrope.backends import padding
from isentrope.core.layout import Layout, Rows
from tests.fixtures.oracle import brute
from tests.fixtures.recipes import EXACT, TRAINABLE
from tests.fixtures.turns import in_turns

BACKENDS = (*TRAINABLE, "flex")
KEYS = 13
KINDS = ("right", "left", "documents")
COUNTS = torch.tensor([KEYS - 2, KEYS - 7])
BAD = (math.nan, math.inf, 1e200)  # the last is finite, but its products are not


def tensors(queries, seed=0, keys=KEYS):
    make = torch.Generator().manual_seed(seed)
    shapes = ((2, 4, queries, 8), (2, 2, keys, 8), (2, 2, keys, 5))
    return [torch.randn(shape, generator=make, dtype=torch.float64) for shape in shapes]


def padded_call(kind):
    """Arguments of `attention`, and which slots they pad, (batch, keys)."""
    slots = torch.arange(KEYS)
    if kind == "left":
        return {"mask": ise.Padding(COUNTS, "left")}, slots < (KEYS - COUNTS)[:, None]
    if kind == "documents":
        return {"mask": ise.Padding(COUNTS) & ise.Document(slots // 4)}, slots >= COUNTS[:, None]
    return {"lengths": COUNTS}, slots >= COUNTS[:, None]


def spoiled(tensors, slots, bad):
    """The same with one bad number in every padded key and value."""
    q, *rest = tensors
    q = q.clone()
    if q.shape[2] == KEYS:
        q[..., 1].masked_fill_(slots[:, None], bad)
    out = [q]
    for x in rest:
        x = x.clone()
        x[..., 0].masked_fill_(slots[:, None], bad)
        out.append(x)
    return out


def results(tensors, recipe, backend, options, gradients, live):
    """Output, lse and entropy of queries that are no padding, and the gradients of a loss over them."""
    inputs = [x.detach().requires_grad_(gradients) for x in tensors]
    out, aux = attention(*inputs, recipe, causal=True, backend=backend, return_lse=True, return_entropy=True, **options)
    actual = [x.masked_fill(~live if x.dim() == 3 else ~live[..., None], 0) for x in (out, aux.lse, aux.entropy)]
    if gradients:
        actual += torch.autograd.grad(actual[0].square().sum(), inputs)
    return [x.detach() for x in actual]


@pytest.mark.parametrize(
    ("backend", "kind", "queries"), in_turns(BACKENDS, list(product(KINDS, [KEYS, 1, 4])), every=2)
)
def test_padding_is_never_read(backend, kind, queries):
    """Bad numbers take turns: each recipe meets each of them."""
    options, slots = padded_call(kind)
    live = ~slots[:, None] if queries == KEYS else torch.ones(2, 1, queries, dtype=torch.bool)
    clean = tensors(queries)
    gradients = backend != "flex"
    recipes = ("rope", "rerope:window=3+logn:train_length=4,keys=far+share", "alibi", "cosine:alpha=16+rope")
    for turn, recipe in enumerate(recipes, KINDS.index(kind)):
        bad = BAD[turn % len(BAD)]
        expected = results(clean, recipe, backend, options, gradients, live)
        ours = results(spoiled(clean, slots, bad), recipe, backend, options, gradients, live)
        for name, a, b in zip(("out", "lse", "entropy", "dq", "dk", "dv"), ours, expected, strict=False):
            assert_close(a, b, **EXACT, msg=lambda text, name=name, bad=bad: f"{name} with {bad}: {text}")
        if gradients:
            assert all(bool((x[slots[:, None].expand(x.shape[:3])] == 0).all()) for x in ours[4:])


@pytest.mark.parametrize("backend", BACKENDS)
def test_padded_queries_keep_what_is_wrong_to_themselves(backend):
    options, slots = padded_call("right")
    clean = tensors(KEYS)
    out = attention(*spoiled(clean, slots, math.nan), "rope", backend=backend, **options)
    live = ~slots[:, None].expand(out.shape[:3])
    assert_close(out[live], attention(*clean, "rope", backend=backend, **options)[live], **EXACT)
    assert out.isfinite().all()
    out = attention(*spoiled(clean, slots, 3.0), "rope", backend=backend, **options)
    q = spoiled(clean, slots, 3.0)[0]  # a finite number in a padded query is taken as it is
    assert_close(out, attention(q, *clean[1:], "rope", backend=backend, **options), **EXACT)


@pytest.mark.parametrize(
    ("queries", "backend"),
    [(KEYS, "aot_eager"), (1, "eager"), pytest.param(1, "aot_eager", marks=pytest.mark.slow)],
)
def test_padding_is_never_read_in_a_graph(queries, backend):
    """A graph does not look at values."""
    torch._dynamo.reset()
    options, slots = padded_call("left")
    clean = tensors(queries)
    run = torch.compile(
        lambda q, k, v: attention(q, k, v, "rope", causal=True, **options), fullgraph=True, backend=backend
    )
    live = ~slots[:, None] if queries == KEYS else torch.ones(2, 1, 1, dtype=torch.bool)
    ours = run(*spoiled(clean, slots, math.nan)).masked_fill(~live[..., None], 0)
    assert_close(ours, results(clean, "rope", "sdpa", options, False, live)[0], **EXACT)


def test_padding_is_never_read_under_a_transform():
    options, slots = padded_call("right")
    q, k, v = spoiled(tensors(1), slots, math.nan)
    actual = torch.func.grad(lambda k: attention(q, k, v, "rope", backend="reference", **options).sum())(k)
    assert actual.isfinite().all() and bool((actual != 0).any())


def test_harmless_padding_is_not_copied(monkeypatch):
    monkeypatch.setattr(padding, "_blank", lambda x, slots: pytest.fail("keys were copied"))
    for kind in ("right", "left"):
        attention(*tensors(1), "rope", causal=True, **padded_call(kind)[0])
    whole = {"lengths": torch.tensor([KEYS, KEYS])}
    q, k, v = tensors(1)
    k[0, 0, 3, 0] = math.nan  # a key that is seen
    assert attention(q, k, v, "rope", **whole)[0].isnan().any()


# --- fewer queries than keys ------------------------------------------------------------------------------------------


def row_by_row(q, k, v, recipe, counts, ids):
    """Each row by itself, without its padding."""
    rows = []
    for row, count in enumerate(counts.tolist()):
        one = slice(row, row + 1)
        options = {} if ids is None else {"position_ids": ids[one, :count]}
        rows.append(attention(q[one], k[one, :, :count], v[one, :, :count], recipe, causal=True, **options))
    return torch.cat(rows)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("recipe", ["rope+infoscale:train_length=4", "rerope:window=3", "alibi+window:size=4"])
def test_queries_stand_at_the_last_unpadded_keys(backend, recipe):
    for queries in (1, 4):
        q, k, v = tensors(queries)
        apart = ise.PoSE(4 * KEYS).sample(2, KEYS, torch.Generator().manual_seed(3))
        for ids in (None, torch.arange(KEYS).expand(2, -1), apart):
            given = {} if ids is None else {"position_ids": ids}
            ours = attention(q, k, v, recipe, causal=True, lengths=COUNTS, backend=backend, **given)
            assert_close(ours, row_by_row(q, k, v, recipe, COUNTS, ids), **EXACT)


def test_queries_stand_where_two_loops_put_them():
    recipe = ise.Recipe.parse("rerope:window=3+logn:train_length=4")
    q, k, v = tensors(4)
    out = attention(q, k, v, recipe, causal=True, lengths=COUNTS, position_ids=torch.arange(KEYS))
    for row, count in enumerate(COUNTS.tolist()):
        one = slice(row, row + 1)
        expected, _, _ = brute(q[one], k[one, :, :count], v[one, :, :count], recipe, True)
        assert_close(out[one], expected, **EXACT)


def test_queries_before_the_first_key_count_backwards():
    counts = torch.tensor([2, 0])
    plain = Layout(2, 4, KEYS, torch.device("cpu"), Rows(counts))
    placed = Layout(2, 4, KEYS, torch.device("cpu"), Rows(counts), position_ids=torch.arange(KEYS))
    assert torch.equal(plain.query, torch.tensor([[-2, -1, 0, 1], [-4, -3, -2, -1]]))
    assert torch.equal(placed.query, plain.query)


def test_left_padding_with_positions_of_the_keys():
    q, k, v = tensors(4)
    ids = (torch.arange(KEYS) - (KEYS - COUNTS)[:, None]).clamp_min(0)
    mask = ise.Padding(COUNTS, "left")
    ours = attention(q, k, v, "rope+window:size=3", causal=True, mask=mask, position_ids=ids)
    assert_close(ours, attention(q, k, v, "rope+window:size=3", causal=True, mask=mask), **EXACT)
