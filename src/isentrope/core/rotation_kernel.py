"""The Triton kernel of `rotate_and_scale`: reads and writes each vector once, and angles once for several heads."""

# mypy: ignore-errors
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from isentrope.core.launching import launch_kernel, next_power_of_2

BLOCK_ENTRIES = 4096
HEADS_PER_PROGRAM = 8  # these share the angles that a program has read


def launch(
    x: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    tau: Tensor | None,
    normalise: bool,
    inverse: bool,
    rounded: bool = False,
    total: Tensor | None = None,
) -> Tensor:
    """Return x (batch, heads, length, d) normalised, rotated and multiplied by tau, in x's order of dimensions.

    `inverse`: rotated backwards; `rounded`: with products in the dtype of x, as torch computes them one by one;
    `total`: what the result is added to, in place.
    """
    batch, heads, length, size = x.shape
    y = torch.empty_like(x) if total is None else total
    rows = max(1, BLOCK_ENTRIES // next_power_of_2(size))
    unused = y
    launch_kernel(
        _rotate_and_scale,
        (-(-length // rows), -(-heads // HEADS_PER_PROGRAM), batch),
        (x, y, unused if cos is None else cos, unused if sin is None else sin, unused if tau is None else tau),
        (
            *list_strides(x, y), *broadcast_strides(cos, 0, 2), *broadcast_strides(tau, 0, 1, 2),
            heads, length,
        ),
        {
            "HALF": size // 2, "LANES": next_power_of_2(size // 2), "ROWS": rows, "HEADS": HEADS_PER_PROGRAM,
            "ROTATE": cos is not None, "TAU": tau is not None, "NORMALISE": normalise, "INVERSE": inverse,
            "ROUNDED": rounded, "ADD": total is not None,
        },
        {"enable_fp_fusion": not rounded},  # a fused product would not be rounded
    )  # fmt: skip
    return y


def list_strides(*tensors: Tensor) -> list[int]:
    """Return the strides of tensors (batch, heads, length, d) but the last, those of a single row as 0.

    These may be anything, and from 2³¹ on a kernel would be compiled for a longer integer.
    """
    strides: list[int] = []
    for x in tensors:
        batch, head, row, _ = x.stride()
        strides += (0 if x.shape[0] == 1 else batch, head, row)
    return strides


def broadcast_strides(x: Tensor | None, *axes: int) -> list[int]:
    """Return the strides along these axes, 0 along an axis of size 1."""
    if x is None:
        return [0] * len(axes)
    shape, strides = x.shape, x.stride()
    return [0 if shape[axis] == 1 else strides[axis] for axis in axes]


@triton.jit
def normalise_halves(a, b):
    """Divide vectors, given in halves, by their lengths; a zero vector stays zero.

    Dividing by the largest entry first keeps the sum of squares from overflow.
    """
    peak = tl.maximum(tl.max(tl.abs(a), 1), tl.max(tl.abs(b), 1))
    peak = tl.where(peak > 0, peak, 1.0)[:, None]
    a, b = a / peak, b / peak
    total = tl.sum(a * a, 1) + tl.sum(b * b, 1)
    factor = tl.rsqrt(tl.maximum(total, 0.5))[:, None]
    return a * factor, b * factor


@triton.jit
def _round(product, dtype: tl.constexpr):
    return product.to(dtype).to(tl.float32)


# arguments that change with length or heads are not specialised: one kernel serves them all
@triton.jit(do_not_specialize=["angle_batch", "tau_batch", "tau_head", "heads", "length"])
def _rotate_and_scale(
    x, y, cos, sin, tau,
    x_batch, x_head, x_row, y_batch, y_head, y_row, angle_batch, angle_row, tau_batch, tau_head, tau_row,
    heads, length,
    HALF: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr, ROTATE: tl.constexpr,
    TAU: tl.constexpr, NORMALISE: tl.constexpr, INVERSE: tl.constexpr, ROUNDED: tl.constexpr,
    ADD: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(2).to(tl.int64)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    lane = tl.arange(0, LANES)
    row_valid = row < length
    valid = row_valid[:, None] & (lane < HALF)[None, :]
    if ROTATE:
        offset = batch * angle_batch + row[:, None] * angle_row + lane[None, :]
        c = tl.load(cos + offset, mask=valid, other=1.0).to(tl.float32)
        s = tl.load(sin + offset, mask=valid, other=0.0).to(tl.float32)
        if INVERSE:
            s = -s
    first_head = tl.program_id(1) * HEADS
    for head in range(first_head, tl.minimum(first_head + HEADS, heads)):
        head64 = tl.cast(head, tl.int64)
        source = x + batch * x_batch + head64 * x_head + row[:, None] * x_row + lane[None, :]
        a = tl.load(source, mask=valid, other=0.0).to(tl.float32)
        b = tl.load(source + HALF, mask=valid, other=0.0).to(tl.float32)
        if NORMALISE:
            a, b = normalise_halves(a, b)
        if ROTATE:
            if ROUNDED:
                a, b = (
                    _round(a * c, x.dtype.element_ty) - _round(b * s, x.dtype.element_ty),
                    _round(b * c, x.dtype.element_ty) + _round(a * s, x.dtype.element_ty),
                )
            else:
                a, b = a * c - b * s, b * c + a * s
        if TAU:
            factor = tl.load(tau + batch * tau_batch + head64 * tau_head + row * tau_row, mask=row_valid, other=0.0)
            a, b = a * factor.to(tl.float32)[:, None], b * factor.to(tl.float32)[:, None]
        target = y + batch * y_batch + head64 * y_head + row[:, None] * y_row + lane[None, :]
        if ADD:
            a += tl.load(target, mask=valid, other=0.0).to(tl.float32)
            b += tl.load(target + HALF, mask=valid, other=0.0).to(tl.float32)
        tl.store(target, a.to(y.dtype.element_ty), mask=valid)
        tl.store(target + HALF, b.to(y.dtype.element_ty), mask=valid)
