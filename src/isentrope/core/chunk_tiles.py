"""Regions of whole chunks as batches of equal rectangles, so that a kernel without a mask computes each batch.

A chunk against itself is a square, against its neighbour another; all squares of a row are one batch. What lies two or
more chunks back is a staircase. It is cut in halves: the later half of the queries sees all keys of the earlier half,
which is a rectangle, and leaves two staircases of half the size. All rectangles of one size are again one batch, so
m chunks take about log₂ m of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf
from typing import NamedTuple

from torch import Tensor

from isentrope.core.layout import Layout
from isentrope.core.region import Band, Region, Span

MAX_DIFFERENCES = 4  # of chunk indices, each a batch of its own


class Rectangle(NamedTuple):
    """Queries from slot `first` on against keys from slot `begin` on: all pairs, or a lower triangle."""

    first: int
    begin: int
    rows: int
    columns: int
    causal: bool = False


@dataclass(frozen=True)
class ChunkTiles:
    """`count` rectangles of one size, each `stride` queries and keys after the one before."""

    corner: Rectangle
    count: int = 1
    stride: int = 0

    @property
    def band(self) -> Band:
        _, _, rows, columns, causal = self.corner
        return Band(0, rows, 0, columns, inf, 0 if causal else inf)

    def shift_rows(self, offset: int) -> ChunkTiles:
        """Return the same rectangles for a tensor whose queries begin elsewhere."""
        return replace(self, corner=self.corner._replace(first=self.corner.first + offset))

    def view_rows(self, x: Tensor) -> Tensor:
        """Return the queries of a tensor (batch, heads, queries, …) by rectangle, (batch, count, heads, rows, …)."""
        return self._view(x, self.corner.first, self.corner.rows)

    def view_columns(self, x: Tensor) -> Tensor:
        """Return the keys of a tensor (batch, heads, keys, …) by rectangle, (batch, count, heads, columns, …)."""
        return self._view(x, self.corner.begin, self.corner.columns)

    def _view(self, x: Tensor, first: int, size: int) -> Tensor:
        last = first + (self.count - 1) * self.stride + size
        return x[:, :, first:last].unfold(2, size, max(1, self.stride)).movedim(2, 1).movedim(-1, 3)


def share_queries(tiles: list[ChunkTiles]) -> bool:
    """Return whether some query is in several rectangles."""
    firsts = [(tile.corner.first + n * tile.stride, tile.corner.rows) for tile in tiles for n in range(tile.count)]
    firsts.sort()
    return any(first + rows > later for (first, rows), (later, _) in pairwise(firsts))


def find_tiles(region: Region, layout: Layout) -> list[ChunkTiles] | None:
    """Return the batches of rectangles that a region of whole chunks is; None if it is anything else."""
    if not layout.plain or len(region.spans) != 1 or not region.spans[0].chunk or layout.queries > layout.keys:
        return None
    return layout.cached(("chunk tiles", region), lambda: cut_chunks(region.spans[0], layout.queries, layout.keys))


def cut_chunks(span: Span, queries: int, keys: int) -> list[ChunkTiles] | None:
    """Return a span of chunks as batches of rectangles, for queries at the last of positions 0 … keys - 1.

    None for bounds on positions or distances beside those on chunks, other than that no key is ahead of its query.
    """
    bounded = (span.start, span.stop, span.low) != (-inf, inf, -inf) or span.high not in (1, inf)
    if bounded or not span.chunk:
        return None
    rows, oldest = range(keys - queries, keys), (keys - queries) // span.chunk
    newest = (keys - 1) // span.chunk
    low, high = span.chunk_low, span.chunk_high
    rectangles: list[Rectangle] = []
    if span.high == 1:
        if low <= 0 < high:
            rectangles += _cut_triangles(span.chunk, rows)
        high = min(high, 0)
    first, last = int(max(low, -newest)), int(min(high, newest - oldest + 1))
    if last - first <= MAX_DIFFERENCES:
        for difference in range(first, last):
            rectangles += _cut_squares(span.chunk, rows, difference)
    elif low == -inf and high < inf:
        rectangles += _cut_staircase(span.chunk, rows, int(high), behind=True)
    elif low > -inf and high == inf:
        rectangles += _cut_staircase(span.chunk, rows, int(low) - 1, behind=False)
    else:
        return None
    return _batch(rectangles)


def _clip(rows: range, queries: tuple[int, int], keys: tuple[int, int], causal: bool = False) -> Iterator[Rectangle]:
    """Yield the part of a rectangle of positions that has queries and keys, if there is any."""
    first, last = max(queries[0], rows.start), min(queries[1], rows.stop)
    begin, end = max(keys[0], 0), min(keys[1], rows.stop)
    if first < last and begin < end:
        yield Rectangle(first - rows.start, begin, last - first, end - begin, causal)


def _cut_triangles(size: int, rows: range) -> Iterator[Rectangle]:
    """Yield the chunks of queries against their own keys up to each query."""
    for start in range(rows.start // size * size, rows.stop, size):
        middle, end = max(start, rows.start), min(start + size, rows.stop)
        yield from _clip(rows, (middle, end), (middle, end), causal=True)
        yield from _clip(rows, (middle, end), (start, middle))  # keys that came before the first query


def _cut_squares(size: int, rows: range, difference: int) -> Iterator[Rectangle]:
    """Yield the chunks of queries against the chunks of keys at this difference."""
    for start in range(rows.start // size * size, rows.stop, size):
        begin = start + difference * size
        yield from _clip(rows, (start, start + size), (begin, begin + size))


def _cut_staircase(size: int, rows: range, shift: int, behind: bool) -> Iterator[Rectangle]:
    """Yield rectangles of queries in chunk c and keys in chunks before c + shift, or with `behind` false after it.

    Of t = c + shift and a chunk u < t of keys, the first bit in which they differ is 1 in t and 0 in u: rectangles of
    2^s chunks are the odd blocks of queries against the even blocks before them.
    """
    # both sides are moved up so that no t is negative; with keys behind, such a query sees none
    lift = 0 if behind else max(0, -(rows.start // size + shift))
    most = (rows.stop - 1) // size + max(shift, 0) + lift
    width = 1
    while width <= most:
        for even in range(0, most + 1, 2 * width):
            odd = even + width
            seeing, seen = (odd, even) if behind else (even, odd)
            start, begin = (seeing - shift - lift) * size, (seen - lift) * size
            yield from _clip(rows, (start, start + width * size), (begin, begin + width * size))
        width *= 2


def _batch(rectangles: list[Rectangle]) -> list[ChunkTiles]:
    """Join rectangles of one size at equal strides; they follow each other in the list."""
    batches: list[ChunkTiles] = []
    for tile in sorted(rectangles, key=lambda r: (r.causal, r.columns, r.rows, r.first)):
        if batches:
            last = batches[-1]
            step = tile.first - last.corner.first
            aligned = step == tile.begin - last.corner.begin >= max(tile.rows, tile.columns)
            stride = step if last.count == 1 else last.stride
            if tile[2:] == last.corner[2:] and aligned and step == last.count * stride:
                batches[-1] = ChunkTiles(last.corner, last.count + 1, stride)
                continue
        batches.append(ChunkTiles(tile))
    return batches
