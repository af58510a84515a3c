"""Compile small tensor functions where that pays: on a GPU, once per function, for all lengths."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F, example: Tensor) -> F:
    """The function fused into one kernel when `example` lives on a GPU; as it is on a CPU or inside a larger graph."""
    if not example.is_cuda or torch.compiler.is_compiling():
        return function
    return _compile(function)


@cache
def _compile(function: F) -> F:
    return torch.compile(function, dynamic=True)  # type: ignore[return-value]
