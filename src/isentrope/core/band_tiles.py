"""Bands of keys as rectangles, triangles and short rows of a band, for kernels that know no window (those of a CPU).

A query of a span sees an interval of keys. From one query to the next both of its ends stay or move by one, so the
queries of a row or document fall into a few runs: where neither end moves, a rectangle; where one does, a rectangle and
a triangle; where both do, a band, cut into groups of queries that share one small mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from math import inf
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from isentrope.core.compile import values_are_readable
from isentrope.core.frame_calls import Frame, list_frames
from isentrope.core.layout import Layout
from isentrope.core.region import Region, Span

MAX_MASKED_QUERIES = 16  # of padded rows, which one mask serves better than a kernel a row
MAX_ONE_MASK_QUERIES = 128  # of a band: several tiles are more operations than the pairs that they save
MIN_FRAME_QUERIES = 64  # on average, or a mask serves better too
# Queries that share the mask of a band, by its width: more of them mask more pairs, fewer make slower products. Cutting
# off the two triangles of a group, so that the rest needs no mask, takes as long.
GROUP_QUERIES = ((2048, 192), (512, 64), (0, 32))
# The same with several threads, which gain nothing in fp32 from products of 32 rows, into which PyTorch cuts fewer than
# 192 queries.
PARALLEL_GROUP_QUERIES = ((512, 192), (0, 32))
MIN_SHARED_GROUP_QUERIES = 64  # where heads that share keys are rows of one product

GroupSizes = tuple[tuple[int, int], ...]


class BandTile(NamedTuple):
    """A tile, or `repeats` tiles of a band: each begins `rows` queries and keys after the one before.

    kind: "full": all pairs; "lower": a triangle, the first query sees the first key; "upper": a triangle, the first
        query sees all keys; "band": query r of a tile sees `width` keys from its r-th on, counted from `lead` keys
        before the first.
    adds: whether an earlier tile has some of these queries too.
    """

    batch: slice
    first: int
    begin: int
    rows: int
    columns: int
    kind: Literal["full", "lower", "upper", "band"]
    width: int = 0
    repeats: int = 1
    lead: int = 0
    adds: bool = False

    @property
    def last(self) -> int:
        """The query after the last."""
        return self.first + self.rows * self.repeats


def find_band_tiles(region: Region, layout: Layout, sharing: int = 1) -> list[BandTile] | None:
    """Return a region as tiles; None where a mask serves better, or where positions are not counted in slots.

    Args:
        sharing: how many heads are rows of one product.
    """
    if torch.compiler.is_compiling() or not layout.implicit or any(span.chunk for span in region.spans):
        return None
    if not layout.plain:
        readable = type(layout.slots) is Tensor and values_are_readable(layout.slots)
        if not readable or layout.queries <= MAX_MASKED_QUERIES:
            return None
    sizes = choose_group_sizes(sharing)
    key = "band tiles", region, sizes, layout.padded_queries_matter
    return layout.cached(key, lambda: _cut_region(region, layout, sizes))


def choose_group_sizes(sharing: int = 1) -> GroupSizes:
    """Return how many queries share the mask of a band, by its width."""
    if sharing > 1:
        return ((0, max(MIN_SHARED_GROUP_QUERIES, 192 // sharing)),)
    return GROUP_QUERIES if torch.get_num_threads() == 1 else PARALLEL_GROUP_QUERIES


def _cut_region(region: Region, layout: Layout, sizes: GroupSizes) -> list[BandTile] | None:
    frames = list_frames(layout, layout.padded_queries_matter)
    if not layout.plain and len(frames) * MIN_FRAME_QUERIES > layout.queries * layout.batch:
        return None
    tiles: list[BandTile] = []
    for frame in frames:
        cut: list[BandTile] = []
        for tile in (tile for span in region.spans for tile in cut_span(span, frame, sizes)):
            adds = any(tile.first < other.last and other.first < tile.last for other in cut)
            cut.append(tile._replace(adds=adds))
        tiles += cut
    return tiles


def cut_span(span: Span, frame: Frame, sizes: GroupSizes = GROUP_QUERIES) -> Iterator[BandTile]:
    """Yield the tiles of one span without chunks in a frame; a query may be in two of them."""
    least, most = max(frame.begin, frame.origin + span.start), min(frame.end, frame.origin + span.stop)
    low, high = frame.offset + span.low, frame.offset + span.high  # bounds of key slot less query index
    first, last = max(frame.first, least - high + 1), min(frame.last, most - low)
    if first >= last or least >= most:
        return
    if last - first <= MAX_ONE_MASK_QUERIES and span.low > -inf and span.high < inf:
        begin, end = int(max(least, first + low)), int(min(most, last - 1 + high))
        rows, width, lead = int(last - first), int(high - low), int(begin - first - low)
        yield BandTile(frame.rows, int(first), begin, rows, end - begin, "band", width, lead=lead)
        return
    moves, stops = least - low + 1, most - high + 1  # from here on the first key moves, and before it the last one does
    edges = sorted({int(x) for x in (first, last, moves, stops) if first <= x <= last})
    for start, stop in pairwise(edges):
        begin, end = int(max(least, start + low)), int(min(most, start + high))
        rows, columns = stop - start, end - begin
        full = BandTile(frame.rows, start, begin, rows, columns, "full")
        both, neither = start >= moves and start < stops, start < moves and start >= stops
        if rows == 1 or neither:
            yield full
        elif both:
            yield from _cut_band(full, sizes)
        elif start < stops:
            if columns > 1:
                yield full._replace(columns=columns - 1)
            yield full._replace(begin=end - 1, columns=rows, kind="lower")
        else:
            if columns > rows:
                yield full._replace(begin=begin + rows, columns=columns - rows)
            yield full._replace(columns=rows, kind="upper")


def _cut_band(tile: BandTile, sizes: GroupSizes) -> Iterator[BandTile]:
    """Yield a band whose first query sees all columns of a tile as groups of queries.

    A group has an even number of keys, which a CPU's kernel takes faster: with one that the query before saw.
    """
    width = tile.columns
    size = next(queries for least, queries in sizes if width >= least)
    count, rest = divmod(tile.rows, size)
    done = count * size
    for first, rows, repeats in ((0, size, count), (done, rest, 1)):
        extra = (width + rows - 1) % 2
        if rows and repeats:
            yield tile._replace(
                first=tile.first + first, begin=tile.begin + first - extra, rows=rows,
                columns=width + rows - 1 + extra, kind="band", width=width, repeats=repeats, lead=-extra,
            )  # fmt: skip
