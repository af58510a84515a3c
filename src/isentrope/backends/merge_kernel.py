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
from isentrope.core.caching import get_constant
from isentrope.core.launching import launch_kernel, next_power_of_2
from isentrope.core.rotation_kernel import broadcast_strides

BLOCK_ENTRIES = 4096
ALIGNMENT = 8  # entries of outputs that are read at once where all strides allow it
NUMBERS = tl.constexpr(13)  # of a part, as `_list_numbers` lists them


def launch(parts: Sequence[TileOutput], shape: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp of all rectangles together.

    Args:
        parts: batches of rectangles; a query may be in any number of them.
        shape: batch, heads and queries of the result.
    """
    batch, heads, queries = shape
    size = parts[0].out.shape[-1]
    parts = [part if part.out.stride(-1) == 1 else part._replace(out=part.out.contiguous()) for part in parts]
    out = parts[0].out.new_empty(batch, heads, queries, size)
    lse = out.new_empty(batch, heads, queries, dtype=torch.float32)
    if batch == 0:
        return out, lse
    aligned = all(stride % ALIGNMENT == 0 for part in parts for stride in part.out.stride()[:3])
    unit = ALIGNMENT if aligned else 1
    # on the device, where a kernel is not compiled anew for other lengths
    numbers = tuple(number for part in parts for number in _list_numbers(part, batch, unit))
    lanes = next_power_of_2(size)
    rows = max(1, BLOCK_ENTRIES // lanes)
    offsets = tuple([lse if part.offset is None else part.offset for part in parts])
    launch_kernel(
        _merge_tiles,
        (-(-queries // rows), heads, batch),
        (
            out, lse, get_constant(_make_numbers, out.device, numbers),
            tuple([part.out for part in parts]), tuple([part.lse for part in parts]), offsets,
        ),
        (heads, queries),
        {
            "OFFSETS": sum(1 << n for n, part in enumerate(parts) if part.offset is not None), "PARTS": len(parts),
            "SIZE": size, "LANES": lanes, "ROWS": rows, "UNIT": unit,
        },
    )  # fmt: skip
    return out, lse


def _list_numbers(part: TileOutput, batch: int, unit: int) -> list[int]:
    """Return where the rectangles of a part are, how many rows and rectangles there are, and all strides."""
    count, strides = part.out.shape[0] // batch, [stride // unit for stride in part.out.stride()[:3]]
    place = [part.first, max(1, part.stride), part.out.shape[2], count]
    return [*place, *strides, *part.lse.stride(), *broadcast_strides(part.offset, 0, 1, 2)]


def _make_numbers(numbers: tuple[int, ...]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


@triton.jit(do_not_specialize=["heads", "queries"])
def _merge_tiles(
    out, lse, numbers, outs, lses, offsets, heads, queries,
    OFFSETS: tl.constexpr, PARTS: tl.constexpr, SIZE: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    """Merge the rectangles that some queries of one head are in."""
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    row, lane = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64), tl.arange(0, LANES)
    inside = row < queries
    row_max = tl.full((ROWS,), float("-inf"), tl.float32)
    row_sum = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, LANES), tl.float32)
    for part in tl.static_range(PARTS):
        n = numbers + part * NUMBERS
        local = row - tl.load(n)
        step, count = tl.load(n + 1), tl.load(n + 3)
        tile = tl.minimum(tl.maximum(local, 0) // step, count - 1)
        local = local - tile * step
        valid = inside & (local >= 0) & (local < tl.load(n + 2))
        tile += batch * count
        place = tile * tl.load(n + 7) + head * tl.load(n + 8) + local * tl.load(n + 9)
        part_lse = tl.load(lses[part] + place, mask=valid, other=float("-inf")).to(tl.float32)
        if (OFFSETS >> part) & 1:
            place = batch * tl.load(n + 10) + head * tl.load(n + 11) + row * tl.load(n + 12)
            part_lse += tl.load(offsets[part] + place, mask=valid, other=0.0).to(tl.float32)
        place = (tile * tl.load(n + 4) + head * tl.load(n + 5) + local * tl.load(n + 6)) * UNIT
        mask = valid[:, None] & (lane < SIZE)[None, :]
        block = tl.load(outs[part] + place[:, None] + lane[None, :], mask=mask, other=0.0).to(tl.float32)
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
