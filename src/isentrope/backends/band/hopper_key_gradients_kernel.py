"""The band's backward for Hopper, in Gluon: gradients of keys and values, tile by tile through the queries that see it.

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
    copy_block,
    get_number,
    put_number,
)

UNMASKED, MASKED, SOME_UNSEEN = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)  # pairs of a block


@gluon.jit
def _blank_unseen(block, bounds, LAYOUT: gl.constexpr):
    """Put zeros into the queries of a block that see none of a tile's keys. Both warpgroups do."""
    for part in gl.static_range(4):  # few registers at a time
        packed = bounds.slice(part * (ROWS // 4), ROWS // 4).load(gl.SliceLayout(1, LAYOUT))
        some = block.slice(part * (ROWS // 4), ROWS // 4)
        some.store(gl.where(((packed & 0xFFFF) < (packed >> 16))[:, None], some.load(LAYOUT), 0.0))


@gluon.jit
def _copy_queries(operands, shared, shape, GROUPS: gl.constexpr, STAGES: gl.constexpr,
                  PADDED: gl.constexpr):  # fmt: skip
    """Copy tiles of keys and values, and for each the blocks of queries that see it, with what belongs to them."""
    terms, lows, highs, q, k, v, grad, ranges = operands
    k_smem, v_smem, q_smem, g_smem, numbers, bounds, floats, kv_full, kv_empty, q_full, q_empty = shared
    interval_batch, range_batch, heads, batches, queries, keys, tiles, nearby = shape
    layout: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    blocks, kv_heads = gl.cdiv(keys, TILE), heads // GROUPS
    count = batches.to(gl.int64) * heads * queries
    done, step = 0, 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        start, of_all = locate_vectors(tile, blocks, kv_heads * batches, nearby, False)
        kv_head, batch = of_all % kv_heads, of_all // kv_heads
        slot = step % 2
        pointer = ranges + batch * range_batch + start // TILE * 2
        first, last = gl.load(pointer), gl.load(pointer + 1)
        mbarrier.wait(kv_empty.index(slot), (step // 2 & 1) ^ 1)
        put_number(numbers, STAGES + 2 * slot, first)
        put_number(numbers, STAGES + 2 * slot + 1, last)
        mbarrier.expect(kv_full.index(slot), WARPGROUPS * (k.block_type.nbytes + v.block_type.nbytes))
        for part in gl.static_range(WARPGROUPS):
            corner = [batch, kv_head, start + part * ROWS, 0]
            copy_block(k, corner, kv_full.index(slot), k_smem.index(slot * WARPGROUPS + part))
            copy_block(v, corner, kv_full.index(slot), v_smem.index(slot * WARPGROUPS + part))
        for group in range(GROUPS):
            head = kv_head * GROUPS + group
            of_head = (batch * heads + head).to(gl.int64) * queries
            for block in range(first, last):
                stage = done % STAGES
                row = block * ROWS + gl.arange(0, ROWS, layout)
                low, high = load_bounds(lows, highs, batch * interval_batch, row, queries)
                lse, delta = load_terms(terms, count, of_head, row, queries)
                low = gl.minimum(gl.maximum(low - start, 0), TILE)
                high = gl.minimum(gl.maximum(high - start, 0), TILE)
                masked = gl.max(gl.where((low > 0) | (high < TILE), MASKED, UNMASKED), 0)
                if PADDED:
                    masked = gl.maximum(masked, gl.max(gl.where(low < high, UNMASKED, SOME_UNSEEN), 0))
                mbarrier.wait(q_empty.index(stage), (done // STAGES & 1) ^ 1)
                bounds.index(stage).store(low | (high << 16))
                floats.index(2 * stage).store(lse)
                floats.index(2 * stage + 1).store(delta)
                put_number(numbers, stage, masked)
                mbarrier.expect(q_full.index(stage), q.block_type.nbytes + grad.block_type.nbytes)
                copy_block(q, [batch, head, block * ROWS, 0], q_full.index(stage), q_smem.index(stage))
                copy_block(grad, [batch, head, block * ROWS, 0], q_full.index(stage), g_smem.index(stage))
                done += 1
        step += 1


@gluon.jit
def _sum_over_queries(PART: gl.constexpr, results, score_scale, scale, shared, shape, GROUPS: gl.constexpr,
                      SIZE: gl.constexpr, STAGES: gl.constexpr, PADDED: gl.constexpr):  # fmt: skip
    """Compute dk and dv of the 64 keys that a warpgroup has of each tile."""
    dk, dv, dk_strides, dv_strides = results
    k_smem, v_smem, q_smem, g_smem, numbers, bounds, floats, kv_full, kv_empty, q_full, q_empty = shared
    interval_batch, range_batch, heads, batches, queries, keys, tiles, nearby = shape
    dtype: gl.constexpr = q_smem.dtype
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [ROWS // 16, 1], [16, ROWS, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [ROWS // 16, 1], [16, SIZE, 16])
    weight_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    column: gl.constexpr = gl.SliceLayout(0, score_layout)
    whole_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // SIZE, SIZE // 8], [ROWS // 16, 1], [1, 0])
    blocks, kv_heads = gl.cdiv(keys, TILE), heads // GROUPS
    done, step = 0, 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        start, of_all = locate_vectors(tile, blocks, kv_heads * batches, nearby, False)
        slot = step % 2
        mbarrier.wait(kv_full.index(slot), step // 2 & 1)
        first = get_number(numbers, STAGES + 2 * slot)
        last = get_number(numbers, STAGES + 2 * slot + 1)
        k_block = k_smem.index(slot * WARPGROUPS + PART).reshape((ROWS, SIZE))
        v_block = v_smem.index(slot * WARPGROUPS + PART).reshape((ROWS, SIZE))
        key = PART * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, score_layout))  # of the tile
        dk_acc = gl.zeros((ROWS, SIZE), gl.float32, acc_layout)
        dv_acc = gl.zeros((ROWS, SIZE), gl.float32, acc_layout)
        for _ in range((last - first) * GROUPS):
            stage = done % STAGES
            mbarrier.wait(q_full.index(stage), done // STAGES & 1)
            q_block, g_block = q_smem.index(stage).reshape((ROWS, SIZE)), g_smem.index(stage).reshape((ROWS, SIZE))
            masked = get_number(numbers, stage)
            if PADDED:
                if masked == SOME_UNSEEN:
                    _blank_unseen(q_block, bounds.index(stage), whole_layout)
                    _blank_unseen(g_block, bounds.index(stage), whole_layout)
                    fence_async_shared()
            scores = multiply_blocks(k_block, q_block, score_layout)
            products = multiply_blocks(v_block, g_block, score_layout)
            scores = warpgroup_mma_wait(1, deps=[scores])
            below = scores * score_scale - floats.index(2 * stage).load(column)[None, :]
            if masked != UNMASKED:
                packed = bounds.index(stage).load(column)[None, :]
                visible = (key[:, None] >= (packed & 0xFFFF)) & (key[:, None] < (packed >> 16))
                below = gl.where(visible, below, NOTHING)
            weight = gl.exp2(below)
            rounded = gl.convert_layout(weight.to(dtype), weight_layout)
            dv_acc = warpgroup_mma(rounded, g_block, dv_acc, is_async=True)
            products = warpgroup_mma_wait(1, deps=[products])
            slope = differentiate(weight, products - floats.index(2 * stage + 1).load(column)[None, :], PADDED)
            rounded_slope = gl.convert_layout(slope.to(dtype), weight_layout)
            dk_acc = warpgroup_mma(rounded_slope, q_block, dk_acc, is_async=True)
            dv_acc, dk_acc = warpgroup_mma_wait(0, deps=[dv_acc, dk_acc])
            mbarrier.arrive(q_empty.index(stage), count=1)
            done += 1
        place = start + PART * ROWS, of_all % kv_heads, of_all // kv_heads, keys
        write_gradients(dk, dk_strides, dk_acc, scale, k_block, place, SIZE)
        write_gradients(dv, dv_strides, dv_acc, 1.0, v_block, place, SIZE)
        fence_async_shared()  # before the copy engine writes where gradients were
        mbarrier.arrive(kv_empty.index(slot), count=1)
        step += 1


# arguments that change with length or heads are not specialised: one kernel serves them all
@gluon.jit(do_not_specialize=[
    "interval_batch", "range_batch", "heads", "batches", "queries", "keys", "tiles", "nearby",
])  # fmt: skip
def compute_key_gradients(
    terms, lows, highs, q, k, v, grad, dk, dv, ranges, dk_batch, dk_head, dk_row, dv_batch, dv_head, dv_row,
    interval_batch, range_batch, heads, batches, queries, keys, tiles, nearby, score_scale, scale,
    GROUPS: gl.constexpr, SIZE: gl.constexpr, STAGES: gl.constexpr, PADDED: gl.constexpr,
):  # fmt: skip
    """Compute dk and dv, over all query heads that share a key head."""
    k_smem, v_smem, q_smem, g_smem, kv_full, kv_empty, q_full, q_empty = allocate_tiles(k, STAGES, SIZE)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    numbers = gl.allocate_shared_memory(gl.int32, [STAGES + 4, 1], flat)
    bounds = gl.allocate_shared_memory(gl.int32, [STAGES, ROWS], flat)
    floats = gl.allocate_shared_memory(gl.float32, [2 * STAGES, ROWS], flat)
    shared = k_smem, v_smem, q_smem, g_smem, numbers, bounds, floats, kv_full, kv_empty, q_full, q_empty
    shape = interval_batch, range_batch, heads, batches, queries, keys, tiles, nearby
    operands = terms, lows, highs, q, k, v, grad, ranges
    results = dk, dv, (dk_batch, dk_head, dk_row), (dv_batch, dv_head, dv_row)
    gl.warp_specialize(
        [
            (_sum_over_queries, (0, results, score_scale, scale, shared, shape, GROUPS, SIZE, STAGES, PADDED)),
            (_sum_over_queries, (1, results, score_scale, scale, shared, shape, GROUPS, SIZE, STAGES, PADDED)),
            (_copy_queries, (operands, shared, shape, GROUPS, STAGES, PADDED)),
        ],
        [ROWS // 16, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
