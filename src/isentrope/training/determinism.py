"""Training that gives the same bits again: which algorithms torch may use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# cuBLAS splits sums over streams unless its workspace is fixed; read when a process first multiplies
CUBLAS_WORKSPACE = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@contextmanager
def use_deterministic_algorithms(enabled: bool) -> Iterator[None]:
    """Let torch use only algorithms that give the same bits again while the block lasts; without effect if not enabled.

    On a GPU, gradients of lookups are otherwise summed by atomic additions in any order, and compiled reductions use
    whichever tiling was fastest when they were timed.
    """
    if not enabled:
        yield
        return
    from torch._inductor import config as inductor  # slow to import

    os.environ.setdefault(*CUBLAS_WORKSPACE)
    before, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        with inductor.patch(deterministic=True):
            yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)
