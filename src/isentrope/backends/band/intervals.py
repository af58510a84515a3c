"""Calls whose queries each see an interval of keys, or a few: padded and packed rows, both directions, far triangles.

Every span of a branch is one run of the band kernel with the visible slots of each query, as the layout has them, and
merges what the runs before it have computed. No mask is built, and a new length, padding or document is new data only.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from isentrope.backends.merge import PartialOutput
from isentrope.backends.padding import blank_queries, needs_zeros
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
    padded = needs_zeros(call.layout)
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
    """Compute folded branches, for the merged backward. Padded keys and values may be anything."""
    from isentrope.backends.band.kernel import launch

    padded = needs_zeros(branches[0].layout)
    far: PartialOutput | None = None
    for branch in branches:
        for interval in list_intervals(branch.layout, branch.region):
            out, lse = launch(
                branch.q, branch.k, branch.v, 0, 0, None, None, branch.scale, False, sink_offset=branch.offset,
                far=far, intervals=interval, padded=padded,
            )  # fmt: skip
            far = PartialOutput(out, lse)
    assert far is not None
    return far.out, far.lse
