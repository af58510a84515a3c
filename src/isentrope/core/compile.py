"""Compile tensor functions where that pays: on a GPU, a few times per function, for all lengths."""

from __future__ import annotations

import types
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec
from os import environ
from typing import Any

import torch
from torch import Tensor

SMALL = 1 << 12  # entries
TRITON = find_spec("triton") is not None
# "1" makes Triton's kernels run on a CPU, slowly, which is how they are debugged
INTERPRETED = environ.get("TRITON_INTERPRET") == "1"


def runs_triton(x: Tensor) -> bool:
    """Whether Triton's kernels run where a tensor is."""
    return TRITON and (x.is_cuda or (INTERPRETED and x.device.type == "cpu"))


def on_device_of(x: Tensor) -> AbstractContextManager[None]:
    """Triton launches on the current device, wherever its tensors are."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def values_are_readable(x: Tensor) -> bool:
    """Return whether control flow may depend on x's values: not while a graph is traced or captured."""
    if torch.compiler.is_compiling() or x.is_meta:
        return False
    return not (x.is_cuda and torch.cuda.is_current_stream_capturing())


@cache
def generation(device: torch.device) -> int:
    """Of an NVIDIA card: 8 is Ampere and Ada, 9 Hopper."""
    return torch.cuda.get_device_capability(device)[0]


def compiled(function: Callable[..., Any], tensors: Sequence[Tensor | None], *variant: Hashable) -> Callable[..., Any]:
    """The function fused into kernels when its `tensors` live on a GPU; as it is on a CPU or inside a larger graph.

    Of tensors as small as one token's, nothing is left to gain. variant: whatever else the generated code depends on.
    """
    if torch.compiler.is_compiling() or not any(x is not None and x.is_cuda for x in tensors):
        return function
    if all(x is None or x.numel() <= SMALL for x in tensors):
        return function
    return variant_of(function, tensors, *variant)


def variant_of(
    function: Callable[..., Any], tensors: Sequence[Tensor | None], *variant: Hashable
) -> Callable[..., Any]:
    """The compiled function for tensors of this kind. Lengths may change freely; one is a kind of its own."""
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    return _compile(function, (modes, *map(_kind, tensors), *variant))


def _kind(x: Tensor | None) -> Hashable:
    """What a compiled function is specialised to: dtype, device, gradient, memory order, and which sizes are one."""
    if x is None:
        return None
    return x.dtype, x.device, x.requires_grad, x.is_contiguous(), tuple(n == 1 for n in x.shape)


@cache
def _compile(function: Callable[..., Any], kind: tuple[Hashable, ...]) -> Callable[..., Any]:
    """Compilations are counted per code object and, past a limit, quietly given up: every kind gets a code object of
    its own, and `fullgraph` turns giving up into an error."""
    return torch.compile(fresh(function), fullgraph=True)


def fresh(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function with a code object of its own."""
    own = types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    own.__kwdefaults__ = function.__kwdefaults__
    return own
