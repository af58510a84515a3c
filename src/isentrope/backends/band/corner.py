"""The far corner of a causal call: a triangle of last queries and first keys that has a branch of its own."""

from __future__ import annotations

from dataclasses import replace
from math import inf

from isentrope.core.call import AttentionCall, RotatedBranch
from isentrope.core.layout import Layout
from isentrope.core.rotation import Angles

MAX_CORNER_SHARE = 8  # of the queries at most one in so many sees the corner, or splitting them gains little


def split_corner(call: AttentionCall) -> tuple[AttentionCall, AttentionCall] | None:
    """Split off the queries that see a far corner, so that those before have a window and a triangle of far keys.

    Returns:
        The calls of the queries before and of the others, or None where there is no such corner.
    """
    layout = call.layout
    if not layout.plain or layout.queries > layout.keys:
        return None
    first = call.cached("corner", lambda: _get_corner(call))
    if first is None:
        return None
    before = first - (layout.keys - layout.queries)  # queries that do not see it
    layouts = layout.cached(
        ("corner layouts", first),
        lambda: (
            Layout(layout.batch, before, first, layout.device),
            Layout(layout.batch, layout.queries - before, layout.keys, layout.device),
        ),
    )
    return (
        _take_rows(call, slice(None, before), first, layouts[0]),
        _take_rows(call, slice(before, None), layout.keys, layouts[1]),
    )


def _get_corner(call: AttentionCall) -> int | None:
    regions = tuple(branch.region for branch in call.branches)
    return call.layout.cached(("corner", *regions), lambda: _find_corner(call))


def _find_corner(call: AttentionCall) -> int | None:
    """Return the slot of the first query that sees a corner, None where there is none."""
    layout = call.layout
    spans = [span for branch in call.branches for span in branch.region.spans]
    if any(len(b.region.spans) != 1 or b.slopes is not None or b.chosen is not None for b in call.branches):
        return None
    edges = {span.low for span in spans}
    # nothing is ahead of the query or tied to positions of its own
    if any(span.start > 0 or span.stop < layout.keys or span.high > 1 for span in spans):
        return None
    corners = [span for span in spans if span.low == -inf and span.high < 1 and span.high in edges]
    if len(corners) != 1 or len(spans) < 3:
        return None
    first = 1 - int(corners[0].high)
    seeing = layout.keys - first
    return first if 0 < seeing * MAX_CORNER_SHARE <= layout.queries else None


def _take_rows(call: AttentionCall, rows: slice, keys: int, layout: Layout) -> AttentionCall:
    """Return the call of some queries and of the first keys, without branches that they see nothing of."""
    branches = [_take_branch_rows(branch, rows, keys, layout) for branch in call.branches]
    reached = [branch for branch in branches if branch.region.spans]
    q, k, v = call.q[:, :, rows], call.k[:, :, :keys], call.v[:, :, :keys]
    return replace(call, q=q, k=k, v=v, layout=layout, branches=reached)


def _take_branch_rows(branch: RotatedBranch, rows: slice, keys: int, layout: Layout) -> RotatedBranch:
    tau, offset = (None if x is None else x[..., rows] for x in (branch.tau, branch.offset))
    return replace(
        branch,
        region=layout.simplify(branch.region),
        query_angles=_take_angles(branch.query_angles, rows),
        key_angles=_take_angles(branch.key_angles, slice(keys)),
        tau=tau,
        offset=offset,
    )


def _take_angles(angles: Angles | None, rows: slice) -> Angles | None:
    if angles is None or angles[0].shape[2] == 1:  # one angle for all
        return angles
    return angles[0][:, :, rows], angles[1][:, :, rows]
