"""How far keys count under a linear bias: the band kernel leaves out what lies beyond, block by block.

Scores to base 2 are t_ij = q_i·k_j - μ |i - j|, with scale and τ in q, and μ = m / ln 2 for a slope m > 0.

1. By Cauchy-Schwarz q_i·k_j ≤ B_i = ‖q_i‖ max_j ‖k_j‖, so that t_ij ≤ B_i - μ |i - j|.
2. Query i sees its own key, at distance 0, with t_ii = q_i·k_i. Relative to that key's weight, another's is at most
   2^{B_i - q_i·k_i - μ |i - j|}.
3. Beyond a distance L there are at most n keys, each with 2^{-μ |i - j|} < 2^{-μ L}. Both sides together have at most
   2 Σ_{Δ > L} e^{-m Δ} = 2 e^{-m L} / (e^m - 1) ≤ (2 / m) 2^{-μ L}, too.
4. So all keys beyond L have at most min(n, 2 / m) 2^{B_i - q_i·k_i - μ L} of the own key's weight. That is at most
   2^-24 of it, and so of the sum of all weights, if

       μ L ≥ B_i - q_i·k_i + log2 min(n, 2 / m) + 24.

L is the largest over a block of queries. One bit more, and B_i larger by 2^-10, are for what is rounded on the way:
norms and products of up to 256 entries, summed in fp32, are off by less than 2^-14 B_i, and entries whose squares are
too small for fp32 add less than 2^-59 to a norm. Where μ is not positive, or a number not finite, all keys count.

What is left out is at most 2^-24 of the sum of weights, less than what fp32 rounds in the log-sum-exp, and moves the
output by at most 2^-23 max |v|. A value that is not finite reaches the queries that its key counts for.
"""

# mypy: ignore-errors
from __future__ import annotations

from math import log

import triton
import triton.language as tl

BITS = tl.constexpr(24 + 1.0)  # what is skipped is below 2^-24
ROUNDED_UP = tl.constexpr(1 + 2.0**-10)
LOST_NORM = tl.constexpr(2.0**-59)  # of entries whose squares are below the range of fp32
LN2 = tl.constexpr(log(2))


@triton.jit
def find_reach(q_block, own, valid, key_norm, slope, scale, keys, SIZE: tl.constexpr):
    """Return L, the distance beyond which keys do not count for any valid row of a block; `keys` where all do.

    own: pointers to each row's own key. key_norm: max ‖k‖. slope: μ. scale: factor of q·k that q does not have yet.
    """
    q = q_block.to(tl.float32)
    own_keys = tl.load(own + tl.arange(0, SIZE)[None, :], mask=valid[:, None], other=0.0)
    bound = (tl.sqrt(tl.sum(q * q, 1)) + LOST_NORM) * (key_norm + LOST_NORM) * tl.abs(scale)
    gap = bound * ROUNDED_UP - tl.sum(q * own_keys, 1) * scale
    gap = tl.where(gap < float("inf"), gap, float("inf"))  # also where it is not a number
    gap = tl.max(tl.where(valid, gap, 0.0), 0)
    divisor = tl.where(slope > 0, slope, 1.0)
    count = tl.minimum(keys.to(tl.float32), 2 / (divisor * LN2))
    reach = (BITS + gap + tl.log2(count)) / divisor + 1  # rounded up, once the fraction is dropped
    return tl.where((slope > 0) & (reach < keys), tl.maximum(reach, 0.0), keys).to(tl.int32)
