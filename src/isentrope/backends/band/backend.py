"""Windows, with first keys and far keys beside them: a Triton kernel for the band around the diagonal.

It rotates and scales queries in registers, takes in the first keys on the way, and merges far keys, triangles that
PyTorch's fastest kernel computes, into its output. Last queries that see a far corner beside it go to those kernels.
Keys are folded beforehand, since many blocks of queries read each.
Gradients are those of PyTorch's kernels, from its output and log-sum-exp.

Without gradients it also takes padded and packed rows and both directions, with the visible slots of each query in
place of a band (`intervals`), a linear bias (`slopes`), and entropy in the same pass. Off by default
(`core/switches.py`): a backward of its own in Triton, and cards without a copy engine.

On Hopper a kernel in Gluon goes over near and far keys in one pass instead (`spans`), and others compute gradients of
all but whole triangles (`gradients`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from isentrope.backends.band.corner import split_corner
from isentrope.backends.band.gradients import backward_intervals, has_fast_gradients, takes_gradients
from isentrope.backends.band.intervals import forward_folded, forward_intervals, has_faster_kernels
from isentrope.backends.band.slopes import find_window, forward_slopes
from isentrope.backends.band.spans import forward_folded_spans, forward_spans, takes_spans
from isentrope.backends.merge import (
    BranchGradients,
    MergedBackend,
    PartialOutput,
    TileOutput,
    add_offset,
    can_rotate_back,
)
from isentrope.backends.padding import blank_padding, blank_queries
from isentrope.backends.protocol import triton_refusal
from isentrope.backends.sdpa import MAX_MASKED_QUERIES, SDPABackend, forward_band
from isentrope.core.call import AttentionCall, FoldedBranch
from isentrope.core.compile import cuda_capability_major
from isentrope.core.region import Band, Region, Span
from isentrope.core.switches import BAND_BACKWARD, BAND_CHUNKED_PREFILL, BAND_ENTROPY, BAND_POINTERS, BAND_ROWS, is_on

MAX_SINKS = 64
MAX_INTERVAL_Q_ELEMENTS = 1 << 30  # of several branches, whose outputs are held two at a time: 2 GiB each
MIN_TURNED_QUERIES = 12288  # from here on turning tensors around for an upper triangle costs less than it gains
# of all heads, for windows alone with gradients: with fewer, calls wait for the host, for which PyTorch's are less work
MIN_WINDOW_QUERIES = 1 << 17
AMPERE, HOPPER = 8, 9  # major compute capability


class FarPart(NamedTuple):
    """Far keys of a branch, as a span and as the band that this is."""

    branch: int
    span: Span
    band: Band


class BandPlan(NamedTuple):
    """Which branch has the keys within `left` and `right` of the diagonal, which the first keys, which far ones.

    far: parts that PyTorch's fastest kernels take: triangles, and rectangles that all queries see.
    """

    near_branch: int
    left: int
    right: int
    sink_branch: int | None = None
    sinks: int = 0
    far: tuple[FarPart, ...] = ()


class BandBackend(SDPABackend):
    """The band kernel, with SDPA's kernels for far keys and for the backward."""

    name = "band"
    reads_padding = False  # the kernel reads padded values as zeros; what goes to SDPA's kernels is blanked here

    def refusal(self, call: AttentionCall) -> str | None:
        if (reason := _refuse_operands(call)) is not None:
            return reason
        if find_window(call) is not None:
            return None
        plan, by_interval = _get_plan(call), _takes_intervals(call)
        if plan is None and not by_interval:
            rows = f", {MAX_MASKED_QUERIES + 1} queries or more of padded rows, or both directions"
            whole_rows = "it takes whole rows that see a window, first keys and a triangle of far ones"
            return whole_rows + (rows if is_on(BAND_ROWS) else "")
        if not call.needs_grad or (by_interval and is_on(BAND_BACKWARD)):
            return None
        gains = plan is None or by_interval or plan.far or call.q.shape[:3].numel() >= MIN_WINDOW_QUERIES
        if gains and has_fast_gradients(call.q, call.v):
            return None
        if not _has_backward(plan) or split_corner(call) is not None:
            return "it has no backward but of a window with a triangle of far keys, and first keys beside them"
        return None

    def computes_entropy(self, call: AttentionCall) -> bool:
        """Return whether the kernel takes a call together with its entropy, in one pass over all keys."""
        laws = any(branch.entropy_law is not None or branch.chosen is not None for branch in call.branches)
        return is_on(BAND_ENTROPY) and not laws and not call.needs_grad and _refuse_operands(call) is None

    def computes_all(self, call: AttentionCall) -> bool:
        """Return whether the kernel takes all heads of a call at once: without SDPA, it needs memory for keys alone.

        By intervals it needs memory for a second output too.
        """
        if self.refusal(call) is not None:
            return False
        plan, window = _get_plan(call), find_window(call)
        if window is None and takes_spans(call):  # which holds keys under each rotation, and no second output
            return len(call.branches) == 1 or call.q.numel() <= MAX_INTERVAL_Q_ELEMENTS
        if plan is None and window is None:
            return call.q.numel() <= MAX_INTERVAL_Q_ELEMENTS
        return plan is None or not plan.far

    def forward(self, call: AttentionCall, need_lse: bool) -> tuple[Tensor, Tensor | None]:
        if call.needs_grad:  # what folds padding under autograd would find NaN in it
            kept = has_fast_gradients(call.q, call.v) and can_rotate_back(call)
            return MergedBackend.forward(self, blank_queries(call) if kept else blank_padding(call), need_lse)
        if find_window(call) is None and (attended := forward_spans(call)) is not None:
            return attended[:2]
        parts = split_corner(call)
        if parts is None or _get_plan(call) is None:
            return self.run_kernel(call)
        return self._forward_parts(*parts)

    def forward_with_entropy(self, call: AttentionCall) -> tuple[Tensor, Tensor, Tensor] | None:
        if not self.computes_entropy(call):
            return None
        window = find_window(call)
        attended = forward_spans(call, need_entropy=True) if window is None else None
        if attended is None:
            attend = forward_intervals if window is None else partial(forward_slopes, window=window)
            attended = attend(call, need_entropy=True)
        out, lse, entropy = attended
        assert entropy is not None
        return out, lse, entropy

    def run_kernel(self, call: AttentionCall, far: PartialOutput | None = None) -> tuple[Tensor, Tensor]:
        """Run the kernel, which merges `far`, the output of other keys, with that of the call."""
        if (window := find_window(call)) is not None:
            return forward_slopes(call, window, far)[:2]
        if far is None and (attended := forward_spans(call)) is not None:
            return attended[:2]
        plan = _get_plan(call)
        if plan is None:
            return forward_intervals(call, far=far)[:2]
        near = call.branches[plan.near_branch]
        k = call.fold_keys(near)
        sink = near if plan.sink_branch is None else call.branches[plan.sink_branch]
        sink_keys = k if sink is near else call.fold_keys(sink, plan.sinks)
        if plan.far:
            assert far is None
            far = self._forward_far(call, plan)
        from isentrope.backends.band.kernel import launch

        return launch(
            call.q, k, call.v, plan.left, plan.right, near.query_angles, near.tau, call.scale, call.normalise,
            plan.sinks, sink_keys, sink.query_angles, sink.tau, sink.offset, far,
        )  # fmt: skip

    def _forward_far(self, call: AttentionCall, plan: BandPlan) -> PartialOutput:
        """Compute the parts of far keys with SDPA's kernels."""
        numbers = dict.fromkeys(part.branch for part in plan.far)
        folded = {n: call.fold_branch(call.branches[n]) for n in numbers}  # with the keys of all its parts
        return _merge_parts(
            [(forward_band(folded[n], band), call.branches[n].offset) for n, _, band in plan.far], call.q
        )

    def _forward_parts(self, most: AttentionCall, last: AttentionCall) -> tuple[Tensor, Tensor]:
        """Compute the queries before a far corner with the kernel, and the few that see it with SDPA's."""
        parts = self.run_kernel(most), SDPABackend().forward(last, True)
        assert parts[1][1] is not None
        return torch.cat((parts[0][0], parts[1][0]), 2), torch.cat((parts[0][1], parts[1][1]), 2)

    def forward_branches(self, branches: list[FoldedBranch]) -> tuple[Tensor, Tensor]:
        """Compute folded branches, a window, a triangle of far keys and perhaps first keys, for the merged backward.

        Queries are folded for each branch, so that the kernel cannot take first keys in as it does without gradients.
        """
        from isentrope.backends.band.kernel import launch

        if (attended := forward_folded_spans(branches)) is not None:
            return attended[:2]
        layout = branches[0].layout
        plan = plan_band([x.region for x in branches], layout.queries, layout.keys) if layout.plain else None
        if plan is None or not _has_backward(plan):
            return forward_folded(branches)
        near = branches[plan.near_branch]
        others = [branch for n, branch in enumerate(branches) if n != plan.near_branch]
        far = _merge_parts([(self.forward_branch(branch), branch.offset) for branch in others], near.q)
        return launch(near.q, near.k, near.v, plan.left, plan.right, None, None, near.scale, False, far=far)

    def forward_branch(self, branch: FoldedBranch) -> PartialOutput:
        if branch.layout.plain:
            return super().forward_branch(branch)
        return PartialOutput(*forward_folded([branch.set_operands(branch.q, branch.k, branch.v, None)]))

    def backward_branch(self, branch: FoldedBranch, grad: Tensor, out: Tensor, lse: Tensor) -> BranchGradients:
        if takes_gradients(branch):
            return BranchGradients(*backward_intervals(branch, grad, out, lse))
        return super().backward_branch(branch, grad, out, lse)


def _has_backward(plan: BandPlan | None) -> bool:
    """Return whether the kernel gains with gradients too, whose first keys and far ones are branches of their own."""
    return plan is not None and len(plan.far) == 1


def _merge_parts(parts: list[tuple[PartialOutput, Tensor | None]], q: Tensor) -> PartialOutput:
    """Return outputs of keys beyond the window, each with the offset of its scores, as one."""
    if len(parts) == 1:
        return add_offset(*parts[0])
    from isentrope.backends.merge_kernel import launch

    tiles = [TileOutput(x.out, x.lse, x.first, offset=offset) for x, offset in parts]
    return PartialOutput(*launch(tiles, (q.shape[0], q.shape[1], q.shape[2])))


def _refuse_operands(call: AttentionCall) -> str | None:
    """Return why the kernel cannot take the tensors of a call, whatever queries see."""
    if torch.compiler.is_compiling():
        return "it is not for graphs, which make kernels of their own"
    if call.q.dtype not in (torch.float16, torch.bfloat16 if call.q.is_cuda else torch.float32):
        return f"it takes half precision, got {call.q.dtype}"  # Triton's interpreter has no bfloat16
    oldest = AMPERE if is_on(BAND_POINTERS) else HOPPER
    if call.q.is_cuda and (torch.version.hip is not None or cuda_capability_major(call.q.device) < oldest):
        return "it needs the copy engine that NVIDIA's cards have since Hopper"
    return triton_refusal(call, takes_slopes=find_window(call) is not None)


def _takes_intervals(call: AttentionCall) -> bool:
    """Return whether each query of a call is to see intervals of keys: in padded rows, and in both directions."""
    return is_on(BAND_ROWS) and call.layout.queries > MAX_MASKED_QUERIES and not has_faster_kernels(call)


def _get_plan(call: AttentionCall) -> BandPlan | None:
    switches = is_on(BAND_CHUNKED_PREFILL), is_on(BAND_ROWS)
    return call.cached(("band plan", *switches), lambda: _make_plan(call))


def _make_plan(call: AttentionCall) -> BandPlan | None:
    if (parts := split_corner(call)) is not None:
        call = parts[0]
    layout = call.layout
    if not layout.plain:
        return None
    regions = tuple(branch.region for branch in call.branches)
    rectangles = is_on(BAND_CHUNKED_PREFILL) and layout.queries > MAX_MASKED_QUERIES
    both = is_on(BAND_ROWS) and layout.queries >= MIN_TURNED_QUERIES
    key = ("band plan", rectangles, both, *regions)
    return layout.cached(key, lambda: plan_band(regions, layout.queries, layout.keys, rectangles, both))


def plan_band(
    regions: Sequence[Region], queries: int, keys: int, rectangles: bool = False, both: bool = False
) -> BandPlan | None:
    """Return the regions as one window, at most one set of first keys before it, and far triangles, or None.

    Args:
        regions: of the branches.
        queries: in a row, the last of the keys.
        keys: in a row.
        rectangles: whether a rectangle may be before the triangle of keys before the window.
        both: whether there may be a triangle of keys after the window too.
    """
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
        elif band is None or (plan.far and not both):
            return None
        elif band.causal or band.full or (both and band.anticausal):
            plan = plan._replace(far=(*plan.far, FarPart(n, span, band)))
        elif rectangles and (parts := _split_rectangle(span, band)):
            bands = [(part, part.to_band(queries, keys)) for part in parts]
            plan = plan._replace(far=(*plan.far, *(FarPart(n, part, x) for part, x in bands if x is not None)))
        else:
            return None
    return plan


def _split_rectangle(span: Span, band: Band) -> tuple[Span, Span] | None:
    """Return a span that is a triangle with more keys than queries as the keys that all see, and a triangle."""
    ahead = (band.end - band.begin) - (band.last - band.first)
    if band.left != inf or band.right != 0 or ahead <= 0:
        return None
    return span & Span(stop=band.begin + ahead), span & Span(start=band.begin + ahead)
