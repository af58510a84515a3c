"""What the band's kernel for Hopper does with a tile of queries and a block of keys. In Gluon, as that kernel is."""

# mypy: ignore-errors
from __future__ import annotations

from math import log

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma

from isentrope.backends.band.key_span import MAX_SPANS, TILE_QUERIES

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
def bound_blocks(start, batch, queries, keys, left, right, low, high, interval_batch, LEAST: gl.constexpr,
                  INTERVALS: gl.constexpr):  # fmt: skip
    """Return the first key of the blocks that a tile sees of a span, and the one after them.

    There are LEAST blocks or more. Also return the first of the keys that all its queries see, the one after these, and
    the same of the keys that some query sees.
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
    end = gl.maximum(begin + gl.cdiv(highest - begin, COLUMNS) * COLUMNS, begin + LEAST * COLUMNS)
    return begin, end, inner_begin, inner_end, lowest, highest


@gluon.jit
def put_number(tile_info, slot, n: gl.constexpr, value):
    """Write a number of a tile for the warpgroups."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    tile_info.index(slot * NUMBERS + n).store(gl.full((1,), value, gl.int32, layout))


@gluon.jit
def get_number(tile_info, slot, n: gl.constexpr):
    """Read a number of a tile."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(tile_info.index(slot * NUMBERS + n).load(layout), 0)


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
def load_angles(cos, sin, strides, batch, row, valid, lane, default, ROTATE: gl.constexpr):
    """Load the cosines and sines of each query, or return a default where there are none."""
    c, d = default, default
    if ROTATE:
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
def blank_values(v_block, low, high, LAYOUT: gl.constexpr):
    """Put zeros in place of the values before `low` and from `high` on, which may be NaN. Both warpgroups do."""
    if (low > 0) | (high < COLUMNS):
        for part in gl.static_range(4):  # few registers at a time
            row = part * (COLUMNS // 4) + gl.arange(0, COLUMNS // 4, gl.SliceLayout(1, LAYOUT))
            some = v_block.slice(part * (COLUMNS // 4), COLUMNS // 4)
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
