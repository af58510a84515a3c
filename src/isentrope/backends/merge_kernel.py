"""The Triton kernel that merges rectangles of attention: each output is read once, the result written once.

Imported only where Triton is installed.
"""

# mypy: ignore-errors
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from isentrope.backends.merge import TileOutput
from isentrope.core.compile import device_context
from isentrope.core.rotation_kernel import broadcast_strides

BLOCK_ENTRIES = 4096
ALIGNMENT = 8  # entries of outputs that are read at once where all strides and addresses allow it
NUMBERS = tl.constexpr(16)  # of a part, as `_list_numbers` lists them


def launch(parts: Sequence[TileOutput], shape: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp of all rectangles together.

    Args:
        parts: batches of rectangles; a query may be in any number of them.
        shape: batch, heads and queries of the result.
    """
    batch, heads, queries = shape
    size = parts[0].out.shape[-1]
    parts = [_make_readable(part) for part in parts]
    out = parts[0].out.new_empty(batch, heads, queries, size)
    lse = out.new_empty(batch, heads, queries, dtype=torch.float32)
    strides = [stride for part in parts for stride in part.out.stride()[:3]]
    addresses = [part.out.data_ptr() // out.element_size() for part in parts]
    unit = ALIGNMENT if all(number % ALIGNMENT == 0 for number in (*strides, *addresses)) else 1
    # one kernel serves any number of rectangles at all lengths: it reads addresses and sizes from the device
    table = torch.tensor([_list_numbers(part, batch, unit) for part in parts], dtype=torch.int64)
    if out.is_cuda:
        table = table.pin_memory().to(out.device, non_blocking=True)
    lanes = triton.next_power_of_2(size)
    rows = max(1, BLOCK_ENTRIES // lanes)
    with device_context(out):
        _merge_tiles[(triton.cdiv(queries, rows), heads, batch)](
            out, lse, table, len(parts), heads, queries, SIZE=size, LANES=lanes, ROWS=rows, UNIT=unit
        )
    return out, lse


def _make_readable(part: TileOutput) -> TileOutput:
    """Return a part with contiguous vectors, and a log-sum-exp and offset in fp32."""
    out = part.out if part.out.stride(-1) == 1 else part.out.contiguous()
    return part._replace(out=out, lse=part.lse.float(), offset=None if part.offset is None else part.offset.float())


def _list_numbers(part: TileOutput, batch: int, unit: int) -> list[int]:
    """Return addresses, where the rectangles of a part are, how many rows and rectangles there are, and all strides."""
    count, strides = part.out.shape[0] // batch, [stride // unit for stride in part.out.stride()[:3]]
    addresses = [part.out.data_ptr(), part.lse.data_ptr(), 0 if part.offset is None else part.offset.data_ptr()]
    place = [part.first, max(1, part.stride), part.out.shape[2], count]
    return [*addresses, *place, *strides, *part.lse.stride(), *broadcast_strides(part.offset, 0, 1, 2)]


@triton.jit(do_not_specialize=["parts", "heads", "queries"])
def _merge_tiles(
    out, lse, table, parts, heads, queries, SIZE: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    """Merge the rectangles that some queries of one head are in."""
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    row, lane = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, LANES)
    inside = row < queries
    row_max = tl.full((ROWS,), float("-inf"), tl.float32)
    row_sum = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, LANES), tl.float32)
    for part in range(parts):
        n = table + part * NUMBERS
        step, count = tl.load(n + 4).to(tl.int32), tl.load(n + 6).to(tl.int32)
        local = row - tl.load(n + 3).to(tl.int32)
        tile = tl.minimum(tl.maximum(local, 0) // step, count - 1)
        local = local - tile * step
        valid = inside & (local >= 0) & (local < tl.load(n + 5).to(tl.int32))
        tile64, local64 = batch * count + tile, local.to(tl.int64)
        part_lses = tl.load(n + 1).to(tl.pointer_type(tl.float32))
        place = tile64 * tl.load(n + 10) + head * tl.load(n + 11) + local64 * tl.load(n + 12)
        part_lse = tl.load(part_lses + place, mask=valid, other=float("-inf"))
        offset_address = tl.load(n + 2)
        if offset_address != 0:
            offsets = offset_address.to(tl.pointer_type(tl.float32))
            place = batch * tl.load(n + 13) + head * tl.load(n + 14) + row.to(tl.int64) * tl.load(n + 15)
            part_lse += tl.load(offsets + place, mask=valid, other=0.0)
        part_outs = tl.load(n).to(tl.pointer_type(out.dtype.element_ty))
        if UNIT > 1:
            part_outs = tl.multiple_of(part_outs, 16)
        place = (tile64 * tl.load(n + 7) + head * tl.load(n + 8) + local64 * tl.load(n + 9)) * UNIT
        mask = valid[:, None] & (lane < SIZE)[None, :]
        block = tl.load(part_outs + place[:, None] + lane[None, :], mask=mask, other=0.0).to(tl.float32)
        new_max = tl.maximum(row_max, part_lse)
        anchor = tl.where(new_max == float("-inf"), 0.0, new_max)
        decay, weight = tl.exp(row_max - anchor), tl.exp(part_lse - anchor)
        acc = acc * decay[:, None] + block * weight[:, None]
        row_sum = row_sum * decay + weight
        row_max = new_max
    seen = row_sum > 0
    total = tl.where(seen, row_sum, 1.0)
    place = (batch * heads + head) * queries + row
    tl.store(lse + place, tl.where(seen, row_max + tl.log(total), float("-inf")), mask=inside)
    acc = acc / total[:, None]
    mask = inside[:, None] & (lane < SIZE)[None, :]
    tl.store(out + place[:, None] * SIZE + lane[None, :], acc.to(out.dtype.element_ty), mask=mask)
