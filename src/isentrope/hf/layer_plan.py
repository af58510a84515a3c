"""What becomes of each layer of a model under a recipe, decided before anything is changed."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from isentrope.hf.introspection import Attending
from isentrope.hf.rope import Native, Rope, apply_to, rescaled, streaming
from isentrope.hf.sharding import Heads, position_here, temperature_here
from isentrope.positions import Position, RoPE
from isentrope.recipe import KINDS, Recipe

# models whose learned positions begin after the padding token's
COUNT_FROM_PADDING = ("roberta", "xlm-roberta", "camembert")


def read(recipe: Recipe | str, config: PreTrainedConfig, layers: list[Attending]) -> Recipe:
    """The recipe, with what it requires and leaves out taken from the model."""
    turning = {2 * layer.rope.theta.shape[-1] for layer in layers if layer.rope is not None}
    known = {
        "train_length": train_length(config),
        "heads": layers[0].heads,
        "dim": turning.pop() if len(turning) == 1 else None,
    }
    if not isinstance(recipe, (Recipe, str)):
        raise ValueError(f"recipe: expected a Recipe or its text, got {recipe!r}")
    # what a recipe learns belongs to one model
    recipe = Recipe.parse(recipe, **known) if isinstance(recipe, str) else copy.deepcopy(recipe)
    recipe = recipe.resolve()
    if recipe.position is None:
        return recipe
    return replace(recipe, position=recipe.position.resolve(known["train_length"]))


def train_length(config: PreTrainedConfig) -> int | None:
    """The length a config says its model was trained at.

    A config with scaled frequencies also states the length before scaling. Models are trained anew with llama3's and
    longrope's; with the others' they mostly are not, and the length before is the one they know.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    longest = getattr(config, "max_position_embeddings", None)
    if config.model_type in COUNT_FROM_PADDING and longest is not None:
        return longest - (config.pad_token_id or 0) - 1
    if rope.get("rope_type") in ("llama3", "longrope"):
        return longest
    before = rope.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
    return before or longest


def check_trained(recipe: Recipe, kind: str, allow_untrained: bool) -> None:
    """Refuse parts that a model does not work with before it was trained with them, or warn of them."""
    untrained = [part for part in (recipe.score, recipe.position, recipe.temperature) if _needs_training(part)]
    if untrained:
        what = f"{kind}: was not trained with {' and '.join(str(part) for part in untrained)}"
        if not allow_untrained:
            raise ValueError(
                f"{what}, and does not work with it before it is; to train it, or to see, pass allow_untrained=True"
            )
        warnings.warn(f"{what}: expect poor output until it is", UserWarning, stacklevel=3)


def check(recipe: Recipe, kind: str, layers: list[Attending]) -> None:
    """Refuse what a model has no place for."""
    if recipe.position is not None and all(layer.rope is None for layer in layers):
        raise ValueError(
            f"{kind}: has no rotary embedding, so {recipe.position} cannot take its place; temperatures and masks can"
        )
    if recipe.temperature is None:
        return
    for layer in layers:
        law = recipe.for_layer(layer.index).temperature
        tau = law.scale(torch.full((1, 1, 1), 1 << 20), layer.head_dim)
        if tau.shape[-2] not in (1, layer.heads):
            raise ValueError(f"{kind}: has {layer.heads} attention heads, {law} has {tau.shape[-2]}")


def _needs_training(part: Any) -> bool:
    return getattr(part, "needs_training", False)


@dataclass
class Plan:
    """One layer: its recipe, whose frequencies its keys arrive without, and frequencies to write into the model."""

    recipe: Recipe
    raw: Rope | None = None
    theta: Tensor | None = None


def planned(recipe: Recipe, layers: list[Attending], config: PreTrainedConfig, owner: nn.Module) -> list[Plan]:
    """What becomes of each layer. `owner` is the model, on which a learned position method is registered."""
    shared: dict[tuple[int, str | None, Heads], Position] = {}
    plans = []
    for layer in layers:
        own = recipe.for_layer(layer.index)
        if isinstance(own.temperature, nn.Module):
            own = replace(own, temperature=copy.deepcopy(own.temperature))
        own = replace(own, temperature=temperature_here(own.temperature, layer.here, layer.head_dim))
        causal = all(span.high <= 1 for span in layer.band.spans)
        rope = layer.rope
        stream = streaming(recipe.mask, recipe.position) if causal else None
        if rope is None or not (recipe.position or stream) or not _reached(layer, layers):
            plans.append(Plan(replace(own, position=None)))
            continue
        key = (id(rope.module), rope.layer_type, layer.here)
        if key not in shared:
            position = _position(recipe, rope, layer.head_dim, stream, config.model_type, owner)
            shared[key] = position_here(position, layer.here)
        position = shared[key]
        if isinstance(position, Native) and position.writable:
            # one angle a position: the model's own rotary module rotates, and its cache holds rotated keys
            plans.append(Plan(replace(own, position=None), theta=rescaled(position.inner, rope, 1)))
        else:
            plans.append(Plan(replace(own, position=position), raw=rope))
    for plan in plans:  # layers with the same parts share the recipe: what is kept for one is known for the others
        plan.recipe = next(other.recipe for other in plans if _same_parts(other.recipe, plan.recipe))
    return plans


def parts_of(plans: list[Plan]) -> tuple[Any, ...]:
    """Every part of every layer's recipe, once."""
    given = [getattr(plan.recipe, kind) for plan in plans for kind in KINDS]
    return tuple({id(part): part for part in given if part is not None}.values())


def _same_parts(one: Recipe, other: Recipe) -> bool:
    return all(getattr(one, kind) is getattr(other, kind) for kind in KINDS)


def _reached(layer: Attending, layers: list[Attending]) -> bool:
    """Whether a position method applies to a layer.

    Where a model keeps frequencies of their own for its windowed layers, those never meet a distance they have not
    seen, and stay as they are.
    """
    rotated = [other for other in layers if other.rope is not None]
    alike = [other for other in rotated if other.rope.same(layer.rope)]  # type: ignore[union-attr]
    return not all(map(_windowed, alike)) or all(map(_windowed, rotated))


def _windowed(layer: Attending) -> bool:
    return any(span.low > float("-inf") for span in layer.band.spans)


def _position(
    recipe: Recipe, rope: Rope, head_dim: int, stream: tuple[int, int] | None, kind: str, owner: nn.Module
) -> Position:
    position = apply_to(recipe.position or RoPE(), rope, stream, kind, owner)
    if rope.scaling != 1 and 2 * rope.theta.shape[-1] != head_dim:
        raise ValueError(
            f"{kind}: rotates part of a head and scales it, which {recipe.position or recipe.mask} cannot be joined to"
        )
    return position
