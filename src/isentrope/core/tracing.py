"""What the operations of a graph that is being traced may share: layers of a model need the same masks and angles."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def can_share_in_graph() -> bool:
    """Return whether a graph is traced, and what is computed now may be used anywhere in the rest of it.

    Not within checkpointed layers and autograd functions, which torch traces as graphs of their own, nor where a tracer
    other than Dynamo runs.
    """
    return torch.compiler.is_dynamo_compiling() and _is_outermost_graph()


def _is_outermost_graph() -> bool:
    try:
        from torch._dynamo.symbolic_convert import InstructionTranslator

        return bool(InstructionTranslator.current_tx().output.is_root_tracer())
    except (ImportError, AttributeError):  # private names of torch: without them nothing is shared
        return False


# called, not traced; torch.compiler.assume_constant_result does the same, but imports all of Dynamo
setattr(_is_outermost_graph, "_dynamo_marked_constant", True)  # noqa: B010


class GraphCache:
    """Values of the graph in which this object was made; nothing is dropped, since graph and object end together."""

    def __init__(self) -> None:
        self._values: dict[Hashable, Any] = {}

    def find(self, key: Hashable) -> Any:
        """Return the value of a key, or None."""
        return self._values.get(key)

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return what `make` returned the first time."""
        value: Any = self._values.get(key)
        if value is None:
            value = make()
            if can_share_in_graph():
                self._values[key] = value
        return value
