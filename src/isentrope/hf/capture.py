"""Capture the queries, keys and recipe of every attention layer while a transformers model runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from isentrope.core.layout import Layout
from isentrope.hf.extend import extended
from isentrope.hf.extension import find_extension, get_extension
from isentrope.hf.introspection import LayerInfo
from isentrope.hf.layer import LayerCall, get_layer
from isentrope.hf.rope import ModelRope
from isentrope.recipe import Recipe


@dataclass(frozen=True, eq=False)
class CapturedAttention:
    """One call of a layer's attention: `attention(q, k, v, recipe, **options)`, without v.

    Attributes:
        index: of the layer.
        options: the layout, and whatever else is not the default.
        applied_rope: the frequencies that q and k were rotated by before; None where the recipe rotates.
    """

    index: int
    q: Tensor
    k: Tensor
    recipe: Recipe
    options: dict[str, Any]
    applied_rope: ModelRope | None = None

    @property
    def layout(self) -> Layout:
        return self.options["layout"]

    def without_position(self) -> CapturedAttention:
        """Return the same call before any position method: no rotation, no bias. Mask and τ of all keys stay."""
        q, k, rope = self.q, self.k, self.applied_rope
        if rope is not None:
            # `rotate` multiplies by the rope's scaling, which q and k already have
            q = rope.rotate(q, -self.layout.query) / rope.scaling
            k = rope.rotate(k, -self.layout.key) / rope.scaling
        return replace(self, q=q, k=k, recipe=self.recipe.without_far_keys(), applied_rope=None)


@contextmanager
def capture_attention(model: nn.Module, callback: Callable[[CapturedAttention], None]) -> Iterator[None]:
    """Call `callback` for each attention layer that runs while the block lasts, in the order in which they run.

    Args:
        model: any transformers model that `extend` takes, extended or not; its output stays the same, bit for bit.
        callback: receives the layer's call.

    Raises:
        ValueError: the model's attention is out of reach.
    """
    with ExitStack() as stack:
        if find_extension(model) is None:
            stack.enter_context(extended(model, Recipe()))  # type: ignore[type-var]
        for layer in get_extension(model).layers:
            handle = get_layer(layer.module).register_forward_pre_hook(_make_hook(layer, callback))
            stack.callback(handle.remove)
        yield


def get_recipe(model: nn.Module) -> Recipe:
    """Return what a model was extended with; the empty recipe where it was not."""
    extension = find_extension(model)
    return Recipe() if extension is None else extension.recipe


def _make_hook(
    info: LayerInfo, callback: Callable[[CapturedAttention], None]
) -> Callable[[Any, tuple[LayerCall]], None]:
    def hook(layer: Any, args: tuple[LayerCall]) -> None:
        (call,) = args
        if call.sink_logits is not None:
            raise ValueError(f"{info.name} has sink logits, which take a share of the weight that no key has")
        recipe, options = layer.get_attention_arguments(layer.get_layout(call), call.scaling)
        applied_rope = info.rope if layer.rope is None and recipe.position is None else None
        callback(CapturedAttention(info.index, call.query, call.key, recipe, options, applied_rope))

    return hook
