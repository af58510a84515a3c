"""What the band's backward for Hopper does with tiles and blocks of vectors. In Gluon, as that backward is."""

# mypy: ignore-errors
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma

from isentrope.backends.band.hopper_tile_kernel import ROWS, WARPGROUPS, write_rows
from isentrope.backends.band.key_span import TILE_QUERIES

TILE = gl.constexpr(TILE_QUERIES)  # queries or keys of a program at a time
CONSUMER_REGISTERS, PRODUCER_REGISTERS = gl.constexpr(240), gl.constexpr(24)


@gluon.jit
def locate_vectors(tile, blocks, all_heads, nearby, LAST_FIRST: gl.constexpr):
    """Return the first vector and the head, of all rows, of a tile.

    Tiles are in an order of `nearby` heads at a time, whose other operands the cache holds, and of these the longest of
    causal attention first.
    """
    several = tile // (nearby * blocks)
    count = gl.minimum(nearby, all_heads - several * nearby)
    within = tile - several * nearby * blocks
    block = within // count
    if LAST_FIRST:
        block = blocks - 1 - block
    return block * TILE, several * nearby + within % count


@gluon.jit
def load_bounds(lows, highs, offset, row, queries):
    """Load the intervals of some queries; those past the last see nothing."""
    valid = row < queries
    return gl.load(lows + offset + row, mask=valid, other=0), gl.load(highs + offset + row, mask=valid, other=0)


@gluon.jit
def load_terms(terms, count, of_head, row, queries):
    """Load the log-sum-exps of some queries and their rowsum(do ∘ o), of `count` queries in all heads."""
    valid = row < queries
    lse = gl.load(terms + of_head + row, mask=valid, other=float("inf"))
    return lse, gl.load(terms + count + of_head + row, mask=valid, other=0.0)


@gluon.jit
def multiply_blocks(a, b, LAYOUT: gl.constexpr):
    """Start the product of two blocks of vectors."""
    zeros = gl.zeros((ROWS, ROWS), gl.float32, LAYOUT)
    return warpgroup_mma(a, b.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def differentiate(weight, products, PADDED: gl.constexpr):
    """Return ds, given do·vᵀ - rowsum(do ∘ o), which may be NaN where one of a pair is padding."""
    slope = weight * products
    if PADDED:
        slope = gl.where(weight == 0, 0.0, slope)
    return slope


@gluon.jit
def write_gradients(x, strides, acc, scale, staging, place, SIZE: gl.constexpr):
    """Write a block of gradients; whole lines of half precision, through shared memory."""
    start, head, batch, length = place
    dtype: gl.constexpr = x.dtype.element_ty
    if dtype == gl.float32:
        acc_layout: gl.constexpr = acc.type.layout
        write_rows(x, strides, acc * scale, start, head, batch, length, SIZE, acc_layout)
    else:
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // SIZE, SIZE // 8], [ROWS // 16, 1], [1, 0])
        staging.store((acc * scale).to(dtype))
        write_rows(x, strides, staging.load(layout), start, head, batch, length, SIZE, layout)


@gluon.jit
def allocate_tiles(k, STAGES: gl.constexpr, SIZE: gl.constexpr):
    """Allocate two slots for a tile of two operands, STAGES for a block of two others, and their barriers."""
    dtype: gl.constexpr = k.dtype
    bar_layout: gl.constexpr = mbarrier.MBarrierLayout()
    tiles0 = gl.allocate_shared_memory(dtype, [2 * WARPGROUPS, 1, 1, ROWS, SIZE], k.layout)
    tiles1 = gl.allocate_shared_memory(dtype, [2 * WARPGROUPS, 1, 1, ROWS, SIZE], k.layout)
    blocks0 = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, ROWS, SIZE], k.layout)
    blocks1 = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, ROWS, SIZE], k.layout)
    tile_full = gl.allocate_shared_memory(gl.int64, [2, 1], bar_layout)
    tile_empty = gl.allocate_shared_memory(gl.int64, [2, 1], bar_layout)
    block_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar_layout)
    block_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar_layout)
    for slot in gl.static_range(2):
        mbarrier.init(tile_full.index(slot), count=1)
        mbarrier.init(tile_empty.index(slot), count=WARPGROUPS)
    for stage in gl.static_range(STAGES):
        mbarrier.init(block_full.index(stage), count=1)
        mbarrier.init(block_empty.index(stage), count=WARPGROUPS)
    fence_async_shared()
    return tiles0, tiles1, blocks0, blocks1, tile_full, tile_empty, block_full, block_empty
