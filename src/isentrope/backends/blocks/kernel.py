"""The Triton kernel of groups of queries against chosen blocks of far keys, which are read where they lie.

A program has the queries of one group, in all heads that share a key head: they see the same blocks. It goes through
the chosen blocks, the first keys, and the keys between the last block and the window. Imported only where Triton is
installed.
"""

# mypy: ignore-errors
from __future__ import annotations

from math import log

import torch
import triton
import triton.language as tl

from isentrope.backends.merge import PartialOutput
from isentrope.backends.softmax_kernel import accumulate
from isentrope.core.call import FoldedBranch
from isentrope.core.compile import find_shared_memory
from isentrope.core.launching import launch_kernel
from isentrope.core.rotation_kernel import list_strides
from isentrope.core.tile_shapes import choose_shape

LN2 = tl.constexpr(log(2))
MIN_MATRIX_SIZE = 16  # rows or columns that tensor cores take


def launch(branch: FoldedBranch) -> PartialOutput:
    """Compute a folded branch over its chosen blocks, without its offset."""
    chosen, q, k, v = branch.chosen, branch.q, branch.k, branch.v
    assert chosen is not None
    groups, choice = chosen.groups, chosen.groups.choice
    batch, heads, queries, size = q.shape
    kv_heads, value_size = k.shape[1], v.shape[-1]
    out = v.new_empty(batch, heads, queries, value_size)
    lse = torch.empty(batch, heads, queries, dtype=torch.float32, device=q.device)
    rows, columns, stages, warps = _choose_shape(branch, choice.queries * branch.groups, choice.size)
    tiles = triton.cdiv(choice.queries * branch.groups, rows)
    index = chosen.index.to(torch.int32).contiguous()
    launch_kernel(
        _attend_group,
        (groups.count * tiles, kv_heads, batch),
        (q, k, v, index, out, lse),
        (
            *list_strides(q, k, v), heads, queries, groups.keys, groups.count, groups.lead, groups.window,
            branch.scale / log(2),
        ),
        {
            "SHARED": branch.groups, "QUERIES": choice.queries, "BLOCKS": choice.blocks, "BLOCK_SIZE": choice.size,
            "FIRST_BLOCK": choice.first_block, "SIZE": size, "VALUE_SIZE": value_size, "ROWS": rows,
            "COLUMNS": columns, "TILES": tiles, "IEEE": q.dtype == torch.float32,
        },
        {"num_warps": warps, "num_stages": stages},
    )  # fmt: skip
    return PartialOutput(out, lse)


def _choose_shape(branch: FoldedBranch, rows: int, block_size: int) -> tuple[int, int, int, int]:
    """Return rows and keys of a tile, pipeline stages and warps that fit the memory of a multiprocessor."""
    q, v = branch.q, branch.v
    size = max(q.shape[-1], v.shape[-1])
    most_rows, columns, stages, warps = choose_shape(q, size)  # the shapes that are fastest for the band kernel
    rows = min(most_rows, max(MIN_MATRIX_SIZE, triton.next_power_of_2(rows)))
    columns = min(columns, max(MIN_MATRIX_SIZE, triton.next_power_of_2(block_size)))
    while stages > 1 and (rows + 2 * stages * columns) * size * q.element_size() > find_shared_memory(q):
        stages -= 1
    return rows, columns, stages, warps


@triton.jit
def _attend_keys(row_max, row_sum, acc, q_block, k, v, column, visible, k_row, v_row, scale, lane, value_lane,
                 MASKED: tl.constexpr, IEEE: tl.constexpr):  # fmt: skip
    """Add some keys to the running softmax: of those that are not -1, a row sees `visible`; or all (not MASKED)."""
    precision: tl.constexpr = "ieee" if IEEE else "tf32"
    inside = (column >= 0)[:, None]
    place = column.to(tl.int64)[:, None]
    if MASKED:
        k_block = tl.load(k + place * k_row + lane[None, :], mask=inside, other=0.0)
        v_block = tl.load(v + place * v_row + value_lane[None, :], mask=inside, other=0.0)
    else:
        k_block = tl.load(k + place * k_row + lane[None, :])
        v_block = tl.load(v + place * v_row + value_lane[None, :])
    scores = tl.dot(q_block, tl.trans(k_block), input_precision=precision) * scale
    if MASKED:
        scores = tl.where(visible, scores, float("-inf"))
    row_max, row_sum, acc, _ = accumulate(row_max, row_sum, acc, 0.0, scores, v_block, IEEE, MASKED, False)
    return row_max, row_sum, acc


@triton.jit(do_not_specialize=["heads", "queries", "keys", "count", "lead", "window"])
def _attend_group(
    q, k, v, index, out, lse, q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    heads, queries, keys, count, lead, window, scale,
    SHARED: tl.constexpr, QUERIES: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    FIRST_BLOCK: tl.constexpr, SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, TILES: tl.constexpr, IEEE: tl.constexpr,
):  # fmt: skip
    """Compute some rows of one group: all of its queries in all heads that share a key head."""
    group, tile = tl.program_id(0) // TILES, tl.program_id(0) % TILES
    kv_head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    row = tile * ROWS + tl.arange(0, ROWS)
    member = row // SHARED
    query = group * QUERIES + member - lead
    head = kv_head * SHARED + row % SHARED
    valid = (member < QUERIES) & (query >= 0) & (query < queries)
    lane, value_lane = tl.arange(0, SIZE), tl.arange(0, VALUE_SIZE)
    query64 = query.to(tl.int64)
    q_pointer = q + batch * q_batch + (head * q_head + query64 * q_row)[:, None] + lane[None, :]
    q_block = tl.load(q_pointer, mask=valid[:, None], other=0.0)
    k += batch * k_batch + kv_head * k_head
    v += batch * v_batch + kv_head * v_head

    offset = keys - queries
    last_far = tl.where(valid, query + offset - window, -1)  # the last far key of each row
    first_position = tl.maximum(offset, offset - lead + group * QUERIES)
    far_keys = tl.maximum(first_position - window + 1, 0)
    end_block = tl.maximum(far_keys // BLOCK_SIZE, FIRST_BLOCK)
    chosen = tl.minimum(end_block - FIRST_BLOCK, BLOCKS)
    last_position = tl.minimum(offset - lead + (group + 1) * QUERIES, keys) - 1
    stop = last_position - window + 1  # after the last far key of the group

    row_max = tl.full((ROWS,), float("-inf"), tl.float32)
    row_sum = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, VALUE_SIZE), tl.float32)
    index += ((batch * tl.num_programs(1) + kv_head) * count + group) * BLOCKS
    PARTS: tl.constexpr = (BLOCK_SIZE + COLUMNS - 1) // COLUMNS
    for step in tl.range(0, chosen * PARTS):
        within = (step % PARTS) * COLUMNS + tl.arange(0, COLUMNS)
        column = tl.load(index + step // PARTS) * BLOCK_SIZE + within
        if BLOCK_SIZE % COLUMNS != 0:
            column = tl.where(within < BLOCK_SIZE, column, -1)
        row_max, row_sum, acc = _attend_keys(row_max, row_sum, acc, q_block, k, v, column, (column >= 0)[None, :],
                                            k_row, v_row, scale, lane, value_lane, BLOCK_SIZE % COLUMNS != 0,
                                            IEEE)  # fmt: skip
    for start in tl.range(0, tl.minimum(FIRST_BLOCK * BLOCK_SIZE, stop), COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        column = tl.where(column < tl.minimum(FIRST_BLOCK * BLOCK_SIZE, stop), column, -1)
        visible = (column >= 0)[None, :] & (column[None, :] <= last_far[:, None])
        row_max, row_sum, acc = _attend_keys(row_max, row_sum, acc, q_block, k, v, column, visible,
                                            k_row, v_row, scale, lane, value_lane, True, IEEE)  # fmt: skip
    for start in tl.range(end_block * BLOCK_SIZE, stop, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        column = tl.where(column < stop, column, -1)
        visible = (column >= 0)[None, :] & (column[None, :] <= last_far[:, None])
        row_max, row_sum, acc = _attend_keys(row_max, row_sum, acc, q_block, k, v, column, visible,
                                            k_row, v_row, scale, lane, value_lane, True, IEEE)  # fmt: skip

    seen = row_sum > 0
    total = tl.where(seen, row_sum, 1.0)
    place = (batch * heads + head) * queries + query64
    tl.store(lse + place, tl.where(seen, (row_max + tl.log2(total)) * LN2, float("-inf")), mask=valid)
    acc = acc / total[:, None]
    out_pointer = out + place[:, None] * VALUE_SIZE + value_lane[None, :]
    tl.store(out_pointer, acc.to(out.dtype.element_ty), mask=valid[:, None])
