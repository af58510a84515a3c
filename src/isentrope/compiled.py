"""Compile tensor functions where that pays: on a GPU, once per variant, for all lengths."""

from __future__ import annotations

import types
from collections.abc import Callable, Hashable
from functools import cache
from typing import Any

import torch
from torch import Tensor


def compiled(function: Callable[..., Any], example: Tensor, *variant: Hashable) -> Callable[..., Any]:
    """The function fused into kernels when `example` lives on a GPU; as it is on a CPU or inside a larger graph.

    variant: whatever the generated code depends on besides lengths.
    """
    if not example.is_cuda or torch.compiler.is_compiling():
        return function
    return _compile(function, variant)


@cache
def _compile(function: Callable[..., Any], variant: tuple[Hashable, ...]) -> Callable[..., Any]:
    """Compilations are counted per code object and, past a limit, quietly given up: every variant gets a code object of
    its own, and `fullgraph` turns giving up into an error."""
    own = types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
    return torch.compile(own, fullgraph=True)
