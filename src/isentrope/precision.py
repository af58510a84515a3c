"""In which precision things are worked out, and whether values may be looked at."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def wide(x: Tensor) -> torch.dtype:
    """fp32, or fp64 for fp64: what temperatures, angles and sums are worked out in."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def as_given(x: Tensor) -> AbstractContextManager[object]:
    """Computation in the dtypes at hand: autocast would round what is kept wide on purpose."""
    kind = x.device.type
    if kind in ("cpu", "cuda", "mps", "xpu") and torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return nullcontext()


def readable(x: Tensor) -> bool:
    """Whether a tensor's values may be looked at: not while a graph is being traced or captured."""
    if torch.compiler.is_compiling():
        return False
    return not (x.is_cuda and torch.cuda.is_current_stream_capturing())
