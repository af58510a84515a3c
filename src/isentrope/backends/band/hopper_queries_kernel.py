"""How the band's kernel for Hopper fetches tiles and prepares their queries, while others multiply the tile before.

In Gluon, as that kernel is.
"""

# mypy: ignore-errors
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from isentrope.backends.band.hopper_tile_kernel import (
    COLUMNS,
    NOTHING,
    NUMBERS,
    NUMBERS_OF_SPAN,
    NUMBERS_OF_TILE,
    ROWS,
    WARPGROUPS,
    load_rows,
    put_number,
    write_rows,
)

WARPS = gl.constexpr(4)  # that prepare queries


@gluon.jit
def prepare_queries(results, taken, query_buffers, tile_queue, operands, strides, spans, shape, SPANS: gl.constexpr,
                    SIZE: gl.constexpr, Q_STAGES: gl.constexpr, ROTATE: gl.constexpr, UNIFORM: gl.constexpr,
                    TAU: gl.constexpr, NORMALISE: gl.constexpr, INTERVALS: gl.constexpr, FOLDED: gl.constexpr,
                    ENTROPY: gl.constexpr):  # fmt: skip
    """Fetch tiles until none is left; write the keys that each sees, and its queries folded for each span.

    Outputs of tiles without keys (padding, or queries before all keys) are written here, and other warps skip them.
    """
    q_smem, q_full, q_empty = query_buffers
    tile_info, tile_full, tile_empty = tile_queue
    interval_batch, heads, all_heads, queries, keys, tiles, nearby = shape
    tile, step, item = gl.program_id(0), 0, 0
    while tile < tiles:
        start, head, batch = _locate_tile(tile, heads, all_heads, queries, nearby)
        first = _bound_blocks(0, start, batch, queries, keys, spans, interval_batch, INTERVALS)
        second, third = first, first
        if SPANS > 1:
            second = _bound_blocks(1, start, batch, queries, keys, spans, interval_batch, INTERVALS)
        if SPANS > 2:
            third = _bound_blocks(2, start, batch, queries, keys, spans, interval_batch, INTERVALS)
        bounds = first, second, third
        blocks = 0
        for s in gl.static_range(SPANS):
            blocks += (bounds[s][1] - bounds[s][0]) // COLUMNS
        if (not INTERVALS) or blocks > 0:
            slot = step % 2
            info = slot * NUMBERS
            mbarrier.wait(tile_empty.index(slot), (step // 2 & 1) ^ 1)
            for s in gl.static_range(SPANS):
                for n in gl.static_range(NUMBERS_OF_SPAN):
                    put_number(tile_info, info + NUMBERS_OF_TILE + NUMBERS_OF_SPAN * s + n, bounds[s][n])
            if first[1] == first[0]:  # the warpgroups begin with a block of the first span
                put_number(tile_info, info + NUMBERS_OF_TILE + 1, first[0] + COLUMNS)
                blocks += 1
            put_number(tile_info, info, start)
            put_number(tile_info, info + 1, head)
            put_number(tile_info, info + 2, batch)
            put_number(tile_info, info + 3, blocks)
            mbarrier.arrive(tile_full.index(slot), count=1)
            for s in gl.static_range(SPANS):
                buffer = item % Q_STAGES
                mbarrier.wait(q_empty.index(buffer), (item // Q_STAGES & 1) ^ 1)
                for part in range(WARPGROUPS):
                    _fold_queries(
                        s, q_smem.index(buffer * WARPGROUPS + part), start + part * ROWS, head, batch, queries,
                        operands, strides, SIZE, ROTATE, UNIFORM, TAU, NORMALISE, FOLDED,
                    )  # fmt: skip
                fence_async_shared()
                mbarrier.arrive(q_full.index(buffer), count=1)
                item += 1
            step += 1
        else:
            _write_nothing(results, start, head, batch, heads, queries, SIZE, ENTROPY)
        tile = gl.num_programs(0) + gl.atomic_add(taken, 1, sem="relaxed")  # a count, which orders no other memory
    mbarrier.wait(tile_empty.index(step % 2), (step // 2 & 1) ^ 1)
    put_number(tile_info, step % 2 * NUMBERS, -1)
    mbarrier.arrive(tile_full.index(step % 2), count=1)


@gluon.jit
def _locate_tile(tile, heads, all_heads, queries, nearby):
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
def _bound_blocks(s: gl.constexpr, start, batch, queries, keys, spans, interval_batch, INTERVALS: gl.constexpr):
    """Return the first key of the blocks that a tile sees of a span, and the one after them.

    Also return the first of the keys that all its queries see, the one after these, and the same of the keys that some
    query sees.
    """
    lefts, rights, lows, highs = spans
    ALL: gl.constexpr = ROWS * WARPGROUPS
    if INTERVALS:  # every warp reads all rows, so that none waits for another
        row = start + gl.arange(0, ALL, gl.BlockedLayout([ALL // 32], [32], [gl.num_warps()], [0]))
        valid = row < queries
        first = gl.load(lows[s] + batch * interval_batch + row, mask=valid, other=0)
        last = gl.load(highs[s] + batch * interval_batch + row, mask=valid, other=0)
        seen = first < last
        lowest = gl.min(gl.where(seen, first, keys), 0)
        highest = gl.max(gl.where(seen, last, 0), 0)
        inner_begin = gl.max(gl.where(valid, first, 0), 0)
        inner_end = gl.min(gl.where(valid, last, keys), 0)
    else:
        first_position = start + keys - queries
        last_position = gl.minimum(start + ALL, queries) - 1 + keys - queries
        lowest = gl.maximum(first_position - lefts[s], 0)
        highest = gl.minimum(last_position + rights[s] + 1, keys)
        inner_begin = gl.maximum(last_position - lefts[s], 0)
        inner_end = gl.minimum(first_position + rights[s] + 1, keys)
    begin = lowest // COLUMNS * COLUMNS
    end = gl.maximum(begin + gl.cdiv(highest - begin, COLUMNS) * COLUMNS, begin)
    return begin, end, inner_begin, inner_end, lowest, highest


@gluon.jit
def _fold_queries(s: gl.constexpr, target, start, head, batch, queries, operands, strides, SIZE: gl.constexpr,
                  ROTATE: gl.constexpr, UNIFORM: gl.constexpr, TAU: gl.constexpr, NORMALISE: gl.constexpr,
                  FOLDED: gl.constexpr):  # fmt: skip
    """Write a warpgroup's queries for a span to shared memory: normalised, rotated and multiplied by τ."""
    HALF: gl.constexpr = SIZE // 2
    COUNT: gl.constexpr = WARPS * 256 // HALF  # queries at a time, eight entries of each half to a thread
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HALF, HALF // 8], [WARPS, 1], [1, 0])
    row = start + gl.arange(0, COUNT, gl.SliceLayout(1, layout))
    lane = gl.arange(0, HALF, gl.SliceLayout(0, layout))
    loaded = _load_queries(s, row, lane, head, batch, queries, operands, strides, HALF, ROTATE, UNIFORM, TAU, FOLDED)
    for n in gl.static_range(ROWS // COUNT):
        a, b, c, d, factor = loaded
        if n + 1 < ROWS // COUNT:  # before the first use of these, so that it waits for the memory beside them
            row += COUNT
            loaded = _load_queries(
                s, row, lane, head, batch, queries, operands, strides, HALF, ROTATE, UNIFORM, TAU, FOLDED
            )
        x, y = a.to(gl.float32), b.to(gl.float32)
        if NORMALISE:
            x, y = _normalise_halves(x, y)
        if (ROTATE >> s) & 1:
            x, y = x * c - y * d, y * c + x * d
        if (TAU >> s) & 1:
            x, y = x * factor, y * factor
        block = gl.join(x, y).permute((0, 2, 1)).reshape((COUNT, SIZE)).to(target.dtype)
        target.slice(n * COUNT, COUNT).store(block)


@gluon.jit
def _load_queries(s: gl.constexpr, row, lane, head, batch, queries, operands, strides, HALF: gl.constexpr,
                  ROTATE: gl.constexpr, UNIFORM: gl.constexpr, TAU: gl.constexpr, FOLDED: gl.constexpr):  # fmt: skip
    """Load both halves of some queries, and their cosines, sines and factor where a span has these."""
    q, cos, sin, tau = operands
    q_batch, q_head, q_row, angle_strides, tau_strides = strides
    valid = row < queries
    own = q[s] if FOLDED else q[0]
    own += batch.to(gl.int64) * q_batch + head.to(gl.int64) * q_head
    a, b = _load_halves(own, row, valid, q_row, lane, HALF)
    c, d = _load_angles(
        cos[s], sin[s], angle_strides[s], batch, row, valid, lane, a, (ROTATE >> s) & 1, (UNIFORM >> s) & 1
    )
    factor = a
    if (TAU >> s) & 1:
        factor = load_rows(tau[s], tau_strides[s], batch, head, row, valid)[:, None]
    return a, b, c, d, factor


@gluon.jit
def _load_halves(q, row, valid, q_row, lane, HALF: gl.constexpr):
    """Load both halves of each query."""
    offset = row[:, None].to(gl.int64) * q_row + lane[None, :]
    a = gl.load(q + offset, mask=valid[:, None], other=0.0)
    return a, gl.load(q + offset + HALF, mask=valid[:, None], other=0.0)


@gluon.jit
def _load_angles(cos, sin, strides, batch, row, valid, lane, default, ROTATE: gl.constexpr, UNIFORM: gl.constexpr):
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
def _normalise_halves(a, b):
    """Divide vectors, given in halves, by their lengths; the largest entry first, or squares overflow."""
    peak = gl.maximum(gl.max(gl.abs(a), 1), gl.max(gl.abs(b), 1))
    peak = gl.where(peak > 0, peak, 1.0)[:, None]
    a, b = a / peak, b / peak
    factor = gl.rsqrt(gl.maximum(gl.sum(a * a, 1) + gl.sum(b * b, 1), 0.5))[:, None]
    return a * factor, b * factor


@gluon.jit
def _write_nothing(results, start, head, batch, heads, queries, SIZE: gl.constexpr, ENTROPY: gl.constexpr):
    """Write what queries without keys have: zeros, and a log-sum-exp of -inf."""
    out, lse, entropy, out_strides = results
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // SIZE, SIZE // 8], [WARPS, 1], [1, 0])
    zeros = gl.zeros((ROWS, SIZE), out.dtype.element_ty, layout)
    for part in range(WARPGROUPS):
        write_rows(out, out_strides, zeros, start + part * ROWS, head, batch, queries, SIZE, layout)
    rows: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    row = start + gl.arange(0, ROWS * WARPGROUPS, rows)
    index = (batch.to(gl.int64) * heads + head) * queries + row
    gl.store(lse + index, gl.full((ROWS * WARPGROUPS,), NOTHING, gl.float32, rows), mask=row < queries)
    if ENTROPY:
        gl.store(entropy + index, gl.zeros((ROWS * WARPGROUPS,), gl.float32, rows), mask=row < queries)
