"""What is done to a query or key before attention: normalise, rotate, multiply by τ, in one pass.

All of it folds into q and k, so that any attention kernel runs every method unchanged.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from isentrope.core.compile import compiled, runs_triton
from isentrope.core.dtypes import accumulation_dtype
from isentrope.scores import unit

Angles = tuple[Tensor, Tensor]


def angles(position: Tensor | float | None, frequencies: Tensor, dtype: torch.dtype) -> Angles | None:
    """cos and sin of position · θ, (batch or 1, 1, length or 1, pairs); None where nothing turns.

    The product is formed in `dtype`, as transformers forms it: models have been trained with its rounding.
    """
    if position is None:
        return None
    if isinstance(position, Tensor):
        turn = position.to(dtype)[..., None] * frequencies
    else:
        turn = (position * frequencies).reshape(1, -1, frequencies.shape[-1])
    turn = turn[:, None]
    return turn.cos(), turn.sin()


def fold(
    x: Tensor, turn: Angles | None = None, tau: Tensor | None = None, normalise: bool = False, interleaved: bool = False
) -> Tensor:
    """x (batch, heads, length, d) ready for a kernel; tau (batch or 1, heads or 1, length)."""
    if turn is None and tau is None and not normalise:
        return x
    cos, sin = (None, None) if turn is None else turn
    if _has_kernel(x, cos, tau, normalise, interleaved):
        differentiated = (x.requires_grad and torch.is_grad_enabled()) or _transformed()
        run = Folded.apply if differentiated else _kernel
        return run(x, cos, sin, tau, normalise)
    sizes = x.shape[-1], 0 if cos is None else cos.shape[-1]
    run = compiled(_fold, (x, cos, tau), *sizes, normalise, interleaved)
    return run(x, cos, sin, tau, normalise, interleaved)


def _has_kernel(x: Tensor, cos: Tensor | None, tau: Tensor | None, normalise: bool, interleaved: bool) -> bool:
    """Whether the Triton kernel does this: whole vectors laid out in halves, and no gradient but that of rotation."""
    if torch.compiler.is_compiling() or not runs_triton(x):  # a graph fuses this with what is around it
        return False
    if x.dtype == torch.float64 or x.stride(-1) != 1 or x.shape[-1] % 2:
        return False
    if cos is not None and (interleaved or 2 * cos.shape[-1] != x.shape[-1] or cos.stride(-1) != 1):
        return False
    learns = (normalise and x.requires_grad) or any(part is not None and part.requires_grad for part in (cos, tau))
    return not (learns and torch.is_grad_enabled())


def _transformed() -> bool:
    """Whether derivatives are taken forwards, or by torch.func: what a Function refuses, and a launch would not see."""
    return forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None


def _kernel(
    x: Tensor, cos: Tensor | None, sin: Tensor | None, tau: Tensor | None, normalise: bool, back: bool = False
) -> Tensor:
    from isentrope.core.rotation_kernel import launch  # Triton is not everywhere

    return launch(x, cos, sin, tau, normalise, back)


class Folded(torch.autograd.Function):
    """The Triton kernel, and its gradient: the same kernel, turning back."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, cos: Tensor | None, sin: Tensor | None, tau: Tensor | None, normalise: bool
    ) -> Tensor:
        ctx.save_for_backward(cos, sin, tau)
        return _kernel(x, cos, sin, tau, normalise)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        grad = grad if grad.stride(-1) == 1 else grad.contiguous()
        cos, sin, tau = ctx.saved_tensors
        return _kernel(grad, cos, sin, tau, normalise=False, back=True), None, None, None, None


def _fold(
    x: Tensor, cos: Tensor | None, sin: Tensor | None, tau: Tensor | None, normalise: bool, interleaved: bool
) -> Tensor:
    y = x.to(accumulation_dtype(x))
    if normalise:
        y = unit(y)
    if cos is not None and sin is not None:
        y = rotate(y, cos, sin, interleaved)
    if tau is not None:
        y = y * tau[..., None]
    return y.to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Turn each pair (a, b) of the first 2 · pairs entries to (a cos - b sin, b cos + a sin), in place in the vector.

    Writing pairs back where they stood, in both layouts, means that an operand left unrotated needs no permutation.
    """
    pairs = cos.shape[-1]
    head, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
    a, b = (head[..., 0::2], head[..., 1::2]) if interleaved else (head[..., :pairs], head[..., pairs:])
    turned = a * cos - b * sin, b * cos + a * sin
    head = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return torch.cat((head, rest), -1) if rest.shape[-1] else head
