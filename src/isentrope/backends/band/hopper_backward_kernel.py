"""The band's backward for Hopper, for queries that each see one interval of keys.

With p = e^{s - L} and ds = p ∘ (do·vᵀ - rowsum(do ∘ o)):  dv = pᵀ·do, dk = scale · dsᵀ·q, dq = scale · ds·k. One kernel
takes 128 keys through the queries that see them, the other 128 queries through their keys, with no atomic additions, so
that gradients are the same every time. In both, two warpgroups share the blocks of 64 vectors that a further warp
copies. Imported only where Triton is installed.
"""

# mypy: ignore-errors
from __future__ import annotations

from math import log

import torch
from torch import Tensor

from isentrope.backends.band.copy_engine import describe_blocks
from isentrope.backends.band.hopper_key_gradients_kernel import compute_key_gradients
from isentrope.backends.band.hopper_query_gradients_kernel import compute_query_gradients
from isentrope.backends.band.hopper_tile_kernel import ROWS
from isentrope.backends.band.key_span import TILE_QUERIES
from isentrope.core.compile import count_multiprocessors
from isentrope.core.launching import launch_kernel
from isentrope.core.rotation_kernel import list_strides

STAGES = {64: 6, 128: 3}  # blocks under way, by head size
CACHED_BYTES = 24 << 20  # of what programs read at a time, for the L2 cache


def launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad: Tensor,
    terms: Tensor,
    scale: float,
    interval: tuple[Tensor, Tensor],
    ranges: Tensor,
    dtype: torch.dtype,
    padded: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv.

    Args:
        q: queries, ready to multiply.
        k: keys, as they are.
        v: values.
        grad: gradient of the output.
        terms: as `compute_row_terms` returns them.
        scale: factor of the scores.
        interval: the first key that each query sees and the one after the last, int32 (batch or 1, queries) each.
        ranges: blocks of 64 queries that see something of 128 keys, first and after the last, int32 (batch or 1, tiles
            of keys, 2).
        dtype: of the gradients.
        padded: whether vectors that are in no pair may be anything, NaN too.
    """
    batch, heads, queries, size = q.shape
    kv_heads, keys = k.shape[1:3]
    dq, dk, dv = (torch.empty_like(x, dtype=dtype) for x in (q, k, v))
    if batch == 0:
        return dq, dk, dv
    described = [describe_blocks(x, ROWS.value, swizzled=True) for x in (q, k, v, grad)]
    low, high = interval
    strides = [0 if x.shape[0] == 1 else x.stride(0) for x in (low, ranges)]
    constants = {"GROUPS": heads // kv_heads, "SIZE": size, "STAGES": STAGES[size], "PADDED": padded}
    programs, vector_bytes = count_multiprocessors(q.device), size * k.element_size()
    read_by_head = 2 * vector_bytes * queries * heads // kv_heads, 2 * vector_bytes * keys * kv_heads // heads
    for kernel, outputs, more, length, count, read in (
        (compute_key_gradients, (dk, dv), (ranges,), keys, kv_heads, read_by_head[0]),
        (compute_query_gradients, (dq,), (), queries, heads, read_by_head[1]),
    ):
        tiles, nearby = -(-length // TILE_QUERIES) * count * batch, max(1, CACHED_BYTES // read)
        launch_kernel(
            kernel,
            (min(tiles, programs), 1, 1),
            (terms, low, high, *described, *outputs, *more),
            (*list_strides(*outputs), *strides, heads, batch, queries, keys, tiles, nearby, scale / log(2), scale),
            constants,
            {"num_warps": ROWS.value // 16},
        )
    return dq, dk, dv


def choose_blocks(size: int, value_size: int) -> tuple[int, int]:
    """Return how many queries and keys `ranges` are to count by."""
    return ROWS.value, TILE_QUERIES
