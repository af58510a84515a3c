"""Windows, with first keys and far keys beside them: a Triton kernel for the band around the diagonal.

It rotates and scales queries in registers, takes in the first keys on the way, and merges far keys, a triangle that
PyTorch's fastest kernel computes, into its output. Last queries that see a far corner beside it go to those kernels.
Keys are folded beforehand, since many blocks of queries read each.
Gradients are those of PyTorch's kernels, from its output and log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from isentrope.backends.band.corner import split_corner
from isentrope.backends.merge import MergedBackend, PartialOutput, add_offset
from isentrope.backends.protocol import triton_refusal
from isentrope.backends.sdpa import SDPABackend
from isentrope.core.call import AttentionCall, FoldedBranch
from isentrope.core.compile import cuda_capability_major
from isentrope.core.region import Region, Span

MAX_SINKS = 64
HOPPER = 9  # major compute capability


class BandPlan(NamedTuple):
    """Which branch has the keys within `left` and `right` of the diagonal, which the first keys, which a far span."""

    near_branch: int
    left: int
    right: int
    sink_branch: int | None = None
    sinks: int = 0
    far_branch: int | None = None
    far_span: Span = Span()


class BandBackend(SDPABackend):
    """The band kernel, with SDPA's kernels for far keys and for the backward."""

    name = "band"
    reads_padding = False

    def refusal(self, call: AttentionCall) -> str | None:
        if torch.compiler.is_compiling():
            return "it is not for graphs, which make kernels of their own"
        if call.q.dtype not in (torch.float16, torch.bfloat16 if call.q.is_cuda else torch.float32):
            return f"it takes half precision, got {call.q.dtype}"  # Triton's interpreter has no bfloat16
        if call.q.is_cuda and (torch.version.hip is not None or cuda_capability_major(call.q.device) < HOPPER):
            return "it needs the copy engine that NVIDIA's cards have since Hopper"
        if (reason := triton_refusal(call)) is not None:
            return reason
        if (plan := _get_plan(call)) is None:
            return "it takes whole rows that see a window, first keys and a triangle of far ones"
        if call.needs_grad and (plan.far_branch is None or plan.sinks or split_corner(call) is not None):
            return "it has no backward but of a window with a triangle of far keys"
        return None

    def computes_all(self, call: AttentionCall) -> bool:
        """Return whether the kernel takes a call without the help of SDPA, so that it needs no memory but for keys."""
        return self.refusal(call) is None and (plan := _get_plan(call)) is not None and plan.far_branch is None

    def forward(self, call: AttentionCall, need_lse: bool) -> tuple[Tensor, Tensor | None]:
        if call.needs_grad:
            return MergedBackend.forward(self, call, need_lse)
        parts = split_corner(call)
        return self.run_kernel(call) if parts is None else self._forward_parts(*parts)

    def run_kernel(self, call: AttentionCall, far: PartialOutput | None = None) -> tuple[Tensor, Tensor]:
        """Run the kernel, which merges `far`, the output of other keys, with that of the call."""
        from isentrope.backends.band.kernel import launch

        plan = _get_plan(call)
        assert plan is not None
        near = call.branches[plan.near_branch]
        k = call.fold_keys(near)
        sink = near if plan.sink_branch is None else call.branches[plan.sink_branch]
        sink_keys = k if sink is near else call.fold_keys(sink, plan.sinks)
        if plan.far_branch is not None:
            assert far is None
            branch = replace(call.branches[plan.far_branch], region=Region((plan.far_span,)))
            far = add_offset(self.forward_branch(call.fold_branch(branch)), branch.offset)
        return launch(
            call.q, k, call.v, plan.left, plan.right, near.query_angles, near.tau, call.scale, call.normalise,
            plan.sinks, sink_keys, sink.query_angles, sink.tau, sink.offset, far,
        )  # fmt: skip

    def _forward_parts(self, most: AttentionCall, last: AttentionCall) -> tuple[Tensor, Tensor]:
        """Compute the queries before a far corner with the kernel, and the few that see it with SDPA's."""
        parts = self.run_kernel(most), SDPABackend().forward(last, True)
        assert parts[1][1] is not None
        return torch.cat((parts[0][0], parts[1][0]), 2), torch.cat((parts[0][1], parts[1][1]), 2)

    def forward_branches(self, branches: list[FoldedBranch]) -> tuple[Tensor, Tensor]:
        """Compute folded branches, a window and a triangle of far keys, for the merged backward."""
        from isentrope.backends.band.kernel import launch

        layout = branches[0].layout
        plan = plan_band([branch.region for branch in branches], layout.queries, layout.keys)
        assert plan is not None and plan.far_branch is not None and not plan.sinks
        near, far_branch = branches[plan.near_branch], branches[plan.far_branch]
        far = add_offset(self.forward_branch(far_branch), far_branch.offset)
        return launch(near.q, near.k, near.v, plan.left, plan.right, None, None, near.scale, False, far=far)


def _get_plan(call: AttentionCall) -> BandPlan | None:
    if (parts := split_corner(call)) is not None:
        call = parts[0]
    layout = call.layout
    if not layout.plain:
        return None
    regions = tuple(branch.region for branch in call.branches)
    return layout.cached(("band plan", *regions), lambda: plan_band(regions, layout.queries, layout.keys))


def plan_band(regions: Sequence[Region], queries: int, keys: int) -> BandPlan | None:
    """Return the regions as one window, at most one set of first keys before it, and at most one triangle, or None."""
    if queries > keys:  # some see nothing
        return None
    spans = [(n, span) for n, region in enumerate(regions) for span in region.spans]
    if any(span.chunk for _, span in spans):
        return None
    windows = [(n, s) for n, s in spans if s.start <= 0 and s.stop >= keys and -inf < s.low <= 0 < s.high]
    if len(windows) != 1:
        return None
    near, window = windows[0]
    plan = BandPlan(near, -int(window.low), int(min(window.high - 1, keys)))
    for n, span in spans:
        if span is window:
            continue
        band = span.to_band(queries, keys)
        early = span.start <= 0 and span.stop <= MAX_SINKS and (span.low, span.high) == (-inf, window.low)
        if early and not plan.sinks:
            plan = plan._replace(sink_branch=n, sinks=int(min(span.stop, keys)))
        elif band is not None and (band.causal or band.full) and plan.far_branch is None:
            plan = plan._replace(far_branch=n, far_span=span)
        else:
            return None
    return plan
