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
    shape = x.shape
    strides = None if x.data_ptr() % 16 else _find_block_strides(shape, x.stride(), 16 // x.element_size())
    if strides is None:
        x = x.clone(memory_format=torch.contiguous_format)
        strides = _find_block_strides(shape, x.stride(), 16 // x.element_size())
    block = [1, 1, rows, shape[-1]]
    if swizzled:
        return SwizzledDescriptor(x, list(shape), list(strides), block, SWIZZLED)
    return TensorDescriptor(x, list(shape), list(strides), block)


@bounded_cache(MAX_LAUNCHES)
def _find_block_strides(shape: tuple[int, ...], strides: tuple[int, ...], step: int) -> tuple[int, ...] | None:
    """Return the strides with which the engine may read a tensor; None if some are not multiples of `step`."""
    pairs = list(zip(shape[:-1], strides[:-1], strict=True))
    if any(size > 1 and (stride == 0 or stride % step) for size, stride in pairs):
        return None
    # the stride of an axis of size 1 is arbitrary
    return *(stride if size > 1 else shape[-1] for size, stride in pairs), 1
