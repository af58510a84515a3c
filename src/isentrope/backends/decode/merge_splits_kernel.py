"""The Triton kernel that merges the partial outputs of one query. Imported only where Triton is installed."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

MERGED_SPLITS = 64  # held in registers at a time


@triton.jit(do_not_specialize=["splits"])
def merge_splits(
    partial_out, partial_lse, out, lse, splits, VALUE_SIZE: tl.constexpr, CHUNK: tl.constexpr,
    OVERLAP: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """Merge the splits of one head, a chunk at a time, so that one kernel serves any number; lse is for `LSE` alone."""
    if OVERLAP:  # launched while splits are computed
        gdc_wait()
    head, value_lane = tl.program_id(0).to(tl.int64), tl.arange(0, VALUE_SIZE)
    partial_lse += head * splits
    partial_out += head * splits * VALUE_SIZE
    row_max, row_sum, acc = float("-inf"), 0.0, tl.zeros((VALUE_SIZE,), tl.float32)
    for start in range(0, splits, CHUNK):
        part = start + tl.arange(0, CHUNK)
        valid = part < splits
        split_lse = tl.load(partial_lse + part, mask=valid, other=float("-inf"))
        outputs = tl.load(
            partial_out + part[:, None] * VALUE_SIZE + value_lane[None, :], mask=valid[:, None], other=0.0
        )
        new_max = tl.maximum(row_max, tl.max(split_lse, 0))
        anchor = tl.where(new_max == float("-inf"), 0.0, new_max)
        decay, weight = tl.exp(row_max - anchor), tl.exp(split_lse - anchor)
        row_sum = row_sum * decay + tl.sum(weight, 0)
        acc = acc * decay + tl.sum(outputs * weight[:, None], 0)
        row_max = new_max
    denominator = tl.where(row_sum > 0, row_sum, 1.0)
    tl.store(out + head * VALUE_SIZE + value_lane, (acc / denominator).to(out.dtype.element_ty))
    if LSE:
        tl.store(lse + head, tl.where(row_sum > 0, row_max + tl.log(denominator), float("-inf")))
