"""Constant tensors kept on a device."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import lru_cache

import torch
from torch import Tensor


def constant(make: Callable[..., Tensor], device: torch.device, *given: Hashable) -> Tensor:
    """make(*given), on a device; kept there: from the host nothing can be copied while a graph is being captured."""
    if device.type == "cpu" or torch.compiler.is_compiling() or type(torch.empty(0)) is not Tensor:
        return make(*given).to(device)
    return _kept(make, device, *given)


@lru_cache(64)
def _kept(make: Callable[..., Tensor], device: torch.device, *given: Hashable) -> Tensor:
    with torch.inference_mode(False):  # it serves calls with gradients too
        return make(*given).to(device)
