"""Products of low-precision matrices as they leave the tensor cores, in fp32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isentrope.core.dtypes import accumulation_dtype


def narrow(x: Tensor) -> torch.dtype:
    """What factors are rounded to: the dtype at hand on a GPU, whose tensor cores add up in fp32; wide on a CPU."""
    return x.dtype if x.is_cuda else accumulation_dtype(x)


def product(a: Tensor, b: Tensor) -> Tensor:
    """a b, (batch, heads, …) each, in wide precision: a score of 80 rounded to bf16 would be off by a quarter."""
    if a.is_cuda and a.dtype in (torch.bfloat16, torch.float16):
        return Wide.apply(a, b)
    return a.to(accumulation_dtype(a)) @ b.to(accumulation_dtype(a))


class Wide(torch.autograd.Function):
    """`bmm` with an output wider than its factors, which has no gradient of its own."""

    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        out = torch.bmm(a.flatten(0, 1), b.flatten(0, 1), out_dtype=torch.float32)
        return out.unflatten(0, a.shape[:2])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        grad = grad.to(a.dtype)
        return grad @ b.mT, a.mT @ grad
