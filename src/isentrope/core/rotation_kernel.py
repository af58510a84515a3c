"""The Triton kernel of `fold`: each vector is read once and written once, angles once for several heads."""

# mypy: ignore-errors
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from isentrope.core.compile import on_device_of

ENTRIES = 4096  # of a block of vectors
HEADS = 8  # that share the angles a program has read


def launch(
    x: Tensor, cos: Tensor | None, sin: Tensor | None, tau: Tensor | None, normalise: bool, back: bool
) -> Tensor:
    """x (batch, heads, length, d) normalised, turned and multiplied by tau; `back`: turned the other way."""
    batch, heads, length, size = x.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = max(1, ENTRIES // triton.next_power_of_2(size))
    nothing = y
    with on_device_of(x):
        _fold[(triton.cdiv(length, rows), triton.cdiv(heads, HEADS), batch)](
            x, y, nothing if cos is None else cos, nothing if sin is None else sin, nothing if tau is None else tau,
            *x.stride()[:3], *y.stride()[:3], *strides_of(cos, 0, 2), *strides_of(tau, 0, 1, 2), heads, length,
            HALF=size // 2, LANES=triton.next_power_of_2(size // 2), ROWS=rows, HEADS=HEADS, TURN=cos is not None,
            TAU=tau is not None, NORMALISE=normalise, BACK=back,
        )  # fmt: skip
    return y


def strides_of(x: Tensor | None, *axes: int) -> list[int]:
    """Strides along these axes, 0 where there is one entry for all."""
    return [0 if x is None or x.shape[axis] == 1 else x.stride(axis) for axis in axes]


@triton.jit
def united(a, b):
    """Vectors, given in halves, made as long as 1; a zero vector stays zero. The largest entry is made 1 first, which
    keeps the sum of squares from overflow."""
    peak = tl.maximum(tl.max(tl.abs(a), 1), tl.max(tl.abs(b), 1))
    peak = tl.where(peak > 0, peak, 1.0)[:, None]
    a, b = a / peak, b / peak
    total = tl.sum(a * a, 1) + tl.sum(b * b, 1)
    unit = tl.rsqrt(tl.maximum(total, 0.5))[:, None]
    return a * unit, b * unit


# what changes with the length is not looked at more closely: one kernel serves all lengths
@triton.jit(do_not_specialize=["turn_batch", "tau_batch", "tau_head", "length"])
def _fold(
    x, y, cos, sin, tau,
    x_batch, x_head, x_row, y_batch, y_head, y_row, turn_batch, turn_row, tau_batch, tau_head, tau_row, heads, length,
    HALF: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr, TURN: tl.constexpr,
    TAU: tl.constexpr, NORMALISE: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(2).to(tl.int64)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    lane = tl.arange(0, LANES)
    live = row < length
    held = live[:, None] & (lane < HALF)[None, :]
    if TURN:
        where = batch * turn_batch + row[:, None] * turn_row + lane[None, :]
        c = tl.load(cos + where, mask=held, other=1.0).to(tl.float32)
        s = tl.load(sin + where, mask=held, other=0.0).to(tl.float32)
        if BACK:
            s = -s
    first = tl.program_id(1) * HEADS
    for head in range(first, tl.minimum(first + HEADS, heads)):
        one = tl.cast(head, tl.int64)
        source = x + batch * x_batch + one * x_head + row[:, None] * x_row + lane[None, :]
        a = tl.load(source, mask=held, other=0.0).to(tl.float32)
        b = tl.load(source + HALF, mask=held, other=0.0).to(tl.float32)
        if NORMALISE:
            a, b = united(a, b)
        if TURN:
            a, b = a * c - b * s, b * c + a * s
        if TAU:
            heat = tl.load(tau + batch * tau_batch + one * tau_head + row * tau_row, mask=live, other=0.0)
            a, b = a * heat.to(tl.float32)[:, None], b * heat.to(tl.float32)[:, None]
        target = y + batch * y_batch + one * y_head + row[:, None] * y_row + lane[None, :]
        tl.store(target, a.to(y.dtype.element_ty), mask=held)
        tl.store(target + HALF, b.to(y.dtype.element_ty), mask=held)
