"""Recipes: the score, position method, temperature and mask that attention uses."""

from __future__ import annotations

import ast
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch

from isentrope import masks, positions, scores, temperatures
from isentrope.core.caching import MAX_RECIPE_TEXTS, register_clear
from isentrope.parts import REQUIRED, Part
from isentrope.utils.messages import format_value, suggest, truncate

# the parts that a recipe's text may name; add a new method here
KINDS: dict[str, tuple[type[Part], ...]] = {
    "position": (
        positions.RoPE, positions.PI, positions.NTK, positions.YaRN, positions.ReRoPE, positions.LeakyReRoPE,
        positions.SelfExtend, positions.ALiBi, positions.CLEX, positions.NoPE,
    ),
    "temperature": (
        temperatures.Constant, temperatures.LogLength, temperatures.SoftmaxPlus, temperatures.LogN,
        temperatures.YaRNTemperature, temperatures.InfoScale, temperatures.InfoScaleExact, temperatures.Llama4,
        temperatures.SSMax, temperatures.Fitted,
    ),
    "score": (scores.Dot, scores.Cosine),
    "mask": (masks.Full, masks.Causal, masks.Window, masks.Sink, masks.Lambda, masks.And, masks.Or),
}  # fmt: skip
PARTS = {part.name(): (kind, part) for kind, parts in KINDS.items() for part in parts}
PLAIN = "plain"
MAX_DEPTH = 32  # of brackets, or of masks inside masks


@dataclass(frozen=True)
class Recipe:
    """softmax(τ(n) · s(R q, R k) + M) v: a score s, a position method R, a temperature τ and a mask M.

    A part left out has no effect: the scaled dot product of q and k as they are, τ = 1, no mask beyond the call's own.
    """

    score: Any = None
    position: Any = None
    temperature: Any = None
    mask: Any = None

    def __post_init__(self) -> None:
        expected = {
            "score": scores.Score,
            "position": positions.Position,
            "temperature": object,
            "mask": masks.Mask,
        }
        for kind, base in expected.items():
            part = getattr(self, kind)
            if part is None:
                continue
            valid = hasattr(part, "scale") if kind == "temperature" else isinstance(part, base)
            if isinstance(part, type) or not valid:
                raise ValueError(
                    f"Recipe({kind}=…): expected a {kind} such as {KINDS[kind][0].__name__}(), got {format_value(part)}"
                )
        length = getattr(self.temperature, "train_length", None)
        position = None if self.position is None else self.position.resolve(length)
        resolved = None
        if position is not self.position:
            resolved = copy(self)
            vars(resolved).update(position=position, _resolved=None)
        vars(self)["_resolved"] = resolved  # made once, so that caches find the same object in every call

    @property
    def learned(self) -> tuple[torch.nn.Module, ...]:
        """The parts with parameters, which a model must register itself: a recipe is not a module."""
        return tuple(part for part in (self.position, self.temperature) if isinstance(part, torch.nn.Module))

    @property
    def cacheable(self) -> bool:
        """Whether calls with the same layout may share what the recipe computes: no part learns or holds data."""
        parts = ((self.position, positions.Position), (self.temperature, temperatures.Temperature))
        known = all(part is None or (isinstance(part, kind) and not part.learns) for part, kind in parts)
        return known and not any(masks.find_data_masks(self.mask))

    def resolve(self) -> Recipe:
        """Return the recipe with a position method's missing training length taken from the temperature."""
        return self._resolved or self  # type: ignore[attr-defined]

    def for_layer(self, layer: int) -> Recipe:
        """Return the recipe of one layer, where temperatures differ between layers."""
        if not hasattr(self.temperature, "for_layer"):
            return self
        return replace(self, temperature=self.temperature.for_layer(layer))

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON: a dictionary with the name and options of every part."""
        return {kind: part.to_dict() for kind in KINDS if (part := getattr(self, kind)) is not None}

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
        for key in data:
            if key not in KINDS:
                raise ValueError(f"Recipe.from_dict: unknown key {format_value(key)}{suggest(key, KINDS)}")
        parts = {}
        for expected, options in data.items():
            kind, part = _from_dict(options, defaults)
            if kind != expected:
                raise ValueError(
                    f"Recipe.from_dict: expected a {expected} under {expected!r}, got the {kind} {truncate(str(part))}"
                )
            parts[kind] = part
        return cls(**parts)

    def __str__(self) -> str:
        return "+".join(str(part) for kind in KINDS if (part := getattr(self, kind)) is not None) or PLAIN

    @classmethod
    def parse(cls, text: str, **defaults: Any) -> Recipe:
        """Parse parts `name:option=value,…` joined by `+`; masks may be combined with `&`, `|` and brackets.

        Args:
            text: the recipe, such as "rerope:window=64+infoscale:train_length=64", or "plain" for no part.
            defaults: values of required options that the text leaves out, such as a model's train_length.

        Raises:
            ValueError: a part or option is unknown, missing or invalid.
        """
        if not isinstance(text, str) or not text.strip():
            raise ValueError(
                f"recipe: expected text such as 'rerope:window=64+infoscale:train_length=64', got {format_value(text)}"
            )
        parts: dict[str, Part] = {}
        if text.strip() == PLAIN:
            return cls()
        for part_text in _split(text, "+"):
            kind, part = _parse_part(part_text, defaults)
            if kind in parts:
                reason = "; ALiBi takes the place of rotation" if "alibi" in (part.name(), parts[kind].name()) else ""
                both = f"{truncate(str(parts[kind]))} and {truncate(str(part))}"
                raise ValueError(f"recipe {format_value(text)}: expected one {kind}, got {both}{reason}")
            parts[kind] = part
        return cls(**parts)


def _split(text: str, separator: str) -> list[str]:
    """Split at a separator outside all brackets."""
    items, depth, start = [], 0, 0
    for index, character in enumerate(text):
        depth += (character in "([") - (character in ")]")
        if depth > MAX_DEPTH:
            raise ValueError(f"recipe: expected at most {MAX_DEPTH} nested brackets, got {format_value(text)}")
        if character == separator and depth == 0:
            items.append(text[start:index])
            start = index + 1
    if depth:
        raise ValueError(f"recipe: expected matching brackets, got {format_value(text)}")
    return [item.strip() for item in (*items, text[start:])]


def _parse_part(text: str, defaults: dict[str, Any]) -> tuple[str, Part]:
    for operator, combine in (("|", masks.Or), ("&", masks.And)):
        operands = _split(text, operator)
        if len(operands) > 1:
            parts = [_parse_part(operand, defaults) for operand in operands]
            for kind, part in parts:
                if kind != "mask":
                    got = f"the {kind} {truncate(str(part))} in {format_value(text)}"
                    raise ValueError(f"recipe: only masks are joined with {operator}, got {got}; use + for a {kind}")
            return "mask", combine(tuple(part for _, part in parts))  # type: ignore[misc]
    if text.startswith("(") and text.endswith(")"):
        return _parse_part(text[1:-1], defaults)
    name, _, rest = text.partition(":")
    options: dict[str, Any] = {}
    for option in _split(rest, ",") if rest else []:
        key, equals, value = option.partition("=")
        if not equals:
            raise ValueError(f"recipe part {format_value(text)}: expected name=value, got {format_value(option)}")
        if key.strip() in options:
            raise ValueError(
                f"recipe part {format_value(text)}: option {format_value(key.strip())} is given twice; keep one"
            )
        options[key.strip()] = _parse_value(value.strip())
    return _build(name.strip(), options, defaults)


def _parse_value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):  # not a literal, or too large
        return {"true": True, "false": False, "none": None}.get(text.lower(), text)


def _from_dict(data: Any, defaults: dict[str, Any], depth: int = 0) -> tuple[str, Part]:
    if not isinstance(data, dict) or not isinstance(data.get("name"), str):
        raise ValueError(f"Recipe.from_dict: expected a dictionary with a name, got {format_value(data)}")
    if depth > MAX_DEPTH:
        raise ValueError(f"Recipe.from_dict: expected at most {MAX_DEPTH} nested masks, got more")
    options = {key: value for key, value in data.items() if key != "name"}
    if data["name"] in ("and", "or") and isinstance(options.get("masks"), (list, tuple)):
        options["masks"] = tuple(_from_dict(mask, defaults, depth + 1)[1] for mask in options["masks"])
    return _build(data["name"], options, defaults)


def _build(name: str, options: dict[str, Any], defaults: dict[str, Any]) -> tuple[str, Part]:
    """Build the part called `name`; errors for unknown names and options suggest a known one."""
    if name not in PARTS:
        raise ValueError(f"recipe: unknown part {format_value(name)}{suggest(name, PARTS)}")
    kind, part = PARTS[name]
    known = part.options()
    for key in options:
        if key not in known:
            raise ValueError(f"recipe part {name!r}: unknown option {format_value(key)}{suggest(key, known)}")
    required = [key for key, default in known.items() if default is REQUIRED]
    options = {key: defaults[key] for key in required if defaults.get(key) is not None} | options
    missing = [key for key in required if key not in options]
    if missing:
        example = ",".join(f"{key}=…" for key in missing)
        raise ValueError(
            f"recipe part {name!r}: missing option {', '.join(map(repr, missing))}; add it as {name}:{example}"
        )
    built = part(**options)
    # for use as it is: a model that registers learned parts puts them in its own mode
    return kind, built.eval() if isinstance(built, torch.nn.Module) else built


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
