"""The Triton kernels of the band's backward, for queries that each see one interval of keys.

With p = e^{s - L} and ds = p ∘ (do·vᵀ - rowsum(do ∘ o)):  dq = scale · ds·k,  dk = scale · dsᵀ·q,  dv = pᵀ·do. One
kernel takes a block of queries through its keys, the other a block of keys through its queries, with no atomic
additions, so that gradients are the same every time. Imported only where Triton is installed.
"""

# mypy: ignore-errors
from __future__ import annotations

from math import log

import torch
import triton
import triton.language as tl
from torch import Tensor

from isentrope.core.compile import device_context
from isentrope.core.rotation_kernel import list_strides

# queries and keys per block, pipeline stages and warps, by head size
BLOCKS = {32: (64, 64, 2, 4), 64: (64, 64, 2, 4), 128: (32, 64, 2, 8), 256: (32, 32, 1, 8)}


def launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad: Tensor,
    terms: Tensor,
    scale: float,
    interval: tuple[Tensor, Tensor],
    ranges: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv.

    Args:
        q: queries, ready to multiply.
        k: keys, as they are.
        v: values.
        grad: gradient of the output.
        terms: as `compute_row_terms` returns them.
        scale: factor of the scores.
        interval: the first key that each query sees and the one after the last, int32 (batch or 1, queries) each.
        ranges: blocks of queries that see a block of keys, first and after the last, int32 (batch or 1, blocks, 2).
        dtype: of the gradients.
    """
    batch, heads, queries, size = q.shape
    kv_heads, keys, value_size = k.shape[1], k.shape[2], v.shape[-1]
    rows, columns, stages, warps = choose_blocks(size, value_size)
    dq, dk, dv = (x.new_empty(x.shape, dtype=dtype) for x in (q, k, v))
    low, high = interval
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    tensors = q, k, v, grad, terms, low, high
    strides = list_strides(q, k, v, grad)
    numbers = heads, queries, keys, 0 if low.shape[0] == 1 else low.stride(0), scale / log(2), scale
    constants = {
        "GROUPS": heads // kv_heads, "SIZE": size, "VALUE_SIZE": value_size, "ROWS": rows, "COLUMNS": columns,
        "IEEE": q.dtype == torch.float32, "num_stages": stages, "num_warps": warps,
    }  # fmt: skip
    with device_context(q):
        _compute_dq[(triton.cdiv(queries, rows), heads, batch)](*tensors, dq, *strides, *numbers, **constants)
        _compute_dkv[(triton.cdiv(keys, columns), kv_heads, batch)](
            *tensors, ranges, dk, dv, *strides, *numbers, 0 if ranges.shape[0] == 1 else ranges.stride(0), **constants
        )
    return dq, dk, dv


def choose_blocks(size: int, value_size: int) -> tuple[int, int, int, int]:
    """Return queries and keys per block, pipeline stages and warps."""
    return BLOCKS[max(size, value_size)]


@triton.jit
def _load_block(x, index, valid, x_row, SIZE: tl.constexpr):
    lane = tl.arange(0, SIZE)
    return tl.load(x + index.to(tl.int64)[:, None] * x_row + lane[None, :], mask=valid[:, None], other=0.0)


@triton.jit
def _load_rows(x, index, valid):
    return tl.load(x + index, mask=valid, other=0)


@triton.jit
def _load_terms(terms, index, valid, heads, queries):
    """Load the log-sum-exps of some queries, and their rowsum(do ∘ o)."""
    count = tl.num_programs(2).to(tl.int64) * heads * queries
    return _load_rows(terms, index, valid), _load_rows(terms + count, index, valid)


@triton.jit
def _differentiate(q_block, k_block, v_block, g_block, lse, delta, low, high, column, score_scale, IEEE: tl.constexpr):
    """Return p and ds of a block of pairs, 0 where a pair is not visible."""
    precision: tl.constexpr = "ieee" if IEEE else "tf32"
    scores = tl.dot(q_block, tl.trans(k_block), input_precision=precision) * score_scale
    visible = (column[None, :] >= low[:, None]) & (column[None, :] < high[:, None])
    p = tl.where(visible, tl.exp2(scores - lse[:, None]), 0.0)
    dp = tl.dot(g_block, tl.trans(v_block), input_precision=precision)
    return p, p * (dp - delta[:, None])


@triton.jit(do_not_specialize=["heads", "queries", "keys", "interval_batch"])
def _compute_dq(
    q, k, v, grad, terms, lows, highs, dq, q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    g_batch, g_head, g_row, heads, queries, keys, interval_batch, score_scale, scale,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    IEEE: tl.constexpr,
):  # fmt: skip
    """Compute dq of one block of queries of one head."""
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    kv_head = head // GROUPS
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    valid = row < queries
    low = _load_rows(lows + batch * interval_batch, row, valid)
    high = _load_rows(highs + batch * interval_batch, row, valid)
    index = (batch * heads + head) * queries + row
    row_lse, row_delta = _load_terms(terms, index, valid, heads, queries)
    q_block = _load_block(q + batch * q_batch + head * q_head, row, valid, q_row, SIZE)
    g_block = _load_block(grad + batch * g_batch + head * g_head, row, valid, g_row, VALUE_SIZE)
    k += batch * k_batch + kv_head * k_head
    v += batch * v_batch + kv_head * v_head
    seen = low < high
    begin = tl.min(tl.where(seen, low, keys), 0) // COLUMNS * COLUMNS
    end = tl.max(tl.where(seen, high, 0), 0)
    precision: tl.constexpr = "ieee" if IEEE else "tf32"
    acc = tl.zeros((ROWS, SIZE), tl.float32)
    for start in tl.range(begin, end, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        k_block = _load_block(k, column, column < keys, k_row, SIZE)
        v_block = _load_block(v, column, column < keys, v_row, VALUE_SIZE)
        _, ds = _differentiate(q_block, k_block, v_block, g_block, row_lse, row_delta, low, high, column, score_scale,
                               IEEE)  # fmt: skip
        acc = tl.dot(ds.to(k_block.dtype), k_block, acc, input_precision=precision)
    pointer = dq + index.to(tl.int64)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(pointer, (acc * scale).to(dq.dtype.element_ty), mask=valid[:, None])


@triton.jit(do_not_specialize=["heads", "queries", "keys", "interval_batch", "range_batch"])
def _compute_dkv(
    q, k, v, grad, terms, lows, highs, ranges, dk, dv, q_batch, q_head, q_row, k_batch, k_head, k_row,
    v_batch, v_head, v_row, g_batch, g_head, g_row, heads, queries, keys, interval_batch, score_scale, scale,
    range_batch,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    IEEE: tl.constexpr,
):  # fmt: skip
    """Compute dk and dv of one block of keys of one head, over all query heads that share it."""
    kv_head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < keys
    k_block = _load_block(k + batch * k_batch + kv_head * k_head, column, inside, k_row, SIZE)
    v_block = _load_block(v + batch * v_batch + kv_head * v_head, column, inside, v_row, VALUE_SIZE)
    lows += batch * interval_batch
    highs += batch * interval_batch
    ranges += batch * range_batch + tl.program_id(0) * 2
    first, last = tl.load(ranges), tl.load(ranges + 1)
    precision: tl.constexpr = "ieee" if IEEE else "tf32"
    dk_acc = tl.zeros((COLUMNS, SIZE), tl.float32)
    dv_acc = tl.zeros((COLUMNS, VALUE_SIZE), tl.float32)
    for group in range(GROUPS):
        head = kv_head * GROUPS + group
        for block in tl.range(first, last):
            row = block * ROWS + tl.arange(0, ROWS)
            valid = row < queries
            low, high = _load_rows(lows, row, valid), _load_rows(highs, row, valid)
            index = (batch * heads + head) * queries + row
            row_lse, row_delta = _load_terms(terms, index, valid, heads, queries)
            q_block = _load_block(q + batch * q_batch + head * q_head, row, valid, q_row, SIZE)
            g_block = _load_block(grad + batch * g_batch + head * g_head, row, valid, g_row, VALUE_SIZE)
            p, ds = _differentiate(q_block, k_block, v_block, g_block, row_lse, row_delta, low, high, column,
                                   score_scale, IEEE)  # fmt: skip
            dv_acc = tl.dot(tl.trans(p.to(g_block.dtype)), g_block, dv_acc, input_precision=precision)
            dk_acc = tl.dot(tl.trans(ds.to(q_block.dtype)), q_block, dk_acc, input_precision=precision)
    index = ((batch * (heads // GROUPS) + kv_head) * keys + column)[:, None]
    key_pointer = dk + index * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(key_pointer, (dk_acc * scale).to(dk.dtype.element_ty), mask=inside[:, None])
    value_pointer = dv + index * VALUE_SIZE + tl.arange(0, VALUE_SIZE)[None, :]
    tl.store(value_pointer, dv_acc.to(dv.dtype.element_ty), mask=inside[:, None])
