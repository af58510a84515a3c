"""Rows without their padding, and packed documents, as calls of their own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from isentrope.core.call import AttentionCall, RotatedBranch
from isentrope.core.compile import values_are_readable
from isentrope.core.layout import Layout, get_layout
from isentrope.core.region import Region
from isentrope.core.rotation import is_transformed

MIN_PADDING = 0.1  # of all slots
# Slots of queries, on average, with at least so much padding and with less: a call of its own costs more than it saves
# below.
MIN_FRAME_SLOTS, MIN_FULL_FRAME_SLOTS = 256, 1024


class Frame(NamedTuple):
    """Queries first … last - 1 of some rows of a batch, which see keys begin … end - 1 at most.

    Query i is aligned with slot i + offset; slot `origin` is at position 0.
    """

    rows: slice
    first: int
    last: int
    begin: int
    end: int
    offset: int
    origin: int


class FrameCall(NamedTuple):
    """A call for the queries of some rows, or of a document in them, against its keys alone."""

    rows: slice
    queries: slice
    call: AttentionCall


def list_frames(layout: Layout, padding: bool) -> list[Frame]:
    """Return the rows or documents of a layout, with padded queries or without; rows that are cut alike are one."""
    if layout.plain:
        return [Frame(slice(None), 0, layout.queries, 0, layout.keys, layout.keys - layout.queries, 0)]
    return layout.cached(("frames", padding), lambda: _list_frames(layout, padding))


def _list_frames(layout: Layout, padding: bool) -> list[Frame]:
    low, high, slot, origin = torch.broadcast_tensors(
        layout.frame_low, layout.frame_high, layout.own_slot, layout.origin
    )
    offset = slot - torch.arange(layout.queries, device=slot.device)
    whole = low.shape[0] == 1
    frames: list[Frame] = []
    previous = None
    for row, facts in enumerate(torch.stack((low, high, offset, origin), -1).cpu()):
        if previous is not None and torch.equal(facts, previous):
            same = [frame for frame in frames if frame.rows.stop == row]
            frames = [frame for frame in frames if frame.rows.stop != row]
            frames += [frame._replace(rows=slice(frame.rows.start, row + 1)) for frame in same]
            continue
        previous = facts
        starts = (facts[1:] != facts[:-1]).any(1).nonzero()[:, 0] + 1
        edges = [0, *starts.tolist(), layout.queries]
        for first, last in pairwise(edges):
            begin, end, shift, start = facts[first].tolist()
            if not padding:
                first, last = max(first, begin - shift), min(last, end - shift)
            rows = slice(None) if whole else slice(row, row + 1)
            if first < last:
                frames.append(Frame(rows, first, last, begin, end, shift, start))
    return frames


def is_better_split(call: AttentionCall) -> bool:
    """Return whether the rows of a call are better computed one after another: on a CPU, if nobody reads padding.

    Kernels may skip padding, but what rotates vectors does not, and tensors of all rows together do not fit caches.
    """
    layout = call.layout
    if type(layout) is not Layout or not layout.padded or layout.padded_queries_matter or not layout.implicit:
        return False
    if call.q.device.type != "cpu" or layout.batch * layout.queries < MIN_FRAME_SLOTS:
        return False
    if call.needs_grad or not values_are_readable(call.q) or is_transformed():
        return False
    return layout.cached("better split", lambda: _is_better_split(layout))


def _is_better_split(layout: Layout) -> bool:
    frames, slots = list_frames(layout, False), layout.batch * layout.queries
    tokens = sum(_count_rows(frame, layout) * (frame.last - frame.first) for frame in frames)
    least = MIN_FRAME_SLOTS if tokens <= (1 - MIN_PADDING) * slots else MIN_FULL_FRAME_SLOTS
    if len(frames) * least > slots:
        return False
    return all(frame.origin == frame.begin and frame.end == frame.last + frame.offset for frame in frames)


def _count_rows(frame: Frame, layout: Layout) -> int:
    return len(range(*frame.rows.indices(layout.batch)))


def split_frames(call: AttentionCall) -> Iterator[FrameCall]:
    """Yield one call over unpadded rows for each padded row or packed document; padded queries are in none.

    Raises:
        ValueError: a cache has dropped keys.
    """
    frames = list_frames(call.layout, False)
    if any(frame.origin != frame.begin for frame in frames):
        raise ValueError(
            "retrieve: expected all keys of a row, got a cache that drops some; generate with another cache"
        )
    learned = call.needs_grad
    branches = _take_branches(call, frames) if learned else call.cached("frames", lambda: _take_branches(call, frames))
    for frame, some in zip(frames, branches, strict=True):
        queries, keys = slice(frame.first, frame.last), slice(frame.begin, frame.last + frame.offset)
        q, k, v = (x[frame.rows, :, part] for x, part in ((call.q, queries), (call.k, keys), (call.v, keys)))
        layout = get_layout(q.shape[0], q.shape[2], k.shape[2], q.device)
        yield FrameCall(frame.rows, queries, replace(call, q=q, k=k, v=v, layout=layout, branches=some))


def _take_branches(call: AttentionCall, frames: list[Frame]) -> list[list[RotatedBranch]]:
    """Return the branches of each frame."""
    return [_take_frame_branches(call, frame) for frame in frames]


def _take_frame_branches(call: AttentionCall, frame: Frame) -> list[RotatedBranch]:
    queries, keys = slice(frame.first, frame.last), slice(frame.begin, frame.last + frame.offset)
    rows = _count_rows(frame, call.layout)
    layout = get_layout(rows, queries.stop - queries.start, keys.stop - keys.start, call.q.device)
    done: dict[tuple[int, int, int], Tensor] = {}  # branches that share angles share the parts too

    def take(x: Tensor | None, part: slice) -> Any:
        if x is None:
            return None
        place = id(x), part.start, part.stop
        if place not in done:
            own = x if x.shape[0] == 1 else x[frame.rows]
            done[place] = own if x.shape[2] == 1 else own[:, :, part]
        return done[place]

    branches = []
    for branch in call.branches:
        region = layout.simplify(branch.region)
        if region.spans:
            changed = replace(
                branch,
                region=region,
                query_angles=branch.query_angles and tuple(take(x, queries) for x in branch.query_angles),
                key_angles=branch.key_angles and tuple(take(x, keys) for x in branch.key_angles),
                tau=take(branch.tau, queries),
                offset=take(branch.offset, queries),
            )
            branches.append(changed)
    return branches or [replace(call.branches[0], region=Region(()))]
