"""Near keys, and chosen blocks of far ones: each group of queries against its own far keys.

Near keys are computed by the band kernel, or PyTorch's kernels, and merged with far ones by log-sum-exp.
"""

from __future__ import annotations

import torch
from torch import Tensor

from isentrope.backends.band.backend import BandBackend
from isentrope.backends.blocks.gathered import backward_gathered, forward_gathered
from isentrope.backends.merge import MergedBackend, PartialOutput
from isentrope.backends.protocol import TRITON_HEAD_DIMS
from isentrope.backends.sdpa import SDPABackend
from isentrope.core.call import AttentionCall, FoldedBranch
from isentrope.core.compile import can_run_triton


class BlocksBackend(BandBackend):
    """Chosen blocks of far keys; without any, what the band kernel or SDPA computes."""

    name = "blocks"
    reads_padding = True
    chooses_keys = True

    def refusal(self, call: AttentionCall) -> str | None:
        reason = SDPABackend.refusal(self, call)
        return None if reason is None else reason.replace("use 'chunked'", "use 'dense'")

    def forward(self, call: AttentionCall, need_lse: bool) -> tuple[Tensor, Tensor | None]:
        if not call.needs_grad and BandBackend.refusal(self, call) is None:
            return BandBackend.forward(self, call, need_lse)
        if all(branch.chosen is None for branch in call.branches):
            return SDPABackend.forward(self, call, need_lse)
        return MergedBackend.forward(self, call, need_lse)

    def forward_branches(self, branches: list[FoldedBranch]) -> tuple[Tensor, Tensor]:
        return SDPABackend.forward_branches(self, branches)  # those of a call with gradients

    def forward_branch(self, branch: FoldedBranch) -> PartialOutput:
        if branch.chosen is None:
            return super().forward_branch(branch)
        if _takes_kernel(branch):
            from isentrope.backends.blocks.kernel import launch

            return launch(branch)
        return forward_gathered(branch)

    def backward_branch(
        self, branch: FoldedBranch, grad: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        if branch.chosen is None:
            return super().backward_branch(branch, grad, out, lse)
        return backward_gathered(branch, grad, out, lse)


def _takes_kernel(branch: FoldedBranch) -> bool:
    """Return whether the Triton kernel computes a branch over chosen blocks."""
    q, k, v = branch.q, branch.k, branch.v
    sizes = q.shape[-1] in TRITON_HEAD_DIMS and v.shape[-1] in TRITON_HEAD_DIMS
    half = (torch.float16, torch.bfloat16) if q.is_cuda else (torch.float16,)  # Triton's interpreter has no bfloat16
    known = q.dtype in (*half, torch.float32)
    return can_run_triton(q) and sizes and known and all(x.stride(-1) == 1 for x in (q, k, v))
