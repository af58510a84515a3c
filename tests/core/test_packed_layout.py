"""Sequences packed side by side, in one call, against each sequence alone."""

from __future__ import annotations

import pytest
import torch

import isentrope as ise
from isentrope.core.layout import Layout
from isentrope.core.packed_layout import PackedKeys, PackedLayout

HEADS, KEY_HEADS, SIZE = 4, 2, 8
QUERIES, KEYS, DROPPED = (5, 1, 40, 2), (5, 30, 40, 23), (0, 0, 0, 7)
RECIPES = (
    "rope+infoscale:train_length=16",
    "rerope:window=8+share:reference=4",
    "leakyrerope:window=8+power:train_length=8,keys=far",
    "selfextend:window=8,group=4",
    "dualchunk:chunk=8,local=4+logn:train_length=8,keys=far",
    "string:shift=8",
    "dpe:window=8,scales=(1,2,4)",
    "rope+sink:sinks=2,size=8",
    "rope+window:size=8",
    "alibi",
    "cosine:alpha=16+rope",
)


def pack(by_row):
    """A layout of all queries of sequences at the ends of their keys, of which the first may have been dropped."""
    ends = torch.tensor(KEYS).cumsum(0)
    first = ends - torch.tensor(KEYS)
    origin = first - torch.tensor(DROPPED)
    numbers = torch.arange(len(KEYS))
    packed = PackedKeys(torch.stack((first, ends, origin)), numbers.repeat_interleave(torch.tensor(KEYS)))
    lengths = [keys + dropped for keys, dropped in zip(KEYS, DROPPED, strict=True)]
    positions = [torch.arange(n - q, n) for n, q in zip(lengths, QUERIES, strict=True)]
    return PackedLayout(packed, numbers.repeat_interleave(torch.tensor(QUERIES)), torch.cat(positions), by_row)


def make_alone(queries, keys, dropped):
    """The layout of one sequence without its first keys."""
    own = torch.arange(keys - queries, keys)[None]
    frames = torch.full_like(own, -dropped), torch.full_like(own, keys), own
    layout = Layout(1, queries, keys, own.device, frames=frames)
    layout.key = (torch.arange(keys) + dropped)[None]
    return layout


@pytest.mark.parametrize("backend", ["reference", "sdpa", "chunked"])
@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("text", RECIPES)
def test_sequences_see_themselves_alone(text, by_row, backend):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, heads, sum(lengths), SIZE, generator=generator, dtype=torch.float64)
        for heads, lengths in ((HEADS, QUERIES), (KEY_HEADS, KEYS), (KEY_HEADS, KEYS))
    )
    recipe = ise.Recipe.parse(text)
    parts = zip(q.split(QUERIES, 2), k.split(KEYS, 2), v.split(KEYS, 2), QUERIES, KEYS, DROPPED, strict=True)
    expected = [
        ise.attention(*qkv, recipe, causal=True, layout=make_alone(*sizes), backend="reference")
        for *qkv, a, b, c in parts
        for sizes in [(a, b, c)]
    ]
    layout = pack(by_row)
    if by_row:
        q, k, v = q.transpose(0, 2), *(x.expand(layout.batch, -1, -1, -1) for x in (k, v))
    out = ise.attention(q, k, v, recipe, causal=True, layout=layout, backend=backend)
    out = out.transpose(0, 2) if by_row else out
    torch.testing.assert_close(out, torch.cat(expected, 2))


@pytest.mark.parametrize("by_row", [False, True])
def test_angles_of_keys_are_shared(by_row):
    """Rows that share keys share their positions: memory grows with the keys, not with rows times keys."""
    layout = pack(by_row)
    assert layout.key.shape == (1, sum(KEYS)) and layout.batch * layout.queries == sum(QUERIES)
    assert layout.key[0].tolist() == [x + dropped for n, dropped in zip(KEYS, DROPPED, strict=True) for x in range(n)]
    assert all(x.shape == (layout.batch, layout.queries) for x in (layout.query, layout.frame_low, layout.own_slot))
