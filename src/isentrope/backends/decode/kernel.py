"""The Triton kernels of the decode backend. Imported only where Triton is installed."""

# mypy: ignore-errors
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from isentrope.core.compile import device_context
from isentrope.core.rotation_kernel import broadcast_strides, normalise_halves

MAX_BLOCK_KEYS = 64
MAX_BLOCK_BYTES = 32 << 10  # consumer GPUs have little shared memory
MIN_ROWS = 16  # what tensor cores take: query heads per key head are padded to it
TARGET_PROGRAMS = 264  # two for each multiprocessor of the largest GPUs


def launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Tensor,
    angles: list[Tensor],
    rotated: list[bool],
    taus: list[Tensor | None],
    offsets: list[Tensor | None],
    scale: float,
    normalise: bool,
) -> tuple[Tensor, Tensor]:
    """Compute attention of one query per row over raw keys, in one or two branches.

    Args:
        q: (batch, heads, 1, d).
        k: (batch, kv_heads, keys, d).
        v: (batch, kv_heads, keys, dv).
        bounds: visible keys, two intervals [low, high) per branch: (batch or 1, branches, 4).
        angles: cos and sin of each entry of `rotated` that is true.
        rotated: whether queries of branch 0, keys of branch 0, queries and keys of branch 1 are rotated.
        taus: temperatures of each branch, (batch or 1, heads or 1, 1).
        offsets: added to the scores of each branch, (batch or 1, heads or 1, 1).
        scale: factor of the scores.
        normalise: whether to divide queries and keys by their lengths.

    Returns:
        Output (batch, heads, 1, dv) and log-sum-exp (batch, heads, 1).
    """
    batch, heads, _, size = q.shape
    kv_heads, keys, value_size = k.shape[1], k.shape[2], v.shape[-1]
    groups = heads // kv_heads
    splits = max(1, min(TARGET_PROGRAMS // max(1, batch * kv_heads), triton.cdiv(keys, 4 * MAX_BLOCK_KEYS)))
    splits = 1 << (splits.bit_length() - 1)
    partial_out = q.new_empty(batch, heads, splits, value_size, dtype=torch.float32)
    partial_lse = q.new_empty(batch, heads, splits, dtype=torch.float32)
    rotated = rotated + [False] * (4 - len(rotated))
    remaining, tables, angle_strides = iter(angles), [], []
    for is_rotated in rotated:
        for _ in range(2):
            table = next(remaining) if is_rotated else partial_lse
            tables.append(table)
        # a table for all rows or all positions has stride 0 there
        angle_strides += broadcast_strides(table if is_rotated else None, 0, 2)
    tau0, tau1, offset0, offset1 = factors = [*_pad_pair(taus), *_pad_pair(offsets)]
    out = q.new_empty(batch, heads, 1, value_size)
    lse = q.new_empty(batch, heads, 1, dtype=torch.float32)
    with device_context(q):
        _attend_split[(batch * kv_heads, splits)](
            q, k, v, partial_out, partial_lse, bounds,
            *(partial_lse if x is None else x for x in factors), *tables,
            q.stride(0), q.stride(1), k.stride(0), k.stride(1), k.stride(2), v.stride(0), v.stride(1), v.stride(2),
            0 if bounds.shape[0] == 1 else bounds.stride(0),
            *(stride for x in factors for stride in broadcast_strides(x, 0, 1)),
            *angle_strides, scale, kv_heads, splits,
            GROUPS=groups, ROWS=max(MIN_ROWS, triton.next_power_of_2(groups)), SIZE=size, HALF=size // 2,
            VALUE_SIZE=value_size, BLOCK=min(MAX_BLOCK_KEYS, MAX_BLOCK_BYTES // (size * q.element_size())),
            BRANCHES=bounds.shape[1], TAU0=tau0 is not None, TAU1=tau1 is not None, OFFSET0=offset0 is not None,
            OFFSET1=offset1 is not None, PER_HEAD=any(x is not None and x.shape[1] > 1 for x in factors),
            NORMALISE=normalise, IEEE=q.dtype == torch.float32,
            ROTATE_Q0=rotated[0], ROTATE_K0=rotated[1], ROTATE_Q1=rotated[2], ROTATE_K1=rotated[3],
        )  # fmt: skip
        _merge_splits[(batch * heads,)](partial_out, partial_lse, out, lse, VALUE_SIZE=value_size, SPLITS=splits)
    return out, lse


def _pad_pair(values: list[Tensor | None]) -> list[Tensor | None]:
    """Return values of one or two branches as two."""
    return [*values, None][:2]


@triton.jit
def _load_heads(x, batch, head, x_batch, x_head, row, GROUPS: tl.constexpr, PER_HEAD: tl.constexpr):
    """Load a value for each query head of one key head, (batch or 1, heads or 1, 1)."""
    if not PER_HEAD:  # a scalar needs no exchange between threads
        return tl.load(x + batch * x_batch).to(tl.float32) + row * 0.0
    return tl.load(x + batch * x_batch + head * x_head, mask=row < GROUPS, other=0.0).to(tl.float32)


@triton.jit
def _rotate(a, b, cos, sin):
    return a * cos - b * sin, b * cos + a * sin


@triton.jit
def _load_queries(q, row, factor, cos, sin, lane, GROUPS: tl.constexpr, HALF: tl.constexpr, ROTATE: tl.constexpr,
                  NORMALISE: tl.constexpr):  # fmt: skip
    """Load the query heads of one key head in halves, normalise, rotate and multiply them by `factor`."""
    valid = row[:, None] < GROUPS
    a = tl.load(q, mask=valid, other=0.0).to(tl.float32)
    b = tl.load(q + HALF, mask=valid, other=0.0).to(tl.float32)
    if NORMALISE:
        a, b = normalise_halves(a, b)
    if ROTATE:
        a, b = _rotate(a, b, tl.load(cos + lane)[None, :], tl.load(sin + lane)[None, :])
    return a * factor[:, None], b * factor[:, None]


@triton.jit
def _compute_scores(qa, qb, a, b, cos, sin, key, key_valid, lane, angle_row, ROTATE: tl.constexpr,
                    NORMALISE: tl.constexpr, IEEE: tl.constexpr):  # fmt: skip
    """Multiply queries with a block of keys, normalised and rotated, both given in halves."""
    dtype = a.dtype
    if NORMALISE:
        a, b = normalise_halves(a.to(tl.float32), b.to(tl.float32))
    if ROTATE:
        offset = key.to(tl.int64)[:, None] * angle_row + lane[None, :]
        c = tl.load(cos + offset, mask=key_valid[:, None], other=0.0)
        s = tl.load(sin + offset, mask=key_valid[:, None], other=0.0)
        a, b = _rotate(a.to(tl.float32), b.to(tl.float32), c, s)
    a, b = a.to(dtype), b.to(dtype)
    precision: tl.constexpr = "ieee" if IEEE else "tf32"
    scores = tl.dot(qa.to(dtype), tl.trans(a), input_precision=precision)
    return scores + tl.dot(qb.to(dtype), tl.trans(b), input_precision=precision)


@triton.jit
def _attend_split(
    q, k, v, partial_out, partial_lse, bounds, tau0, tau1, offset0, offset1,
    cos_q0, sin_q0, cos_k0, sin_k0, cos_q1, sin_q1, cos_k1, sin_k1,
    q_batch, q_head, k_batch, k_head, k_key, v_batch, v_head, v_key, bounds_batch,
    tau0_batch, tau0_head, tau1_batch, tau1_head, offset0_batch, offset0_head, offset1_batch, offset1_head,
    q0_batch, q0_row, k0_batch, k0_row, q1_batch, q1_row, k1_batch, k1_row, scale, kv_heads, splits,
    GROUPS: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr, HALF: tl.constexpr, VALUE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr, BRANCHES: tl.constexpr, TAU0: tl.constexpr, TAU1: tl.constexpr,
    OFFSET0: tl.constexpr, OFFSET1: tl.constexpr, PER_HEAD: tl.constexpr, NORMALISE: tl.constexpr,
    ROTATE_Q0: tl.constexpr, ROTATE_K0: tl.constexpr, ROTATE_Q1: tl.constexpr, ROTATE_K1: tl.constexpr,
    IEEE: tl.constexpr,
):  # fmt: skip
    """Compute output and log-sum-exp of one key head's queries over one split of the visible keys."""
    batch, head = (tl.program_id(0) // kv_heads).to(tl.int64), tl.program_id(0) % kv_heads
    split = tl.program_id(1)
    row, lane, value_lane = tl.arange(0, ROWS), tl.arange(0, HALF), tl.arange(0, VALUE_SIZE)

    # visible keys: two intervals per branch, empty where low = high
    bounds += batch * bounds_batch
    low0, high0 = tl.load(bounds), tl.load(bounds + 1)
    low1, high1 = tl.load(bounds + 2), tl.load(bounds + 3)
    first = tl.minimum(tl.where(low0 < high0, low0, 2147483647), tl.where(low1 < high1, low1, 2147483647))
    last = tl.maximum(tl.where(low0 < high0, high0, 0), tl.where(low1 < high1, high1, 0))
    low2, high2, low3, high3 = first * 0, first * 0, first * 0, first * 0
    if BRANCHES == 2:
        low2, high2 = tl.load(bounds + 4), tl.load(bounds + 5)
        low3, high3 = tl.load(bounds + 6), tl.load(bounds + 7)
        first = tl.minimum(first, tl.where(low2 < high2, low2, 2147483647))
        first = tl.minimum(first, tl.where(low3 < high3, low3, 2147483647))
        last = tl.maximum(last, tl.where(low2 < high2, high2, 0))
        last = tl.maximum(last, tl.where(low3 < high3, high3, 0))
    split_size = tl.cdiv(tl.cdiv(tl.maximum(last - first, 0), splits), BLOCK) * BLOCK
    begin = first + split * split_size
    end = tl.minimum(begin + split_size, last)

    q_head_index = head * GROUPS + row
    factor0, factor1 = tl.full((ROWS,), 1.0, tl.float32), tl.full((ROWS,), 1.0, tl.float32)
    shift0, shift1 = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS,), tl.float32)
    if TAU0:
        factor0 = _load_heads(tau0, batch, q_head_index, tau0_batch, tau0_head, row, GROUPS, PER_HEAD)
    if TAU1:
        factor1 = _load_heads(tau1, batch, q_head_index, tau1_batch, tau1_head, row, GROUPS, PER_HEAD)
    if OFFSET0:
        shift0 = _load_heads(offset0, batch, q_head_index, offset0_batch, offset0_head, row, GROUPS, PER_HEAD)
    if OFFSET1:
        shift1 = _load_heads(offset1, batch, q_head_index, offset1_batch, offset1_head, row, GROUPS, PER_HEAD)
    q_pointer = q + batch * q_batch + q_head_index[:, None].to(tl.int64) * q_head + lane[None, :]
    cos_q0, sin_q0, cos_k0, sin_k0 = (
        cos_q0 + batch * q0_batch, sin_q0 + batch * q0_batch, cos_k0 + batch * k0_batch, sin_k0 + batch * k0_batch,
    )  # fmt: skip
    qa0, qb0 = _load_queries(q_pointer, row, factor0, cos_q0, sin_q0, lane, GROUPS, HALF, ROTATE_Q0, NORMALISE)
    qa1, qb1 = qa0, qb0
    if BRANCHES == 2:
        cos_q1, sin_q1, cos_k1, sin_k1 = (
            cos_q1 + batch * q1_batch, sin_q1 + batch * q1_batch, cos_k1 + batch * k1_batch, sin_k1 + batch * k1_batch,
        )  # fmt: skip
        qa1, qb1 = _load_queries(q_pointer, row, factor1, cos_q1, sin_q1, lane, GROUPS, HALF, ROTATE_Q1, NORMALISE)

    k += batch * k_batch + head.to(tl.int64) * k_head
    v += batch * v_batch + head.to(tl.int64) * v_head
    row_max = tl.full((ROWS,), float("-inf"), tl.float32)
    row_sum = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, VALUE_SIZE), tl.float32)
    for start in range(begin, end, BLOCK):
        key = start + tl.arange(0, BLOCK)
        stop = tl.minimum(start + BLOCK, end)
        key_valid = key < end
        sees_first = (low0 < stop) & (high0 > start) | (low1 < stop) & (high1 > start)
        sees_second = (low2 < stop) & (high2 > start) | (low3 < stop) & (high3 > start)
        if sees_first | sees_second:
            offset = key.to(tl.int64)[:, None] * k_key + lane[None, :]
            a = tl.load(k + offset, mask=key_valid[:, None], other=0.0)
            b = tl.load(k + offset + HALF, mask=key_valid[:, None], other=0.0)
            scores = tl.full((ROWS, BLOCK), float("-inf"), tl.float32)
            if sees_first:
                branch_scores = _compute_scores(qa0, qb0, a, b, cos_k0, sin_k0, key, key_valid, lane, k0_row, ROTATE_K0,
                                                NORMALISE, IEEE)  # fmt: skip
                visible = key_valid & ((key >= low0) & (key < high0) | (key >= low1) & (key < high1))
                scores = tl.where(visible[None, :], branch_scores * scale + shift0[:, None], scores)
            if sees_second:
                branch_scores = _compute_scores(qa1, qb1, a, b, cos_k1, sin_k1, key, key_valid, lane, k1_row, ROTATE_K1,
                                                NORMALISE, IEEE)  # fmt: skip
                visible = key_valid & ((key >= low2) & (key < high2) | (key >= low3) & (key < high3))
                scores = tl.where(visible[None, :], branch_scores * scale + shift1[:, None], scores)
            new_max = tl.maximum(row_max, tl.max(scores, 1))
            anchor = tl.where(new_max == float("-inf"), 0.0, new_max)
            weight = tl.exp(scores - anchor[:, None])
            decay = tl.exp(row_max - anchor)
            v_pointer = v + key.to(tl.int64)[:, None] * v_key + value_lane[None, :]
            v_block = tl.load(v_pointer, mask=key_valid[:, None], other=0.0)
            precision: tl.constexpr = "ieee" if IEEE else "tf32"
            acc = acc * decay[:, None] + tl.dot(weight.to(v_block.dtype), v_block, input_precision=precision)
            row_sum = row_sum * decay + tl.sum(weight, 1)
            row_max = new_max

    denominator = tl.where(row_sum > 0, row_sum, 1.0)
    valid = row < GROUPS
    index = (batch * kv_heads * GROUPS + q_head_index) * splits + split
    tl.store(partial_lse + index, tl.where(row_sum > 0, row_max + tl.log(denominator), float("-inf")), mask=valid)
    out_pointer = partial_out + index[:, None] * VALUE_SIZE + value_lane[None, :]
    tl.store(out_pointer, acc / denominator[:, None], mask=valid[:, None])


@triton.jit
def _merge_splits(partial_out, partial_lse, out, lse, VALUE_SIZE: tl.constexpr, SPLITS: tl.constexpr):
    """Merge the splits of one head."""
    head, split, value_lane = tl.program_id(0), tl.arange(0, SPLITS), tl.arange(0, VALUE_SIZE)
    split_lse = tl.load(partial_lse + head * SPLITS + split)
    row_max = tl.max(split_lse, 0)
    anchor = tl.where(row_max == float("-inf"), 0.0, row_max)
    weight = tl.exp(split_lse - anchor)
    row_sum = tl.sum(weight, 0)
    outputs = tl.load(partial_out + (head * SPLITS + split)[:, None] * VALUE_SIZE + value_lane[None, :])
    denominator = tl.where(row_sum > 0, row_sum, 1.0)
    acc = tl.sum(outputs * weight[:, None], 0) / denominator
    tl.store(out + head * VALUE_SIZE + value_lane, acc.to(out.dtype.element_ty))
    tl.store(lse + head, tl.where(row_sum > 0, anchor + tl.log(denominator), float("-inf")))
