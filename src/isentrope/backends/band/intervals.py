"""Calls whose queries each see an interval of keys, or a few: padded and packed rows, both directions, far triangles.

Every span of a branch is one run of the band kernel with the visible slots of each query, as the layout has them, and
merges what the runs before it have computed. No mask is built, and a new length, padding or document is new data only.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from isentrope.backends.merge import PartialOutput
from isentrope.backends.padding import blank_queries
from isentrope.core.call import AttentionCall, FoldedBranch
from isentrope.core.layout import Layout
from isentrope.core.region import EVERYTHING, Region

Interval = tuple[Tensor, Tensor]


class Attended(NamedTuple):
    """Output, log-sum-exp, and the entropy of attention weights if wanted."""

    out: Tensor
    lse: Tensor
    entropy: Tensor | None = None


def list_intervals(layout: Layout, region: Region) -> list[Interval]:
    """Return the visible slots of each query, [low, high) as int32 (batch or 1, queries), span by span.

    Padded queries whose outputs nobody reads see nothing.
    """

    def make() -> list[Interval]:
        low, high = (x.to(torch.int32) for x in layout.bounds(region))
        if not layout.padded_queries_matter:
            low, high = torch.broadcast_tensors(low, torch.where(layout.padding()[0][..., None], low, high))
        return [(a.contiguous(), b.contiguous()) for a, b in zip(low.unbind(-1), high.unbind(-1), strict=True)]

    return layout.cached(("intervals", region), make)


def has_faster_kernels(call: AttentionCall) -> bool:
    """Return whether rows are whole, and causal, all pairs or chunks: PyTorch's kernels, or bands, take those."""
    if not call.layout.plain:
        return False
    spans = [span for branch in call.branches for span in branch.region.spans]
    causal = all(span.high <= 1 for span in spans)
    return causal or any(span.chunk for span in spans) or any(b.region == EVERYTHING for b in call.branches)


def forward_intervals(call: AttentionCall, need_entropy: bool = False, far: PartialOutput | None = None) -> Attended:
    """Compute all branches, rotating queries in the kernel, and merge them with `far`, the output of other keys.

    Padded keys and values may be anything. At most two outputs are held at a time, and the keys of each rotation.
    """
    from isentrope.backends.band.kernel import launch

    assert far is None or not need_entropy
    call = blank_queries(call)
    padded = call.layout.padded and not call.layout.harmless_padding
    entropy: Tensor | None = None
    keys: list[Tensor] = []
    for n, branch in enumerate(call.branches):
        same = (k for k, other in zip(keys, call.branches, strict=False) if branch.rotates_keys_like(other))
        k = next(same, None)
        keys.append(call.fold_keys(branch) if k is None else k)
        for interval in list_intervals(call.layout, branch.region):
            target = call.q.new_empty(call.q.shape[:3], dtype=torch.float32) if need_entropy else None
            out, lse = launch(
                call.q, keys[n], call.v, 0, 0, branch.query_angles, branch.tau, call.scale, call.normalise,
                sink_offset=branch.offset, far=far, intervals=interval, far_entropy=entropy, entropy=target,
                padded=padded,
            )  # fmt: skip
            far, entropy = PartialOutput(out, lse), target
    assert far is not None
    return Attended(far.out, far.lse, None if entropy is None else entropy.clamp_min(0))


def forward_folded(branches: list[FoldedBranch]) -> tuple[Tensor, Tensor]:
    """Compute folded branches, for the merged backward."""
    from isentrope.backends.band.kernel import launch

    far: PartialOutput | None = None
    for branch in branches:
        for interval in list_intervals(branch.layout, branch.region):
            out, lse = launch(
                branch.q, branch.k, branch.v, 0, 0, None, None, branch.scale, False, sink_offset=branch.offset,
                far=far, intervals=interval,
            )  # fmt: skip
            far = PartialOutput(out, lse)
    assert far is not None
    return far.out, far.lse


def backward_intervals(branch: FoldedBranch, grad: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv of one branch, from the merged output and log-sum-exp."""
    from isentrope.backends.band.backward_kernel import choose_blocks, launch

    intervals = list_intervals(branch.layout, branch.region)
    blocks = choose_blocks(branch.q.shape[-1], branch.v.shape[-1])[:2]
    dtype = branch.q.dtype if len(intervals) == 1 else torch.float32
    delta = (grad.float() * out.float()).sum(-1)
    lse = torch.where(lse == -torch.inf, 0.0, lse.float())  # of a query without keys, whose weights are 0
    total: tuple[Tensor, ...] | None = None
    for n, interval in enumerate(intervals):
        key = ("query ranges", branch.region, n, blocks)
        ranges = branch.layout.cached(key, partial(find_query_ranges, interval, branch.layout.keys, *blocks))
        part = launch(branch.q, branch.k, branch.v, grad, lse, delta, branch.scale, interval, ranges, dtype)
        total = part if total is None else tuple(a.add_(b) for a, b in zip(total, part, strict=True))
    assert total is not None
    dq, dk, dv = (x.to(branch.q.dtype) for x in total)
    return dq, dk, dv


def find_query_ranges(interval: Interval, keys: int, rows: int, columns: int) -> Tensor:
    """Return the blocks of queries that see something of each block of keys.

    Args:
        interval: visible slots of each query, (batch or 1, queries) each.
        keys: in a row.
        rows: queries in a block.
        columns: keys in a block.

    Returns:
        int32 (batch or 1, blocks of keys, 2): the first block of queries, and the one after the last.
    """
    low, high = interval
    seen = low < high
    spare = -low.shape[1] % rows
    low = torch.nn.functional.pad(torch.where(seen, low, keys), (0, spare), value=keys)
    high = torch.nn.functional.pad(torch.where(seen, high, 0), (0, spare))
    least, most = low.unflatten(1, (-1, rows)).amin(2), high.unflatten(1, (-1, rows)).amax(2)
    start = torch.arange(0, keys, columns, device=low.device, dtype=low.dtype)[None, :, None]
    overlap = (least[:, None] < start + columns) & (most[:, None] > start)
    first = overlap.to(torch.int8).argmax(2)
    last = overlap.shape[2] - overlap.flip(2).to(torch.int8).argmax(2)
    last = torch.where(overlap.any(2), last, first)
    return torch.stack((first, last), -1).to(torch.int32).contiguous()
