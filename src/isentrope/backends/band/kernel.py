"""The Triton kernel of the band backend. Imported only where Triton is installed."""

# mypy: ignore-errors
from __future__ import annotations

from math import log

import torch
import triton
import triton.language as tl
from torch import Tensor

from isentrope.backends.band.copy_engine import describe_blocks
from isentrope.backends.band.slopes_kernel import find_reach
from isentrope.backends.merge import PartialOutput
from isentrope.backends.softmax_kernel import accumulate, move_gap
from isentrope.core.launching import launch_kernel, next_power_of_2
from isentrope.core.rotation import Angles
from isentrope.core.rotation_kernel import broadcast_strides, list_strides, normalise_halves
from isentrope.core.tile_shapes import choose_shape, has_copy_engine

MIN_MATRIX_SIZE = 16  # rows or columns that tensor cores take
LN2 = tl.constexpr(log(2))


def launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    left: int,
    right: int,
    angles: Angles | None,
    tau: Tensor | None,
    scale: float,
    normalise: bool,
    sinks: int = 0,
    sink_keys: Tensor | None = None,
    sink_angles: Angles | None = None,
    sink_tau: Tensor | None = None,
    sink_offset: Tensor | None = None,
    far: PartialOutput | None = None,
    intervals: tuple[Tensor, Tensor] | None = None,
    far_entropy: Tensor | None = None,
    entropy: Tensor | None = None,
    slopes: tuple[Tensor, Tensor] | None = None,
    padded: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute attention of each query over `left` keys before its own and `right` after it, plus sinks and far keys.

    Args:
        q: raw queries, aligned with the last keys; normalised, rotated by `angles` and multiplied by `tau` in the
            kernel, or left untouched where there is nothing to do, as a backward needs them.
        k: keys ready to multiply.
        v: values.
        left: keys before a query's own.
        right: keys after it.
        angles: rotation of the queries in the band.
        tau: temperatures in the band, (batch or 1, heads or 1, queries).
        scale: factor of the scores.
        normalise: whether to divide queries by their lengths.
        sinks: number of first keys that queries also see, as far as these lie before the band.
        sink_keys: the sinks, ready to multiply; `k` by default.
        sink_angles: rotation of the queries against the sinks.
        sink_tau: temperatures against the sinks, as `tau`.
        sink_offset: added to the scores of the sinks, (batch or 1, heads or 1, queries).
        far: output of further keys, to be merged.
        intervals: in place of `left` and `right`, the first key that each query sees and the one after the last, int32
            (batch or 1, queries) each; `sink_offset` is then added to all scores.
        far_entropy: entropy of attention over the further keys, as its log-sum-exp; for `entropy`.
        entropy: where to write that of each query's weights, (batch, heads, queries) in fp32.
        slopes: for a bias of - slope · distance, without sinks and intervals: the slopes (heads,), and the largest norm
            of each head's keys, (batch, kv_heads) in fp32.
        padded: whether keys and values outside all intervals may be anything, NaN too.

    Returns:
        Output (batch, heads, queries, dv) and log-sum-exp (batch, heads, queries).
    """
    batch, heads, queries, size = q.shape
    kv_heads, keys, value_size = k.shape[1], k.shape[2], v.shape[-1]
    rows, columns, stages, warps = choose_shape(q, max(size, value_size))
    # query by query, as models read it on and FlashAttention's backward takes it: neither copies it
    order = queries * heads * value_size, value_size, heads * value_size, 1
    out = q.new_empty_strided((batch, heads, queries, value_size), order)
    lse = q.new_empty((batch, heads, queries), dtype=torch.float32)
    if batch == 0:
        return out, lse
    cos, sin = angles or (lse, lse)
    sink_cos, sink_sin = sink_angles or (lse, lse)
    sink_keys = k if sink_keys is None else sink_keys
    far_out, far_lse, first = far or PartialOutput(out, lse, 0)
    lows, highs = intervals or (lse, lse)
    head_slopes, key_norms = (x.contiguous() for x in slopes) if slopes else (lse, lse)
    described = has_copy_engine(q)
    k_blocks, v_blocks = (describe_blocks(x, columns) for x in (k, v)) if described else (k, v)
    strides = list_strides(q, v, sink_keys, far_out, k)
    launch_kernel(
        _band,
        (-(-queries // rows), heads, batch),
        (
            q, k_blocks, v_blocks, v, sink_keys, out, lse,
            cos, sin, sink_cos, sink_sin, lse if tau is None else tau,
            lse if sink_tau is None else sink_tau, lse if sink_offset is None else sink_offset, far_out, far_lse,
            lows, highs, lse if entropy is None else entropy, lse if far_entropy is None else far_entropy,
            head_slopes, key_norms,
        ),
        (
            *strides[:9],
            *broadcast_strides(angles and cos, 0, 2), *broadcast_strides(sink_angles and sink_cos, 0, 2),
            *broadcast_strides(tau, 0, 1, 2), *broadcast_strides(sink_tau, 0, 1, 2),
            *broadcast_strides(sink_offset, 0, 1, 2),
            *strides[9:12], *far_lse.stride(),
            heads, queries, keys, left, right, sinks, first, first + far_out.shape[2], scale / log(2),
            *broadcast_strides(lows, 0), *strides[12:],
        ),
        {
            "GROUPS": heads // kv_heads, "SIZE": size, "VALUE_SIZE": value_size, "ROWS": rows, "COLUMNS": columns,
            "SINKS": max(MIN_MATRIX_SIZE, next_power_of_2(sinks)) if sinks else 0, "ROTATE": angles is not None,
            "ROTATE_SINKS": sink_angles is not None, "TAU": tau is not None, "SINK_TAU": sink_tau is not None,
            "SINK_OFFSET": sink_offset is not None, "NORMALISE": normalise, "FAR": far is not None,
            "SCALE_SCORES": angles is sink_angles is tau is sink_tau is None and not normalise,
            "IEEE": q.dtype == torch.float32, "INTERVALS": intervals is not None, "DESCRIBED": described,
            "ENTROPY": entropy is not None, "SLOPES": slopes is not None, "PADDED": padded,
        },
        {"num_stages": stages, "num_warps": warps},
    )  # fmt: skip
    return out, lse


@triton.jit
def _load_rows(x, x_batch, x_head, x_row, batch, head, row, valid):
    """Load a value for each row of a block, (batch or 1, heads or 1, queries)."""
    pointer = x + batch * x_batch + head * x_head + row.to(tl.int64) * x_row
    return tl.load(pointer, mask=valid, other=0.0).to(tl.float32)


@triton.jit
def _load_queries(q, cos, sin, factor, row, valid, q_row, angle_row, SIZE: tl.constexpr, ROTATE: tl.constexpr,
                  NORMALISE: tl.constexpr):  # fmt: skip
    """Load a block of queries, normalise, rotate and multiply it by `factor`, in its own dtype."""
    half: tl.constexpr = SIZE // 2
    lane = tl.arange(0, half)
    offset = row[:, None].to(tl.int64) * q_row + lane[None, :]
    a = tl.load(q + offset, mask=valid[:, None], other=0.0).to(tl.float32)
    b = tl.load(q + offset + half, mask=valid[:, None], other=0.0).to(tl.float32)
    if NORMALISE:
        a, b = normalise_halves(a, b)
    if ROTATE:
        angle_offset = row[:, None].to(tl.int64) * angle_row + lane[None, :]
        c = tl.load(cos + angle_offset, mask=valid[:, None], other=1.0)
        s = tl.load(sin + angle_offset, mask=valid[:, None], other=0.0)
        a, b = a * c - b * s, b * c + a * s
    block = tl.reshape(tl.permute(tl.join(a * factor[:, None], b * factor[:, None]), (0, 2, 1)), (row.shape[0], SIZE))
    return block.to(q.dtype.element_ty)


@triton.jit
def _load_keys(x, batch, head, start, keys, x_key, SIZE: tl.constexpr, COLUMNS: tl.constexpr, DESCRIBED: tl.constexpr,
               MASKED: tl.constexpr):  # fmt: skip
    """Load a block of vectors by the copy engine, which reads zeros past the last, or by pointers to one head."""
    if DESCRIBED:
        block = x.load([batch, head, start, 0]).reshape(COLUMNS, SIZE)
    else:
        column, lane = start + tl.arange(0, COLUMNS), tl.arange(0, SIZE)
        pointer = x + column.to(tl.int64)[:, None] * x_key + lane[None, :]
        block = tl.load(pointer, mask=(column < keys)[:, None], other=0.0) if MASKED else tl.load(pointer)
    return block


@triton.jit
def _attend_blocks(row_max, row_sum, acc, gap, q_block, k, v, batch, head, position, left, right, keys, begin, end,
                   scale, slope, k_key, v_key, SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, COLUMNS: tl.constexpr,
                   SCALE_SCORES: tl.constexpr, IEEE: tl.constexpr, MASKED: tl.constexpr, INTERVALS: tl.constexpr,
                   DESCRIBED: tl.constexpr, ENTROPY: tl.constexpr, SLOPES: tl.constexpr,
                   PADDED: tl.constexpr):  # fmt: skip
    """Add the blocks of keys from `begin` to `end`: all pairs, or (MASKED) those in the band.

    INTERVALS: each row sees the keys from its `left` to before its `right`. PADDED: values that no row sees are read as
    zeros, since a weight of 0 does not undo a NaN.
    """
    precision: tl.constexpr = "ieee" if IEEE else "tf32"
    BLANKED: tl.constexpr = MASKED and PADDED
    if BLANKED:
        seen = left < right
        lowest, highest = tl.min(tl.where(seen, left, keys), 0), tl.max(tl.where(seen, right, 0), 0)
    # the few masked blocks leave the memory of a pipeline stage to the values with zeros
    for start in tl.range(begin, end, COLUMNS, num_stages=2 if BLANKED else None):
        k_block = _load_keys(k, batch, head, start, keys, k_key, SIZE, COLUMNS, DESCRIBED, MASKED)
        scores = tl.dot(q_block, tl.trans(k_block), input_precision=precision)
        if SCALE_SCORES:
            scores = scores * scale
        if SLOPES:  # fp32 has every distance exactly, and is faster here than integers
            distance = (position - start).to(tl.float32)[:, None] - tl.arange(0, COLUMNS).to(tl.float32)[None, :]
            scores -= slope * tl.abs(distance)
        if MASKED:
            column = start + tl.arange(0, COLUMNS)
            if INTERVALS:
                visible = (column[None, :] >= left[:, None]) & (column[None, :] < right[:, None])
            else:
                distance = column[None, :] - position[:, None]
                visible = (distance >= -left) & (distance <= right) & (column < keys)[None, :]
            scores = tl.where(visible, scores, float("-inf"))
        v_block = _load_keys(v, batch, head, start, keys, v_key, VALUE_SIZE, COLUMNS, DESCRIBED, MASKED)
        if BLANKED:
            v_block = tl.where(((column >= lowest) & (column < highest))[:, None], v_block, 0.0)
        row_max, row_sum, acc, gap = accumulate(row_max, row_sum, acc, gap, scores, v_block, IEEE, MASKED, ENTROPY)
    return row_max, row_sum, acc, gap


# arguments that change with length or heads are not specialised: one kernel serves them all
@triton.jit(do_not_specialize=[
    "angle_batch", "sink_angle_batch", "tau_batch", "tau_head", "sink_tau_batch", "sink_tau_head",
    "sink_offset_batch", "sink_offset_head", "far_lse_batch", "far_lse_head",
    "heads", "queries", "keys", "left", "right", "sinks", "first", "last", "interval_batch",
])  # fmt: skip
def _band(
    q, k_blocks, v_blocks, v, sink_keys, out, lse, cos, sin, sink_cos, sink_sin, tau, sink_tau, sink_offset,
    far_out, far_lse, lows, highs, entropy, far_entropy, slopes, key_norms,
    q_batch, q_head, q_row, v_batch, v_head, v_key, sink_batch, sink_head, sink_key,
    angle_batch, angle_row, sink_angle_batch, sink_angle_row, tau_batch, tau_head, tau_row,
    sink_tau_batch, sink_tau_head, sink_tau_row, sink_offset_batch, sink_offset_head, sink_offset_row,
    far_batch, far_head, far_row, far_lse_batch, far_lse_head, far_lse_row,
    heads, queries, keys, left, right, sinks, first, last, scale, interval_batch, k_batch, k_head, k_key,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    SINKS: tl.constexpr, ROTATE: tl.constexpr, ROTATE_SINKS: tl.constexpr, TAU: tl.constexpr,
    SINK_TAU: tl.constexpr, SINK_OFFSET: tl.constexpr, NORMALISE: tl.constexpr, FAR: tl.constexpr,
    SCALE_SCORES: tl.constexpr, IEEE: tl.constexpr, INTERVALS: tl.constexpr, DESCRIBED: tl.constexpr,
    ENTROPY: tl.constexpr, SLOPES: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Compute one block of queries of one head. SCALE_SCORES: queries stay untouched, scores are scaled.

    INTERVALS: row i sees the keys from lows[i] to before highs[i], or none, and sink_offset is added to all scores.
    DESCRIBED: k_blocks and v_blocks are descriptors for the copy engine, otherwise keys and values themselves.
    ENTROPY: that of each row's weights is written too, `far_entropy` being that of far keys.
    SLOPES: slope · distance is subtracted from scores, and keys too far to count are left out.
    PADDED: keys and values outside all intervals may be NaN.
    """
    # flat slopes, for which most keys count, are those of the last heads: these start first
    head = heads - 1 - tl.program_id(1) if SLOPES else tl.program_id(1)
    kv_head, batch = head // GROUPS, tl.program_id(2).to(tl.int64)
    head64, kv_head64 = head.to(tl.int64), kv_head.to(tl.int64)
    start = tl.program_id(0) * ROWS
    row = start + tl.arange(0, ROWS)
    row_valid = row < queries
    offset = keys - queries
    position = row + offset
    factor = tl.full((ROWS,), 1.0, tl.float32)
    if not SCALE_SCORES:
        factor = factor * scale
    sink_factor = factor
    if TAU:
        factor = factor * _load_rows(tau, tau_batch, tau_head, tau_row, batch, head64, row, row_valid)
    q += batch * q_batch + head64 * q_head
    v += batch * v_batch + kv_head64 * v_head
    value_lane = tl.arange(0, VALUE_SIZE)
    row_max = tl.full((ROWS,), float("-inf"), tl.float32)
    row_sum = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, VALUE_SIZE), tl.float32)
    gap = tl.zeros((ROWS,), tl.float32)
    if not DESCRIBED:
        k_blocks += batch * k_batch + kv_head64 * k_head
        v_blocks += batch * v_batch + kv_head64 * v_head

    q_block = _load_queries(q, cos + batch * angle_batch, sin + batch * angle_batch, factor, row, row_valid, q_row,
                            angle_row, SIZE, ROTATE, NORMALISE)  # fmt: skip
    slope = 0.0
    if SLOPES:
        slope = (tl.load(slopes + head) / LN2).to(tl.float32)
        own = sink_keys + batch * sink_batch + kv_head64 * sink_head + position.to(tl.int64)[:, None] * sink_key
        norm = tl.load(key_norms + batch * (heads // GROUPS) + kv_head)
        reach = find_reach(q_block, own, row_valid, norm, slope, scale if SCALE_SCORES else 1.0, keys, SIZE)
        left, right = tl.minimum(left, reach), tl.minimum(right, reach)
    # begin … end: blocks that some row sees; inner_begin … inner_end: those that all rows see entirely
    if INTERVALS:
        lows += batch * interval_batch + row
        highs += batch * interval_batch + row
        left, right = tl.load(lows, mask=row_valid, other=0), tl.load(highs, mask=row_valid, other=0)
        seen = left < right
        begin = tl.min(tl.where(seen, left, keys), 0) // COLUMNS * COLUMNS
        end = tl.maximum(tl.cdiv(tl.max(tl.where(seen, right, 0), 0), COLUMNS) * COLUMNS, begin)
        inner_begin = tl.cdiv(tl.max(tl.where(row_valid, left, 0), 0), COLUMNS) * COLUMNS
        inner_begin = tl.minimum(tl.maximum(inner_begin, begin), end)
        inner_end = tl.min(tl.where(row_valid, right, keys), 0) // COLUMNS * COLUMNS
        inner_end = tl.maximum(tl.minimum(inner_end, end), inner_begin)
    else:
        first_position, last_position = start + offset, tl.minimum(start + ROWS, queries) - 1 + offset
        begin = tl.maximum(first_position - left, 0) // COLUMNS * COLUMNS
        end = tl.cdiv(tl.minimum(last_position + right + 1, keys), COLUMNS) * COLUMNS
        inner_begin = tl.minimum(tl.cdiv(tl.maximum(last_position - left, 0), COLUMNS) * COLUMNS, end)
        inner_end = tl.maximum(tl.minimum(first_position + right + 1, keys) // COLUMNS * COLUMNS, inner_begin)
    row_max, row_sum, acc, gap = _attend_blocks(
        row_max, row_sum, acc, gap, q_block, k_blocks, v_blocks, tl.program_id(2), kv_head, position, left, right,
        keys, begin, inner_begin, scale, slope, k_key, v_key, SIZE, VALUE_SIZE, COLUMNS, SCALE_SCORES, IEEE, True,
        INTERVALS, DESCRIBED, ENTROPY, SLOPES, PADDED,
    )  # fmt: skip
    row_max, row_sum, acc, gap = _attend_blocks(
        row_max, row_sum, acc, gap, q_block, k_blocks, v_blocks, tl.program_id(2), kv_head, position, left, right,
        keys, inner_begin, inner_end, scale, slope, k_key, v_key, SIZE, VALUE_SIZE, COLUMNS, SCALE_SCORES, IEEE, False,
        INTERVALS, DESCRIBED, ENTROPY, SLOPES, PADDED,
    )  # fmt: skip
    row_max, row_sum, acc, gap = _attend_blocks(
        row_max, row_sum, acc, gap, q_block, k_blocks, v_blocks, tl.program_id(2), kv_head, position, left, right,
        keys, inner_end, end, scale, slope, k_key, v_key, SIZE, VALUE_SIZE, COLUMNS, SCALE_SCORES, IEEE, True,
        INTERVALS, DESCRIBED, ENTROPY, SLOPES, PADDED,
    )  # fmt: skip

    if SINKS > 0:  # last, when the loops have released their shared memory
        if SINK_TAU:
            tau_rows = _load_rows(sink_tau, sink_tau_batch, sink_tau_head, sink_tau_row, batch, head64, row, row_valid)
            sink_factor = sink_factor * tau_rows
        q_block = _load_queries(q, sink_cos + batch * sink_angle_batch, sink_sin + batch * sink_angle_batch,
                                sink_factor, row, row_valid, q_row, sink_angle_row, SIZE, ROTATE_SINKS,
                                NORMALISE)  # fmt: skip
        column, lane = tl.arange(0, SINKS), tl.arange(0, SIZE)
        sink_valid = (column < sinks)[:, None]
        sink = column.to(tl.int64)[:, None]
        sink_pointer = sink_keys + batch * sink_batch + kv_head64 * sink_head
        k_block = tl.load(sink_pointer + sink * sink_key + lane[None, :], mask=sink_valid, other=0.0)
        v_block = tl.load(v + sink * v_key + value_lane[None, :], mask=sink_valid, other=0.0)
        precision: tl.constexpr = "ieee" if IEEE else "tf32"
        scores = tl.dot(q_block, tl.trans(k_block), input_precision=precision)
        if SCALE_SCORES:
            scores = scores * scale
        if SINK_OFFSET:
            offset_rows = _load_rows(sink_offset, sink_offset_batch, sink_offset_head, sink_offset_row, batch, head64,
                                     row, row_valid)  # fmt: skip
            scores = scores + offset_rows[:, None] / LN2
        visible = (column < sinks)[None, :] & (column[None, :] < (position - left)[:, None])
        scores = tl.where(visible, scores, float("-inf"))
        row_max, row_sum, acc, gap = accumulate(row_max, row_sum, acc, gap, scores, v_block, IEEE, True, ENTROPY)
    if INTERVALS and SINK_OFFSET:
        offset_rows = _load_rows(sink_offset, sink_offset_batch, sink_offset_head, sink_offset_row, batch, head64, row,
                                 row_valid)  # fmt: skip
        row_max += offset_rows / LN2

    if FAR:
        far_valid = row_valid & (row >= first) & (row < last)
        far_index = (row - first).to(tl.int64)
        lse_pointer = far_lse + batch * far_lse_batch + head64 * far_lse_head + far_index * far_lse_row
        far_max = tl.load(lse_pointer, mask=far_valid, other=float("-inf")).to(tl.float32) / LN2
        out_pointer = far_out + batch * far_batch + head64 * far_head + far_index[:, None] * far_row
        far_block = tl.load(out_pointer + value_lane[None, :], mask=far_valid[:, None], other=0.0).to(tl.float32)
        new_max = tl.maximum(tl.where(row_valid, row_max, 0.0), far_max)
        if INTERVALS:  # a row may see nothing
            new_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        decay, weight = tl.exp2(row_max - new_max), tl.exp2(far_max - new_max)
        if ENTROPY:
            far_pointer = far_entropy + batch * far_lse_batch + head64 * far_lse_head + far_index * far_lse_row
            far_gap = far_max - new_max - tl.load(far_pointer, mask=far_valid, other=0.0) / LN2
            gap = move_gap(gap, row_max, row_sum, new_max, decay) + weight * tl.where(weight > 0, far_gap, 0.0)
        acc = acc * decay[:, None] + far_block * weight[:, None]
        row_sum, row_max = row_sum * decay + weight, new_max

    row_seen = row_valid
    if INTERVALS:
        row_seen = row_sum > 0
        row_max = tl.where(row_seen, row_max, float("-inf"))
    row_sum = tl.where(row_seen, row_sum, 1.0)
    index = (batch * heads + head64) * queries + row
    tl.store(lse + index, (row_max + tl.log2(row_sum)) * LN2, mask=row_valid)
    if ENTROPY:
        tl.store(entropy + index, (tl.log2(row_sum) - gap / row_sum) * LN2, mask=row_valid)
    acc = acc / row_sum[:, None]
    out_pointer = out + ((batch * queries + row) * heads + head64)[:, None] * VALUE_SIZE + value_lane[None, :]
    tl.store(out_pointer, acc.to(out.dtype.element_ty), mask=row_valid[:, None])
