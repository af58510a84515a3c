"""Calls for single rows of a padded batch, and for single documents of packed rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from isentrope.core.call import AttentionCall
from isentrope.core.layout import Layout, get_layout
from isentrope.core.region import Region


class Frame(NamedTuple):
    """Queries of one row, or of one document, and its keys."""

    row: int
    queries: slice
    keys: slice


def list_frames(layout: Layout) -> list[Frame]:
    """List the rows, or documents, of a call in order; padded queries are in none. Reads the layout from its device.

    Raises:
        ValueError: a cache has dropped keys.
    """
    return layout.cached("frames", lambda: list(_find_frames(layout)))


def _find_frames(layout: Layout) -> Iterator[Frame]:
    tensors = torch.broadcast_tensors(layout.frame_low, layout.frame_high, layout.own_slot, layout.origin)
    low, high, slot, origin = torch.stack(tensors).expand(-1, layout.batch, -1).cpu()
    inside = (slot >= low) & (slot < high)
    if bool((inside & (origin != low)).any()):
        raise ValueError(
            "retrieve: expected all keys of a row, got a cache that drops some; generate with another cache"
        )
    for row, begins in enumerate(torch.where(inside, low, -1)):
        first = 0
        for begin, count in zip(*(x.tolist() for x in begins.unique_consecutive(return_counts=True)), strict=True):
            if begin >= 0:
                yield Frame(row, slice(first, first + count), slice(begin, int(slot[row, first + count - 1]) + 1))
            first += count


def take_frame(call: AttentionCall, frame: Frame) -> AttentionCall:
    """Return the call of one frame, which is an unpadded row."""
    row, queries, keys = frame
    q, k, v = (x[row : row + 1, :, part] for x, part in ((call.q, queries), (call.k, keys), (call.v, keys)))
    layout = get_layout(1, q.shape[2], k.shape[2], q.device)
    branches = []
    for branch in call.branches:
        region = layout.simplify(branch.region)
        if region.spans:
            query_angles = _take(branch.query_angles, row, queries)
            key_angles = _take(branch.key_angles, row, keys)
            tau, offset = (None if x is None else _take((x,), row, queries)[0] for x in (branch.tau, branch.offset))
            branches.append(
                replace(branch, region=region, query_angles=query_angles, key_angles=key_angles, tau=tau, offset=offset)
            )
    branches = branches or [replace(call.branches[0], region=Region(()))]
    return replace(call, q=q, k=k, v=v, layout=layout, branches=branches)


def _take(tensors: Sequence[Tensor] | None, row: int, part: slice) -> Any:
    """Return a row and a part of tensors (batch or 1, …, length or 1 in the third place)."""
    if tensors is None:
        return None
    rows = (x if x.shape[0] == 1 else x[row : row + 1] for x in tensors)
    return tuple(x if x.shape[2] == 1 else x[:, :, part] for x in rows)


class RowPart(NamedTuple):
    """Some tokens of a row: a frame, as a call that lacks its q, k and v, or padding (None)."""

    tokens: int
    call: AttentionCall | None


def split_rows(call: AttentionCall, frames: Sequence[Frame]) -> list[list[RowPart]]:
    """Return the parts of each row, where queries are the keys' own tokens."""
    rows: list[list[RowPart]] = [[] for _ in range(call.q.shape[0])]
    ends = [0] * len(rows)
    nothing = call.q.new_empty(0)
    for frame in frames:
        part = take_frame(call, frame).set_tensors(nothing, nothing, nothing)
        vars(part)["shared"] = {}
        first, end = frame.queries.start, frame.queries.stop
        rows[frame.row] += [RowPart(first - ends[frame.row], None)] if first > ends[frame.row] else []
        rows[frame.row].append(RowPart(end - first, part))
        ends[frame.row] = end
    for parts, end in zip(rows, ends, strict=True):
        if end < call.q.shape[2]:
            parts.append(RowPart(call.q.shape[2] - end, None))
    return rows
