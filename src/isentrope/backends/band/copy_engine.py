"""Blocks of tensors for Hopper's copy engine. Imported only where Triton is installed."""

# mypy: ignore-errors
from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as SwizzledDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from isentrope.core.caching import MAX_LAUNCHES, bounded_cache

SWIZZLED = NVMMASharedLayout(128, 16, rank=4)  # of vectors of 64 entries or more


def describe_blocks(x: Tensor, rows: int, swizzled: bool = False) -> TensorDescriptor | SwizzledDescriptor:
    """Describe x (batch, heads, length, size) in blocks of `rows` vectors for Hopper's copy engine.

    The engine needs strides that are multiples of 16 bytes: x is copied where they are not.
    Swizzled ones are for kernels in Gluon, whose tensor cores read blocks of half precision as they come.
    """
    kind = x.shape, x.dtype, rows, swizzled
    template = None if x.data_ptr() % 16 else _make_template(x.stride(), *kind)
    if template is None:
        x = x.clone(memory_format=torch.contiguous_format)
        template = _make_template(x.stride(), *kind)
    # as `copy.copy` would, without checking again what is the same for all tensors of a kind
    descriptor = object.__new__(type(template))
    vars(descriptor).update(vars(template), base=x)
    return descriptor


@bounded_cache(MAX_LAUNCHES)
def _make_template(
    strides: tuple[int, ...], shape: torch.Size, dtype: torch.dtype, rows: int, swizzled: bool
) -> TensorDescriptor | SwizzledDescriptor | None:
    """Return a descriptor without its tensor; None where the engine cannot read tensors with these strides."""
    readable = _find_block_strides(shape, strides, 16 // dtype.itemsize)
    if readable is None:
        return None
    base, block = torch.empty(16, dtype=dtype, device="cpu"), [1, 1, rows, shape[-1]]
    if swizzled:
        descriptor = SwizzledDescriptor(base, list(shape), list(readable), block, SWIZZLED)
    else:
        descriptor = TensorDescriptor(base, list(shape), list(readable), block)
    descriptor.base = None
    return descriptor


def _find_block_strides(shape: tuple[int, ...], strides: tuple[int, ...], step: int) -> tuple[int, ...] | None:
    """Return the strides with which the engine may read a tensor; None if some are not multiples of `step`."""
    pairs = list(zip(shape[:-1], strides[:-1], strict=True))
    if strides[-1] != 1 or any(size > 1 and (stride == 0 or stride % step) for size, stride in pairs):
        return None
    # the stride of an axis of size 1 is arbitrary
    return *(stride if size > 1 else shape[-1] for size, stride in pairs), 1
