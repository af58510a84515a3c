"""The running softmax of Triton kernels, and the sum that an entropy needs. Imported only where Triton is installed."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def move_gap(gap, row_max, row_sum, anchor, decay):
    """Return Σ w (t - anchor) for Σ w (t - row_max), of weights w that `decay` multiplies."""
    return (gap + row_sum * tl.where(row_sum > 0, row_max - anchor, 0.0)) * decay


@triton.jit
def accumulate(row_max, row_sum, acc, gap, scores, v_block, IEEE: tl.constexpr, MASKED: tl.constexpr,
                ENTROPY: tl.constexpr):  # fmt: skip
    """Add a block of scores t (to base 2) and values to the running softmax, and to gap = Σ 2^{t - max} (t - max)."""
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    anchor = new_max
    if MASKED:  # a row may not have seen a key yet
        anchor = tl.where(new_max == float("-inf"), 0.0, new_max)
    weight = tl.exp2(scores - anchor[:, None])
    decay = tl.exp2(row_max - anchor)
    if ENTROPY:
        below = scores - anchor[:, None]
        if MASKED:  # -inf
            below = tl.where(weight > 0, below, 0.0)
        gap = move_gap(gap, row_max, row_sum, anchor, decay) + tl.sum(weight * below, 1)
    precision: tl.constexpr = "ieee" if IEEE else "tf32"
    acc = tl.dot(weight.to(v_block.dtype), v_block, acc * decay[:, None], input_precision=precision)
    return new_max, row_sum * decay + tl.sum(weight, 1), acc, gap
