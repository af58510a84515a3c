"""The band's backward for Hopper, in Gluon: gradients of queries, tile by tile through the keys that it sees.

Imported only where Triton is installed.
"""

# mypy: ignore-errors
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from isentrope.backends.band.hopper_gradient_tile_kernel import (
    CONSUMER_REGISTERS,
    PRODUCER_REGISTERS,
    TILE,
    allocate_tiles,
    differentiate,
    load_bounds,
    load_terms,
    locate_vectors,
    multiply_blocks,
    write_gradients,
)
from isentrope.backends.band.hopper_tile_kernel import (
    NOTHING,
    ROWS,
    WARPGROUPS,
    blank_vectors,
    copy_block,
    get_number,
    put_number,
)

NUMBERS = gl.constexpr(5)  # of a tile: bounds of its keys


@gluon.jit
def _copy_keys(operands, shared, shape, GROUPS: gl.constexpr, STAGES: gl.constexpr):
    """Copy tiles of queries and their gradients, and for each the blocks of keys and values that it sees."""
    lows, highs, q, k, v, grad = operands
    q_smem, g_smem, k_smem, v_smem, numbers, q_full, q_empty, kv_full, kv_empty = shared
    interval_batch, range_batch, heads, batches, queries, keys, tiles, nearby = shape
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    done, step = 0, 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        start, of_all = locate_vectors(tile, gl.cdiv(queries, TILE), heads * batches, nearby, True)
        head, batch = of_all % heads, of_all // heads
        slot = step % 2
        row = start + gl.arange(0, TILE, layout)
        low, high = load_bounds(lows, highs, batch * interval_batch, row, queries)
        seen = (low < high) & (row < queries)
        lowest, highest = gl.min(gl.where(seen, low, keys), 0), gl.max(gl.where(seen, high, 0), 0)
        begin = lowest // ROWS * ROWS
        mbarrier.wait(q_empty.index(slot), (step // 2 & 1) ^ 1)
        put_number(numbers, NUMBERS * slot, begin)
        put_number(numbers, NUMBERS * slot + 1, highest)
        put_number(numbers, NUMBERS * slot + 2, gl.max(low, 0))
        put_number(numbers, NUMBERS * slot + 3, gl.min(high, 0))
        put_number(numbers, NUMBERS * slot + 4, lowest)
        mbarrier.expect(q_full.index(slot), WARPGROUPS * (q.block_type.nbytes + grad.block_type.nbytes))
        for part in gl.static_range(WARPGROUPS):
            corner = [batch, head, start + part * ROWS, 0]
            copy_block(q, corner, q_full.index(slot), q_smem.index(slot * WARPGROUPS + part))
            copy_block(grad, corner, q_full.index(slot), g_smem.index(slot * WARPGROUPS + part))
        for first in range(begin, highest, ROWS):
            stage = done % STAGES
            mbarrier.wait(kv_empty.index(stage), (done // STAGES & 1) ^ 1)
            mbarrier.expect(kv_full.index(stage), k.block_type.nbytes + v.block_type.nbytes)
            copy_block(k, [batch, head // GROUPS, first, 0], kv_full.index(stage), k_smem.index(stage))
            copy_block(v, [batch, head // GROUPS, first, 0], kv_full.index(stage), v_smem.index(stage))
            done += 1
        step += 1


@gluon.jit
def _sum_over_keys(PART: gl.constexpr, rows, dq, dq_strides, score_scale, scale, shared, shape, SIZE: gl.constexpr,
                   STAGES: gl.constexpr, PADDED: gl.constexpr):  # fmt: skip
    """Compute dq of the 64 queries that a warpgroup has of each tile."""
    terms, lows, highs = rows
    q_smem, g_smem, k_smem, v_smem, numbers, q_full, q_empty, kv_full, kv_empty = shared
    interval_batch, range_batch, heads, batches, queries, keys, tiles, nearby = shape
    dtype: gl.constexpr = q_smem.dtype
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [ROWS // 16, 1], [16, ROWS, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [ROWS // 16, 1], [16, SIZE, 16])
    weight_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    whole_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // SIZE, SIZE // 8], [ROWS // 16, 1], [1, 0])
    column = gl.arange(0, ROWS, gl.SliceLayout(0, score_layout))[None, :]
    done, step = 0, 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        start, of_all = locate_vectors(tile, gl.cdiv(queries, TILE), heads * batches, nearby, True)
        slot = step % 2
        row = start + PART * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, score_layout))
        of_head = of_all.to(gl.int64) * queries
        batch = of_all // heads
        low, high = load_bounds(lows, highs, batch * interval_batch, row, queries)
        lse, delta = load_terms(terms, batches.to(gl.int64) * heads * queries, of_head, row, queries)
        mbarrier.wait(q_full.index(slot), step // 2 & 1)
        begin, end = get_number(numbers, NUMBERS * slot), get_number(numbers, NUMBERS * slot + 1)
        inner_begin, inner_end = get_number(numbers, NUMBERS * slot + 2), get_number(numbers, NUMBERS * slot + 3)
        lowest = get_number(numbers, NUMBERS * slot + 4)
        q_block = q_smem.index(slot * WARPGROUPS + PART).reshape((ROWS, SIZE))
        g_block = g_smem.index(slot * WARPGROUPS + PART).reshape((ROWS, SIZE))
        acc = gl.zeros((ROWS, SIZE), gl.float32, acc_layout)
        for first in range(begin, end, ROWS):
            stage = done % STAGES
            mbarrier.wait(kv_full.index(stage), done // STAGES & 1)
            k_block, v_block = k_smem.index(stage).reshape((ROWS, SIZE)), v_smem.index(stage).reshape((ROWS, SIZE))
            if PADDED:
                blank_vectors(k_block, lowest - first, end - first, ROWS, whole_layout)
            scores = multiply_blocks(q_block, k_block, score_layout)
            products = multiply_blocks(g_block, v_block, score_layout)
            scores = warpgroup_mma_wait(1, deps=[scores])
            below = scores * score_scale - lse[:, None]
            if (first < inner_begin) | (first + ROWS > inner_end):
                visible = (column >= (low - first)[:, None]) & (column < (high - first)[:, None])
                below = gl.where(visible, below, NOTHING)
            weight = gl.exp2(below)
            products = warpgroup_mma_wait(0, deps=[products])
            slope = differentiate(weight, products - delta[:, None], PADDED)
            rounded = gl.convert_layout(slope.to(dtype), weight_layout)
            acc = warpgroup_mma(rounded, k_block, acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(kv_empty.index(stage), count=1)
            done += 1
        place = start + PART * ROWS, of_all % heads, batch, queries
        write_gradients(dq, dq_strides, acc, scale, q_block, place, SIZE)
        fence_async_shared()  # before the copy engine writes where gradients were
        mbarrier.arrive(q_empty.index(slot), count=1)
        step += 1


# arguments that change with length or heads are not specialised: one kernel serves them all
@gluon.jit(do_not_specialize=[
    "interval_batch", "range_batch", "heads", "batches", "queries", "keys", "tiles", "nearby",
])  # fmt: skip
def compute_query_gradients(
    terms, lows, highs, q, k, v, grad, dq, dq_batch, dq_head, dq_row, interval_batch, range_batch, heads, batches,
    queries, keys, tiles, nearby, score_scale, scale,
    GROUPS: gl.constexpr, SIZE: gl.constexpr, STAGES: gl.constexpr, PADDED: gl.constexpr,
):  # fmt: skip
    """Compute dq."""
    q_smem, g_smem, k_smem, v_smem, q_full, q_empty, kv_full, kv_empty = allocate_tiles(q, STAGES, SIZE)
    numbers = gl.allocate_shared_memory(gl.int32, [2 * NUMBERS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    shared = q_smem, g_smem, k_smem, v_smem, numbers, q_full, q_empty, kv_full, kv_empty
    shape = interval_batch, range_batch, heads, batches, queries, keys, tiles, nearby
    rows, strides = (terms, lows, highs), (dq_batch, dq_head, dq_row)
    gl.warp_specialize(
        [
            (_sum_over_keys, (0, rows, dq, strides, score_scale, scale, shared, shape, SIZE, STAGES, PADDED)),
            (_sum_over_keys, (1, rows, dq, strides, score_scale, scale, shared, shape, SIZE, STAGES, PADDED)),
            (_copy_keys, ((lows, highs, q, k, v, grad), shared, shape, GROUPS, STAGES)),
        ],
        [ROWS // 16, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
