"""Keys under one or two rotations, in one pass over them. Imported only where Triton is installed."""

# mypy: ignore-errors
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from isentrope.core.launching import RepeatedLaunch, next_power_of_2
from isentrope.core.rotation_kernel import (
    BLOCK_ENTRIES,
    HEADS_PER_PROGRAM,
    broadcast_strides,
    list_strides,
    normalise_halves,
)

MAX_ROTATIONS = 2


class KeyRotations:
    """What rotates keys laid out like the first ones; it holds none of them.

    Args:
        x: keys, (batch, heads, length, d).
        angles: of each rotation; None for none, where keys are only normalised.
        normalise: whether to divide keys by their lengths first.
        bounds: the first key of each row that is no padding and the one after the last, (batch or 1,) each; others may
            be left out.
    """

    def __init__(
        self,
        x: Tensor,
        angles: Sequence[tuple[Tensor, Tensor] | None],
        normalise: bool,
        bounds: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        batch, heads, length, size = x.shape
        self.count, unused = len(angles), x.new_empty(1)
        first, second = (*angles, None)[:MAX_ROTATIONS]
        lanes = next_power_of_2(size)
        rows = max(1, BLOCK_ENTRIES // lanes)
        tensors = (*(first or (unused, unused)), *(second or (unused, unused)), *(bounds or (unused, unused)))
        numbers = (
            *list_strides(x, torch.empty_like(x, device="meta")), *broadcast_strides(first and first[0], 0, 2),
            *broadcast_strides(second and second[0], 0, 2), *broadcast_strides(bounds and bounds[0], 0), heads, length,
        )  # fmt: skip
        constants = {
            "HALF": size // 2, "LANES": lanes // 2, "ROWS": rows, "HEADS": HEADS_PER_PROGRAM,
            "ROTATE": first is not None, "TWICE": self.count > 1, "ROTATE_AGAIN": second is not None,
            "NORMALISE": normalise, "BOUNDED": bounds is not None,
        }  # fmt: skip
        grid = -(-length // rows), -(-heads // HEADS_PER_PROGRAM), batch
        options = {"enable_fp_fusion": True}
        self._launch = RepeatedLaunch(_rotate_keys, grid, tensors, numbers, constants, options)

    def run(self, x: Tensor) -> list[Tensor]:
        """Return the keys under each rotation; their device is the current one."""
        rotated = [torch.empty_like(x) for _ in range(self.count)]
        written = rotated[0], rotated[-1]
        self._launch.run((x.data_ptr(), *[y.data_ptr() for y in written]), lambda: (x, *written))
        return rotated


@triton.jit
def _write_rotated(target, a, b, c, s, valid, ROTATE: tl.constexpr, HALF: tl.constexpr):
    if ROTATE:
        a, b = a * c - b * s, b * c + a * s
    tl.store(target, a.to(target.dtype.element_ty), mask=valid)
    tl.store(target + HALF, b.to(target.dtype.element_ty), mask=valid)


# arguments that change with length or heads are not specialised: one kernel serves them all
@triton.jit(do_not_specialize=["angle_batch", "other_batch", "bound_batch", "heads", "length"])
def _rotate_keys(
    x, y, z, cos, sin, other_cos, other_sin, lows, highs, x_batch, x_head, x_row, y_batch, y_head, y_row,
    angle_batch, angle_row, other_batch, other_row, bound_batch, heads, length,
    HALF: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr, ROTATE: tl.constexpr,
    TWICE: tl.constexpr, ROTATE_AGAIN: tl.constexpr, NORMALISE: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """Write x to y under the first rotation, and to z, which lies in memory as y does, under the second."""
    batch = tl.program_id(2).to(tl.int64)
    start = tl.program_id(0) * ROWS
    row = (start + tl.arange(0, ROWS)).to(tl.int64)
    lane = tl.arange(0, LANES)
    valid = (row < length)[:, None] & (lane < HALF)[None, :]
    first_head = tl.program_id(1) * HEADS
    last_head = tl.minimum(first_head + HEADS, heads)
    if BOUNDED:
        low, high = tl.load(lows + batch * bound_batch), tl.load(highs + batch * bound_batch)
        last_head = tl.where((start + ROWS > low) & (start < high), last_head, first_head)
    c, s, d, t = 1.0, 0.0, 1.0, 0.0
    if ROTATE:
        offset = batch * angle_batch + row[:, None] * angle_row + lane[None, :]
        c = tl.load(cos + offset, mask=valid, other=1.0).to(tl.float32)
        s = tl.load(sin + offset, mask=valid, other=0.0).to(tl.float32)
    if ROTATE_AGAIN:
        other = batch * other_batch + row[:, None] * other_row + lane[None, :]
        d = tl.load(other_cos + other, mask=valid, other=1.0).to(tl.float32)
        t = tl.load(other_sin + other, mask=valid, other=0.0).to(tl.float32)
    for head in range(first_head, last_head):
        head64 = tl.cast(head, tl.int64)
        source = x + batch * x_batch + head64 * x_head + row[:, None] * x_row + lane[None, :]
        a = tl.load(source, mask=valid, other=0.0).to(tl.float32)
        b = tl.load(source + HALF, mask=valid, other=0.0).to(tl.float32)
        if NORMALISE:
            a, b = normalise_halves(a, b)
        place = batch * y_batch + head64 * y_head + row[:, None] * y_row + lane[None, :]
        _write_rotated(y + place, a, b, c, s, valid, ROTATE, HALF)
        if TWICE:
            _write_rotated(z + place, a, b, d, t, valid, ROTATE_AGAIN, HALF)
