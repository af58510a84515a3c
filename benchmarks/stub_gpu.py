"""Stand-ins for a GPU, so that a machine without one sees what a call costs the host before its kernels are launched.

Tensors stay on the CPU but pass for those of a GPU: calls take a GPU's path, and kernels return without computing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from torch.nn import functional as F
from triton.compiler import CompiledKernel

from isentrope.backends import sdpa, tile_kernels
from isentrope.backends.band import spans
from isentrope.core import compile as compiling
from isentrope.core import launching
from isentrope.core.caching import clear_caches

HOPPER = SimpleNamespace(capability=(9, 0), shared_memory_per_block_optin=232448, multi_processor_count=132)


class Launches:
    """Counts the launches of Triton's kernels."""

    count = 0


class StubKernel(CompiledKernel):
    """A compiled kernel that does nothing but count its launches, of which the first has been."""

    def __init__(self, launches: Launches) -> None:
        self.module, self.launches = None, launches
        launches.count += 1

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self._launch

    def _launch(self, *arguments: Any, **options: Any) -> None:
        self.launches.count += 1


def _attend(q: Tensor, k: Tensor, v: Tensor, *others: Any, **options: Any) -> Tensor:
    return q


def _attend_with_lse(q: Tensor, k: Tensor, v: Tensor, *others: Any, **options: Any) -> tuple[Tensor, Tensor]:
    return q, _make_lse(q)[..., None]


def _make_lse(q: Tensor) -> Tensor:
    return q.new_empty(q.shape[:-1], dtype=torch.float32)


@contextmanager
def stub_gpu(card: Any = HOPPER, one_pass: bool = False) -> Iterator[Launches]:
    """Let tensors on the CPU pass for those of a card; what is cached meanwhile is dropped at the end.

    Args:
        card: its compute capability, the shared memory of a program in bytes, and how many multiprocessors it has.
        one_pass: whether the kernel for Hopper takes calls of any length, under any release of Triton.

    Yields:
        The launches of Triton's kernels so far.
    """
    launches = Launches()
    kernels = SimpleNamespace(
        _scaled_dot_product_cudnn_attention=_attend_with_lse,
        _scaled_dot_product_efficient_attention=lambda q, *others, **options: (q, _make_lse(q)),
        _flash_attention_forward=lambda q, *others, **options: (q, _make_lse(q.transpose(1, 2))),
    )
    replacements: list[tuple[Any, str, Any]] = [
        (Tensor, "is_cuda", property(lambda x: True)),
        (torch.cuda, "get_device_capability", lambda device=None: card.capability),
        (torch.cuda, "get_device_properties", lambda device=None: card),
        (torch.cuda, "is_current_stream_capturing", lambda: False),
        (compiling, "current_device", lambda: None),  # the index of the CPU
        (launching, "current_stream", lambda index: None),
        (triton.JITFunction, "run", lambda kernel, *arguments, **options: StubKernel(launches)),
        (tile_kernels, "aten", kernels),
        (F, "scaled_dot_product_attention", _attend),
        (sdpa, "tiles_on_cpu", lambda branch, sharing=1: None),
    ]
    if one_pass:
        release = tuple(map(int, triton.__version__.split(".")[:2]))
        limits = {"MIN_TILES": 0, "TRITON_RELEASES": (release,)}
        replacements += [(spans, name, value) for name, value in limits.items()]
    clear_caches(keep_compiled=True)
    try:
        with ExitStack() as stack:
            for owner, name, stand_in in replacements:
                stack.enter_context(patch.object(owner, name, stand_in))
            yield launches
    finally:
        clear_caches(keep_compiled=True)
