"""The processes that share a sequence, and what they send each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from isentrope.utils.messages import truncate

# what backends say of a process that is gone, where they raise no error of a class of its own
LOST_CONNECTION = ("connection", "timed out", "timeout", "broken pipe", "socket", "nccl")


class Processes:
    """A process group, with errors of one sentence.

    Args:
        group: of `torch.distributed`, or a `DeviceMesh` with one dimension; None for all processes.

    Attributes:
        rank: of this process in the group.
        size: number of processes.

    Raises:
        ValueError: `torch.distributed` was not initialised, or this process is not in the group.
    """

    def __init__(self, group: Any = None) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise ValueError(
                "group: expected processes of torch.distributed, got none; start them with torchrun, and call "
                "torch.distributed.init_process_group() first"
            )
        if hasattr(group, "get_group"):
            if group.ndim != 1:
                raise ValueError(f"group: expected a mesh with one dimension, got {group.ndim}; pass mesh['name']")
            group = group.get_group()
        self.group = dist.group.WORLD if group is None else group
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        if self.rank < 0:
            raise ValueError("group: expected one that this process belongs to, got another")

    def exchange(
        self, buffer: Tensor, sent: Sequence[int], received: Sequence[int], wait: bool = True
    ) -> tuple[Tensor, Callable[[], object]]:
        """Send each process its part of a buffer, along the first dimension, and receive one from each.

        Args:
            buffer: what is sent, contiguous, in the order of ranks.
            sent: entries for each process.
            received: entries from each process.
            wait: return when everything has arrived; otherwise after the returned function was called.
        """
        out = buffer.new_empty((sum(received), *buffer.shape[1:]))
        buffer = buffer.detach().contiguous()

        def start() -> Any:
            return dist.all_to_all_single(out, buffer, list(received), list(sent), group=self.group, async_op=not wait)

        work = self._run(start)
        return out, (lambda: None) if work is None else (lambda: self._run(work.wait))

    def gather(self, x: Tensor) -> Tensor:
        """Return equally large tensors of all processes, (size, …), without gradients."""
        own = x.detach().contiguous()
        parts = own.new_empty((self.size, *own.shape))
        self._run(lambda: dist.all_gather(list(parts), own, group=self.group))
        return parts

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of a tensor over all processes, without gradients."""
        total = x.detach().clone().contiguous()
        self._run(lambda: dist.all_reduce(total, group=self.group))
        return total

    def _run(self, operation: Callable[[], Any]) -> Any:
        try:
            return operation()
        except RuntimeError as error:
            if not _is_lost_connection(error):
                raise
            reason = truncate(str(error).strip().splitlines()[0])
            raise RuntimeError(
                f"context parallel: process {self.rank} of {self.size} lost the connection to another, which may have "
                f"died or be stuck; see its output, and start all of them again ({reason})"
            ) from error

    def __deepcopy__(self, memo: dict[int, Any]) -> Processes:
        return self  # a copy of a model runs in the same processes

    def __reduce__(self) -> Any:
        raise TypeError("a process group cannot be pickled; restore the model, and extend it again where it is loaded")


def _is_lost_connection(error: RuntimeError) -> bool:
    """Return whether a collective failed for another process, and not for its arguments or for memory."""
    message = str(error).lower()
    return isinstance(error, dist.DistError) or any(words in message for words in LOST_CONNECTION)
