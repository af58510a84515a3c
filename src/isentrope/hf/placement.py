"""Notice layers that were put in place of extended ones: their queries and keys would arrive unrotated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from isentrope.hf.introspection import LayerInfo
from isentrope.hf.names import LAYER


class Placement:
    """A hook on an extended model, which compares where its attention modules are with where they were.

    Wrappers around them (FSDP's, checkpointing's) and layers that are removed are fine.
    """

    def __init__(self, model: nn.Module, layers: Sequence[LayerInfo]) -> None:
        self.modules = {info.module: info.name for info in layers}
        self.places = list(_list_places(model, set(self.modules)))

    def check(self, model: nn.Module, args: Any) -> None:
        """A hook before the model runs."""
        if torch.compiler.is_compiling():
            return
        for parent, name, child in self.places:
            if parent._modules.get(name) is not child:
                self._check_again(model)
                return

    def _check_again(self, model: nn.Module) -> None:
        present = set(model.modules())
        missing = {type(module): name for module, name in self.modules.items() if module not in present}
        replaced = [missing[type(x)] for x in present if type(x) in missing and not hasattr(x, LAYER)]
        if replaced:
            raise RuntimeError(
                f"{replaced[0]}: was replaced after isentrope.extend, and the new module does not follow the recipe; "
                "call isentrope.restore(model) before that, and extend again"
            )
        self.places = list(_list_places(model, set(self.modules) & present))


def _list_places(module: nn.Module, wanted: set[nn.Module]) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """List the way to each wanted module: a parent, the name of a child, and the child."""
    for name, child in module.named_children():
        below = list(_list_places(child, wanted))
        if below or child in wanted:
            yield module, name, child
            yield from below
