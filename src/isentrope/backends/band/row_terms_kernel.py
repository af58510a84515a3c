"""What a backward needs of each query besides its vectors, in one pass. Imported only where Triton is installed."""

# mypy: ignore-errors
from __future__ import annotations

from math import log

import torch
import triton
import triton.language as tl
from torch import Tensor

from isentrope.core.launching import launch_kernel, next_power_of_2
from isentrope.core.rotation_kernel import list_strides

BLOCK_ENTRIES = 8192


def compute_row_terms(out: Tensor, grad: Tensor, lse: Tensor) -> Tensor:
    """Return log-sum-exps to base 2, inf in place of -inf, and rowsum(do ∘ o): (2, batch, heads, queries) in fp32.

    A weight e^{s - inf} is 0, as those of a query without keys are to be.

    Args:
        out: output, (batch, heads, queries, d).
        grad: its gradient.
        lse: log-sum-exp, (batch, heads, queries) in fp32.
    """
    batch, heads, queries, size = out.shape
    terms = out.new_empty((2, batch, heads, queries), dtype=torch.float32)
    if terms.numel() == 0:
        return terms
    out, grad = (x if x.stride(-1) == 1 else x.contiguous() for x in (out, grad))
    lanes = next_power_of_2(size)
    rows = max(1, BLOCK_ENTRIES // lanes)
    launch_kernel(
        _compute_row_terms,
        (-(-queries // rows), heads, batch),
        (out, grad, lse, terms),
        (*list_strides(out, grad), *lse.stride(), batch, heads, queries, 1 / log(2)),
        {"SIZE": size, "LANES": lanes, "ROWS": rows},
    )
    return terms


# arguments that change with length or heads are not specialised: one kernel serves them all
@triton.jit(do_not_specialize=["lse_batch", "lse_head", "batches", "heads", "queries"])
def _compute_row_terms(
    out, grad, lse, terms, out_batch, out_head, out_row, grad_batch, grad_head, grad_row, lse_batch, lse_head, lse_row,
    batches, heads, queries, log2_e, SIZE: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    lane = tl.arange(0, LANES)
    row_valid = row < queries
    valid = row_valid[:, None] & (lane < SIZE)[None, :]
    o = tl.load(out + batch * out_batch + head * out_head + row[:, None] * out_row + lane[None, :], mask=valid, other=0)
    g = tl.load(
        grad + batch * grad_batch + head * grad_head + row[:, None] * grad_row + lane[None, :], mask=valid, other=0
    )
    total = tl.sum(o.to(tl.float32) * g.to(tl.float32), 1)
    total_lse = tl.load(lse + batch * lse_batch + head * lse_head + row * lse_row, mask=row_valid, other=0.0)
    index = (batch * heads + head) * queries + row
    tl.store(terms + index, tl.where(total_lse == float("-inf"), float("inf"), total_lse * log2_e), mask=row_valid)
    tl.store(terms + tl.cast(batches, tl.int64) * heads * queries + index, total, mask=row_valid)
