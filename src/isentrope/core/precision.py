"""In which precision things are worked out, whether values may be looked at, and what stays on a device."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache

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
    if torch.compiler.is_compiling() or x.is_meta:
        return False
    return not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def constant(make: Callable[..., Tensor], device: torch.device, *given: Hashable) -> Tensor:
    """make(*given), on a device; kept there: from the host nothing can be copied while a graph is being captured."""
    if device.type == "cpu" or torch.compiler.is_compiling() or type(torch.empty(0)) is not Tensor:
        return make(*given).to(device)
    return _kept(make, device, *given)


@lru_cache(64)
def _kept(make: Callable[..., Tensor], device: torch.device, *given: Hashable) -> Tensor:
    with torch.inference_mode(False):  # it serves calls with gradients too
        return make(*given).to(device)
