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
# of a tile: its first query, -1 after the last tile, its head, batch row and blocks of keys; then bounds of each span
NUMBERS_OF_TILE, NUMBERS_OF_SPAN = gl.constexpr(4), gl.constexpr(6)
NUMBERS = gl.constexpr(4 + 6 * MAX_SPANS)
LN2 = gl.constexpr(log(2))
NOTHING = gl.constexpr(float("-inf"))
HIDDEN = gl.constexpr(-1e30)  # in place of -inf, since 0 · -inf is not a number
LOWEST = gl.constexpr(-1e20)  # below any score of a key that is seen, above any hidden one


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
def weigh_scores(scores, row_max, row_sum, gap, first, low, extent, offset, inner_begin, inner_end, scale,
           HAS_OFFSET: gl.constexpr, ENTROPY: gl.constexpr, LAYOUT: gl.constexpr):  # fmt: skip
    """Add a block of scores t (to base 2) to the running softmax, and to gap = Σ 2^{t - max} (t - max) for an ENTROPY.

    `first` is the block's first key; each query sees `extent` keys from `low` on. Return weights, the factor of what
    has been added before, and the new maximum, sum and gap.
    """
    if (first < inner_begin) | (first + COLUMNS > inner_end):
        past_low = gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))[None, :] + (first - low)[:, None]
        visible = past_low.to(gl.uint32, bitcast=True) < extent[:, None].to(gl.uint32, bitcast=True)
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
def pack_pairs(weight, dtype: gl.constexpr):
    """Round neighbouring columns to half precision, two to an integer: as such a loop keeps them without unpacking."""
    first, second = gl.split(weight.reshape((ROWS, COLUMNS // 2, 2)))
    convert: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;" if dtype == gl.bfloat16 else "cvt.rn.f16x2.f32 $0, $2, $1;"
    return gl.inline_asm_elementwise(convert, "=r,f,f", [first, second], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def unpack_pairs(pairs, dtype: gl.constexpr, LAYOUT: gl.constexpr):
    """Return the columns of `pack_pairs`, ready to multiply with values."""
    first, second = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [pairs], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
    )
    both = gl.join(first, second).reshape((ROWS, COLUMNS)).to(dtype, bitcast=True)
    return gl.convert_layout(both, LAYOUT, assert_trivial=True)


@gluon.jit
def load_limits(s: gl.constexpr, batch, head, row, spans, offsets, shape, INTERVALS: gl.constexpr,
                OFFSET: gl.constexpr, LAYOUT: gl.constexpr):  # fmt: skip
    """Return the first key of a span that each query sees, how many it sees, and the offset of its scores."""
    lefts, rights, lows, highs = spans
    tensors, offset_strides = offsets
    interval_batch, heads, all_heads, queries, keys, tiles, nearby = shape
    valid = row < queries
    if INTERVALS:
        low = gl.load(lows[s] + batch * interval_batch + row, mask=valid, other=0)
        high = gl.load(highs[s] + batch * interval_batch + row, mask=valid, other=0)
    else:
        position = row + keys - queries
        low, high = position - lefts[s], gl.minimum(position + rights[s] + 1, keys)
    offset = gl.zeros((ROWS,), gl.float32, LAYOUT)
    if (OFFSET >> s) & 1:
        offset = load_rows(tensors[s], offset_strides[s], batch, head, row, valid) / LN2
    return low, gl.maximum(high - low, 0), offset


@gluon.jit
def attend_tile(PART: gl.constexpr, place, slot, done, last, item, results, scale, shared, spans, offsets, shape,
                SPANS: gl.constexpr, SIZE: gl.constexpr, STAGES: gl.constexpr, Q_STAGES: gl.constexpr,
                OFFSET: gl.constexpr, INTERVALS: gl.constexpr, ENTROPY: gl.constexpr,
                PADDED: gl.constexpr):  # fmt: skip
    """Compute a warpgroup's queries of a tile, from the `done`-th block of keys of a program to the `last`-th.

    Its queries for each span are in the `item`-th buffer of a program, and those after it.
    """
    start, head, batch = place
    out, lse, entropy, out_strides = results
    query_buffers, key_buffers, tile_queue = shared
    q_smem, q_full, q_empty = query_buffers
    k_smem, v_smem, k_full, k_empty, v_full, v_empty = key_buffers
    tile_info, tile_full, tile_empty = tile_queue
    heads, queries = shape[1], shape[3]
    dtype: gl.constexpr = out.dtype.element_ty
    WARPS: gl.constexpr = ROWS // 16
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, COLUMNS, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, SIZE, 16])
    weight_layout: gl.constexpr = gl.DotOperandLayout(0, out_layout, 2)
    score_row: gl.constexpr = gl.SliceLayout(1, score_layout)
    out_row: gl.constexpr = gl.SliceLayout(1, out_layout)
    whole_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // SIZE, SIZE // 8], [WARPS, 1], [1, 0])

    score_rows = start + gl.arange(0, ROWS, score_row)
    row_max = gl.full((ROWS,), NOTHING, gl.float32, score_row)
    row_sum, gap = gl.zeros((ROWS,), gl.float32, score_row), gl.zeros((ROWS,), gl.float32, score_row)
    acc = gl.zeros((ROWS, SIZE), gl.float32, out_layout)
    upcoming = load_limits(0, batch, head, score_rows, spans, offsets, shape, INTERVALS, OFFSET, score_row)
    mbarrier.wait(k_full.index(done % STAGES), done // STAGES & 1)
    for s in gl.static_range(SPANS):
        number = slot * NUMBERS + NUMBERS_OF_TILE + NUMBERS_OF_SPAN * s
        begin, end = get_number(tile_info, number), get_number(tile_info, number + 1)
        inner_begin, inner_end = get_number(tile_info, number + 2), get_number(tile_info, number + 3)
        lowest, highest = get_number(tile_info, number + 4), get_number(tile_info, number + 5)
        low, extent, offset = upcoming
        if s + 1 < SPANS:  # loaded while the blocks of this span are multiplied
            upcoming = load_limits(s + 1, batch, head, score_rows, spans, offsets, shape, INTERVALS, OFFSET, score_row)
        buffer = (item + s) % Q_STAGES
        mbarrier.wait(q_full.index(buffer), (item + s) // Q_STAGES & 1)
        q_block = q_smem.index(buffer * WARPGROUPS + PART)
        if s == 0:
            stage = done % STAGES
            scores = multiply_keys(q_block, k_smem.index(stage), SIZE, score_layout)
            scores = warpgroup_mma_wait(0, deps=[scores])
            mbarrier.arrive(k_empty.index(stage), count=1)
            weight, _, row_max, row_sum, gap = weigh_scores(
                scores, row_max, row_sum, gap, begin, low, extent, offset, inner_begin, inner_end, scale,
                (OFFSET >> s) & 1, ENTROPY, score_layout,
            )  # fmt: skip
            pairs = pack_pairs(weight, dtype)
            done += 1
            mbarrier.wait(k_full.index(done % STAGES), done // STAGES & 1, pred=done < last)
            blank_low, blank_high = lowest - begin, highest - begin
            begin += COLUMNS
        # the values of a block are multiplied while the weights of the next are computed
        for first in range(begin, end, COLUMNS):
            stage, before = done % STAGES, (done - 1) % STAGES
            rounded = unpack_pairs(pairs, dtype, weight_layout)
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
                scores, row_max, row_sum, gap, first, low, extent, offset, inner_begin, inner_end, scale,
                (OFFSET >> s) & 1, ENTROPY, score_layout,
            )  # fmt: skip
            pairs = pack_pairs(weight, dtype)
            done += 1
            # here, so that the compiler does not move the wait for values before the weights
            mbarrier.wait(k_full.index(done % STAGES), done // STAGES & 1, pred=done < last)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(v_empty.index(before), count=1)
            acc = acc * gl.convert_layout(decay, out_row)[:, None]
        if s + 1 < SPANS:
            mbarrier.arrive(q_empty.index(buffer), count=1)
    rounded = unpack_pairs(pairs, dtype, weight_layout)
    stage = (done - 1) % STAGES
    mbarrier.wait(v_full.index(stage), (done - 1) // STAGES & 1)
    if PADDED:
        blank_vectors(v_smem.index(stage).reshape((COLUMNS, SIZE)), blank_low, blank_high, COLUMNS, whole_layout)
    acc = warpgroup_mma(rounded, v_smem.index(stage).reshape((COLUMNS, SIZE)), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(v_empty.index(stage), count=1)

    seen = row_sum != 0  # NaN stays
    row_sum = gl.where(seen, row_sum, 1.0)
    index = (batch.to(gl.int64) * heads + head) * queries + score_rows
    total = gl.where(seen, (row_max + gl.log2(row_sum)) * LN2, NOTHING)
    gl.store(lse + index, total, mask=score_rows < queries)
    if ENTROPY:
        gl.store(entropy + index, (gl.log2(row_sum) - gap / row_sum) * LN2, mask=score_rows < queries)
    acc = acc * gl.convert_layout(1.0 / row_sum, out_row)[:, None]
    q_block.store(acc.to(dtype))  # whole lines of the output are written from where the last span's queries were
    whole = q_block.load(whole_layout)
    mbarrier.arrive(q_empty.index(buffer), count=1)
    mbarrier.arrive(tile_empty.index(slot), count=1)
    write_rows(out, out_strides, whole, start, head, batch, queries, SIZE, whole_layout)


@gluon.jit
def write_rows(x, strides, block, start, head, batch, length, SIZE: gl.constexpr, LAYOUT: gl.constexpr):
    """Write a block of a head's vectors, `start` on, as far as there are."""
    row = start + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    lane = gl.arange(0, SIZE, gl.SliceLayout(0, LAYOUT))
    pointer = x + batch.to(gl.int64) * strides[0] + head.to(gl.int64) * strides[1]
    gl.store(pointer + row[:, None].to(gl.int64) * strides[2] + lane[None, :], block, mask=(row < length)[:, None])
