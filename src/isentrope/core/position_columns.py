"""A linear distance bias as further columns of q and k, so that kernels without any bias compute it.

On one side of the query |i - j| is linear in j: scale · q·k - m |i - j| = scale · (q·k ± (M j - M i)), M = m / scale.
Half precision holds digits of j exactly, j = Σ_l w_l j_l with w_l = B^l and B = 256 (bf16) or 2048 (fp16), and M as a
sum of two parts, M₁ + M₂, to 2^-17 or better. Columns of k are digits and powers of B; those of q are multiples of M.

Kernels add products in fp32. M j may be 2^17 and more where M (j - i) is small, and a sum that has passed through 2^17
keeps no digit below 2^-7. So the columns with upper digits come first: their products are exact, and so is their sum,
M₁ Σ_{l>0} w_l (j_l - i_l), small for keys nearby before any product of q and k is added. The last digit and M₂ are
small themselves, and come last. The row's own term, - M i, is among the columns: the log-sum-exp needs no correction.

A GPU uses them where the band kernel, which adds the bias itself, does not take a call: padded rows, other head sizes.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary

from isentrope.core.caching import register_clear
from isentrope.core.call import AttentionCall, FoldedBranch
from isentrope.core.compile import values_are_readable
from isentrope.core.layout import Layout
from isentrope.core.region import Region, band
from isentrope.core.switches import ALIBI_COLUMNS, is_on

DIGIT_BITS = {torch.bfloat16: 8, torch.float16: 11}  # integers of so many bits are exact
LEVELS = {torch.bfloat16: 3, torch.float16: 2}  # digits of a position
MAX_FP16_MULTIPLE = 31.0  # of M by the weight of a digit, 2^11, in fp16
FIRST_COLUMNS = 16  # a step of tensor cores: nothing else is added before their sum is complete
LAST_COLUMNS = 8
SIZE_MULTIPLE = 8  # of head sizes, for fused kernels
REST_PARTS = 3  # of the row's own term, less what upper digits have taken
MAX_HEAD_DIM = 256 - FIRST_COLUMNS - LAST_COLUMNS
SIDES = ((-1, band(-inf, 1)), (1, band(1, inf)))  # sign of |i - j| as a multiple of i - j, and the keys with it
MIN_QUERIES = 17  # fewer have a small mask, and wide keys would be a copy of all keys
# Of a CPU's matrix products the order of summation is unknown: in any order a score is off by a few 2^-25 m n, which
# must stay below a quarter of the rounding of the output.
CPU_SCORE_ROUNDING = 2.0**-25
_steepest: Any = WeakTensorKeyDictionary()  # the largest of each tensor of slopes
register_clear(_steepest.clear)


def has_bias(call: AttentionCall) -> bool:
    """Return whether a branch of a call has a linear bias."""
    return any(branch.slopes is not None for branch in call.branches)


def takes_columns(call: AttentionCall) -> bool:
    """Return whether every linear bias of a call can be columns: in half precision, on a GPU without gradients."""
    biased = [branch for branch in call.branches if branch.slopes is not None]
    size, dtype = max(call.q.shape[-1], call.v.shape[-1]), call.q.dtype
    if not biased or torch.compiler.is_compiling() or dtype not in DIGIT_BITS or size > MAX_HEAD_DIM:
        return False
    if call.layout.queries < MIN_QUERIES or any(branch.distance_law is not None for branch in biased):
        return False
    if call.q.device.type not in ("cpu", "cuda") or (call.q.is_cuda and not _gains_on_gpu(call)):
        return False
    reach = _find_reach(call.layout)
    if reach is None or reach > 1 << (DIGIT_BITS[dtype] * LEVELS[dtype]):
        return False
    if call.q.is_cuda and dtype == torch.bfloat16:  # has the range of fp32, and slopes need not be read
        return True
    steepest = [_find_steepest(branch.slopes) for branch in biased if branch.slopes is not None]
    if None in steepest:
        return False
    largest = max(x for x in steepest if x is not None)
    if call.q.is_cuda:
        return largest <= MAX_FP16_MULTIPLE * call.scale
    small = largest * reach * CPU_SCORE_ROUNDING <= torch.finfo(dtype).eps / 4
    return small and (dtype == torch.bfloat16 or largest <= MAX_FP16_MULTIPLE * call.scale)


def _gains_on_gpu(call: AttentionCall) -> bool:
    return is_on(ALIBI_COLUMNS) and not call.needs_grad  # the backward of wide heads has not been timed


def _find_reach(layout: Layout) -> int | None:
    """Return a bound of |positions|, None where they cannot be read."""
    if layout.plain:
        return layout.keys
    if not values_are_readable(layout.key):
        return None
    pair = layout.query, layout.key
    return layout.cached("reach", lambda: 1 + max(int(x.abs().max()) if x.numel() else 0 for x in pair))


def _find_steepest(slopes: Tensor) -> float | None:
    """Return the largest slope, None where it cannot be read; read once, since a GPU has to be waited for."""
    if slopes not in _steepest:
        if not values_are_readable(slopes):
            return None
        _steepest[slopes] = slopes.abs().max().item() if slopes.numel() else 0.0
    largest: float = _steepest[slopes]
    return largest


def widen_branches(call: AttentionCall) -> list[FoldedBranch]:
    """Return the branches of a call, each with a linear bias as one or two without, for each side of the query one."""
    return [part for branch in call.fold() for part in _widen_branch(branch)]


def _widen_branch(branch: FoldedBranch) -> list[FoldedBranch]:
    if branch.slopes is None:
        return [branch]
    parts = []
    for sign, side in SIDES:
        region = branch.layout.simplify(branch.region & side)
        if region.spans or (sign < 0 and not branch.region.spans):
            parts.append(_widen_side(branch, region, -sign))
    return parts


def _widen_side(branch: FoldedBranch, region: Region, sign: int) -> FoldedBranch:
    """Return the keys on one side with + sign · M (j - i) as columns."""
    q, k, layout = branch.q, branch.k, branch.layout
    assert branch.slopes is not None
    first_k, last_k = layout.cached(("columns", q.dtype), lambda: _make_key_columns(layout.key, q.dtype))
    slopes = sign * branch.slopes.to(torch.float64) / branch.scale
    first_q, last_q = _make_query_columns(layout.query, slopes, q.dtype)
    first_q, last_q = (x.expand(q.shape[0], -1, -1, -1) for x in (first_q, last_q))
    first_k, last_k = (x.expand(*k.shape[:2], -1, -1) for x in (first_k, last_k))
    spare = -q.shape[-1] % SIZE_MULTIPLE
    wide_q, wide_k = (
        torch.cat((a, x, F.pad(b, (0, spare))), -1) for a, x, b in ((first_q, q, last_q), (first_k, k, last_k))
    )
    return replace(branch, q=wide_q, k=wide_k, region=region, slopes=None)


def _split_digits(positions: Tensor, dtype: torch.dtype) -> tuple[list[tuple[Tensor, float]], Tensor]:
    """Return the upper digits of integers, each with its weight, and the lowest digit, as fp64."""
    bits, levels = DIGIT_BITS[dtype], LEVELS[dtype]
    upper = []
    for level in range(levels - 1, 0, -1):
        digit = positions >> (bits * level)
        upper.append(((digit if level == levels - 1 else digit & (1 << bits) - 1).double(), 2.0 ** (bits * level)))
    return upper, (positions & (1 << bits) - 1).double()


def _round(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).double()


def _make_key_columns(positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the first and the last columns of keys, (batch or 1, 1, keys, columns)."""
    upper, lowest = _split_digits(positions[:, None], dtype)
    one = torch.ones_like(lowest)
    first = [column for digit, weight in upper for column in (digit, one * weight, one * weight)]
    last = [*(digit for digit, _ in upper), lowest, lowest, *[one] * REST_PARTS]
    return _stack(first, FIRST_COLUMNS, dtype), _stack(last, LAST_COLUMNS, dtype)


def _make_query_columns(positions: Tensor, slopes: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the first and the last columns of queries, (batch or 1, heads, queries, columns)."""
    upper, lowest = _split_digits(positions[:, None], dtype)
    slopes = slopes[None, :, None]
    part = _round(slopes, dtype)
    small = _round(slopes - part, dtype)
    first, last = [], []
    rest = part * lowest + small * positions[:, None].double()  # of M i, less what the first columns have of it
    for digit, weight in upper:
        own = part * digit
        high = _round(own, dtype)
        first += [part * weight, -high, high - own]
        last.append(small * weight)
    last += [part, small]
    for _ in range(REST_PARTS):
        high = _round(rest, dtype)
        last.append(-high)
        rest = rest - high
    return _stack(first, FIRST_COLUMNS, dtype), _stack(last, LAST_COLUMNS, dtype)


def _stack(columns: list[Tensor], count: int, dtype: torch.dtype) -> Tensor:
    stacked = torch.stack(torch.broadcast_tensors(*columns), -1)
    return F.pad(stacked, (0, count - stacked.shape[-1])).to(dtype)
