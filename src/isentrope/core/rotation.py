"""Normalise, rotate and scale queries and keys, in one pass.

All of it is applied to q and k, so that any attention kernel runs every method unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from isentrope.core.compile import can_run_triton, maybe_compile
from isentrope.core.dtypes import accumulation_dtype, cast

Angles = tuple[Tensor, Tensor]  # cos and sin


def compute_angles(position: Tensor | float | None, frequencies: Tensor, dtype: torch.dtype) -> Angles | None:
    """Return cos and sin of position · θ, (batch or 1, 1, length or 1, pairs) each; None for no rotation.

    A position (batch or 1, length, groups) differs between equal groups of pairs. The product is formed in `dtype`, as
    transformers forms it: models have been trained with its rounding.
    """
    if position is None:
        return None
    if isinstance(position, Tensor):
        position = position.to(dtype)
        angle = (
            spread_groups(position, frequencies.shape[-1]) if position.dim() == 3 else position[..., None]
        ) * frequencies
    else:  # frequencies may differ from row to row
        angle = position * frequencies
        angle = angle if angle.dim() == 3 else angle.reshape(1, -1, frequencies.shape[-1])
    angle = angle[:, None]
    return angle.cos(), angle.sin()


def widen_angles(angles: Angles) -> Angles:
    """Return cos of every entry of a whole vector in half layout, and sin with the sign that its other entry takes.

    Rotating by these is three operations in place of eleven, each of which Dynamo would trace in every layer.
    """
    cos, sin = angles
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def spread_groups(position: Tensor, pairs: int) -> Tensor:
    """Return positions (…, groups) as (…, pairs): pair m is in group ⌊m · groups / pairs⌋."""
    groups = position.shape[-1]
    if pairs % groups == 0:
        return position.repeat_interleave(pairs // groups, -1)
    return position[..., torch.arange(pairs, device=position.device) * groups // pairs]


def rotate_and_scale(
    x: Tensor,
    angles: Angles | None = None,
    tau: Tensor | None = None,
    normalise: bool = False,
    interleaved: bool = False,
) -> Tensor:
    """Return τ · R(angles) x, of x / ‖x‖ if `normalise`, in x's dtype.

    Args:
        x: queries or keys, (batch, heads, length, d).
        angles: cos and sin from `compute_angles`; in a graph, perhaps from `widen_angles`.
        tau: temperatures, (batch or 1, heads or 1, length).
        normalise: divide each vector by its length first.
        interleaved: pairs are (2m, 2m + 1) rather than (m, m + d/2).
    """
    if angles is None and tau is None and not normalise:
        return x
    cos, sin = (None, None) if angles is None else angles
    if torch.compiler.is_compiling():  # a graph fuses this with its surroundings
        if cos is not None and sin is not None and tau is None and not normalise and cos.shape[-1] == x.shape[-1]:
            return _rotate_wide(x, cos, sin)
        return _rotate_and_scale(x, cos, sin, tau, normalise, interleaved)
    if _has_kernel(x, cos, tau, normalise, interleaved):
        differentiated = (x.requires_grad and torch.is_grad_enabled()) or is_transformed()
        run = RotateAndScale.apply if differentiated else _launch
        return run(x, cos, sin, tau, normalise)
    sizes = x.shape[-1], 0 if cos is None else cos.shape[-1]
    run = maybe_compile(_rotate_and_scale, (x, cos, tau), *sizes, normalise, interleaved)
    return run(x, cos, sin, tau, normalise, interleaved)


def prepare_rotations(
    x: Tensor,
    angles: Sequence[Angles | None],
    normalise: bool,
    interleaved: bool,
    bounds: tuple[Tensor, Tensor] | None = None,
) -> Callable[[Tensor], list[Tensor]]:
    """Return what gives tensors laid out like x under several rotations, as `rotate_and_scale` does without gradients.

    Their device is the current one. `bounds`: the first vector of each row that is no padding and the one after the
    last, (batch or 1,) each; others may be anything.
    """
    done = [n for n, each in enumerate(angles) if each is not None or normalise]
    if not all(_has_kernel(x, each and each[0], None, normalise, interleaved) for each in angles):
        return lambda x: [rotate_and_scale(x, each, None, normalise, interleaved) for each in angles]
    from isentrope.core.key_rotation_kernel import MAX_ROTATIONS, KeyRotations  # Triton may not be installed

    parts = [done[n : n + MAX_ROTATIONS] for n in range(0, len(done), MAX_ROTATIONS)]
    launches = [(part, KeyRotations(x, [angles[n] for n in part], normalise, bounds)) for part in parts]

    def rotate(x: Tensor) -> list[Tensor]:
        rotated = [x] * len(angles)
        for part, launch in launches:
            for n, y in zip(part, launch.run(x), strict=True):
                rotated[n] = y
        return rotated

    return rotate


def _has_kernel(x: Tensor, cos: Tensor | None, tau: Tensor | None, normalise: bool, interleaved: bool) -> bool:
    """Return whether the Triton kernel supports this: whole vectors in half layout, gradients of rotation alone."""
    if not can_run_triton(x):
        return False
    if x.dtype == torch.float64 or x.stride(-1) != 1 or x.shape[-1] % 2:
        return False
    if cos is not None and (interleaved or 2 * cos.shape[-1] != x.shape[-1] or cos.stride(-1) != 1):
        return False
    learns = (normalise and x.requires_grad) or any(part is not None and part.requires_grad for part in (cos, tau))
    return not (learns and torch.is_grad_enabled())


def can_rotate_in_kernel(x: Tensor, angles: Angles | None, tau: Tensor | None, interleaved: bool) -> bool:
    """Return whether `rotate_and_scale` and `rotate_back` launch one kernel for x, or leave it as it is."""
    if is_transformed():
        return False
    return (angles is None and tau is None) or _has_kernel(x, angles and angles[0], tau, False, interleaved)


def rotate_back(grad: Tensor, angles: Angles | None, tau: Tensor | None, total: Tensor | None = None) -> Tensor:
    """Return the gradient of x for that of `rotate_and_scale(x, angles, tau)`, added to a total if there is one."""
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    cos, sin = (None, None) if angles is None else angles
    return _launch(grad, cos, sin, tau, normalise=False, inverse=True, total=total)


def is_transformed() -> bool:
    """Return whether forward-mode AD or torch.func is active: a Function raises there, a bare launch would not."""
    return forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None


def _launch(
    x: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    tau: Tensor | None,
    normalise: bool,
    inverse: bool = False,
    total: Tensor | None = None,
) -> Tensor:
    from isentrope.core.rotation_kernel import launch  # Triton may not be installed

    return launch(x, cos, sin, tau, normalise, inverse, total=total)


class RotateAndScale(torch.autograd.Function):
    """The Triton kernel and its gradient: the same kernel with the inverse rotation."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, cos: Tensor | None, sin: Tensor | None, tau: Tensor | None, normalise: bool
    ) -> Tensor:
        ctx.save_for_backward(cos, sin, tau)
        return _launch(x, cos, sin, tau, normalise)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        cos, sin, tau = ctx.saved_tensors
        return rotate_back(grad, None if cos is None else (cos, sin), tau), None, None, None, None


def _rotate_and_scale(
    x: Tensor, cos: Tensor | None, sin: Tensor | None, tau: Tensor | None, normalise: bool, interleaved: bool
) -> Tensor:
    y = cast(x, accumulation_dtype(x))
    if normalise:
        y = normalise_vectors(y)
    if cos is not None and sin is not None:
        wide = cos.shape[-1] == x.shape[-1]
        y = _rotate_wide(y, cos, sin) if wide else rotate(y, cos, sin, interleaved)
    if tau is not None:
        y = y.mul_(tau[..., None]) if y is not x and _scales_in_place(y, tau) else y * tau[..., None]
    return cast(y, x.dtype)


def _rotate_wide(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate whole vectors by angles from `widen_angles`, in x's dtype."""
    y = x if x.dtype == cos.dtype else x.to(cos.dtype)
    y = torch.addcmul(y * cos, y.roll(y.shape[-1] // 2, -1), sin)
    return y if x.dtype == y.dtype else y.to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate each pair (a, b) of the first 2 · pairs entries to (a cos - b sin, b cos + a sin).

    Pairs stay where they are in both layouts, so that an operand left unrotated needs no permutation.
    """
    pairs = cos.shape[-1]
    traced = torch.compiler.is_compiling()
    if not traced and _rotates_in_kernel(x, cos, interleaved):
        from isentrope.core.rotation_kernel import launch  # Triton may not be installed

        return launch(x, cos, sin, None, normalise=False, inverse=False, rounded=True)
    if not traced and _rotates_in_place(x, cos, interleaved):
        return _rotate_in_place(x, cos, sin)
    whole = x.shape[-1] == 2 * pairs
    head = x if whole else x[..., : 2 * pairs]
    a, b = (head[..., 0::2], head[..., 1::2]) if interleaved else head.split(pairs, -1)
    rotated = a * cos - b * sin, b * cos + a * sin
    head = torch.stack(rotated, -1).flatten(-2) if interleaved else torch.cat(rotated, -1)
    return head if whole else torch.cat((head, x[..., 2 * pairs :]), -1)


def _rotate_in_place(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Do what `rotate` does, to the last bit, with fewer passes over short pieces of memory: those are slow."""
    pairs = cos.shape[-1]
    kept = [cos.new_ones(*cos.shape[:-1], x.shape[-1] - 2 * pairs)] if x.shape[-1] > 2 * pairs else []
    out = x * torch.cat((cos, cos, *kept), -1)
    (a, b), (first, second) = (y.split(pairs, -1)[:2] for y in (x, out))
    first.sub_(b * sin)
    second.add_(a * sin)
    return out


def _rotates_in_kernel(x: Tensor, cos: Tensor, interleaved: bool) -> bool:
    """Return whether one launch gives what torch's operations give, to the last bit.

    In fp32 a compiler would fuse products and sums.
    """
    if interleaved or not can_run_triton(x) or x.dtype != cos.dtype:
        return False
    if x.dtype not in (torch.float16, torch.bfloat16) or x.dim() != 4 or cos.dim() != 4 or cos.shape[1] != 1:
        return False
    if 2 * cos.shape[-1] != x.shape[-1] or x.stride(-1) != 1 or cos.stride(-1) != 1:
        return False
    return not (is_transformed() or (torch.is_grad_enabled() and (x.requires_grad or cos.requires_grad)))


def _rotates_in_place(x: Tensor, cos: Tensor, interleaved: bool) -> bool:
    """Return whether both halves may be written where they belong: on a CPU, nothing differentiated or traced."""
    if interleaved or x.dtype != cos.dtype or not _is_plain_on_cpu(x, cos):
        return False
    return x.dim() == cos.dim() and all(n in (1, m) for m, n in zip(x.shape[:-1], cos.shape[:-1], strict=True))


def _scales_in_place(x: Tensor, tau: Tensor) -> bool:
    """Return whether x, which nothing else uses, may be multiplied where it is: a CPU would allocate it by pages."""
    if torch.compiler.is_compiling() or x.dtype != tau.dtype or not _is_plain_on_cpu(x, tau):
        return False
    return x.dim() == tau.dim() + 1 and all(n in (1, m) for m, n in zip(x.shape[:-1], tau.shape, strict=True))


def _is_plain_on_cpu(*tensors: Tensor) -> bool:
    """Return whether tensors are on a CPU, and nothing records or transforms what is done to them."""
    if any(x.device.type != "cpu" or type(x) is not Tensor for x in tensors) or is_transformed():
        return False
    return not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors))


def normalise_vectors(x: Tensor) -> Tensor:
    """Return x / ‖x‖ along the last axis; a zero vector stays zero. Expects fp32 or wider."""
    # Dividing by the largest entry keeps the sum of squares from overflow and underflow. The result does not depend on
    # it, so no gradient passes through amax: that would look for the entry equal to the maximum, which a compiler that
    # recomputes x with other rounding may not find.
    peak = x.detach().abs().amax(-1, keepdim=True)
    x = x / torch.where(peak > 0, peak, torch.ones_like(peak))
    # the sum is at least 1 unless x is zero: then the floor keeps the gradient finite
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True).clamp_min(0.5))
