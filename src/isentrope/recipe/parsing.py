"""Read the parts of a recipe from its text and from plain data."""

from __future__ import annotations

import ast
from typing import Any

import torch

from isentrope import masks
from isentrope.parts import REQUIRED, Part
from isentrope.recipe.auto import AUTO
from isentrope.recipe.kinds import LAYERS, PARTS, PLAIN
from isentrope.recipe.suggestions import suggest_part
from isentrope.utils.messages import format_value, suggest, truncate

MAX_DEPTH = 32  # of brackets, or of masks inside masks


def split_text(text: str, separator: str) -> list[str]:
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


def parse_part(text: str, defaults: dict[str, Any]) -> tuple[str, Part]:
    for operator, combine in (("|", masks.Or), ("&", masks.And)):
        operands = split_text(text, operator)
        if len(operands) > 1:
            parts = [parse_part(operand, defaults) for operand in operands]
            for kind, part in parts:
                if kind != "mask":
                    got = f"the {kind} {truncate(str(part))} in {format_value(text)}"
                    raise ValueError(f"recipe: only masks are joined with {operator}, got {got}; use + for a {kind}")
            return "mask", combine(tuple(part for _, part in parts))  # type: ignore[misc]
    if text.startswith("(") and text.endswith(")"):
        return parse_part(text[1:-1], defaults)
    name, _, rest = text.partition(":")
    options: dict[str, Any] = {}
    for option in split_text(rest, ",") if rest else []:
        key, equals, value = option.partition("=")
        if not equals:
            raise ValueError(f"recipe part {format_value(text)}: expected name=value, got {format_value(option)}")
        if key.strip() in options:
            raise ValueError(
                f"recipe part {format_value(text)}: option {format_value(key.strip())} is given twice; keep one"
            )
        options[key.strip()] = _parse_value(value.strip())
    return _build_part(name.strip(), options, defaults)


def _parse_value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):  # not a literal, or too large
        return {"true": True, "false": False, "none": None}.get(text.lower(), text)


def part_from_dict(data: Any, defaults: dict[str, Any], depth: int = 0) -> tuple[str, Part]:
    if not isinstance(data, dict) or not isinstance(data.get("name"), str):
        raise ValueError(f"Recipe.from_dict: expected a dictionary with a name, got {format_value(data)}")
    if depth > MAX_DEPTH:
        raise ValueError(f"Recipe.from_dict: expected at most {MAX_DEPTH} nested masks, got more")
    options = {key: value for key, value in data.items() if key != "name"}
    if data["name"] in ("and", "or") and isinstance(options.get("masks"), (list, tuple)):
        options["masks"] = tuple(part_from_dict(mask, defaults, depth + 1)[1] for mask in options["masks"])
    return _build_part(data["name"], options, defaults)


def _build_part(name: str, options: dict[str, Any], defaults: dict[str, Any]) -> tuple[str, Part]:
    """Build the part called `name`; errors for unknown names and options suggest a known one."""
    if name == LAYERS:
        raise ValueError("recipe: expected a recipe per layer as the whole text, got 'layers' beside or inside another")
    if name == AUTO:
        raise ValueError(
            "recipe: 'auto' is chosen for one model, and stands alone; use isentrope.extend(model, 'auto', "
            "length='4x'), or --recipe auto for a causal model"
        )
    if name == PLAIN:
        raise ValueError("recipe: 'plain' stands alone, for no part at all; leave it out beside others")
    if name not in PARTS:
        raise ValueError(f"recipe: unknown part {format_value(name)}{suggest_part(name, (*PARTS, PLAIN))}")
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
