"""The Triton kernel that scores blocks of keys: the largest product of a query with a key of each block.

Products are reduced where they are computed; only one number per query and block is written. Imported only where
Triton is installed.
"""

# mypy: ignore-errors
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from isentrope.core.launching import launch_kernel
from isentrope.core.rotation_kernel import list_strides

BLOCKS_PER_PROGRAM = 8
MIN_ROWS = 16  # that tensor cores take


def launch(q: Tensor, k: Tensor, block_size: int) -> Tensor:
    """Return max_j q·k_j over the keys of each block, (batch, heads, queries, blocks) in fp32.

    Args:
        q: (batch, heads, queries, d).
        k: (batch, kv_heads, blocks · block_size, d).
        block_size: keys of a block.
    """
    batch, heads, queries, size = q.shape
    blocks = k.shape[2] // block_size
    best = torch.empty(batch, heads, blocks, queries, dtype=torch.float32, device=q.device)
    rows = MIN_ROWS if queries <= MIN_ROWS else 64 if size > 128 else 128  # two kernels for all lengths
    columns = min(8192 // size, 128, max(16, triton.next_power_of_2(block_size)))
    grid = (triton.cdiv(queries, rows), triton.cdiv(blocks, BLOCKS_PER_PROGRAM), batch * heads)
    launch_kernel(
        _score_blocks,
        grid,
        (q, k, best),
        (*list_strides(q, k), heads, queries, blocks),
        {
            "SHARED": heads // k.shape[1], "BLOCK_SIZE": block_size, "SIZE": size, "ROWS": rows, "COLUMNS": columns,
            "PER_PROGRAM": BLOCKS_PER_PROGRAM, "IEEE": q.dtype == torch.float32,
        },
        {"num_warps": 8 if rows == 128 else 4, "num_stages": 2},
    )  # fmt: skip
    return best.mT


@triton.jit(do_not_specialize=["heads", "queries", "blocks"])
def _score_blocks(
    q, k, best, q_batch, q_head, q_row, k_batch, k_head, k_row, heads, queries, blocks,
    SHARED: tl.constexpr, BLOCK_SIZE: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    PER_PROGRAM: tl.constexpr, IEEE: tl.constexpr,
):  # fmt: skip
    """Score a few blocks for some queries of one head."""
    batch, head = (tl.program_id(2) // heads).to(tl.int64), (tl.program_id(2) % heads).to(tl.int64)
    row, lane = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, SIZE)
    valid = row < queries
    q_pointer = q + batch * q_batch + head * q_head + row.to(tl.int64)[:, None] * q_row + lane[None, :]
    q_block = tl.load(q_pointer, mask=valid[:, None], other=0.0)
    k += batch * k_batch + (head // SHARED) * k_head
    best += (batch * heads + head) * blocks * queries
    precision: tl.constexpr = "ieee" if IEEE else "tf32"
    first = tl.program_id(1) * PER_PROGRAM
    for block in tl.range(first, tl.minimum(first + PER_PROGRAM, blocks)):
        top = tl.full((ROWS,), float("-inf"), tl.float32)
        for start in tl.range(0, BLOCK_SIZE, COLUMNS):
            within = start + tl.arange(0, COLUMNS)
            inside = within < BLOCK_SIZE
            place = (block * BLOCK_SIZE + within).to(tl.int64)[:, None]
            k_block = tl.load(k + place * k_row + lane[None, :], mask=inside[:, None], other=0.0)
            scores = tl.dot(q_block, tl.trans(k_block), input_precision=precision)
            if BLOCK_SIZE % COLUMNS != 0:
                scores = tl.where(inside[None, :], scores, float("-inf"))
            top = tl.maximum(top, tl.max(scores, 1))
        tl.store(best + block * queries + row, top, mask=valid)
