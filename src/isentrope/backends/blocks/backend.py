"""Near keys, and chosen blocks of far ones: each group of queries against its own far keys.

Near keys are computed by the band kernel, or PyTorch's kernels, and merged with far ones by log-sum-exp.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from isentrope.backends.band.backend import BandBackend
from isentrope.backends.blocks.gathered import backward_gathered, forward_gathered
from isentrope.backends.blocks.one_query import get_plan
from isentrope.backends.merge import BranchGradients, MergedBackend, PartialOutput, add_offset, merge
from isentrope.backends.protocol import TRITON_HEAD_DIMS, Launch
from isentrope.backends.sdpa import SDPABackend
from isentrope.core.call import AttentionCall, FoldedBranch, describe_tensors
from isentrope.core.compile import can_run_triton
from isentrope.core.layout import get_layout
from isentrope.core.region import Region
from isentrope.core.rotation import Angles
from isentrope.core.switches import ONE_QUERY, is_on


class BlocksBackend(BandBackend):
    """Chosen blocks of far keys; without any, what the band kernel or SDPA computes."""

    name = "blocks"
    reads_padding = True
    chooses_keys = True

    def refusal(self, call: AttentionCall) -> str | None:
        reason = SDPABackend.refusal(self, call)
        return None if reason is None else reason.replace("use 'chunked'", "use 'dense'")

    def forward(self, call: AttentionCall, need_lse: bool) -> tuple[Tensor, Tensor | None]:
        chosen = [branch for branch in call.branches if branch.chosen is not None]
        if not chosen:
            takes_band = BandBackend.refusal(self, call) is None and not call.needs_grad
            return (BandBackend if takes_band else SDPABackend).forward(self, call, need_lse)
        if call.needs_grad:
            return MergedBackend.forward(self, call, need_lse)
        far = add_offset(self.forward_branch(call.fold_branch(chosen[0])), chosen[0].offset)
        near = _take_near(call)
        if near is None:
            return far.out, far.lse
        if BandBackend.refusal(self, near) is None:
            return self.run_kernel(near, far)
        out, lse = SDPABackend.forward(self, near, need_lse=True)
        assert lse is not None
        return merge([PartialOutput(out, lse), far], call.layout.queries)

    def choose_and_forward(self, call: AttentionCall) -> tuple[Tensor, Tensor] | None:
        """Compute a call whose blocks are not chosen yet, for one query a row; None where no kernel takes it."""
        if (launch := self.prepare(call)) is None:
            return None
        q = call.q
        out, lse = q.new_empty(*q.shape[:3], call.v.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)
        launch.run(q, call.k, call.v, out, lse)
        return out, lse

    def prepare(self, call: AttentionCall) -> Launch | None:
        if call.choice is None or not is_on(ONE_QUERY) or (plan := get_plan(call)) is None:
            return None
        q, k, v = call.q, call.k, call.v

        def make() -> Launch:
            from isentrope.backends.blocks.one_query_kernel import OneQueryLaunch  # Triton may not be installed

            launch: Launch = OneQueryLaunch(q, k, v, call.scale, plan)
            return launch

        return call.cached(("one query", describe_tensors(q, k, v)), make)

    def forward_branches(self, branches: list[FoldedBranch]) -> tuple[Tensor, Tensor]:
        return SDPABackend.forward_branches(self, branches)  # those of a call with gradients

    def forward_branch(self, branch: FoldedBranch) -> PartialOutput:
        if branch.chosen is None:
            return super().forward_branch(branch)
        if _takes_kernel(branch):
            from isentrope.backends.blocks.kernel import launch

            return launch(branch)
        return forward_gathered(branch)

    def backward_branch(self, branch: FoldedBranch, grad: Tensor, out: Tensor, lse: Tensor) -> BranchGradients:
        if branch.chosen is None:
            return super().backward_branch(branch, grad, out, lse)
        return BranchGradients(*backward_gathered(branch, grad, out, lse))


def _take_near(call: AttentionCall) -> AttentionCall | None:
    """Return the call without chosen blocks, and without keys before all windows: those need no rotation."""
    branches = [branch for branch in call.branches if branch.chosen is None]
    if not branches:
        return None
    layout = call.layout
    low, _ = layout.key_range(Region(tuple(span for b in branches for span in b.region.spans)), 0, layout.queries)
    if low == 0 or not layout.plain:
        return replace(call, branches=branches)
    layout = get_layout(layout.batch, layout.queries, layout.keys - low, layout.device)
    branches = [
        replace(branch, region=layout.simplify(branch.region), key_angles=_drop_angles(branch.key_angles, low))
        for branch in branches
    ]
    return replace(call, k=call.k[:, :, low:], v=call.v[:, :, low:], layout=layout, branches=branches)


def _drop_angles(angles: Angles | None, low: int) -> Angles | None:
    if angles is None or angles[0].shape[2] == 1:
        return angles
    return angles[0][:, :, low:], angles[1][:, :, low:]


def _takes_kernel(branch: FoldedBranch) -> bool:
    """Return whether the Triton kernel computes a branch over chosen blocks."""
    q, k, v = branch.q, branch.k, branch.v
    sizes = q.shape[-1] in TRITON_HEAD_DIMS and v.shape[-1] in TRITON_HEAD_DIMS
    half = (torch.float16, torch.bfloat16) if q.is_cuda else (torch.float16,)  # Triton's interpreter has no bfloat16
    known = q.dtype in (*half, torch.float32)
    return can_run_triton(q) and sizes and known and all(x.stride(-1) == 1 for x in (q, k, v))
