"""Softmax over a union of disjoint key sets, from the softmax over each.

With outputs o_b and log-sum-exps L_b of the branches:  L = ln Σ e^{L_b},  o = Σ o_b e^{L_b - L}. Backward, with the
*merged* o and L, every branch has p = e^{s - L} and ds = p ∘ (do·vᵀ - rowsum(do ∘ o)): its own kernel's backward,
called with o and L of the whole, gives exact gradients (as in ring attention), and none flows through L.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from isentrope.backends.call import Call
from isentrope.compiled import compiled


class Kernel(Protocol):
    """A backend that computes branches one by one."""

    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of one branch; zeros and -inf for a query that sees no key of it."""

    def backward(self, call: Call, grad: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv of one branch, from the output and log-sum-exp of all branches together."""


def _merge(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    lse = torch.logsumexp(torch.stack(lses), 0)
    # a query that sees nothing has lse = -inf everywhere, and -inf - (-inf) is no number
    anchor = torch.where(lse == -torch.inf, 0.0, lse)
    out = outs[0].to(lse.dtype) * torch.exp(lses[0] - anchor)[..., None]
    for o, branch in zip(outs[1:], lses[1:], strict=True):
        out = out + o.to(lse.dtype) * torch.exp(branch - anchor)[..., None]
    return out.to(outs[0].dtype), lse


def merge(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of all branches together; differentiable in both."""
    if len(outs) == 1:
        return outs[0], lses[0]
    return compiled(_merge, outs, outs[0].shape[-1])(outs, lses)


class Merged(torch.autograd.Function):
    """Branches through a kernel, merged, with the merged backward."""

    @staticmethod
    def forward(ctx: Any, kernel: Kernel, calls: list[Call], v: Tensor, *operands: Tensor) -> tuple[Tensor, Tensor]:
        parts = [kernel.forward(call) for call in _filled(calls, v, operands)]
        out, lse = merge([o for o, _ in parts], [lse for _, lse in parts])
        nothing = v.new_empty(0)
        ctx.kernel, ctx.calls = kernel, [replace(call, q=nothing, k=nothing, v=nothing) for call in calls]
        ctx.save_for_backward(out, lse, v, *operands)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return _backward(ctx, *grads)


class Traced(Merged):
    """The same for a graph that is being compiled, which has no second derivatives to refuse.

    Kernels write their output in place; torch 2.11 traces no gradient to such a tensor, but does to a copy.
    """

    @staticmethod
    def forward(ctx: Any, kernel: Kernel, calls: list[Call], v: Tensor, *operands: Tensor) -> tuple[Tensor, Tensor]:
        parts = [kernel.forward(call) for call in _filled(calls, v, operands)]
        out, lse = (x.clone() for x in merge([o for o, _ in parts], [lse for _, lse in parts]))
        ctx.kernel, ctx.calls = kernel, calls
        ctx.save_for_backward(out, lse, v, *operands)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return _backward(ctx, *grads)


def _backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
    out, lse, v, *operands = ctx.saved_tensors
    d_operands: list[Tensor] = []
    dv_total: Tensor | None = None
    for call in _filled(ctx.calls, v, operands):
        dq, dk, dv = ctx.kernel.backward(call, grads[0], out, lse)
        d_operands += [dq, dk]
        dv_total = dv if dv_total is None else dv_total + dv
    return None, None, dv_total, *d_operands


def _filled(calls: list[Call], v: Tensor, operands: Sequence[Tensor]) -> list[Call]:
    pairs = zip(operands[::2], operands[1::2], strict=True)
    return [replace(call, q=q, k=k, v=v) for call, (q, k) in zip(calls, pairs, strict=True)]


def attend(kernel: Kernel, calls: list[Call]) -> tuple[Tensor, Tensor]:
    """All branches of one attention through a kernel."""
    calls = [part for call in calls for part in call.split()]
    operands = [x for call in calls for x in (call.q, call.k)]
    if not torch.is_grad_enabled() or not any(x.requires_grad for x in (calls[0].v, *operands)):
        parts = [kernel.forward(call) for call in calls]
        return merge([o for o, _ in parts], [lse for _, lse in parts])
    function = Traced if torch.compiler.is_compiling() else Merged
    return function.apply(kernel, calls, calls[0].v, *operands)
