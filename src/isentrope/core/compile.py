"""Compile tensor functions where that pays: on a GPU, a few times per function, for all lengths."""

from __future__ import annotations

import types
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from os import environ
from typing import Any

import torch
from torch import Tensor

from isentrope.core.caching import MAX_COMPILED_FUNCTIONS, MAX_DEVICES, bounded_cache

MAX_EAGER_ENTRIES = 1 << 12  # tensors as small as those of one token gain nothing from fusion
HAS_TRITON = find_spec("triton") is not None
# TRITON_INTERPRET=1 runs Triton kernels on a CPU, slowly, for debugging
TRITON_INTERPRETED = environ.get("TRITON_INTERPRET") == "1"
HOPPER_SHARED_MEMORY_BYTES = 227 << 10  # of a program
AMD_SHARED_MEMORY_BYTES = 64 << 10
_NO_CONTEXT = nullcontext()
# what torch.cuda asks after it has checked that CUDA was initialised, which a tensor there already shows
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


def can_run_triton(x: Tensor) -> bool:
    """Return whether Triton kernels run on x's device."""
    return HAS_TRITON and (x.is_cuda or (TRITON_INTERPRETED and x.device.type == "cpu"))


def device_context(x: Tensor) -> AbstractContextManager[None]:
    """Return a context that makes x's device the current one, where Triton launches its kernels."""
    if not x.is_cuda or x.device.index == current_device():
        return _NO_CONTEXT
    return torch.cuda.device(x.device)


def values_are_readable(x: Tensor) -> bool:
    """Return whether control flow may depend on x's values: not while a graph is traced or captured."""
    if torch.compiler.is_compiling() or x.is_meta:
        return False
    return not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def find_shared_memory(x: Tensor) -> int:
    """Return how many bytes of shared memory a program has on x's device; Hopper's where kernels are interpreted."""
    return read_shared_memory(x.device) if x.is_cuda else HOPPER_SHARED_MEMORY_BYTES


@bounded_cache(MAX_DEVICES)
def read_shared_memory(device: torch.device) -> int:
    """Return how many bytes of shared memory a program has on a GPU."""
    properties = torch.cuda.get_device_properties(device)
    # AMD's cards have no such property
    return getattr(properties, "shared_memory_per_block_optin", AMD_SHARED_MEMORY_BYTES)


@bounded_cache(MAX_DEVICES)
def count_multiprocessors(device: torch.device) -> int:
    """Return how many multiprocessors a GPU has."""
    return torch.cuda.get_device_properties(device).multi_processor_count


@bounded_cache(MAX_DEVICES)
def cuda_capability_major(device: torch.device) -> int:
    """Return the major compute capability of an NVIDIA GPU: 8 is Ampere and Ada, 9 Hopper."""
    return torch.cuda.get_device_capability(device)[0]


def maybe_compile(
    function: Callable[..., Any], tensors: Sequence[Tensor | None], *variant: Hashable
) -> Callable[..., Any]:
    """Compile a function for tensors on a GPU; return it unchanged on a CPU, for small tensors or inside a graph.

    Args:
        function: the function to compile.
        tensors: its tensor arguments.
        variant: whatever else the generated code depends on.
    """
    if torch.compiler.is_compiling() or not any(x is not None and x.is_cuda for x in tensors):
        return function
    if all(x is None or x.numel() <= MAX_EAGER_ENTRIES for x in tensors):
        return function
    return compile_variant(function, tensors, *variant)


def compile_variant(
    function: Callable[..., Any], tensors: Sequence[Tensor | None], *variant: Hashable
) -> Callable[..., Any]:
    """Compile a function for tensors of this kind; lengths may change freely, except to or from 1."""
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    return _compile(function, (modes, *map(_specialisation, tensors), *variant))


def _specialisation(x: Tensor | None) -> Hashable:
    """Return what compiled code is specialised to: dtype, device, gradient, memory order, and which sizes are 1."""
    if x is None:
        return None
    return x.dtype, x.device, x.requires_grad, x.is_contiguous(), tuple(n == 1 for n in x.shape)


@bounded_cache(MAX_COMPILED_FUNCTIONS, compiled=True)
def _compile(function: Callable[..., Any], key: tuple[Hashable, ...]) -> Callable[..., Any]:
    """Compile a copy of the function.

    torch counts recompilations per code object and, past a limit, silently runs eagerly: each key therefore gets its
    own code object, and `fullgraph` makes falling back an error.
    """
    return torch.compile(copy_function(function), fullgraph=True)


def copy_function(function: Callable[..., Any], name: str | None = None) -> Callable[..., Any]:
    """Return the same function with a code object of its own, and perhaps another name."""
    name = name or function.__name__
    copy = types.FunctionType(
        function.__code__.replace(co_name=name),
        function.__globals__,
        name,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
