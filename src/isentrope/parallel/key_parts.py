"""Attention over keys that arrive in parts: outputs merged by log-sum-exp, with an exact backward.

With outputs o_p and log-sum-exps L_p of the parts:  L = ln Σ e^{L_p},  o = Σ o_p e^{L_p - L}. Backward, every part
has its gradients from the merged o and L (`backends/merge.py`, as in ring attention: Liu et al., 2023), so that a part
is needed twice and never kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from isentrope.backends.merge import MergedBackend, compute_offset_gradient, merge_into
from isentrope.backends.padding import blank_padding
from isentrope.builder import Inputs, build_call
from isentrope.core.call import AttentionCall
from isentrope.core.dtypes import accumulation_dtype, autocast_disabled
from isentrope.core.layout import Layout
from isentrope.dispatch import CHUNKED, choose_backend, dispatch
from isentrope.parallel.rows import ShardedRows
from isentrope.parallel.split import Ranges, intersect_ranges
from isentrope.recipe import Recipe


class Options(NamedTuple):
    """How a layer attends: as `isentrope.attention` takes it.

    jumping: whether it measures distances in position ids, where those jump.
    """

    recipe: Recipe
    causal: bool
    mask: Any
    scale: float | None
    backend: str
    jumping: bool

    @property
    def learned(self) -> list[Tensor]:
        """The weights of the recipe."""
        return [weight for part in self.recipe.learned for weight in part.parameters()]


class KeyPart(NamedTuple):
    """Keys and values of some slots, (batch, kv_heads, slots, …)."""

    slots: range
    k: Tensor
    v: Tensor

    def take(self, slots: range) -> tuple[Tensor, Tensor]:
        part = slice(slots.start - self.slots.start, slots.stop - self.slots.start)
        return self.k[:, :, part], self.v[:, :, part]


class KeySource(Protocol):
    """Where parts come from, and gradients return to."""

    def stream(self, k: Tensor, v: Tensor) -> Iterator[tuple[KeyPart, ...]]:
        """Yield parts, several at a time."""
        ...

    def give_back(self, step: int, gradients: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Take the gradients of the parts of one step."""
        ...

    def collect(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of k and v."""
        ...


@dataclass(frozen=True, eq=False)
class PartwiseCall:
    """What does not change from part to part: chunks of queries with the slots they see, and how to attend."""

    options: Options
    rows: ShardedRows
    seen: tuple[tuple[range, Ranges], ...]
    source: KeySource

    def blocks(self, parts: tuple[KeyPart, ...]) -> Iterator[tuple[slice, range, int, range]]:
        """Yield rows of q, their slots, the number of a part, and the slots of it that they see."""
        first = 0
        for queries, keys in self.seen:
            for number, part in enumerate(parts):
                for slots in intersect_ranges((part.slots,), keys):
                    yield slice(first, first + len(queries)), queries, number, slots
            first += len(queries)

    def build(self, q: Tensor, k: Tensor, v: Tensor, queries: range, keys: range) -> AttentionCall:
        """Build the call of a chunk of queries against a part of a part."""
        layout: Layout = self.rows.get_partial(queries, keys, False, False, q.device)
        options = self.options
        inputs = Inputs(q, k, v, options.mask, options.causal, layout=layout, scale=options.scale)
        return build_call(inputs, options.recipe.resolve())


def attend_to_parts(call: PartwiseCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp of queries over all parts; the latter has no gradient."""
    out, lse = _PartwiseAttention.apply(call, q, k, v, *call.options.learned)
    return out, lse


class _PartwiseAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: PartwiseCall, q: Tensor, k: Tensor, v: Tensor, *learned: Tensor
    ) -> tuple[Tensor, Tensor]:
        dtype = accumulation_dtype(q)
        out = q.new_zeros(*q.shape[:-1], v.shape[-1], dtype=dtype)
        lse = torch.full(q.shape[:-1], -torch.inf, dtype=dtype, device=q.device)
        with autocast_disabled(q):
            for parts in call.source.stream(k, v):
                for rows, queries, number, slots in call.blocks(parts):
                    block = call.build(q[:, :, rows], *parts[number].take(slots), queries, slots)
                    result = dispatch(block, call.options.backend, True, False)
                    assert result.lse is not None
                    part_out, part_lse = result.out.to(out.dtype), result.lse.to(lse.dtype)
                    merge_into(out[:, :, rows], lse[:, :, rows], part_out, part_lse)
        merged = out.to(q.dtype)
        ctx.call = call
        ctx.save_for_backward(q, k, v, merged, lse)
        ctx.mark_non_differentiable(lse)
        return merged, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        call, (q, k, v, out, lse) = ctx.call, ctx.saved_tensors
        learned, dtype = call.options.learned, lse.dtype
        dq = torch.zeros_like(q, dtype=dtype)
        d_learned = [torch.zeros_like(weight, dtype=dtype) for weight in learned]
        with autocast_disabled(q):
            for step, parts in enumerate(call.source.stream(k, v)):
                d_parts = [(torch.zeros_like(p.k, dtype=dtype), torch.zeros_like(p.v, dtype=dtype)) for p in parts]
                for rows, queries, number, slots in call.blocks(parts):
                    part, result = parts[number], (x[:, :, rows] for x in (grads[0], out, lse))
                    inputs = q[:, :, rows], *part.take(slots)
                    gradients = _differentiate(call, inputs, (queries, slots), tuple(result), learned)
                    columns = slice(slots.start - part.slots.start, slots.stop - part.slots.start)
                    dq[:, :, rows] += gradients[0]
                    for total, gradient in zip(d_parts[number], gradients[1:3], strict=True):
                        total[:, :, columns] += gradient
                    for total, gradient in zip(d_learned, gradients[3:], strict=True):
                        total += gradient
                call.source.give_back(step, d_parts)
        dk, dv = call.source.collect(k, v)
        weights = (total.to(weight.dtype) for total, weight in zip(d_learned, learned, strict=True))
        return None, dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), *weights


def _differentiate(
    partwise: PartwiseCall,
    inputs: tuple[Tensor, ...],
    slots: tuple[range, range],
    result: tuple[Tensor, ...],
    learned: Sequence[Tensor],
) -> list[Tensor]:
    """Return the gradients of q, k, v and learned weights that come from one block."""
    grad, out, lse = result
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in inputs]
        call = blank_padding(partwise.build(leaves[0], leaves[1], leaves[2], *slots))
        chosen = choose_backend(call, partwise.options.backend)
        backend = chosen if isinstance(chosen, MergedBackend) else CHUNKED
        branches = [part for branch in backend.list_branches(call) for part in branch.split_spans()]
    outputs: list[Tensor] = []
    gradients: list[Tensor] = []
    with torch.no_grad():
        for branch in branches:
            shifted = lse if branch.offset is None else lse - branch.offset.to(lse.dtype)
            dq, dk, dv = backend.backward_branch(branch, grad, out, shifted).pad(branch)
            pairs = [(branch.q, dq), (branch.k, dk), (branch.v, dv)]
            if branch.offset is not None and branch.offset.requires_grad:
                partial = backend.forward_branch(branch)
                d_offset = compute_offset_gradient(partial, grad, out, shifted).sum_to_size(branch.offset.shape)
                pairs.append((branch.offset, d_offset.to(branch.offset.dtype)))
            for output, gradient in pairs:
                outputs.append(output)
                gradients.append(gradient)
    wanted = [*leaves, *(weight for weight in learned if weight.requires_grad)]
    computed = dict(
        zip(map(id, wanted), torch.autograd.grad(outputs, wanted, gradients, allow_unused=True), strict=True)
    )
    results = ((x, computed.get(id(x))) for x in (*leaves, *learned))
    return [torch.zeros_like(x) if gradient is None else gradient for x, gradient in results]
