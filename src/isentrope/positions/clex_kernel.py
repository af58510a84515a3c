"""Triton kernels of CLEX's path: all steps of its integration, and of its gradient, in one launch each.

In torch a path to t = 64 is thousands of launches. One program does them all here, the two matrices in its registers.
Imported only where Triton is installed.
"""

# mypy: ignore-errors
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from isentrope.core.launching import launch_kernel, next_power_of_2

MAX_ENTRIES = 1 << 14  # of a matrix, which one program holds two of
ENTRIES_PER_WARP = 1 << 9


def fits(hidden: int, pairs: int) -> bool:
    """Return whether one program can hold matrices of this size."""
    return next_power_of_2(hidden) * next_power_of_2(pairs) <= MAX_ENTRIES


class LearnedPath(torch.autograd.Function):
    """The learned part of ln θ before each Runge–Kutta step and after the last, (steps + 1, pairs), in float32.

    Arguments: up (hidden, pairs), down (pairs, hidden), the exponents of RoPE (pairs,), the logarithm of the base of
    θ_ntk at every half step (2 · steps + 1,), and the size of a step.
    """

    @staticmethod
    def forward(ctx, up: Tensor, down: Tensor, exponents: Tensor, log_bases: Tensor, size: float) -> Tensor:
        up, down = up.contiguous(), down.contiguous()
        (hidden, pairs), steps = up.shape, log_bases.numel() // 2
        states, inputs = up.new_empty(steps + 1, pairs), up.new_empty(4 * steps, pairs)
        outputs = up.new_empty(4 * steps, hidden)
        tensors = up, down, exponents, log_bases, states, inputs, outputs
        launch_kernel(_integrate, (1, 1, 1), tensors, (size, steps), *_list_constants(up))
        ctx.save_for_backward(up, down, inputs, outputs)
        ctx.size = size
        return states

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        up, down, inputs, outputs = ctx.saved_tensors
        d_slopes, d_sums = torch.empty_like(inputs), torch.empty_like(outputs)
        tensors = up, down, outputs, grad.contiguous(), d_slopes, d_sums
        numbers = ctx.size, outputs.shape[0] // 4
        launch_kernel(_integrate_back, (1, 1, 1), tensors, numbers, *_list_constants(up))
        return d_sums.T @ inputs, d_slopes.T @ outputs, None, None, None


def _list_constants(up: Tensor) -> tuple[dict[str, int], dict[str, int]]:
    """Return the sizes that kernels are compiled for, and the compiler's options."""
    hidden, pairs = up.shape
    rows, lanes = next_power_of_2(hidden), next_power_of_2(pairs)
    warps = min(max(rows * lanes // ENTRIES_PER_WARP, 1), 16)
    return {"HIDDEN": hidden, "PAIRS": pairs, "ROWS": rows, "LANES": lanes}, {"num_warps": warps}


@triton.jit
def _load_matrices(up, down, HIDDEN: tl.constexpr, PAIRS: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr):
    """Return both as (rows, lanes), so that vectors of either size stay in one arrangement."""
    row, lane = tl.arange(0, ROWS)[:, None], tl.arange(0, LANES)[None, :]
    valid = (row < HIDDEN) & (lane < PAIRS)
    up = tl.load(up + row * PAIRS + lane, mask=valid, other=0.0)
    return up, tl.load(down + lane * HIDDEN + row, mask=valid, other=0.0)


@triton.jit
def _tanh(x):
    decay, square = tl.exp(-2.0 * tl.abs(x)), x * x
    magnitude = (1.0 - decay) / (1.0 + decay)
    series = x * (1.0 - square * (1 / 3 - square * (2 / 15)))  # near 0, where the difference would cancel
    return tl.where(square < 1e-2, series, tl.where(x < 0, -magnitude, magnitude))


@triton.jit
def _slope(up, down, x, inputs, outputs, row, lane, HIDDEN: tl.constexpr, PAIRS: tl.constexpr):
    """Return down tanh(up x), and write x and the tanh."""
    hidden = _tanh(tl.sum(up * x[None, :], 1))
    tl.store(inputs + lane, x, mask=lane < PAIRS)
    tl.store(outputs + row, hidden, mask=row < HIDDEN)
    return tl.sum(down * hidden[:, None], 0)


@triton.jit
def _slope_back(up, down, grad, outputs, d_slopes, d_sums, row, lane, HIDDEN: tl.constexpr, PAIRS: tl.constexpr):
    """Return the gradient of x from that of the slope, and write the latter and that of up x."""
    hidden = tl.load(outputs + row, mask=row < HIDDEN, other=0.0)
    d_sum = tl.sum(down * grad[None, :], 1) * (1.0 - hidden * hidden)
    tl.store(d_slopes + lane, grad, mask=lane < PAIRS)
    tl.store(d_sums + row, d_sum, mask=row < HIDDEN)
    return tl.sum(up * d_sum[:, None], 0)


@triton.jit(do_not_specialize=["steps"])
def _integrate(
    up, down, exponents, log_bases, states, inputs, outputs, size, steps,
    HIDDEN: tl.constexpr, PAIRS: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Runge–Kutta steps of four stages; each stage's input and tanh are written for the backward."""
    row, lane = tl.arange(0, ROWS), tl.arange(0, LANES)
    u, d = _load_matrices(up, down, HIDDEN, PAIRS, ROWS, LANES)
    e = tl.load(exponents + lane, mask=lane < PAIRS, other=0.0)
    y = tl.zeros((LANES,), tl.float32)
    for step in range(steps):
        tl.store(states + step * PAIRS + lane, y, mask=lane < PAIRS)
        # ln θ is y + ln θ_ntk, and what W_up is given has ln θ_ntk = -ln base · exponents once more
        start = -2 * tl.load(log_bases + 2 * step) * e
        middle = -2 * tl.load(log_bases + 2 * step + 1) * e
        end = -2 * tl.load(log_bases + 2 * step + 2) * e
        x, h = inputs + 4 * step * PAIRS, outputs + 4 * step * HIDDEN
        k1 = _slope(u, d, y + start, x, h, row, lane, HIDDEN, PAIRS)
        k2 = _slope(u, d, y + size / 2 * k1 + middle, x + PAIRS, h + HIDDEN, row, lane, HIDDEN, PAIRS)
        k3 = _slope(u, d, y + size / 2 * k2 + middle, x + 2 * PAIRS, h + 2 * HIDDEN, row, lane, HIDDEN, PAIRS)
        k4 = _slope(u, d, y + size * k3 + end, x + 3 * PAIRS, h + 3 * HIDDEN, row, lane, HIDDEN, PAIRS)
        y += size / 6 * (k1 + k4 + 2 * (k2 + k3))
    tl.store(states + steps * PAIRS + lane, y, mask=lane < PAIRS)


@triton.jit(do_not_specialize=["steps"])
def _integrate_back(
    up, down, outputs, grad, d_slopes, d_sums, size, steps,
    HIDDEN: tl.constexpr, PAIRS: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """From the last step to the first, the gradient of each stage's slope and of what its tanh is taken of."""
    row, lane = tl.arange(0, ROWS), tl.arange(0, LANES)
    u, d = _load_matrices(up, down, HIDDEN, PAIRS, ROWS, LANES)
    dy = tl.load(grad + steps * PAIRS + lane, mask=lane < PAIRS, other=0.0)
    for back in range(steps):
        step = steps - 1 - back
        h, g, s = outputs + 4 * step * HIDDEN, d_slopes + 4 * step * PAIRS, d_sums + 4 * step * HIDDEN
        d4 = _slope_back(u, d, size / 6 * dy, h + 3 * HIDDEN, g + 3 * PAIRS, s + 3 * HIDDEN, row, lane, HIDDEN, PAIRS)
        d3 = _slope_back(
            u, d, size / 3 * dy + size * d4, h + 2 * HIDDEN, g + 2 * PAIRS, s + 2 * HIDDEN, row, lane, HIDDEN, PAIRS
        )
        d2 = _slope_back(
            u, d, size / 3 * dy + size / 2 * d3, h + HIDDEN, g + PAIRS, s + HIDDEN, row, lane, HIDDEN, PAIRS
        )
        d1 = _slope_back(u, d, size / 6 * dy + size / 2 * d2, h, g, s, row, lane, HIDDEN, PAIRS)
        dy += d1 + d2 + d3 + d4 + tl.load(grad + step * PAIRS + lane, mask=lane < PAIRS, other=0.0)
