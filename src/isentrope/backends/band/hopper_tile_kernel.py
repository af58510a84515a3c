"""What the band's kernel for Hopper does with a tile of queries and a block of keys. In Gluon, as that kernel is."""

# mypy: ignore-errors
from __future__ import annotations

from math import log

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from isentrope.backends.band.key_span import MAX_SPANS, TILE_QUERIES

# Triton 3.6 and 3.9 name it differently
copy_block = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
WARPGROUPS = gl.constexpr(2)
ROWS = gl.constexpr(TILE_QUERIES // 2)  # queries of a warpgroup
COLUMNS = gl.constexpr(128)  # keys of a block
NUMBERS = gl.constexpr(1 + 7 * MAX_SPANS)  # of a tile: its own, and for each span its own and the bounds of its keys
LN2 = gl.constexpr(log(2))
NOTHING = gl.constexpr(float("-inf"))
HIDDEN = gl.constexpr(-1e30)  # in place of -inf, since 0 · -inf is not a number
LOWEST = gl.constexpr(-1e20)  # below any score of a key that is seen, above any hidden one


@gluon.jit
def locate_tile(tile, heads, all_heads, queries, nearby):
    """Return the first query, the head and the batch row of a tile.

    Tiles are in an order of `nearby` heads at a time, whose keys the cache holds, and of these the last queries first,
    which see the most keys.
    """
    blocks = gl.cdiv(queries, ROWS * WARPGROUPS)
    several = tile // (nearby * blocks)
    count = gl.minimum(nearby, all_heads - several * nearby)
    within = tile - several * nearby * blocks
    head = several * nearby + within % count
    return (blocks - 1 - within // count) * (ROWS * WARPGROUPS), head % heads, head // heads


@gluon.jit
def bound_blocks(start, batch, queries, keys, left, right, low, high, interval_batch, INTERVALS: gl.constexpr):
    """Return the first key of the blocks that a tile sees of a span, and the one after them.

    Also return the first of the keys that all its queries see, the one after these, and the same of the keys that some
    query sees.
    """
    ALL: gl.constexpr = ROWS * WARPGROUPS
    if INTERVALS:
        row = start + gl.arange(0, ALL, gl.BlockedLayout([ALL // (32 * gl.num_warps())], [32], [gl.num_warps()], [0]))
        valid = row < queries
        first = gl.load(low + batch * interval_batch + row, mask=valid, other=0)
        last = gl.load(high + batch * interval_batch + row, mask=valid, other=0)
        seen = first < last
        lowest = gl.min(gl.where(seen, first, keys), 0)
        highest = gl.max(gl.where(seen, last, 0), 0)
        inner_begin = gl.max(gl.where(valid, first, 0), 0)
        inner_end = gl.min(gl.where(valid, last, keys), 0)
    else:
        first_position = start + keys - queries
        last_position = gl.minimum(start + ALL, queries) - 1 + keys - queries
        lowest = gl.maximum(first_position - left, 0)
        highest = gl.minimum(last_position + right + 1, keys)
        inner_begin = gl.maximum(last_position - left, 0)
        inner_end = gl.minimum(first_position + right + 1, keys)
    begin = lowest // COLUMNS * COLUMNS
    end = gl.maximum(begin + gl.cdiv(highest - begin, COLUMNS) * COLUMNS, begin)
    return begin, end, inner_begin, inner_end, lowest, highest


@gluon.jit
def put_number(numbers, index, value):
    """Write an integer for other warps."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    numbers.index(index).store(gl.full((1,), value, gl.int32, layout))


@gluon.jit
def get_number(numbers, index):
    """Read an integer."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(numbers.index(index).load(layout), 0)


@gluon.jit
def load_rows(x, strides, batch, head, row, valid):
    """Load a value for each row of a tile, (batch or 1, heads or 1, queries)."""
    pointer = x + batch.to(gl.int64) * strides[0] + head.to(gl.int64) * strides[1] + row.to(gl.int64) * strides[2]
    return gl.load(pointer, mask=valid, other=0.0).to(gl.float32)


@gluon.jit
def load_halves(q, row, valid, q_row, lane, HALF: gl.constexpr):
    """Load both halves of each query."""
    offset = row[:, None].to(gl.int64) * q_row + lane[None, :]
    a = gl.load(q + offset, mask=valid[:, None], other=0.0)
    return a, gl.load(q + offset + HALF, mask=valid[:, None], other=0.0)


@gluon.jit
def load_angles(cos, sin, strides, batch, row, valid, lane, default, ROTATE: gl.constexpr, UNIFORM: gl.constexpr):
    """Load the cosines and sines of each query, or UNIFORM ones of all; return a default where there are none."""
    c, d = default, default
    if ROTATE and UNIFORM:
        place = batch.to(gl.int64) * strides[0] + lane
        c, d = gl.load(cos + place)[None, :], gl.load(sin + place)[None, :]
    elif ROTATE:
        offset = batch.to(gl.int64) * strides[0] + row[:, None].to(gl.int64) * strides[1] + lane[None, :]
        c = gl.load(cos + offset, mask=valid[:, None], other=1.0)
        d = gl.load(sin + offset, mask=valid[:, None], other=0.0)
    return c, d


@gluon.jit
def normalise_halves(a, b):
    """Divide vectors, given in halves, by their lengths; the largest entry first, or squares overflow."""
    peak = gl.maximum(gl.max(gl.abs(a), 1), gl.max(gl.abs(b), 1))
    peak = gl.where(peak > 0, peak, 1.0)[:, None]
    a, b = a / peak, b / peak
    factor = gl.rsqrt(gl.maximum(gl.sum(a * a, 1) + gl.sum(b * b, 1), 0.5))[:, None]
    return a * factor, b * factor


@gluon.jit
def blank_vectors(block, low, high, COUNT: gl.constexpr, LAYOUT: gl.constexpr):
    """Put zeros in place of the vectors before `low` and from `high` on, which may be NaN. Both warpgroups do."""
    if (low > 0) | (high < COUNT):
        for part in gl.static_range(4):  # few registers at a time
            row = part * (COUNT // 4) + gl.arange(0, COUNT // 4, gl.SliceLayout(1, LAYOUT))
            some = block.slice(part * (COUNT // 4), COUNT // 4)
            some.store(gl.where(((row >= low) & (row < high))[:, None], some.load(LAYOUT), 0.0))
        fence_async_shared()


@gluon.jit
def multiply_keys(q_block, k_block, SIZE: gl.constexpr, LAYOUT: gl.constexpr):
    """Start the product of a tile's queries with a block of keys."""
    zeros = gl.zeros((ROWS, COLUMNS), gl.float32, LAYOUT)
    keys = k_block.reshape((COLUMNS, SIZE)).permute((1, 0))
    return warpgroup_mma(q_block, keys, zeros, use_acc=False, is_async=True)


@gluon.jit
def weigh_scores(scores, row_max, row_sum, gap, first, low, high, offset, inner_begin, inner_end, scale,
           HAS_OFFSET: gl.constexpr, ENTROPY: gl.constexpr, LAYOUT: gl.constexpr):  # fmt: skip
    """Add a block of scores t (to base 2) to the running softmax, and to gap = Σ 2^{t - max} (t - max) for an ENTROPY.

    `first` is the block's first key. Return weights, the factor of what has been added before, and the new maximum,
    sum and gap.
    """
    if (first < inner_begin) | (first + COLUMNS > inner_end):
        column = gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))[None, :]
        visible = (column >= (low - first)[:, None]) & (column < (high - first)[:, None])
        scores = gl.where(visible, scores, HIDDEN if ENTROPY else NOTHING)
    new_max = gl.max(scores, 1) * scale
    if HAS_OFFSET:
        new_max += offset
    new_max = gl.maximum(row_max, new_max)
    anchor = gl.where(new_max < LOWEST, 0.0, new_max)  # a row may not have seen a key yet
    decay = gl.exp2(row_max - anchor)
    if ENTROPY:
        gap = (gap + row_sum * gl.where(row_sum > 0, row_max - anchor, 0.0)) * decay
    if HAS_OFFSET:
        anchor -= offset
    below = scores * scale - anchor[:, None]
    weight = gl.exp2(below)
    if ENTROPY:
        gap += gl.sum(weight * below, 1)
    return weight, decay, new_max, row_sum * decay + gl.sum(weight, 1), gap


@gluon.jit
def attend_tile(PART: gl.constexpr, place, slot, done, last, results, scale, q_smem, shared, operands, strides, spans,
                shape, SPANS: gl.constexpr, SIZE: gl.constexpr, STAGES: gl.constexpr, ROTATE: gl.constexpr,
                UNIFORM: gl.constexpr, TAU: gl.constexpr, OFFSET: gl.constexpr, NORMALISE: gl.constexpr,
                INTERVALS: gl.constexpr, FOLDED: gl.constexpr, ENTROPY: gl.constexpr,
                PADDED: gl.constexpr):  # fmt: skip
    """Compute a warpgroup's queries of a tile, from the `done`-th block of keys of a program to the `last`-th."""
    start, head, batch = place
    out, lse, entropy, out_strides = results
    k_smem, v_smem, k_full, k_empty, v_full, v_empty, tile_info, tile_full, tile_empty = shared
    q, cos, sin, tau, offsets = operands
    q_batch, q_head, q_row, angle_strides, tau_strides, offset_strides = strides
    lefts, rights, lows, highs = spans
    interval_batch, heads, all_heads, queries, keys, tiles, nearby = shape
    info = slot * NUMBERS
    dtype: gl.constexpr = out.dtype.element_ty
    WARPS: gl.constexpr = ROWS // 16
    HALF: gl.constexpr = SIZE // 2
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, COLUMNS, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, SIZE, 16])
    weight_layout: gl.constexpr = gl.DotOperandLayout(0, out_layout, 2)
    score_row: gl.constexpr = gl.SliceLayout(1, score_layout)
    out_row: gl.constexpr = gl.SliceLayout(1, out_layout)
    half_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HALF, HALF // 8], [WARPS, 1], [1, 0])
    whole_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // SIZE, SIZE // 8], [WARPS, 1], [1, 0])
    lane = gl.arange(0, HALF, gl.SliceLayout(0, half_layout))
    zero = gl.zeros((ROWS,), gl.float32, score_row)
    row = start + gl.arange(0, ROWS, gl.SliceLayout(1, half_layout))
    valid = row < queries
    q_offset = batch.to(gl.int64) * q_batch + head.to(gl.int64) * q_head
    # all loads before the first use, so that they wait for the memory together
    a, b = load_halves(q[0] + q_offset, row, valid, q_row, lane, HALF)
    c0, d0 = load_angles(cos[0], sin[0], angle_strides[0], batch, row, valid, lane, a, ROTATE & 1, UNIFORM & 1)
    a1, b1, c1, d1, a2, b2, c2, d2 = a, b, c0, d0, a, b, c0, d0
    if SPANS > 1:
        if FOLDED:
            a1, b1 = load_halves(q[1] + q_offset, row, valid, q_row, lane, HALF)
        c1, d1 = load_angles(cos[1], sin[1], angle_strides[1], batch, row, valid, lane, a, ROTATE & 2, UNIFORM & 2)
    if SPANS > 2:
        if FOLDED:
            a2, b2 = load_halves(q[2] + q_offset, row, valid, q_row, lane, HALF)
        c2, d2 = load_angles(cos[2], sin[2], angle_strides[2], batch, row, valid, lane, a, ROTATE & 4, UNIFORM & 4)
    halves, angles = ((a, b), (a1, b1), (a2, b2)), ((c0, d0), (c1, d1), (c2, d2))
    for s in gl.static_range(SPANS):
        x, y = halves[s][0].to(gl.float32), halves[s][1].to(gl.float32)
        if NORMALISE:
            x, y = normalise_halves(x, y)
        if (ROTATE >> s) & 1:
            x, y = x * angles[s][0] - y * angles[s][1], y * angles[s][0] + x * angles[s][1]
        if (TAU >> s) & 1:
            factor = load_rows(tau[s], tau_strides[s], batch, head, row, valid)[:, None]
            x, y = x * factor, y * factor
        block = gl.join(x, y).permute((0, 2, 1)).reshape((ROWS, SIZE)).to(dtype)
        q_smem.index(PART * SPANS + s).store(block)
    fence_async_shared()

    score_rows = start + gl.arange(0, ROWS, score_row)
    rows_valid = score_rows < queries
    position = score_rows + keys - queries
    row_max = gl.full((ROWS,), NOTHING, gl.float32, score_row)
    row_sum, gap = zero, zero
    acc = gl.zeros((ROWS, SIZE), gl.float32, out_layout)
    mbarrier.wait(k_full.index(done % STAGES), done // STAGES & 1)
    for s in gl.static_range(SPANS):
        begin, end = get_number(tile_info, info + 7 * s + 1), get_number(tile_info, info + 7 * s + 2)
        inner_begin, inner_end = get_number(tile_info, info + 7 * s + 3), get_number(tile_info, info + 7 * s + 4)
        low, high = position - lefts[s], gl.minimum(position + rights[s] + 1, keys)
        if INTERVALS:
            interval = batch * interval_batch + score_rows
            low = gl.load(lows[s] + interval, mask=rows_valid, other=0)
            high = gl.load(highs[s] + interval, mask=rows_valid, other=0)
        offset = zero
        if (OFFSET >> s) & 1:
            offset = load_rows(offsets[s], offset_strides[s], batch, head, score_rows, rows_valid) / LN2
        lowest, highest = get_number(tile_info, info + 7 * s + 6), get_number(tile_info, info + 7 * s + 7)
        # read rather than known, so that the compiler does not keep the addresses of all spans in registers
        q_block = q_smem.index(PART * SPANS + get_number(tile_info, info + 7 * s + 5))
        if s == 0:
            stage = done % STAGES
            scores = multiply_keys(q_block, k_smem.index(stage), SIZE, score_layout)
            scores = warpgroup_mma_wait(0, deps=[scores])
            mbarrier.arrive(k_empty.index(stage), count=1)
            weight, _, row_max, row_sum, gap = weigh_scores(
                scores, row_max, row_sum, gap, begin, low, high, offset, inner_begin, inner_end, scale,
                (OFFSET >> s) & 1, ENTROPY, score_layout,
            )  # fmt: skip
            done += 1
            mbarrier.wait(k_full.index(done % STAGES), done // STAGES & 1, pred=done < last)
            blank_low, blank_high = lowest - begin, highest - begin
            begin += COLUMNS
        # the values of a block are multiplied while the weights of the next are computed
        for first in range(begin, end, COLUMNS):
            stage, before = done % STAGES, (done - 1) % STAGES
            rounded = gl.convert_layout(weight.to(dtype), weight_layout)
            scores = multiply_keys(q_block, k_smem.index(stage), SIZE, score_layout)
            mbarrier.wait(v_full.index(before), (done - 1) // STAGES & 1)
            if PADDED:
                blank_vectors(
                    v_smem.index(before).reshape((COLUMNS, SIZE)), blank_low, blank_high, COLUMNS, whole_layout
                )
                blank_low, blank_high = lowest - first, highest - first
            acc = warpgroup_mma(rounded, v_smem.index(before).reshape((COLUMNS, SIZE)), acc, is_async=True)
            scores = warpgroup_mma_wait(1, deps=[scores])
            mbarrier.arrive(k_empty.index(stage), count=1)
            weight, decay, row_max, row_sum, gap = weigh_scores(
                scores, row_max, row_sum, gap, first, low, high, offset, inner_begin, inner_end, scale,
                (OFFSET >> s) & 1, ENTROPY, score_layout,
            )  # fmt: skip
            done += 1
            # here, so that the compiler does not move the wait for values before the weights
            mbarrier.wait(k_full.index(done % STAGES), done // STAGES & 1, pred=done < last)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(v_empty.index(before), count=1)
            acc = acc * gl.convert_layout(decay, out_row)[:, None]
    rounded = gl.convert_layout(weight.to(dtype), weight_layout)
    stage = (done - 1) % STAGES
    mbarrier.wait(v_full.index(stage), (done - 1) // STAGES & 1)
    if PADDED:
        blank_vectors(v_smem.index(stage).reshape((COLUMNS, SIZE)), blank_low, blank_high, COLUMNS, whole_layout)
    acc = warpgroup_mma(rounded, v_smem.index(stage).reshape((COLUMNS, SIZE)), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(v_empty.index(stage), count=1)
    mbarrier.arrive(tile_empty.index(slot), count=1)

    seen = row_sum != 0  # NaN stays
    row_sum = gl.where(seen, row_sum, 1.0)
    index = (batch.to(gl.int64) * heads + head) * queries + score_rows
    total = gl.where(seen, (row_max + gl.log2(row_sum)) * LN2, NOTHING)
    gl.store(lse + index, total, mask=rows_valid)
    if ENTROPY:
        gl.store(entropy + index, (gl.log2(row_sum) - gap / row_sum) * LN2, mask=rows_valid)
    acc = acc * gl.convert_layout(1.0 / row_sum, out_row)[:, None]
    staging = q_smem.index(PART * SPANS)  # whole lines of the output are written from here
    staging.store(acc.to(dtype))
    whole = staging.load(whole_layout)
    write_rows(out, out_strides, whole, start, head, batch, queries, SIZE, whole_layout)


@gluon.jit
def write_rows(x, strides, block, start, head, batch, length, SIZE: gl.constexpr, LAYOUT: gl.constexpr):
    """Write a block of a head's vectors, `start` on, as far as there are."""
    row = start + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    lane = gl.arange(0, SIZE, gl.SliceLayout(0, LAYOUT))
    pointer = x + batch.to(gl.int64) * strides[0] + head.to(gl.int64) * strides[1]
    gl.store(pointer + row[:, None].to(gl.int64) * strides[2] + lane[None, :], block, mask=(row < length)[:, None])


@gluon.jit
def write_nothing(results, place, heads, queries, SIZE: gl.constexpr, ENTROPY: gl.constexpr):
    """Write what queries without keys have: zeros, and a log-sum-exp of -inf."""
    out, lse, entropy, out_strides = results
    start, head, batch = place
    WARPS: gl.constexpr = ROWS // 16
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // SIZE, SIZE // 8], [WARPS, 1], [1, 0])
    zeros = gl.zeros((ROWS, SIZE), out.dtype.element_ty, layout)
    write_rows(out, out_strides, zeros, start, head, batch, queries, SIZE, layout)
    row_layout: gl.constexpr = gl.SliceLayout(1, layout)
    row = start + gl.arange(0, ROWS, row_layout)
    index = (batch.to(gl.int64) * heads + head) * queries + row
    gl.store(lse + index, gl.full((ROWS,), NOTHING, gl.float32, row_layout), mask=row < queries)
    if ENTROPY:
        gl.store(entropy + index, gl.zeros((ROWS,), gl.float32, row_layout), mask=row < queries)
