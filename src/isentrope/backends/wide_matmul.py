"""Products of low-precision matrices with fp32 results, as tensor cores compute them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isentrope.core.dtypes import accumulation_dtype


def factor_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of factors: x's own on a GPU, whose tensor cores sum in fp32, and fp32 or fp64 on a CPU."""
    return x.dtype if x.is_cuda else accumulation_dtype(x)


def matmul_wide(a: Tensor, b: Tensor) -> Tensor:
    """Return a b, (batch, heads, …) each, in fp32 or fp64: a score of 80 rounded to bf16 would be off by a quarter."""
    if a.is_cuda and a.dtype in (torch.bfloat16, torch.float16):
        return WideProduct.apply(a, b)
    return a.to(accumulation_dtype(a)) @ b.to(accumulation_dtype(a))


class WideProduct(torch.autograd.Function):
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
