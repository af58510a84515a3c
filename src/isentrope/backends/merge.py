"""Softmax over a union of disjoint key sets, from the softmax over each.

With outputs o_b and log-sum-exps L_b of the branches:  L = ln Σ e^{L_b},  o = Σ o_b e^{L_b - L}. Backward, with the
*merged* o and L, every branch has p = e^{s - L} and ds = p ∘ (do·vᵀ - rowsum(do ∘ o)): its own kernel's backward,
called with o and L of the whole, gives exact gradients (as in ring attention), and none flows through L.

An offset c of all scores of a branch needs no kernel of its own: forward it is added to L_b, backward
p = e^{s - (L - c)}, and dc = Σ ds = e^{L_b - L} (do·o_b - do·o).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from isentrope.backends.protocol import Backend
from isentrope.core.call import AttentionCall, FoldedBranch
from isentrope.core.compile import can_run_triton, maybe_compile
from isentrope.core.dtypes import cast
from isentrope.core.rotation import Angles, can_rotate_in_kernel, rotate_back


class PartialOutput(NamedTuple):
    """Output and log-sum-exp of one branch, for queries from `first` on; the others see no key of it."""

    out: Tensor
    lse: Tensor
    first: int = 0


class BranchGradients(NamedTuple):
    """Gradients of one branch: of queries from `first` on and of keys from `begin` on; those of the others are 0."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    first: int = 0
    begin: int = 0

    def pad(self, branch: FoldedBranch) -> tuple[Tensor, Tensor, Tensor]:
        """Return them with zeros for the other queries and keys of a branch."""
        keys = branch.k.shape[2]
        dk, dv = pad_rows(self.dk, self.begin, keys), pad_rows(self.dv, self.begin, keys)
        return pad_rows(self.dq, self.first, branch.q.shape[2]), dk, dv


class TileOutput(NamedTuple):
    """Outputs of a batch of equal rectangles, and an offset that their scores lack.

    out, lse: (rows of the call · rectangles, heads, queries of a rectangle, …).
    first, stride: the first query of the first rectangle, and from one rectangle to the next.
    offset: (batch or 1, heads or 1, all queries).
    """

    out: Tensor
    lse: Tensor
    first: int = 0
    stride: int = 1
    offset: Tensor | None = None


class MergedBackend(Backend):
    """A backend that computes branches one by one, with the merged backward."""

    gradient = "merged"

    def forward(self, call: AttentionCall, need_lse: bool) -> tuple[Tensor, Tensor | None]:
        """Compute all branches, span by span, under autograd where that is needed."""
        if can_rotate_back(call):
            return RotatedAttention.apply(self, call, call.q, call.k, call.v)
        branches = [part for branch in self.list_branches(call) for part in branch.split_spans()]
        operands = [x for branch in branches for x in (branch.q, branch.k, branch.offset)]
        if not torch.is_grad_enabled() or not any(x is not None and x.requires_grad for x in (call.v, *operands)):
            return self.forward_branches(branches)
        if not torch.compiler.is_compiling():
            return MergedAttention.apply(self, branches, call.v, *operands)
        self.share_masks(branches)
        return TracedMergedAttention.apply(self, branches, call.v, *_view_repeated(operands))

    def list_branches(self, call: AttentionCall) -> list[FoldedBranch]:
        """Return the branches to compute, in operations that autograd records."""
        return call.fold()

    def share_masks(self, branches: list[FoldedBranch]) -> None:
        """Trace what layers share before the autograd function, which torch traces as a graph of its own."""

    def forward_branches(self, branches: list[FoldedBranch]) -> tuple[Tensor, Tensor]:
        """Return the merged output and log-sum-exp of all branches."""
        parts = [add_offset(self.forward_branch(branch), branch.offset) for branch in branches]
        return merge(parts, branches[0].q.shape[2])

    @abstractmethod
    def forward_branch(self, branch: FoldedBranch) -> PartialOutput:
        """Compute one branch without its offset; zeros and -inf for a query that sees no key of it."""

    @abstractmethod
    def backward_branch(self, branch: FoldedBranch, grad: Tensor, out: Tensor, lse: Tensor) -> BranchGradients:
        """Return the gradients of one branch, from the merged output and log-sum-exp of all, less its offset."""


def add_offset(part: PartialOutput, offset: Tensor | None) -> PartialOutput:
    """Return the output of a branch with an offset (batch or 1, heads or 1, queries) on its scores."""
    if offset is None:
        return part
    count = part.lse.shape[2]
    rows = offset if count == offset.shape[2] else offset[:, :, part.first : part.first + count]
    return part._replace(lse=part.lse + cast(rows, part.lse.dtype))


def pad_rows(x: Tensor, first: int, length: int, value: float = 0.0) -> Tensor:
    """Return x (batch, heads, some, …) as rows `first` on of a tensor of `length` rows, the others filled."""
    after = length - first - x.shape[2]
    return x if first == after == 0 else F.pad(x, (0, 0) * (x.dim() - 3) + (first, after), value=value)


def add_rows(total: Tensor | None, x: Tensor, first: int, length: int) -> Tensor:
    """Add x to rows `first` on of a total, in place; without one, x becomes the total of `length` rows."""
    if total is None:
        return pad_rows(x, first, length)
    total[:, :, first : first + x.shape[2]].add_(x)
    return total


def merge(parts: list[PartialOutput], length: int) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp of all branches together, for `length` queries; differentiable in both."""
    outs, lses, firsts = (list(x) for x in zip(*parts, strict=True))
    if len(parts) == 1 and lses[0].shape[2] == length:
        return outs[0], lses[0]
    if _merges_in_place(outs, lses, length):
        for out, lse, first in parts[1:]:
            rows = slice(first, first + lse.shape[2])
            merge_into(outs[0][:, :, rows], lses[0][:, :, rows], out, lse)
        return outs[0], lses[0]
    return maybe_compile(_merge, outs, outs[0].shape[-1])(outs, lses, firsts, length)


def _merges_in_place(outs: list[Tensor], lses: list[Tensor], length: int) -> bool:
    """Return whether the first branch, which has all queries, may take the others in: on a CPU, without gradients."""
    out = outs[0]
    if out.device.type != "cpu" or out.dtype != lses[0].dtype or lses[0].shape[2] != length:
        return False
    if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    return not (torch.is_grad_enabled() and any(x.requires_grad for x in (*outs, *lses)))


def merge_into(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> None:
    """Add keys to a softmax in place: o ← o + σ(L' - L) (o' - o), L ← ln(e^L + e^{L'})."""
    out.lerp_(other_out, _weigh(lse, other_lse).to(out.dtype)[..., None])
    torch.logaddexp(lse, other_lse, out=lse)


def join(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return what `merge_into` writes; outputs in the dtype of log-sum-exps."""
    return torch.lerp(out, other_out, _weigh(lse, other_lse)[..., None]), torch.logaddexp(lse, other_lse)


def _weigh(lse: Tensor, other_lse: Tensor) -> Tensor:
    """Return the share σ(L' - L) of the other keys in a softmax."""
    # a query without keys on either side has -inf - (-inf): with a finite L it keeps its zeros
    return torch.sigmoid(other_lse - lse.clamp_min(torch.finfo(lse.dtype).min))


def _merge(outs: list[Tensor], lses: list[Tensor], firsts: list[int], length: int) -> tuple[Tensor, Tensor]:
    whole = [pad_rows(lse, first, length, -torch.inf) for lse, first in zip(lses, firsts, strict=True)]
    lse = torch.logsumexp(torch.stack(whole), 0)
    # a query that sees nothing has lse = -inf everywhere, and -inf - (-inf) is not a number
    anchor = lse.clamp_min(torch.finfo(lse.dtype).min)
    total = None
    for o, first, branch_lse in zip(outs, firsts, whole, strict=True):
        part = cast(pad_rows(o, first, length), lse.dtype) * torch.exp(branch_lse - anchor)[..., None]
        total = part if total is None else total + part
    assert total is not None
    return cast(total, outs[0].dtype), lse


class MergedAttention(torch.autograd.Function):
    """All branches through a backend, merged, with the merged backward."""

    @staticmethod
    def forward(
        ctx: Any, backend: MergedBackend, branches: list[FoldedBranch], v: Tensor, *operands: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        out, lse = backend.forward_branches(_set_operands(branches, v, operands))
        empty = v.new_empty(0)  # autograd keeps the operands itself
        ctx.backend = backend
        ctx.branches = [branch.set_operands(empty, empty, empty, None) for branch in branches]
        ctx.save_for_backward(out, lse, v, *operands)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return _backward(ctx, *grads)


class TracedMergedAttention(MergedAttention):
    """The same in a graph that is being compiled, which has no second derivatives to refuse.

    Kernels write their output in place; torch 2.11 traces no gradient to such a tensor, but does to a copy.
    """

    @staticmethod
    def forward(
        ctx: Any, backend: MergedBackend, branches: list[FoldedBranch], v: Tensor, *operands: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        out, lse = (x.clone() for x in backend.forward_branches(_set_operands(branches, v, operands)))
        ctx.backend, ctx.branches = backend, branches
        ctx.save_for_backward(out, lse, v, *operands)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return _backward(ctx, *grads)


class RotatedAttention(torch.autograd.Function):
    """The same from q and k as they came, where kernels fold them.

    Gradients of branches are rotated back into one sum, so that none is padded with zeros to be added by autograd.
    """

    @staticmethod
    def forward(
        ctx: Any, backend: MergedBackend, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor]:
        folded = call.set_tensors(q, k, v).fold()
        pairs = [(a, part) for a, b in zip(call.branches, folded, strict=True) for part in b.split_spans()]
        out, lse = backend.forward_branches([part for _, part in pairs])
        empty = v.new_empty(0)
        ctx.backend = backend
        ctx.branches = [(rotated, part.set_operands(empty, empty, empty, None)) for rotated, part in pairs]
        ctx.save_for_backward(out, lse, v, *(x for _, part in pairs for x in (part.q, part.k, part.offset)))
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        out, lse, v, *operands = ctx.saved_tensors
        grad = _match_order(grads[0], out)
        rotations = [rotated for rotated, _ in ctx.branches]
        branches = _set_operands([part for _, part in ctx.branches], v, operands)
        dq: Tensor | None = None
        dk: Tensor | None = None
        dv: Tensor | None = None
        for rotated, branch in zip(rotations, branches, strict=True):
            shifted = lse if branch.offset is None else lse - branch.offset.to(lse.dtype)
            part = ctx.backend.backward_branch(branch, grad, out, shifted)
            queries, keys = branch.q.shape[2], branch.k.shape[2]
            dq = _add_rotated_back(dq, part.dq, part.first, queries, rotated.query_angles, rotated.tau)
            dk = _add_rotated_back(dk, part.dk, part.begin, keys, rotated.key_angles, None)
            dv = add_rows(dv, part.dv, part.begin, keys)
        return None, None, dq, dk, dv


def _view_repeated(tensors: list[Tensor | None]) -> list[Tensor | None]:
    """Return the second and later ones of a tensor as views: a traced autograd.Function takes no tensor twice."""
    distinct: list[Tensor | None] = []
    for i, x in enumerate(tensors):
        repeated = x is not None and any(x is other for other in tensors[:i])
        distinct.append(x.view_as(x) if repeated and x is not None else x)
    return distinct


def _match_order(grad: Tensor, out: Tensor) -> Tensor:
    """Return a gradient query by query if the output is stored so: kernels would copy it, each for itself."""
    if grad.transpose(1, 2).is_contiguous() or not out.transpose(1, 2).is_contiguous():
        return grad
    return torch.empty_like(out).copy_(grad)


def can_rotate_back(call: AttentionCall) -> bool:
    """Return whether q, k or v has a gradient and nothing else has, and kernels fold q and k by rotation alone."""
    if torch.compiler.is_compiling() or not can_run_triton(call.q) or call.normalise or not call.needs_grad:
        return False
    fixed = [x for branch in call.branches for x in (branch.tau, branch.offset) if x is not None]
    if any(x.requires_grad for x in (*fixed, *(x for angles in call.rotations for x in angles))):
        return False
    return all(
        not branch.biased
        and branch.chosen is None
        and can_rotate_in_kernel(call.q, branch.query_angles, branch.tau, call.interleaved)
        and can_rotate_in_kernel(call.k, branch.key_angles, None, call.interleaved)
        for branch in call.branches
    )


def _add_rotated_back(
    total: Tensor | None, grad: Tensor, first: int, length: int, angles: Angles | None, tau: Tensor | None
) -> Tensor:
    """Add the gradient of rotated rows `first` on, as that of rows before rotation, to a total as `add_rows` does."""
    if angles is None and tau is None:
        return add_rows(total, grad, first, length)
    rows = slice(first, first + grad.shape[2])
    if total is None and grad.shape[2] < length:
        total = grad.new_zeros(*grad.shape[:2], length, grad.shape[3])
    if angles is not None and angles[0].shape[2] > 1:
        angles = angles[0][:, :, rows], angles[1][:, :, rows]
    tau = None if tau is None else tau[:, :, rows]
    added = rotate_back(grad, angles, tau, None if total is None else total[:, :, rows])
    return added if total is None else total


def _backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
    out, lse, v, *operands = ctx.saved_tensors
    d_operands: list[Tensor | None] = []
    dv_total: Tensor | None = None
    for index, branch in enumerate(_set_operands(ctx.branches, v, operands)):
        offset = branch.offset
        shifted = lse if offset is None else lse - offset.to(lse.dtype)
        gradients = ctx.backend.backward_branch(branch, grads[0], out, shifted)
        d_offset = None
        if offset is not None and ctx.needs_input_grad[3 + 3 * index + 2]:
            part = ctx.backend.forward_branch(branch)
            d_offset = compute_offset_gradient(part, grads[0], out, shifted).sum_to_size(offset.shape).to(offset.dtype)
        dq, dk, dv = gradients.pad(branch)
        d_operands += [dq, dk, d_offset]
        dv_total = dv if dv_total is None else dv_total + dv
    return None, None, dv_total, *d_operands


def compute_offset_gradient(part: PartialOutput, grad: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    """Return dc = e^{L_b - L} (do·o_b - do·o) of each query, given L less the offset."""
    length = lse.shape[2]
    branch_out, branch_lse = pad_rows(part.out, part.first, length), pad_rows(part.lse, part.first, length, -torch.inf)
    weight = torch.exp(branch_lse - torch.where(lse == -torch.inf, 0.0, lse))
    return weight * (grad.to(lse.dtype) * (branch_out.to(lse.dtype) - out.to(lse.dtype))).sum(-1)


def _set_operands(branches: list[FoldedBranch], v: Tensor, operands: Sequence[Any]) -> list[FoldedBranch]:
    triples = zip(operands[::3], operands[1::3], operands[2::3], strict=True)
    return [branch.set_operands(q, k, v, offset) for branch, (q, k, offset) in zip(branches, triples, strict=True)]
