"""The band's kernel for Hopper, in Gluon: several spans of keys in one pass. Imported only where Triton is installed.

Two warpgroups have 64 queries each and share the keys and values that a further warp copies, so that every block is
read once for 128 queries, and each multiplies a block while it takes the exponentials of the one before, as
FlashAttention-3 does (Shah et al. 2024, arXiv:2407.08608). A program goes through several tiles of queries.
"""

# mypy: ignore-errors
from __future__ import annotations

from math import log

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from isentrope.backends.band.copy_engine import describe_blocks
from isentrope.backends.band.hopper_tile_kernel import (
    COLUMNS,
    LN2,
    NOTHING,
    NUMBERS,
    ROWS,
    WARPGROUPS,
    blank_values,
    bound_blocks,
    get_number,
    load_angles,
    load_halves,
    load_rows,
    locate_tile,
    multiply_keys,
    normalise_halves,
    put_number,
    weigh_scores,
)
from isentrope.backends.band.key_span import MAX_SPANS, TILE_QUERIES, KeySpan
from isentrope.core.compile import count_multiprocessors
from isentrope.core.launching import launch_kernel
from isentrope.core.rotation_kernel import broadcast_strides, list_strides

# Triton 3.6 and 3.9 name it differently
copy_block = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
STAGES = {64: 4, 128: 2}  # blocks of keys and of values under way, by head size
CONSUMER_REGISTERS, PRODUCER_REGISTERS = gl.constexpr(240), gl.constexpr(24)
CACHED_BYTES = 24 << 20  # of keys and values that programs read at a time, for the L2 cache


def launch(
    spans: list[KeySpan],
    v: Tensor,
    scale: float,
    normalise: bool,
    padded: bool = False,
    entropy: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend over all spans, which share no key, with queries aligned with the last keys.

    Args:
        spans: one to three; either all have intervals or none, and their queries the same strides.
        v: values.
        scale: positive factor of the scores.
        normalise: whether to divide queries by their lengths.
        padded: whether keys and values that no query sees may be anything, NaN too.
        entropy: where to write that of each query's weights, (batch, heads, queries) in fp32.

    Returns:
        Output (batch, heads, queries, d) and log-sum-exp (batch, heads, queries); zeros and -inf without keys.
    """
    q, k = spans[0].q, spans[0].k
    batch, heads, queries, size = q.shape
    kv_heads, keys = k.shape[1:3]
    order = queries * heads * size, size, heads * size, 1  # as the band's other kernel
    out = q.new_empty_strided((batch, heads, queries, size), order)
    lse = q.new_empty((batch, heads, queries), dtype=torch.float32)
    if batch == 0:
        return out, lse
    tiles = -(-queries // TILE_QUERIES) * heads * batch
    nearby = max(1, CACHED_BYTES // ((1 + len(spans)) * keys * size * k.element_size())) * (heads // kv_heads)
    taken = torch.zeros(1, dtype=torch.int32, device=q.device)  # tiles after each program's first
    programs = min(tiles, count_multiprocessors(q.device))
    described = [describe_blocks(x.k, COLUMNS.value, swizzled=True) for x in spans]
    given = spans + [spans[0]] * (MAX_SPANS - len(spans))
    flags = {
        "ROTATE": sum((x.angles is not None) << n for n, x in enumerate(spans)),
        "TAU": sum((x.tau is not None) << n for n, x in enumerate(spans)),
        "OFFSET": sum((x.offset is not None) << n for n, x in enumerate(spans)),
    }
    intervals = spans[0].interval is not None
    numbers = []
    for x in given:
        numbers += [*broadcast_strides(x.angles and x.angles[0], 0, 2), *broadcast_strides(x.tau, 0, 1, 2),
                    *broadcast_strides(x.offset, 0, 1, 2), x.left, x.right]  # fmt: skip
    launch_kernel(
        _attend_spans,
        (programs, 1, 1),
        (
            *(x.q for x in given), *described, *[described[0]] * (MAX_SPANS - len(spans)),
            describe_blocks(v, COLUMNS.value, swizzled=True), out, lse, lse if entropy is None else entropy, taken,
            *(x.angles[0] if x.angles else lse for x in given), *(x.angles[1] if x.angles else lse for x in given),
            *(lse if x.tau is None else x.tau for x in given), *(lse if x.offset is None else x.offset for x in given),
            *(x.interval[0] if intervals else lse for x in given),
            *(x.interval[1] if intervals else lse for x in given),
        ),
        (
            *list_strides(q), *numbers, *broadcast_strides(spans[0].interval and spans[0].interval[0], 0),
            heads, heads * batch, queries, keys, tiles, nearby, scale / log(2),
        ),
        {
            "SPANS": len(spans), "GROUPS": heads // kv_heads, "SIZE": size, "STAGES": STAGES[size], **flags,
            "NORMALISE": normalise, "INTERVALS": intervals, "FOLDED": any(x.q is not q for x in spans),
            "ENTROPY": entropy is not None, "PADDED": padded,
        },
        {"num_warps": ROWS.value // 16},
    )  # fmt: skip
    return out, lse


@gluon.jit
def _copy(k0, k1, k2, v, taken, shared, spans, shape, SPANS: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr,
          INTERVALS: gl.constexpr):  # fmt: skip
    """Copy the blocks of keys and values of all tiles, each as soon as both warpgroups are done with an earlier one."""
    k_smem, v_smem, k_full, k_empty, v_full, v_empty, tile_info, tile_full, tile_empty = shared
    lefts, rights, lows, highs = spans
    interval_batch, heads, all_heads, queries, keys, tiles, nearby = shape
    k = k0, k1, k2
    done, tile, step = 0, gl.program_id(0), 0
    while tile < tiles:
        start, head, batch = locate_tile(tile, heads, all_heads, queries, nearby)
        slot = step % 2
        mbarrier.wait(tile_empty.index(slot), (step // 2 & 1) ^ 1)
        put_number(tile_info, slot, 0, tile)
        for s in gl.static_range(SPANS):
            begin, end, inner_begin, inner_end, lowest, highest = bound_blocks(
                start, batch, queries, keys, lefts[s], rights[s], lows[s], highs[s], interval_batch,
                1 if s == 0 else 0, INTERVALS,
            )  # fmt: skip
            put_number(tile_info, slot, 7 * s + 1, begin)
            put_number(tile_info, slot, 7 * s + 2, end)
            put_number(tile_info, slot, 7 * s + 3, inner_begin)
            put_number(tile_info, slot, 7 * s + 4, inner_end)
            put_number(tile_info, slot, 7 * s + 5, s)
            put_number(tile_info, slot, 7 * s + 6, lowest)
            put_number(tile_info, slot, 7 * s + 7, highest)
        mbarrier.arrive(tile_full.index(slot), count=1)
        for s in gl.static_range(SPANS):
            for first in range(get_number(tile_info, slot, 7 * s + 1), get_number(tile_info, slot, 7 * s + 2), COLUMNS):
                stage, parity = done % STAGES, done // STAGES & 1
                corner = [batch, head // GROUPS, first, 0]
                mbarrier.wait(k_empty.index(stage), parity ^ 1)
                mbarrier.expect(k_full.index(stage), k[s].block_type.nbytes)
                copy_block(k[s], corner, k_full.index(stage), k_smem.index(stage))
                mbarrier.wait(v_empty.index(stage), parity ^ 1)
                mbarrier.expect(v_full.index(stage), v.block_type.nbytes)
                copy_block(v, corner, v_full.index(stage), v_smem.index(stage))
                done += 1
        tile = gl.num_programs(0) + gl.atomic_add(taken, 1)
        step += 1
    mbarrier.wait(tile_empty.index(step % 2), (step // 2 & 1) ^ 1)
    put_number(tile_info, step % 2, 0, tile)
    mbarrier.arrive(tile_full.index(step % 2), count=1)


@gluon.jit
def _multiply(PART: gl.constexpr, results, scale, q_smem, shared, operands, strides, spans, shape, SPANS: gl.constexpr,
              SIZE: gl.constexpr, STAGES: gl.constexpr, ROTATE: gl.constexpr, TAU: gl.constexpr, OFFSET: gl.constexpr,
              NORMALISE: gl.constexpr, INTERVALS: gl.constexpr, FOLDED: gl.constexpr,
              ENTROPY: gl.constexpr, PADDED: gl.constexpr):  # fmt: skip
    """Compute the 64 queries that a warpgroup has of each tile."""
    out, lse, entropy = results
    k_smem, v_smem, k_full, k_empty, v_full, v_empty, tile_info, tile_full, tile_empty = shared
    q, cos, sin, tau, offsets = operands
    q_batch, q_head, q_row, angle_strides, tau_strides, offset_strides = strides
    lefts, rights, lows, highs = spans
    interval_batch, heads, all_heads, queries, keys, tiles, nearby = shape
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
    done, step = 0, 0
    mbarrier.wait(tile_full.index(0), 0)
    tile = get_number(tile_info, 0, 0)
    while tile < tiles:
        slot = step % 2
        tile_start, head, batch = locate_tile(tile, heads, all_heads, queries, nearby)
        start = tile_start + PART * ROWS
        row = start + gl.arange(0, ROWS, gl.SliceLayout(1, half_layout))
        valid = row < queries
        q_offset = batch.to(gl.int64) * q_batch + head.to(gl.int64) * q_head
        # all loads before the first use, so that they wait for the memory together
        a, b = load_halves(q[0] + q_offset, row, valid, q_row, lane, HALF)
        c0, d0 = load_angles(cos[0], sin[0], angle_strides[0], batch, row, valid, lane, a, ROTATE & 1)
        a1, b1, c1, d1, a2, b2, c2, d2 = a, b, c0, d0, a, b, c0, d0
        if SPANS > 1:
            if FOLDED:
                a1, b1 = load_halves(q[1] + q_offset, row, valid, q_row, lane, HALF)
            c1, d1 = load_angles(cos[1], sin[1], angle_strides[1], batch, row, valid, lane, a, ROTATE & 2)
        if SPANS > 2:
            if FOLDED:
                a2, b2 = load_halves(q[2] + q_offset, row, valid, q_row, lane, HALF)
            c2, d2 = load_angles(cos[2], sin[2], angle_strides[2], batch, row, valid, lane, a, ROTATE & 4)
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
        last = done
        for s in gl.static_range(SPANS):
            last += (get_number(tile_info, slot, 7 * s + 2) - get_number(tile_info, slot, 7 * s + 1)) // COLUMNS
        mbarrier.wait(k_full.index(done % STAGES), done // STAGES & 1)
        for s in gl.static_range(SPANS):
            begin, end = get_number(tile_info, slot, 7 * s + 1), get_number(tile_info, slot, 7 * s + 2)
            inner_begin, inner_end = get_number(tile_info, slot, 7 * s + 3), get_number(tile_info, slot, 7 * s + 4)
            low, high = position - lefts[s], gl.minimum(position + rights[s] + 1, keys)
            if INTERVALS:
                interval = batch * interval_batch + score_rows
                low = gl.load(lows[s] + interval, mask=rows_valid, other=0)
                high = gl.load(highs[s] + interval, mask=rows_valid, other=0)
            offset = zero
            if (OFFSET >> s) & 1:
                offset = load_rows(offsets[s], offset_strides[s], batch, head, score_rows, rows_valid) / LN2
            lowest, highest = get_number(tile_info, slot, 7 * s + 6), get_number(tile_info, slot, 7 * s + 7)
            # read rather than known, so that the compiler does not keep the addresses of all spans in registers
            q_block = q_smem.index(PART * SPANS + get_number(tile_info, slot, 7 * s + 5))
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
                    blank_values(v_smem.index(before).reshape((COLUMNS, SIZE)), blank_low, blank_high, whole_layout)
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
            blank_values(v_smem.index(stage).reshape((COLUMNS, SIZE)), blank_low, blank_high, whole_layout)
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
        out_rows = start + gl.arange(0, ROWS, gl.SliceLayout(1, whole_layout))
        out_lane = gl.arange(0, SIZE, gl.SliceLayout(0, whole_layout))
        pointer = out + ((batch.to(gl.int64) * queries + out_rows) * heads + head)[:, None] * SIZE + out_lane[None, :]
        gl.store(pointer, whole, mask=(out_rows < queries)[:, None])
        step += 1
        mbarrier.wait(tile_full.index(step % 2), step // 2 & 1)
        tile = get_number(tile_info, step % 2, 0)


# arguments that change with length or heads are not specialised: one kernel serves them all
@gluon.jit(do_not_specialize=[
    "angle_batch0", "angle_batch1", "angle_batch2", "tau_batch0", "tau_head0", "tau_batch1", "tau_head1", "tau_batch2",
    "tau_head2", "offset_batch0", "offset_head0", "offset_batch1", "offset_head1", "offset_batch2", "offset_head2",
    "left0", "right0", "left1", "right1", "left2", "right2", "interval_batch", "heads", "all_heads", "queries", "keys",
    "tiles", "nearby",
])  # fmt: skip
def _attend_spans(
    q0, q1, q2, k0, k1, k2, v, out, lse, entropy, taken, cos0, cos1, cos2, sin0, sin1, sin2, tau0, tau1, tau2,
    offset0, offset1, offset2, low0, low1, low2, high0, high1, high2, q_batch, q_head, q_row,
    angle_batch0, angle_row0, tau_batch0, tau_head0, tau_row0, offset_batch0, offset_head0, offset_row0, left0, right0,
    angle_batch1, angle_row1, tau_batch1, tau_head1, tau_row1, offset_batch1, offset_head1, offset_row1, left1, right1,
    angle_batch2, angle_row2, tau_batch2, tau_head2, tau_row2, offset_batch2, offset_head2, offset_row2, left2, right2,
    interval_batch, heads, all_heads, queries, keys, tiles, nearby, scale,
    SPANS: gl.constexpr, GROUPS: gl.constexpr, SIZE: gl.constexpr, STAGES: gl.constexpr, ROTATE: gl.constexpr,
    TAU: gl.constexpr, OFFSET: gl.constexpr, NORMALISE: gl.constexpr, INTERVALS: gl.constexpr, FOLDED: gl.constexpr,
    ENTROPY: gl.constexpr, PADDED: gl.constexpr,
):  # fmt: skip
    """Attend over up to three spans. ROTATE, TAU and OFFSET have a bit for each span; FOLDED: each has its queries."""
    dtype: gl.constexpr = q0.dtype.element_ty
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, SIZE], dtype)
    bar_layout: gl.constexpr = mbarrier.MBarrierLayout()
    q_smem = gl.allocate_shared_memory(dtype, [WARPGROUPS * SPANS, ROWS, SIZE], q_layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, COLUMNS, SIZE], k0.layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, COLUMNS, SIZE], v.layout)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar_layout)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar_layout)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar_layout)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar_layout)
    tile_info = gl.allocate_shared_memory(gl.int32, [2 * NUMBERS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    tile_full = gl.allocate_shared_memory(gl.int64, [2, 1], bar_layout)
    tile_empty = gl.allocate_shared_memory(gl.int64, [2, 1], bar_layout)
    for slot in gl.static_range(2):
        mbarrier.init(tile_full.index(slot), count=1)
        mbarrier.init(tile_empty.index(slot), count=WARPGROUPS)
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
    shared = k_smem, v_smem, k_full, k_empty, v_full, v_empty, tile_info, tile_full, tile_empty
    operands = (q0, q1, q2), (cos0, cos1, cos2), (sin0, sin1, sin2), (tau0, tau1, tau2), (offset0, offset1, offset2)
    results = out, lse, entropy
    strides = q_batch, q_head, q_row, angle_strides, tau_strides, offset_strides
    gl.warp_specialize(
        [
            (_multiply, (0, results, scale, q_smem, shared, operands, strides, spans, shape, SPANS, SIZE, STAGES,
                         ROTATE, TAU, OFFSET, NORMALISE, INTERVALS, FOLDED, ENTROPY, PADDED)),
            (_multiply, (1, results, scale, q_smem, shared, operands, strides, spans, shape, SPANS, SIZE, STAGES,
                         ROTATE, TAU, OFFSET, NORMALISE, INTERVALS, FOLDED, ENTROPY, PADDED)),
            (_copy, (k0, k1, k2, v, taken, shared, spans, shape, SPANS, GROUPS, STAGES, INTERVALS)),
        ],
        [ROWS // 16, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
