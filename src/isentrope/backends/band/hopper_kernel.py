"""The band's kernel for Hopper, in Gluon: several spans of keys in one pass. Imported only where Triton is installed.

Two warpgroups have 64 queries each and share the keys and values that a further warp copies, so that every block is
read once for 128 queries, and each multiplies a block while it takes the exponentials of the one before, as
FlashAttention-3 does (Shah et al. 2024, arXiv:2407.08608). A program goes through several tiles of queries; a third
warpgroup prepares those of the next.
"""

# mypy: ignore-errors
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from isentrope.backends.band.hopper_queries_kernel import WARPS, prepare_queries
from isentrope.backends.band.hopper_tile_kernel import (
    COLUMNS,
    NUMBERS,
    NUMBERS_OF_SPAN,
    NUMBERS_OF_TILE,
    ROWS,
    WARPGROUPS,
    attend_tile,
    copy_block,
    get_number,
)

STAGES = {64: 4, 128: 2}  # blocks of keys and of values under way, by head size
Q_STAGES = 3  # buffers of a tile's queries for one span
# of a thread; all four warpgroups together have four times 128
CONSUMER_REGISTERS, PREPARE_REGISTERS, PRODUCER_REGISTERS = gl.constexpr(208), gl.constexpr(72), gl.constexpr(24)
CACHED_BYTES = 24 << 20  # of keys and values that programs read at a time, for the L2 cache


@gluon.jit
def _copy(k0, k1, k2, v, key_buffers, tile_queue, SPANS: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr):
    """Copy the blocks of keys and values of all tiles, each as soon as both warpgroups are done with an earlier one."""
    k_smem, v_smem, k_full, k_empty, v_full, v_empty = key_buffers
    tile_info, tile_full, tile_empty = tile_queue
    k = k0, k1, k2
    done, step = 0, 0
    mbarrier.wait(tile_full.index(0), 0)
    start = get_number(tile_info, 0)
    while start >= 0:
        slot = step % 2
        info = slot * NUMBERS
        head, batch = get_number(tile_info, info + 1), get_number(tile_info, info + 2)
        for s in gl.static_range(SPANS):
            number = info + NUMBERS_OF_TILE + NUMBERS_OF_SPAN * s
            begin, end = get_number(tile_info, number), get_number(tile_info, number + 1)
            for first in range(begin, end, COLUMNS):
                stage, parity = done % STAGES, done // STAGES & 1
                corner = [batch, head // GROUPS, first, 0]
                mbarrier.wait(k_empty.index(stage), parity ^ 1)
                mbarrier.expect(k_full.index(stage), k[s].block_type.nbytes)
                copy_block(k[s], corner, k_full.index(stage), k_smem.index(stage))
                mbarrier.wait(v_empty.index(stage), parity ^ 1)
                mbarrier.expect(v_full.index(stage), v.block_type.nbytes)
                copy_block(v, corner, v_full.index(stage), v_smem.index(stage))
                done += 1
        mbarrier.arrive(tile_empty.index(slot), count=1)
        step += 1
        mbarrier.wait(tile_full.index(step % 2), step // 2 & 1)
        start = get_number(tile_info, step % 2 * NUMBERS)


@gluon.jit
def _multiply(PART: gl.constexpr, results, scale, shared, spans, offsets, shape, SPANS: gl.constexpr,
              SIZE: gl.constexpr, STAGES: gl.constexpr, Q_STAGES: gl.constexpr, OFFSET: gl.constexpr,
              INTERVALS: gl.constexpr, ENTROPY: gl.constexpr, PADDED: gl.constexpr):  # fmt: skip
    """Compute the 64 queries that a warpgroup has of each tile."""
    tile_info, tile_full, tile_empty = shared[2]
    done, step = 0, 0
    mbarrier.wait(tile_full.index(0), 0)
    start = get_number(tile_info, 0)
    while start >= 0:
        slot = step % 2
        info = slot * NUMBERS
        place = start + PART * ROWS, get_number(tile_info, info + 1), get_number(tile_info, info + 2)
        last = done + get_number(tile_info, info + 3)
        attend_tile(
            PART, place, slot, done, last, step * SPANS, results, scale, shared, spans, offsets, shape, SPANS, SIZE,
            STAGES, Q_STAGES, OFFSET, INTERVALS, ENTROPY, PADDED,
        )  # fmt: skip
        done = last
        step += 1
        mbarrier.wait(tile_full.index(step % 2), step // 2 & 1)
        start = get_number(tile_info, step % 2 * NUMBERS)


# arguments that change with length or heads are not specialised: one kernel serves them all; strides of angles are,
# multiples of 16 all of them, so that angles are loaded four at a time
@gluon.jit(do_not_specialize=[
    "tau_batch0", "tau_head0", "tau_batch1", "tau_head1", "tau_batch2", "tau_head2", "offset_batch0", "offset_head0",
    "offset_batch1", "offset_head1", "offset_batch2", "offset_head2", "left0", "right0", "left1", "right1", "left2",
    "right2", "interval_batch", "heads", "all_heads", "queries", "keys", "tiles", "nearby",
])  # fmt: skip
def _attend_spans(
    q0, q1, q2, k0, k1, k2, v, out, lse, entropy, taken, cos0, cos1, cos2, sin0, sin1, sin2, tau0, tau1, tau2,
    offset0, offset1, offset2, low0, low1, low2, high0, high1, high2, q_batch, q_head, q_row,
    out_batch, out_head, out_row,
    angle_batch0, angle_row0, tau_batch0, tau_head0, tau_row0, offset_batch0, offset_head0, offset_row0, left0, right0,
    angle_batch1, angle_row1, tau_batch1, tau_head1, tau_row1, offset_batch1, offset_head1, offset_row1, left1, right1,
    angle_batch2, angle_row2, tau_batch2, tau_head2, tau_row2, offset_batch2, offset_head2, offset_row2, left2, right2,
    interval_batch, heads, all_heads, queries, keys, tiles, nearby, scale,
    SPANS: gl.constexpr, GROUPS: gl.constexpr, SIZE: gl.constexpr, STAGES: gl.constexpr, Q_STAGES: gl.constexpr,
    ROTATE: gl.constexpr, UNIFORM: gl.constexpr, TAU: gl.constexpr, OFFSET: gl.constexpr, NORMALISE: gl.constexpr,
    INTERVALS: gl.constexpr, FOLDED: gl.constexpr, ENTROPY: gl.constexpr, PADDED: gl.constexpr,
):  # fmt: skip
    """Attend over up to three spans. ROTATE to OFFSET have a bit for each span; FOLDED: each has its queries."""
    dtype: gl.constexpr = q0.dtype.element_ty
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, SIZE], dtype)
    bar_layout: gl.constexpr = mbarrier.MBarrierLayout()
    q_smem = gl.allocate_shared_memory(dtype, [Q_STAGES * WARPGROUPS, ROWS, SIZE], q_layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, COLUMNS, SIZE], k0.layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, COLUMNS, SIZE], v.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], bar_layout)
    q_empty = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], bar_layout)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar_layout)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar_layout)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar_layout)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar_layout)
    tile_info = gl.allocate_shared_memory(gl.int32, [2 * NUMBERS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    tile_full = gl.allocate_shared_memory(gl.int64, [2, 1], bar_layout)
    tile_empty = gl.allocate_shared_memory(gl.int64, [2, 1], bar_layout)
    for slot in gl.static_range(2):
        mbarrier.init(tile_full.index(slot), count=1)
        mbarrier.init(tile_empty.index(slot), count=WARPGROUPS + 1)
    for buffer in gl.static_range(Q_STAGES):
        mbarrier.init(q_full.index(buffer), count=1)
        mbarrier.init(q_empty.index(buffer), count=WARPGROUPS)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=WARPGROUPS)
        mbarrier.init(v_empty.index(stage), count=WARPGROUPS)
    fence_async_shared()
    lefts, rights = (left0, left1, left2), (right0, right1, right2)
    lows, highs = (low0, low1, low2), (high0, high1, high2)
    angle_strides = (angle_batch0, angle_row0), (angle_batch1, angle_row1), (angle_batch2, angle_row2)
    tau_strides = (
        (tau_batch0, tau_head0, tau_row0), (tau_batch1, tau_head1, tau_row1), (tau_batch2, tau_head2, tau_row2),
    )  # fmt: skip
    offset_strides = (
        (offset_batch0, offset_head0, offset_row0), (offset_batch1, offset_head1, offset_row1),
        (offset_batch2, offset_head2, offset_row2),
    )  # fmt: skip
    spans = lefts, rights, lows, highs
    shape = interval_batch, heads, all_heads, queries, keys, tiles, nearby
    query_buffers = q_smem, q_full, q_empty
    key_buffers = k_smem, v_smem, k_full, k_empty, v_full, v_empty
    tile_queue = tile_info, tile_full, tile_empty
    shared = query_buffers, key_buffers, tile_queue
    operands = (q0, q1, q2), (cos0, cos1, cos2), (sin0, sin1, sin2), (tau0, tau1, tau2)
    offsets = (offset0, offset1, offset2), offset_strides
    results = out, lse, entropy, (out_batch, out_head, out_row)
    strides = q_batch, q_head, q_row, angle_strides, tau_strides
    gl.warp_specialize(
        [
            (_multiply, (0, results, scale, shared, spans, offsets, shape, SPANS, SIZE, STAGES, Q_STAGES, OFFSET,
                         INTERVALS, ENTROPY, PADDED)),
            (_multiply, (1, results, scale, shared, spans, offsets, shape, SPANS, SIZE, STAGES, Q_STAGES, OFFSET,
                         INTERVALS, ENTROPY, PADDED)),
            (prepare_queries, (results, taken, query_buffers, tile_queue, operands, strides, spans, shape, SPANS, SIZE,
                               Q_STAGES, ROTATE, UNIFORM, TAU, NORMALISE, INTERVALS, FOLDED, ENTROPY)),
            (_copy, (k0, k1, k2, v, key_buffers, tile_queue, SPANS, GROUPS, STAGES)),
        ],
        [ROWS // 16, WARPS, 1], [CONSUMER_REGISTERS, PREPARE_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
