"""What becomes of each layer of a model under a recipe, decided before anything is changed."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from isentrope.hf.introspection import LayerInfo
from isentrope.hf.rope import FittedPosition, ModelRope, fit_position, get_streaming_window
from isentrope.hf.sharding import check_local_heads
from isentrope.hf.train_length import read_train_length
from isentrope.parallel.heads import shard_position, shard_share, shard_temperature
from isentrope.positions import Position, RoPE
from isentrope.recipe import LayerRecipes, Recipe
from isentrope.utils.messages import format_value, truncate


def resolve_recipe(recipe: Recipe | str, config: PreTrainedConfig, layers: list[LayerInfo]) -> Recipe:
    """Parse or copy a recipe, and take from the model what it requires and leaves out."""
    rotary_dims = {2 * layer.rope.theta.shape[-1] for layer in layers if layer.rope is not None}
    defaults = {
        "train_length": read_train_length(config),
        "heads": layers[0].heads,
        "dim": rotary_dims.pop() if len(rotary_dims) == 1 else None,
    }
    if not isinstance(recipe, (Recipe, str)):
        raise ValueError(f"recipe: expected a Recipe or its text, such as 'auto:length=4x', got {recipe!r}")
    # copied: what a recipe learns belongs to one model
    recipe = Recipe.parse(recipe, **defaults) if isinstance(recipe, str) else copy.deepcopy(recipe)
    return recipe.resolve().fill_train_length(defaults["train_length"])


def check_trained(recipe: Recipe, kind: str, allow_untrained: bool) -> None:
    """Refuse parts that a model must be trained with, or warn of them where `allow_untrained`."""
    untrained = [part for part in recipe.parts if getattr(part, "needs_training", False)]
    if untrained:
        what = f"{kind}: was not trained with {' and '.join(dict.fromkeys(map(str, untrained)))}"
        if not allow_untrained:
            raise ValueError(
                f"{what}, and does not work with it before it is; to train it, or to see, pass allow_untrained=True"
            )
        warnings.warn(f"{what}: expect poor output until it is", UserWarning, stacklevel=3)


def check_supported(recipe: Recipe, kind: str, layers: list[LayerInfo]) -> None:
    """Refuse recipes and tables for other layers or heads, positions without rotation, and what could not be saved."""
    if isinstance(recipe, LayerRecipes):
        _check_layers(recipe, kind, layers)
    for part in recipe.parts:
        if not (hasattr(part, "to_dict") and hasattr(part, "idle")):
            raise ValueError(
                "recipe: expected parts that a config can hold, with to_dict and idle like isentrope.parts.Part, "
                f"got {format_value(part)}"
            )
    for one in recipe.recipes:
        if isinstance(one.share, nn.Module):
            raise ValueError(
                f"recipe: expected a share law without parameters, which a model would not train, got "
                f"{format_value(one.share)}; fit β with isentrope.calibrate"
            )
        if one.position is not None and all(layer.rope is None for layer in layers):
            raise ValueError(
                f"{kind}: has no rotary embedding, so {one.position} cannot take its place; temperatures and masks can"
            )
    _check_tables(recipe, kind, layers)


def _check_layers(recipe: LayerRecipes, kind: str, layers: list[LayerInfo]) -> None:
    indices = [layer.index for layer in layers]
    if len(set(indices)) < len(indices):
        raise ValueError(f"{kind}: several of its layers have the same number; give one recipe for all of them")
    recipe.check_layers(indices)
    learned = {id(one.position): one.position for one in recipe.recipes if isinstance(one.position, nn.Module)}
    if len(learned) > 1:
        methods = " and ".join(map(str, learned.values()))
        raise ValueError(f"{kind}: expected one position method that learns, which layers share, got {methods}")


def _check_tables(recipe: Recipe, kind: str, layers: list[LayerInfo]) -> None:
    """Refuse laws with values for other layers or heads than the model has."""
    count = 1 + max(layer.index for layer in layers)
    for law in recipe.parts:
        if hasattr(law, "for_layer") and _has_layer(law, count):
            raise ValueError(f"{kind}: has {count} layers, the table of {truncate(str(law))} has more")
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


def _has_layer(law: Any, index: int) -> bool:
    """Return whether a law has values of its own for this layer."""
    try:
        return law.for_layer(index) is not law
    except ValueError:
        return False


@dataclass
class LayerPlan:
    """What becomes of one layer.

    Attributes:
        recipe: what its attention follows.
        skipped_rope: the model's rotation that is left out, so that queries and keys arrive unrotated; None where the
            model rotates.
        theta: frequencies to write into the model's own rotary module.
        rotated_recipe: `recipe` for queries and keys that the model has rotated after all, as a paged cache holds them;
            None where layers of the same rotary module need them unrotated.
    """

    recipe: Recipe
    skipped_rope: ModelRope | None = None
    theta: Tensor | None = None
    rotated_recipe: Recipe | None = None


def plan_layers(recipe: Recipe, layers: list[LayerInfo], config: PreTrainedConfig, owner: nn.Module) -> list[LayerPlan]:
    """Decide what becomes of each layer. `owner` is the model, on which a learned position method is registered."""
    recipes = [_localize(recipe.for_layer(layer.index), layer) for layer in layers]
    positions = _fit_positions(recipe, layers, config.model_type, owner)
    without_far_keys: dict[tuple[Any, ...], Recipe] = {}  # made once, so that layers share its parts
    plans = []
    for layer, layer_recipe, fitted in zip(layers, recipes, positions, strict=True):
        if fitted is None:
            near_only = layer.rope is not None and layer_recipe.position is not None
            key = (near_only, *map(id, layer_recipe.parts))
            if key not in without_far_keys:
                without_far_keys[key] = layer_recipe.without_far_keys(near_only=near_only)
            plans.append(LayerPlan(without_far_keys[key]))
        elif fitted.theta is not None:
            plans.append(LayerPlan(layer_recipe.without_far_keys(), theta=fitted.theta))
        elif layer_recipe.retrieve is not None and _has_wider_window(layer, fitted.position.near_window):
            raise ValueError(
                f"{config.model_type}: layer {layer.index} has a window of its own, beyond which there are no far keys "
                f"to choose from; raise the window of {layer_recipe.position} to it, or leave out retrieve there"
            )
        elif layer_recipe.retrieve is not None and not layer.causal:
            raise ValueError(
                f"{config.model_type}: layer {layer.index} reads in both directions, where no query chooses far keys; "
                "leave out retrieve"
            )
        else:
            plans.append(LayerPlan(replace(layer_recipe, position=fitted.position), skipped_rope=layer.rope))
    for plan in plans:  # layers with the same parts share the recipe, and with it what is cached for it
        plan.recipe = next(other.recipe for other in plans if _same_parts(other.recipe, plan.recipe))
    _set_rotated_recipes(plans)
    return plans


def _set_rotated_recipes(plans: list[LayerPlan]) -> None:
    """Make the recipes for rotated queries and keys, where all layers of a rotary module have one."""
    rotated = {id(plan.recipe): _make_rotated(plan.recipe) for plan in plans}
    skipping = [(plan, plan.skipped_rope) for plan in plans if plan.skipped_rope is not None]
    for plan, rope in skipping:
        if all(rotated[id(other.recipe)] is not None for other, other_rope in skipping if rope.same(other_rope)):
            plan.rotated_recipe = rotated[id(plan.recipe)]


def _make_rotated(recipe: Recipe) -> Recipe | None:
    position = recipe.position.for_rotated() if isinstance(recipe.position, FittedPosition) else None
    # blocks are chosen by keys as they are cached elsewhere
    return None if position is None or recipe.retrieve is not None else replace(recipe, position=position)


class _FittedPosition(NamedTuple):
    """A position method at a layer's frequencies, and frequencies to write in its place where that is enough."""

    position: Position
    theta: Tensor | None


def _fit_positions(
    recipe: Recipe, layers: list[LayerInfo], model_type: str, owner: nn.Module
) -> list[_FittedPosition | None]:
    """Fit the position method of each layer; None where the layer rotates as before.

    A rotary module rotates for all layers that share it, or for none. Where they differ, all of them get queries and
    keys unrotated, and those without a method of their own rotate by the model's frequencies.
    """
    known: dict[tuple[Any, ...], _FittedPosition] = {}

    def fit(layer: LayerInfo, position: Position, stream: tuple[int, int] | None) -> _FittedPosition:
        rope = layer.rope
        assert rope is not None
        key = (id(rope.module), rope.layer_type, layer.local_heads, id(position), stream)
        if key not in known:
            fitted, theta = fit_position(position, rope, stream, model_type, owner)
            _check_scaling(position, rope, layer.head_dim, model_type)
            known[key] = _FittedPosition(shard_position(fitted, layer.local_heads), theta)
        return known[key]

    plain = RoPE()
    positions: list[_FittedPosition | None] = []
    for layer in layers:
        own = recipe.for_layer(layer.index)
        stream = get_streaming_window(own.mask, own.position) if layer.causal else None
        applies = layer.rope is not None and (own.position or stream) and takes_position(layer, layers)
        positions.append(fit(layer, own.position or plain, stream) if applies else None)
    sharing: dict[tuple[nn.Module, str | None], list[int]] = {}
    for index, layer in enumerate(layers):
        if layer.rope is not None:
            sharing.setdefault((layer.rope.module, layer.rope.layer_type), []).append(index)
    for indices in sharing.values():
        if not _rotate_alike([positions[index] for index in indices]):
            for index in indices:
                own_position = positions[index] or fit(layers[index], plain, None)
                positions[index] = own_position._replace(theta=None)
    return positions


def _rotate_alike(positions: list[_FittedPosition | None]) -> bool:
    """Return whether one rotary module can serve all of these: none changed, none rotated, or all at one frequency."""
    thetas = [None if position is None else position.theta for position in positions]
    if all(theta is None for theta in thetas):
        return len({position is None for position in positions}) < 2
    first = thetas[0]
    return first is not None and all(theta is not None and torch.equal(theta, first) for theta in thetas)


def _localize(recipe: Recipe, layer: LayerInfo) -> Recipe:
    """Return the recipe of a layer for the heads that are in this process, with modules of its own.

    What is learned stays whole, so that every process saves and trains all of it; layers take their heads from it.
    """
    check_local_heads(recipe, layer.local_heads)
    laws = tuple(
        copy.deepcopy(law) if isinstance(law, nn.Module) else shard_temperature(law, layer.local_heads, layer.head_dim)
        for law in recipe.temperatures
    )
    return replace(recipe, temperature=laws, share=shard_share(recipe.share, layer.local_heads))


def collect_recipes(plans: list[LayerPlan]) -> tuple[Recipe, ...]:
    """Return the recipes of all layers, those with the same parts once."""
    return tuple({tuple(map(id, plan.recipe.parts)): plan.recipe for plan in plans}.values())


def _same_parts(one: Recipe, other: Recipe) -> bool:
    return [id(part) for part in one.parts] == [id(part) for part in other.parts]


def takes_position(layer: LayerInfo, layers: Sequence[LayerInfo]) -> bool:
    """Return whether a position method applies to a layer.

    Where a model keeps frequencies of their own for its windowed layers, those never see a distance that is new to
    them, and stay as they are: all their keys are near, to a temperature of near keys too.
    """
    rotated = [other for other in layers if other.rope is not None]
    alike = [other for other in rotated if other.rope.same(layer.rope)]  # type: ignore[union-attr]
    return not all(map(_is_windowed, alike)) or all(map(_is_windowed, rotated))


def _is_windowed(layer: LayerInfo) -> bool:
    return any(span.low > float("-inf") for span in layer.region.spans)


def _has_wider_window(layer: LayerInfo, near_window: int | None) -> bool:
    """Return whether a layer sees a window alone, and in it keys that are far to a position method."""
    return _is_windowed(layer) and any(span.low <= -(near_window or 0) for span in layer.region.spans)


def _check_scaling(position: Position, rope: ModelRope, head_dim: int, kind: str) -> None:
    """Refuse a scaling of cos and sin that reaches part of a head only: `attention` scales whole heads."""
    if rope.scaling != 1 and 2 * rope.theta.shape[-1] != head_dim:
        raise ValueError(f"{kind}: rotates part of a head and scales it, which {position} cannot be joined to")
