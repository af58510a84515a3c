"""The Triton kernel by which every query votes for the keys with the largest products.

A program goes once through the keys that its queries may vote for, and keeps the best of each query; products are
never written. Imported only where Triton is installed.
"""

# mypy: ignore-errors
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from isentrope.core.launching import launch_kernel
from isentrope.core.rotation_kernel import list_strides

MIN_MATRIX_SIZE = 16  # rows or columns that tensor cores take
MAX_ROWS = 64
TILE_ENTRIES = 8192  # of keys


def launch(q: Tensor, k: Tensor, first: int, ends: Tensor, votes: int) -> Tensor:
    """Return the slots of the keys that each query votes for, in no order: (batch, heads, queries, votes) as int32.

    Of equal products the first win; -1 where there are fewer keys than votes.

    Args:
        q: (batch, heads, queries, d).
        k: (batch, kv_heads, keys, d).
        first: the first key that may be voted for.
        ends: the slot after the last such key, for each query.
        votes: how many keys a query votes for.
    """
    batch, heads, queries, size = q.shape
    slots = torch.empty(batch, heads, queries, votes, dtype=torch.int32, device=q.device)
    rows = MIN_MATRIX_SIZE if queries <= MIN_MATRIX_SIZE else MAX_ROWS  # two kernels for all lengths
    launch_kernel(
        _vote,
        (triton.cdiv(queries, rows), batch * heads, 1),
        (q, k, slots, ends.to(torch.int32).contiguous()),
        (*list_strides(q, k), heads, queries, first),
        {
            "SHARED": heads // k.shape[1], "VOTES": votes, "PLACES": triton.next_power_of_2(votes), "SIZE": size,
            "ROWS": rows, "COLUMNS": max(MIN_MATRIX_SIZE, min(64, TILE_ENTRIES // size)),
            "IEEE": q.dtype == torch.float32,
        },
        {"num_warps": 4, "num_stages": 3},
    )  # fmt: skip
    return slots


@triton.jit(do_not_specialize=["heads", "queries", "first"])
def _vote(
    q, k, slots, ends, q_batch, q_head, q_row, k_batch, k_head, k_row, heads, queries, first,
    SHARED: tl.constexpr, VOTES: tl.constexpr, PLACES: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, IEEE: tl.constexpr,
):  # fmt: skip
    """Find the best keys of some queries of one head; the last queries, which have most keys, come first."""
    batch, head = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    row = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS + tl.arange(0, ROWS)
    lane, place = tl.arange(0, SIZE), tl.arange(0, PLACES)
    valid = row < queries
    q_pointer = q + batch * q_batch + head * q_head + row.to(tl.int64)[:, None] * q_row + lane[None, :]
    q_block = tl.load(q_pointer, mask=valid[:, None], other=0.0)
    end = tl.load(ends + row, mask=valid, other=0)
    last = tl.max(end, 0)
    k += batch * k_batch + (head // SHARED) * k_head
    precision: tl.constexpr = "ieee" if IEEE else "tf32"
    # the places beyond the votes are never the worst
    best = tl.where((place < VOTES)[None, :], float("-inf"), float("inf")) + tl.zeros((ROWS, PLACES), tl.float32)
    chosen = tl.full((ROWS, PLACES), -1, tl.int32)
    worst = tl.min(best, 1)
    for start in range(first, last, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        offset = column.to(tl.int64)[:, None] * k_row + lane[None, :]
        k_block = tl.load(k + offset, mask=(column < last)[:, None], other=0.0)
        scores = tl.dot(q_block, tl.trans(k_block), input_precision=precision)
        scores = tl.where(column[None, :] < end[:, None], scores, float("-inf"))
        top = tl.max(scores, 1)
        while tl.max((top > worst).to(tl.int32), 0) > 0:
            winner = tl.argmax(scores, 1)
            enters = (top > worst)[:, None] & (place[None, :] == tl.argmin(best, 1)[:, None])
            best = tl.where(enters, top[:, None], best)
            chosen = tl.where(enters, (start + winner)[:, None], chosen)
            scores = tl.where(tl.arange(0, COLUMNS)[None, :] == winner[:, None], float("-inf"), scores)
            top, worst = tl.max(scores, 1), tl.min(best, 1)
    target = slots + ((batch * heads + head) * queries + row.to(tl.int64))[:, None] * VOTES + place[None, :]
    tl.store(target, chosen, mask=valid[:, None] & (place < VOTES)[None, :])
