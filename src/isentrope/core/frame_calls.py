"""Padded rows and packed documents as calls of their own, over tokens alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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

MIN_FRAME_SLOTS = 256  # of queries, on average: a call of its own costs more than it saves with less


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
    """Return whether padded rows, whose padding nobody reads, are better computed one after another on a CPU.

    Kernels may skip padding, but what rotates vectors does not, and tensors of all rows together do not fit caches.
    """
    layout = call.layout
    if type(layout) is not Layout or not layout.padded or layout.padded_queries_matter or not layout.implicit:
        return False
    if call.q.device.type != "cpu" or call.needs_grad or not values_are_readable(call.q) or is_transformed():
        return False
    return layout.cached("better split", lambda: _is_better_split(layout))


def _is_better_split(layout: Layout) -> bool:
    frames = list_frames(layout, False)
    if len(frames) * MIN_FRAME_SLOTS > layout.batch * layout.queries:
        return False
    return all(frame.origin == frame.begin and frame.end == frame.last + frame.offset for frame in frames)


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
    rows = len(range(*frame.rows.indices(call.layout.batch)))
    layout = get_layout(rows, queries.stop - queries.start, keys.stop - keys.start, call.q.device)
    branches = []
    for branch in call.branches:
        region = layout.simplify(branch.region)
        if region.spans:
            query_angles = _take(branch.query_angles, frame.rows, queries)
            key_angles = _take(branch.key_angles, frame.rows, keys)
            tau, offset = (
                None if x is None else _take((x,), frame.rows, queries)[0] for x in (branch.tau, branch.offset)
            )
            branches.append(
                replace(branch, region=region, query_angles=query_angles, key_angles=key_angles, tau=tau, offset=offset)
            )
    return branches or [replace(call.branches[0], region=Region(()))]


def _take(tensors: Sequence[Tensor] | None, rows: slice, part: slice) -> Any:
    """Return rows and a part of tensors (batch or 1, …, length or 1 in the third place)."""
    if tensors is None:
        return None
    taken = (x if x.shape[0] == 1 else x[rows] for x in tensors)
    return tuple(x if x.shape[2] == 1 else x[:, :, part] for x in taken)
