"""Recipes: the score, position method, temperature, mask and share law that attention uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch

from isentrope import masks, positions, scores, temperatures
from isentrope.core.caching import MAX_RECIPE_TEXTS, register_clear
from isentrope.core.choice import BlockChoice
from isentrope.recipe.kinds import KINDS, LAYERS, PLAIN
from isentrope.recipe.parsing import parse_part, part_from_dict, split_text
from isentrope.share import Share
from isentrope.utils.messages import format_value, suggest, truncate


@dataclass(frozen=True)
class Recipe:
    """softmax(τ(n) · s(R q, R k) + b + M) v: a score s, a position method R, a temperature τ, a mask M, a share law b.

    A part left out has no effect: the scaled dot product of q and k as they are, τ = 1, no mask beyond the call's own.

    Attributes:
        score: s.
        position: R.
        temperature: τ, or a pair of them where one has keys="near" and the other keys="far".
        mask: M.
        share: b, for a position method with far keys.
        retrieve: which of its far keys a query sees, where they are chosen.
    """

    score: Any = None
    position: Any = None
    temperature: Any = None
    mask: Any = None
    share: Any = None
    retrieve: Any = None

    def __post_init__(self) -> None:
        for kind in KINDS:
            part = getattr(self, kind)
            for each in part if kind == "temperature" and isinstance(part, (list, tuple)) else (part,):
                _check_part(kind, each)
        if isinstance(self.temperature, (list, tuple)):
            vars(self)["temperature"] = _order_pair(self.temperature)
        self._check_far_keys()
        vars(self).update(_resolved=None, _cacheable=self._is_cacheable())
        resolved = self.fill_train_length(None)
        if resolved is not self:
            vars(self)["_resolved"] = resolved  # made once, so that caches find the same object in every call

    def _check_far_keys(self) -> None:
        parts = [part for part in self.temperatures if getattr(part, "keys", "all") != "all"]
        parts += [part for part in (self.share, self.retrieve) if part is not None]
        by_distance = [part for part in self.temperatures if hasattr(part, "by_distance")]
        if self.retrieve is not None and by_distance:
            raise ValueError(f"recipe: {by_distance[0]} cannot be joined with a choice of far keys; leave out retrieve")
        if parts and (self.position is None or not self.position.has_far_keys):
            raise ValueError(
                f"recipe: {truncate(str(parts[0]))} needs a position method with near and far keys, such as "
                f"rerope:window=…, got {'none' if self.position is None else self.position}"
            )
        if self.retrieve is not None:
            self._check_choice()

    def _check_choice(self) -> None:
        if getattr(self.share, "sinks", 0):
            raise ValueError(
                "recipe: retrieve keeps attention sinks itself, beside few far keys; leave sinks=… out of share"
            )
        one_window = self.position.far_keys_are_one_span
        if one_window and (self.mask is None or self.mask.region(True) == masks.Causal().region(True)):
            return
        part, remedy = self.mask, "leave out the mask"
        if not one_window:
            part, remedy = self.position, "use rerope:window=…, or lampe with tail=0"
        raise ValueError(
            "recipe: retrieve needs a position method and masks that leave every key beyond one window to choose from, "
            f"got {truncate(str(part))}; {remedy}"
        )

    @property
    def temperatures(self) -> tuple[Any, ...]:
        """The temperatures: none, one, or a pair for near and far keys."""
        if isinstance(self.temperature, tuple):
            return self.temperature
        return () if self.temperature is None else (self.temperature,)

    @property
    def parts(self) -> tuple[Any, ...]:
        """All parts that are there."""
        parts = (self.score, self.position, *self.temperatures, self.mask, self.share, self.retrieve)
        return tuple(part for part in parts if part is not None)

    @property
    def recipes(self) -> tuple[Recipe, ...]:
        """The recipes of all layers: itself, unless it is a recipe per layer."""
        return (self,)

    def map_recipes(self, function: Callable[[Recipe], Recipe]) -> Recipe:
        """Return what a function makes of the recipe, or of each where it is a recipe per layer."""
        return function(self)

    @property
    def counts_unseen_keys(self) -> bool:
        """Whether a temperature or the position method depends on more than the keys that a query sees."""
        if self.position is not None and self.position.depends_on_row_length:
            return True
        return any(
            getattr(part, "count", "visible") != "visible" or hasattr(part, "by_distance") for part in self.temperatures
        )

    @property
    def depends_on_place(self) -> bool:
        """Whether a mask or the position method depends on where keys are in the row, not on distances alone."""
        position, mask = self.position, self.mask
        return (position is not None and position.depends_on_place) or (
            mask is not None and mask.region(causal=True).depends_on_place
        )

    def idle(self, length: int) -> bool:
        """Return whether the recipe has no effect on rows of up to `length` keys, in a model with plain RoPE."""
        return all(part.idle(length) for part in self.parts) and not self._changes_far_keys(length)

    def _changes_far_keys(self, length: int) -> bool:
        """Return whether a share law or a choice acts, as it may where a position method keeps all distances."""
        if self.share is None and self.retrieve is None:
            return False
        window = self.position.near_window or 0
        if length <= window:
            return False
        if self.retrieve is not None and self.retrieve.hides_keys(length, window):
            return True
        return self.share is not None and (type(self.share) is not Share or self.share.changes(length, window))

    @property
    def learned(self) -> tuple[torch.nn.Module, ...]:
        """The parts with parameters, which a model must register itself: a recipe is not a module."""
        return tuple(part for part in self.parts if isinstance(part, torch.nn.Module))

    @property
    def cacheable(self) -> bool:
        """Whether calls with the same layout may share what the recipe computes: no part learns or holds data."""
        known: bool | None = vars(self).get("_cacheable")
        return self._is_cacheable() if known is None else known

    def _is_cacheable(self) -> bool:
        laws = (temperatures.Temperature, temperatures.Adaptive, temperatures.ScaleInvariant)
        parts: list[tuple[Any, Any]] = [(part, laws) for part in self.temperatures]
        parts += [(self.position, positions.Position), (self.share, Share)]
        known = all(part is None or (isinstance(part, kind) and not part.learns) for part, kind in parts)
        return known and not any(masks.find_data_masks(self.mask))

    def resolve(self) -> Recipe:
        """Return the recipe with missing training lengths taken from the temperature."""
        return self._resolved or self  # type: ignore[attr-defined]

    def fill_train_length(self, train_length: int | None) -> Recipe:
        """Return the recipe with what its position method and share law leave out, from a training length.

        Args:
            train_length: for a recipe whose temperature has none.
        """
        lengths = (getattr(part, "train_length", None) for part in self.temperatures)
        length = next((length for length in lengths if length is not None), train_length)
        position = None if self.position is None else self.position.resolve(length)
        share = self.share
        if hasattr(share, "resolve"):
            share = share.resolve(length, None if position is None else position.near_window)
        if position is self.position and share is self.share:
            return self
        filled = copy(self)
        vars(filled).update(position=position, share=share, _resolved=None)
        vars(filled)["_cacheable"] = filled._is_cacheable()
        return filled

    def _fill_share(self, defaults: dict[str, Any]) -> Recipe:
        length = defaults.get("train_length")
        return self if self.share is None or length is None else self.fill_train_length(length)

    def for_layer(self, layer: int) -> Recipe:
        """Return the recipe of one layer, where temperatures or shares differ between layers."""
        parts = [part.for_layer(layer) if hasattr(part, "for_layer") else part for part in self.temperatures]
        share = self.share.for_layer(layer) if hasattr(self.share, "for_layer") else self.share
        if share is self.share and all(a is b for a, b in zip(parts, self.temperatures, strict=True)):
            return self
        return replace(self, temperature=tuple(parts), share=share)

    def without_far_keys(self, *, near_only: bool = False) -> Recipe:
        """Return the recipe for a layer without a position method: of the other parts, those for all keys.

        Args:
            near_only: all keys of the layer are near, so that a temperature of near keys is one of all.
        """
        kept = ("all", "near") if near_only else ("all",)
        laws = [law for law in self.temperatures if getattr(law, "keys", "all") in kept]
        return replace(self, position=None, temperature=tuple(map(_apply_to_all_keys, laws)), share=None, retrieve=None)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON: the name and options of every part, of two temperatures as a list."""
        data: dict[str, Any] = {kind: part for kind in KINDS if (part := getattr(self, kind)) is not None}
        return {
            kind: [each.to_dict() for each in part] if isinstance(part, tuple) else part.to_dict()
            for kind, part in data.items()
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any], **defaults: Any) -> Recipe:
        """Build a recipe from what `to_dict` returned.

        Args:
            data: a dictionary of parts.
            defaults: values of required options that `data` leaves out.

        Raises:
            ValueError: a part or option is unknown, missing or invalid.
        """
        if not isinstance(data, dict):
            raise ValueError(f"Recipe.from_dict: expected a dictionary, got {format_value(data)}")
        if LAYERS in data:
            return _layer_recipes().from_dict(data, **defaults)
        for key in data:
            if key not in KINDS:
                raise ValueError(f"Recipe.from_dict: unknown key {format_value(key)}{suggest(key, KINDS)}")
        parts: dict[str, Any] = {}
        for expected, options in data.items():
            is_pair = expected == "temperature" and isinstance(options, list) and len(options) > 0
            built = [part_from_dict(each, defaults) for each in (options if is_pair else [options])]
            for kind, part in built:
                if kind != expected:
                    got = f"the {kind} {truncate(str(part))}"
                    raise ValueError(f"Recipe.from_dict: expected a {expected} under {expected!r}, got {got}")
            parts[expected] = tuple(part for _, part in built) if is_pair else built[0][1]
        return cls(**parts)._fill_share(defaults)

    def __str__(self) -> str:
        parts = (part for kind in KINDS if (part := getattr(self, kind)) is not None)
        return "+".join(str(each) for part in parts for each in (part if isinstance(part, tuple) else (part,))) or PLAIN

    @classmethod
    def parse(cls, text: str, **defaults: Any) -> Recipe:
        """Parse parts `name:option=value,…` joined by `+`; masks may be combined with `&`, `|` and brackets.

        Args:
            text: the recipe, such as "rerope:window=64+infoscale:train_length=64", "plain" for no part, or a recipe per
                layer such as "layers:0-2=sink:size=64;3-=rerope:window=64", which gives a `LayerRecipes`.
            defaults: values of required options that the text leaves out, such as a model's train_length.

        Raises:
            ValueError: a part or option is unknown, missing or invalid.
        """
        if not isinstance(text, str) or not text.strip():
            raise ValueError(
                f"recipe: expected text such as 'rerope:window=64+infoscale:train_length=64', got {format_value(text)}"
            )
        parts: dict[str, Any] = {}
        if text.strip() == PLAIN:
            return cls()
        if text.partition(":")[0].strip() == LAYERS:
            return _layer_recipes().parse(text, **defaults)
        for part_text in split_text(text, "+"):
            kind, part = parse_part(part_text, defaults)
            if kind == "temperature":
                part = (*parts.get(kind, ()), part)  # type: ignore[assignment]
            elif kind in parts:
                reason = "; ALiBi takes the place of rotation" if "alibi" in (part.name(), parts[kind].name()) else ""
                both = f"{truncate(str(parts[kind]))} and {truncate(str(part))}"
                raise ValueError(f"recipe {format_value(text)}: expected one {kind}, got {both}{reason}")
            parts[kind] = part
        return cls(**parts)._fill_share(defaults)


def _layer_recipes() -> type[Recipe]:
    from isentrope.recipe.layers import LayerRecipes  # a subclass of what is defined here

    return LayerRecipes


def _check_part(kind: str, part: Any) -> None:
    """Check that a part is of its kind; temperatures and shares may be of any class with their method."""
    if part is None:
        return
    bases: dict[str, type] = {
        "score": scores.Score, "position": positions.Position, "mask": masks.Mask, "retrieve": BlockChoice,
    }  # fmt: skip
    methods = {"temperature": ("scale", "by_entropy", "by_distance"), "share": ("bias",)}.get(kind)
    valid = any(hasattr(part, method) for method in methods) if methods else isinstance(part, bases[kind])
    if isinstance(part, type) or not valid:
        raise ValueError(
            f"Recipe({kind}=…): expected a {kind} such as {KINDS[kind][0].__name__}(), got {format_value(part)}"
        )


def _apply_to_all_keys(law: Any) -> Any:
    """Return a temperature, or a copy of it that is for all keys."""
    if getattr(law, "keys", "all") == "all":
        return law
    law = copy(law)
    vars(law)["keys"] = "all"  # of a frozen dataclass as of a module
    return law


def _order_pair(parts: Sequence[Any]) -> Any:
    """Return no temperature as None, one as itself, and two as (near, far)."""
    if len(parts) < 2:
        return parts[0] if parts else None
    pair = {getattr(part, "keys", "all"): part for part in parts}
    if len(parts) != 2 or pair.keys() != {"near", "far"}:
        raise ValueError(
            "recipe: expected one temperature, or one with keys=near and one with keys=far, got "
            f"{' and '.join(truncate(str(part)) for part in parts)}"
        )
    return pair["near"], pair["far"]


_parsed: dict[str, Recipe] = {}
register_clear(_parsed.clear)
_PLAIN_RECIPE = Recipe()


def as_recipe(recipe: Recipe | str | None) -> Recipe:
    """Return a recipe, parsed if it is text, and the plain one for None.

    Raises:
        ValueError: it is none of these, or its text is not a recipe.
    """
    if isinstance(recipe, str):
        return _parsed[recipe] if recipe in _parsed else _parse_cached(recipe)
    if recipe is None:
        return _PLAIN_RECIPE
    if not isinstance(recipe, Recipe):
        raise ValueError(f"recipe: expected a Recipe, its text or None, got {format_value(recipe)}")
    return recipe


def _parse_cached(text: str) -> Recipe:
    recipe = Recipe.parse(text)
    if not recipe.learned and len(_parsed) < MAX_RECIPE_TEXTS:  # learned parts belong to their own recipe
        _parsed[text] = recipe
    return recipe
