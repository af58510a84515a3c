"""What becomes of each layer of a model under a recipe, decided before anything is changed."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from isentrope.hf.introspection import LayerInfo
from isentrope.hf.rope import ModelRope, fit_position, get_streaming_window
from isentrope.hf.sharding import LocalHeads, shard_position, shard_share, shard_temperature
from isentrope.positions import Position, RoPE
from isentrope.recipe import Recipe
from isentrope.utils.messages import format_value, truncate

# models whose learned positions begin after the padding token's
COUNT_FROM_PADDING = ("roberta", "xlm-roberta", "camembert")


def resolve_recipe(recipe: Recipe | str, config: PreTrainedConfig, layers: list[LayerInfo]) -> Recipe:
    """Parse or copy a recipe, and take from the model what it requires and leaves out."""
    rotary_dims = {2 * layer.rope.theta.shape[-1] for layer in layers if layer.rope is not None}
    defaults = {
        "train_length": read_train_length(config),
        "heads": layers[0].heads,
        "dim": rotary_dims.pop() if len(rotary_dims) == 1 else None,
    }
    if not isinstance(recipe, (Recipe, str)):
        raise ValueError(f"recipe: expected a Recipe or its text, got {recipe!r}")
    # copied: what a recipe learns belongs to one model
    recipe = Recipe.parse(recipe, **defaults) if isinstance(recipe, str) else copy.deepcopy(recipe)
    return recipe.resolve().fill_train_length(defaults["train_length"])


def read_train_length(config: PreTrainedConfig) -> int | None:
    """Read the length that a model was trained at from its config.

    A config with scaled frequencies also states the length before scaling. Models are trained anew with llama3's and
    longrope's scaling; with the others' they mostly are not, and the length before is their training length.
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
    """Refuse parts that a model must be trained with, or warn of them where `allow_untrained`."""
    untrained = [part for part in recipe.parts if getattr(part, "needs_training", False)]
    if untrained:
        what = f"{kind}: was not trained with {' and '.join(str(part) for part in untrained)}"
        if not allow_untrained:
            raise ValueError(
                f"{what}, and does not work with it before it is; to train it, or to see, pass allow_untrained=True"
            )
        warnings.warn(f"{what}: expect poor output until it is", UserWarning, stacklevel=3)


def check_supported(recipe: Recipe, kind: str, layers: list[LayerInfo]) -> None:
    """Refuse a position method for a model without rotation, tables for other heads, and what could not be saved."""
    for part in recipe.parts:
        if not (hasattr(part, "to_dict") and hasattr(part, "idle")):
            raise ValueError(
                "recipe: expected parts that a config can hold, with to_dict and idle like isentrope.parts.Part, "
                f"got {format_value(part)}"
            )
    if isinstance(recipe.share, nn.Module):
        raise ValueError(
            f"recipe: expected a share law without parameters, which a model would not train, got "
            f"{format_value(recipe.share)}; fit β with isentrope.calibrate"
        )
    if recipe.position is not None and all(layer.rope is None for layer in layers):
        raise ValueError(
            f"{kind}: has no rotary embedding, so {recipe.position} cannot take its place; temperatures and masks can"
        )
    far = torch.full((1, 1, 1), 1 << 20)
    for layer in layers:
        layer_recipe = recipe.for_layer(layer.index)
        by_length = [law for law in layer_recipe.temperatures if hasattr(law, "scale")]
        laws = [(law, law.scale(far, layer.head_dim)) for law in by_length]
        if (share := layer_recipe.share) is not None:
            laws.append((share, share.bias(far)))
        for law, values in laws:
            if values.shape[-2] not in (1, layer.heads):
                raise ValueError(
                    f"{kind}: has {layer.heads} attention heads, {truncate(str(law))} has {values.shape[-2]}"
                )


@dataclass
class LayerPlan:
    """What becomes of one layer.

    Attributes:
        recipe: what its attention follows.
        skipped_rope: the model's rotation that is left out, so that queries and keys arrive unrotated; None where the
            model rotates.
        theta: frequencies to write into the model's own rotary module.
    """

    recipe: Recipe
    skipped_rope: ModelRope | None = None
    theta: Tensor | None = None


def plan_layers(recipe: Recipe, layers: list[LayerInfo], config: PreTrainedConfig, owner: nn.Module) -> list[LayerPlan]:
    """Decide what becomes of each layer. `owner` is the model, on which a learned position method is registered."""
    fitted: dict[tuple[int, str | None, LocalHeads], tuple[Position, Tensor | None]] = {}
    near_only = recipe.without_far_keys(near_only=True)  # once, so that layers share its parts
    plans = []
    for layer in layers:
        rope = layer.rope
        if rope is not None and recipe.position is not None and not _takes_position(layer, layers):
            plans.append(LayerPlan(_localize(near_only.for_layer(layer.index), layer)))
            continue
        layer_recipe = _localize(recipe.for_layer(layer.index), layer)
        stream = get_streaming_window(recipe.mask, recipe.position) if layer.causal else None
        if rope is None or not (recipe.position or stream) or not _takes_position(layer, layers):
            plans.append(LayerPlan(layer_recipe.without_far_keys()))
            continue
        key = (id(rope.module), rope.layer_type, layer.local_heads)
        if key not in fitted:
            position, theta = fit_position(recipe.position or RoPE(), rope, stream, config.model_type, owner)
            _check_scaling(recipe, rope, layer.head_dim, config.model_type)
            fitted[key] = shard_position(position, layer.local_heads), theta
        position, theta = fitted[key]
        if theta is not None:
            plans.append(LayerPlan(layer_recipe.without_far_keys(), theta=theta))
        else:
            plans.append(LayerPlan(replace(layer_recipe, position=position), skipped_rope=rope))
    for plan in plans:  # layers with the same parts share the recipe, and with it what is cached for it
        plan.recipe = next(other.recipe for other in plans if _same_parts(other.recipe, plan.recipe))
    return plans


def _localize(recipe: Recipe, layer: LayerInfo) -> Recipe:
    """Return the recipe of a layer for the heads that are in this process, with modules of its own."""
    own = [copy.deepcopy(law) if isinstance(law, nn.Module) else law for law in recipe.temperatures]
    laws = tuple(shard_temperature(law, layer.local_heads, layer.head_dim) for law in own)
    return replace(recipe, temperature=laws, share=shard_share(recipe.share, layer.local_heads))


def collect_parts(plans: list[LayerPlan]) -> tuple[Any, ...]:
    """Return every part of every layer's recipe, once."""
    return tuple({id(part): part for plan in plans for part in plan.recipe.parts}.values())


def _same_parts(one: Recipe, other: Recipe) -> bool:
    return [id(part) for part in one.parts] == [id(part) for part in other.parts]


def _takes_position(layer: LayerInfo, layers: list[LayerInfo]) -> bool:
    """Return whether a position method applies to a layer.

    Where a model keeps frequencies of their own for its windowed layers, those never see a distance that is new to
    them, and stay as they are: all their keys are near, to a temperature of near keys too.
    """
    rotated = [other for other in layers if other.rope is not None]
    alike = [other for other in rotated if other.rope.same(layer.rope)]  # type: ignore[union-attr]
    return not all(map(_is_windowed, alike)) or all(map(_is_windowed, rotated))


def _is_windowed(layer: LayerInfo) -> bool:
    return any(span.low > float("-inf") for span in layer.region.spans)


def _check_scaling(recipe: Recipe, rope: ModelRope, head_dim: int, kind: str) -> None:
    """Refuse a scaling of cos and sin that reaches part of a head only: `attention` scales whole heads."""
    if rope.scaling != 1 and 2 * rope.theta.shape[-1] != head_dim:
        raise ValueError(
            f"{kind}: rotates part of a head and scales it, which {recipe.position or recipe.mask} cannot be joined to"
        )
