"""Which keys the queries of a process see, as ranges of slots of the whole rows."""

from __future__ import annotations

from math import inf

from isentrope.core.partial_layout import RowTable
from isentrope.core.region import Region, Span
from isentrope.masks import Full, Mask
from isentrope.parallel.split import Ranges, join_ranges


def combine_masks(masks: tuple[Mask | None, ...], causal: bool) -> Region:
    """Return the region that several masks allow together."""
    given = [mask for mask in masks if mask is not None]
    causal = causal or any(mask.causal for mask in given)
    region = Full().region(causal)
    for mask in given:
        region = region & mask.region(causal)
    return region


def find_keys(region: Region, queries: range, rows: RowTable) -> Ranges:
    """Return ranges, disjoint and in order, that have every key that some of the queries see; at least one key."""
    if rows.positions is not None:
        return (range(rows.length),)
    frame = range(rows.length)
    if rows.frames is not None:
        low, high = (x[:, queries.start : queries.stop] for x in rows.frames)
        frame = range(int(low.min()), max(int(high.max()), int(low.min())))
    anchored = rows.frames is None
    ranges = join_ranges(_find_span(span, queries, frame, anchored) for span in region.spans)
    return ranges or (range(queries.start, queries.start + 1),)


def _find_span(span: Span, queries: range, frame: range, anchored: bool) -> range:
    nearest, farthest = span.chunk_distances
    low = max(frame.start, queries.start + max(span.low, nearest))
    high = min(frame.stop, queries.stop - 1 + min(span.high, farthest))
    if anchored:  # positions are slots
        low, high = max(low, span.start), min(high, span.stop)
    return range(int(low), int(high)) if low < high and low < inf else range(0)


def join_all(ranges: Ranges) -> Ranges:
    """Return one range from the first slot to the last."""
    return (range(ranges[0].start, ranges[-1].stop),)
