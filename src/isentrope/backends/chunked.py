"""Row chunks in plain PyTorch: linear memory, any device, any dtype, any value size."""

from __future__ import annotations

from collections.abc import Iterator
from math import log, sqrt

import torch
from torch import Tensor
from torch.nn import functional as F

from isentrope.backends import merge
from isentrope.backends.merge import Kernel, Part
from isentrope.backends.product import narrow, product
from isentrope.core.call import Call
from isentrope.core.compile import maybe_compile
from isentrope.core.dtypes import accumulation_dtype

# scores held at once; larger chunks gain nothing on a CPU, whose caches they leave, and smaller ones starve a GPU
SCORES = {"cpu": 1 << 22, "cuda": 1 << 29}


def refusal(calls: list[Call]) -> str | None:
    return None


def attend(calls: list[Call], need_lse: bool) -> tuple[Tensor, Tensor]:
    return merge.attend(KERNEL, calls)


class Chunked(Kernel):
    """One branch, a few query rows at a time, against only the keys those rows may see.

    Query heads that share a key head are laid along the rows, so keys are never copied.
    """

    def forward(self, call: Call) -> Part:
        dtype, factors = accumulation_dtype(call.q), narrow(call.q)
        k, v = call.k.to(factors), call.v.to(factors)
        out = call.v.new_zeros(*call.q.shape[:-1], call.v.shape[-1])
        lse = torch.full(call.q.shape[:-1], -torch.inf, dtype=dtype, device=call.q.device)
        for rows, columns in _chunks(call):
            scores = _scores(call, k, rows, columns)
            weights, top, total = maybe_compile(_weights, (scores,), factors)(scores, factors)
            o = product(weights.flatten(2, 3), v[:, :, columns]).unflatten(2, weights.shape[2:4])
            out[:, :, rows] = (o / total.clamp_min(torch.finfo(dtype).tiny)).flatten(1, 2).to(out.dtype)
            lse[:, :, rows] = (top + total.log()).squeeze(-1).flatten(1, 2)
        return Part(out, lse)

    def backward(self, call: Call, grad: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dtype, factors = accumulation_dtype(call.q), narrow(call.q)
        k, v = call.k.to(factors), call.v.to(factors)
        delta = (grad.to(dtype) * out.to(dtype)).sum(-1)
        anchor = torch.where(lse == -torch.inf, 0.0, lse)
        dq = torch.zeros_like(call.q)
        dk, dv = torch.zeros_like(k, dtype=dtype), torch.zeros_like(v, dtype=dtype)
        for rows, columns in _chunks(call):
            p = _exp(_scores(call, k, rows, columns) - _grouped(anchor[:, :, rows, None], call))
            g = _grouped(grad[:, :, rows].to(factors), call).flatten(2, 3)
            dp = product(g, v[:, :, columns].mT).view_as(p)
            ds = (p * (dp - _grouped(delta[:, :, rows, None], call)) * call.scale).flatten(2, 3).to(factors)
            q = _grouped(call.q[:, :, rows].to(factors), call).flatten(2, 3)
            dq[:, :, rows] = product(ds, k[:, :, columns]).unflatten(2, p.shape[2:4]).flatten(1, 2).to(dq.dtype)
            dk[:, :, columns] += product(ds.mT, q)
            dv[:, :, columns] += product(p.flatten(2, 3).to(factors).mT, g)
        return dq, dk.to(call.k.dtype), dv.to(call.v.dtype)


KERNEL = Chunked()


def _weights(scores: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """e^{s - max s} as factors, the maxima, and the sums."""
    top = scores.amax(-1, keepdim=True).clamp_min(torch.finfo(scores.dtype).min)
    weights = _exp(scores - top)
    return weights.to(dtype), top, weights.sum(-1, keepdim=True)


def _exp(x: Tensor) -> Tensor:
    """e^x, and 0 where it or products with it would leave the normal numbers: far below rounding, and slow on a CPU."""
    least = torch.finfo(x.dtype).tiny / torch.finfo(x.dtype).eps
    return F.threshold(torch.exp(x.clamp_min(log(least) - 1)), least, 0.0)


def _grouped(x: Tensor, call: Call) -> Tensor:
    """(batch, heads, …) as (batch, kv_heads, groups, …)."""
    return x.unflatten(1, (call.k.shape[1], call.groups))


def _scores(call: Call, k: Tensor, rows: slice, columns: slice) -> Tensor:
    """Masked scores (batch, kv_heads, groups, rows, columns)."""
    q = _grouped(call.q[:, :, rows].to(k.dtype), call)
    scores = product(q.flatten(2, 3), k[:, :, columns].mT).mul_(call.scale).unflatten(2, q.shape[2:4])
    if (bias := call.bias(rows, columns)) is not None:
        scores = scores + _grouped(bias.to(scores.dtype), call)
    if call.everything:
        return scores
    return scores.masked_fill(~call.mask(rows, columns)[:, None], -torch.inf)


def _chunks(call: Call) -> Iterator[tuple[slice, slice]]:
    """Row slices, each with the slice of keys that its rows may see."""
    batch, heads, queries, _ = call.q.shape
    ends = [call.layout.key_range(call.region, row, row + 1) for row in (0, queries - 1)]  # one of them sees most
    width = max(high - low for low, high in ends)
    budget = SCORES.get(call.q.device.type, 1 << 22) / max(1, batch * heads)
    # step rows see at most width + step keys: the largest step with step · (width + step) ≤ budget
    step = max(1, min(queries, int((sqrt(width**2 + 4 * budget) - width) / 2)))
    for first in range(0, queries, step):
        last = min(first + step, queries)
        low, high = call.layout.key_range(call.region, first, last)
        if low < high:
            yield slice(first, last), slice(low, high)
