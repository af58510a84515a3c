"""Row chunks in plain PyTorch: linear memory, any device, any dtype, any value size."""

from __future__ import annotations

from collections.abc import Iterator
from math import log, sqrt

import torch
from torch import Tensor
from torch.nn import functional as F

from isentrope.backends.merge import BranchGradients, MergedBackend, PartialOutput
from isentrope.backends.wide_matmul import factor_dtype, matmul_wide
from isentrope.core.call import FoldedBranch
from isentrope.core.compile import maybe_compile
from isentrope.core.dtypes import accumulation_dtype

# larger chunks leave a CPU's caches, smaller ones starve a GPU
MAX_CHUNK_SCORES = {"cpu": 1 << 22, "cuda": 1 << 29}


class ChunkedBackend(MergedBackend):
    """A few query rows of a branch at a time, against only the keys those rows may see.

    Query heads that share a key head are laid along the rows, so keys are never copied.
    """

    name = "chunked"

    def forward_branch(self, branch: FoldedBranch) -> PartialOutput:
        dtype, factors = accumulation_dtype(branch.q), factor_dtype(branch.q)
        k, v = branch.k.to(factors), branch.v.to(factors)
        out = branch.v.new_zeros(*branch.q.shape[:-1], branch.v.shape[-1])
        lse = torch.full(branch.q.shape[:-1], -torch.inf, dtype=dtype, device=branch.q.device)
        for rows, columns in _iterate_chunks(branch):
            scores = _compute_scores(branch, k, rows, columns)
            weights, top, total = maybe_compile(_compute_weights, (scores,), factors)(scores, factors)
            o = matmul_wide(weights.flatten(2, 3), v[:, :, columns]).unflatten(2, weights.shape[2:4])
            out[:, :, rows] = (o / total.clamp_min(torch.finfo(dtype).tiny)).flatten(1, 2).to(out.dtype)
            lse[:, :, rows] = (top + total.log()).squeeze(-1).flatten(1, 2)
        return PartialOutput(out, lse)

    def backward_branch(self, branch: FoldedBranch, grad: Tensor, out: Tensor, lse: Tensor) -> BranchGradients:
        dtype, factors = accumulation_dtype(branch.q), factor_dtype(branch.q)
        k, v = branch.k.to(factors), branch.v.to(factors)
        delta = (grad.to(dtype) * out.to(dtype)).sum(-1)
        anchor = torch.where(lse == -torch.inf, 0.0, lse)
        dq = torch.zeros_like(branch.q)
        dk, dv = torch.zeros_like(k, dtype=dtype), torch.zeros_like(v, dtype=dtype)
        for rows, columns in _iterate_chunks(branch):
            p = _exp(_compute_scores(branch, k, rows, columns) - _group_heads(anchor[:, :, rows, None], branch))
            g = _group_heads(grad[:, :, rows].to(factors), branch).flatten(2, 3)
            dp = matmul_wide(g, v[:, :, columns].mT).view_as(p)
            ds = p * (dp - _group_heads(delta[:, :, rows, None], branch)) * branch.scale
            if (slope := branch.distance_terms(rows, columns)[0]) is not None:
                ds = ds * slope[:, None].to(ds.dtype)
            ds = ds.flatten(2, 3).to(factors)
            q = _group_heads(branch.q[:, :, rows].to(factors), branch).flatten(2, 3)
            dq[:, :, rows] = matmul_wide(ds, k[:, :, columns]).unflatten(2, p.shape[2:4]).flatten(1, 2).to(dq.dtype)
            dk[:, :, columns] += matmul_wide(ds.mT, q)
            dv[:, :, columns] += matmul_wide(p.flatten(2, 3).to(factors).mT, g)
        return BranchGradients(dq, dk.to(branch.k.dtype), dv.to(branch.v.dtype))

    def sum_surprise(self, branch: FoldedBranch, level: Tensor) -> Tensor:
        """Return Σ_j p_j (level - s_j) with p_j = e^{s_j - level} over a branch's keys, (batch, heads, queries).

        Of all branches together that is the entropy, where the level is the log-sum-exp of all scores less the
        branch's offset.
        """
        total = torch.zeros_like(level)
        k = branch.k.to(factor_dtype(branch.q))
        for rows, columns in _iterate_chunks(branch):
            gap = _group_heads(level[:, :, rows, None], branch) - _compute_scores(branch, k, rows, columns)
            weight = torch.exp(-gap)
            total[:, :, rows] = torch.where(weight > 0, weight * gap, 0.0).sum(-1).flatten(1, 2)
        return total


def _compute_weights(scores: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return e^{s - max s} in the dtype of factors, the maxima, and the sums."""
    top = scores.amax(-1, keepdim=True).clamp_min(torch.finfo(scores.dtype).min)
    weights = _exp(scores - top)
    return weights.to(dtype), top, weights.sum(-1, keepdim=True)


def _exp(x: Tensor) -> Tensor:
    """Return e^x, and 0 where products with it would be subnormal: far below rounding, and slow on a CPU."""
    least = torch.finfo(x.dtype).tiny / torch.finfo(x.dtype).eps
    return F.threshold(torch.exp(x.clamp_min(log(least) - 1)), least, 0.0)


def _group_heads(x: Tensor, branch: FoldedBranch) -> Tensor:
    """Return (batch, heads, …) as (batch, kv_heads, groups, …)."""
    return x.unflatten(1, (branch.k.shape[1], branch.groups))


def _compute_scores(branch: FoldedBranch, k: Tensor, rows: slice, columns: slice) -> Tensor:
    """Return masked scores, (batch, kv_heads, groups, rows, columns)."""
    q = _group_heads(branch.q[:, :, rows].to(k.dtype), branch)
    scores = matmul_wide(q.flatten(2, 3), k[:, :, columns].mT).mul_(branch.scale).unflatten(2, q.shape[2:4])
    factor, bias = branch.distance_terms(rows, columns)
    if factor is not None:
        scores = scores * factor[:, None].to(scores.dtype)
    if bias is not None:
        scores = scores + (_group_heads(bias, branch) if bias.shape[1] > 1 else bias[:, None]).to(scores.dtype)
    if branch.unmasked:
        return scores
    return scores.masked_fill(~branch.mask(rows, columns)[:, None], -torch.inf)


def _iterate_chunks(branch: FoldedBranch) -> Iterator[tuple[slice, slice]]:
    """Yield slices of rows, each with the slice of keys that its rows may see."""
    batch, heads, queries, _ = branch.q.shape
    ends = [branch.layout.key_range(branch.region, row, row + 1) for row in (0, queries - 1)]  # one of them sees most
    width = max(high - low for low, high in ends)
    budget = MAX_CHUNK_SCORES.get(branch.q.device.type, 1 << 22) / max(1, batch * heads)
    # step rows see at most width + step keys: the largest step with step · (width + step) ≤ budget
    step = max(1, min(queries, int((sqrt(width**2 + 4 * budget) - width) / 2)))
    for first in range(0, queries, step):
        last = min(first + step, queries)
        low, high = branch.layout.key_range(branch.region, first, last)
        if low < high:
            yield slice(first, last), slice(low, high)
