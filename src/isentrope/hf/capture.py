"""What every attention layer of a transformers model is asked for, shown while the model runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from isentrope.core.layout import Layout
from isentrope.hf.extend import _inner, _state, extended, extension
from isentrope.hf.introspection import Attending
from isentrope.hf.layer import layer_of
from isentrope.hf.rope import Rope
from isentrope.recipe import Recipe


@dataclass(frozen=True, eq=False)
class Seen:
    """Attention in one layer: `attention(q, k, v, recipe, **options)`, v aside.

    options: the layout, and what else is not as by default.
    turned: the frequencies that q and k were rotated by before they came here; None where the recipe rotates.
    """

    index: int
    q: Tensor
    k: Tensor
    recipe: Recipe
    options: dict[str, Any]
    turned: Rope | None = None

    @property
    def layout(self) -> Layout:
        return self.options["layout"]

    def unturned(self) -> Seen:
        """The same before any position method: no rotation, no bias. Mask and temperature stay."""
        q, k = self.q, self.k
        if self.turned is not None:
            # `rotated` multiplies by the rope's scaling, which scores are to keep: once is enough
            q = self.turned.rotated(q, -self.layout.query) / self.turned.scaling
            k = self.turned.rotated(k, -self.layout.key) / self.turned.scaling
        return replace(self, q=q, k=k, recipe=replace(self.recipe, position=None), turned=None)


@contextmanager
def observed(model: nn.Module, see: Callable[[Seen], None]) -> Iterator[None]:
    """While the block lasts, `see` is called for each attention layer that runs, in the order in which they do.

    model: any transformers model that `extend` takes, extended or not; one that is not gives the same output, bit for
    bit. Raises ValueError where its attention is out of reach.
    """
    with ExitStack() as stack:
        if _state(_inner(model)) is None:
            stack.enter_context(extended(model, Recipe()))  # type: ignore[type-var]
        for layer in extension(model).layers:
            handle = layer_of(layer.module).register_forward_pre_hook(_hook(layer, see))
            stack.callback(handle.remove)
        yield


def recipe_of(model: nn.Module) -> Recipe:
    """What a model was extended with; the empty recipe where it was not."""
    state = _state(_inner(model))
    return Recipe() if state is None else state.recipe


def _hook(attending: Attending, see: Callable[[Seen], None]) -> Callable[[Any, tuple[Any, ...]], None]:
    def hook(layer: Any, args: tuple[Any, ...]) -> None:
        _, query, key, _, mask, scaling, _, position_ids, sink_logits = args
        if sink_logits is not None:
            raise ValueError(f"{attending.name} has sink logits, which take a share of the weight that no key has")
        recipe, options = layer.asked(layer.placed(query, key, mask, position_ids), scaling)
        turned = attending.rope if layer.rope is None and recipe.position is None else None
        see(Seen(attending.index, query, key, recipe, options, turned))

    return hook
