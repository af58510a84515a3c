"""Shapes of the tiles of Triton's prompt kernels, by what a card has room for. Without Triton, so that any may ask."""

from __future__ import annotations

import torch
from torch import Tensor

from isentrope.core.caching import MAX_DEVICES, bounded_cache
from isentrope.core.compile import cuda_capability_major, read_shared_memory

# Queries and keys per block, pipeline stages and warps, by head size. Up to 128 two blocks fit on a multiprocessor, so
# that one multiplies while the other computes exponentials, and with up to 32 sinks no registers spill.
SERVER_SHAPES = {32: (128, 64, 3, 4), 64: (64, 64, 3, 4), 128: (64, 64, 3, 4), 256: (64, 32, 2, 8)}
# Pointers to keys take registers, of which eight warps have more (`benchmarks/registers.py`).
CONSUMER_SHAPES = {32: (128, 64, 2, 4), 64: (128, 64, 2, 8), 128: (128, 32, 2, 8), 256: (64, 32, 2, 8)}
MIN_SHARED_MEMORY_BYTES = 160 << 10  # of a program, for SERVER_SHAPES
HOPPER = 9  # major compute capability, the first with a copy engine


def has_copy_engine(x: Tensor) -> bool:
    """Return whether keys are loaded by Hopper's copy engine, as Triton's interpreter does too; else by pointers."""
    return not x.is_cuda or cuda_capability_major(x.device) >= HOPPER


def is_server_card(x: Tensor) -> bool:
    """Return whether x is on a card like Hopper's, which kernels were tuned on, or where they are interpreted."""
    return not x.is_cuda or _is_server_card(x.device)


@bounded_cache(MAX_DEVICES)
def _is_server_card(device: torch.device) -> bool:
    return cuda_capability_major(device) >= HOPPER and read_shared_memory(device) > MIN_SHARED_MEMORY_BYTES


def choose_shape(x: Tensor, size: int) -> tuple[int, int, int, int]:
    """Return queries and keys per block, pipeline stages and warps for heads of a size on x's device."""
    return (SERVER_SHAPES if is_server_card(x) else CONSUMER_SHAPES)[size]
