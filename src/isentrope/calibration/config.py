"""The settings of a calibration."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from transformers import PreTrainedConfig

from isentrope.calibration.laws import count_most_visible
from isentrope.calibration.select import LEVELS
from isentrope.evaluation.evaluate import parse_longer_length
from isentrope.evaluation.recipe_texts import PLAIN, parse_recipe
from isentrope.hf.auto import resolve_auto
from isentrope.hf.train_length import read_train_length
from isentrope.recipe import LayerRecipes
from isentrope.recipe.auto import is_auto
from isentrope.utils.messages import truncate
from isentrope.utils.parsing import parse_numbers

SECONDS_PER_UNIT = {"s": 1, "m": 60, "h": 3600}


@dataclass(frozen=True)
class CalibrationConfig:
    """What is fitted.

    Args:
        length: tokens read of each document.
        recipe: what gets the law; it may contain {window} and {factor}. Where its position method has far keys it may
            name a temperature and a share law to start from.
        windows: values to put there, of which the best is kept.
        factors: the same.
        levels: which laws are fitted, some of LEVELS.
        budget: seconds, of all runs in one folder together; None for no limit.
        train_length: in place of the one in the model's config.
        seed: decides which documents are held out.
        with_retrieval: whether laws are also fitted to, and judged by, passkeys hidden in the texts.
    """

    length: int
    recipe: str = PLAIN
    windows: tuple[int, ...] = ()
    factors: tuple[float, ...] = ()
    levels: tuple[str, ...] = LEVELS
    budget: float | None = None
    train_length: int | None = None
    seed: int = 0
    with_retrieval: bool = False

    def __post_init__(self) -> None:
        if unknown := [level for level in self.levels if level not in LEVELS]:
            raise ValueError(f"levels: expected some of {', '.join(LEVELS)}, got {unknown[0]!r}")
        for text in self.recipes:
            recipe = parse_recipe(text)
            if isinstance(recipe, LayerRecipes):
                raise ValueError(
                    f"recipe: expected one for all layers, whose law is fitted layer by layer, got {truncate(text)}"
                )
            has_far_keys = recipe.position is not None and recipe.position.has_far_keys
            if other := [law for law in recipe.temperatures if not hasattr(law, "scale")]:
                raise ValueError(f"recipe: expected temperatures by length, to fit others beside them, got {other[0]}")
            if recipe.temperatures and not has_far_keys:
                raise ValueError(
                    f"recipe: expected one without a temperature, which is to be fitted, got {recipe.temperature}"
                )

    @classmethod
    def parse(cls, length: int, recipe: str, **values: Any) -> CalibrationConfig:
        """Build from values or their texts: lists separated by commas, the budget as 10m; None for defaults."""
        values |= {
            "windows": _parse_list("windows", values.get("windows"), int),
            "factors": _parse_list("factors", values.get("factors"), float),
            "levels": _parse_levels(values.get("levels")),
            "budget": parse_seconds(values.get("budget")),
        }
        return cls(length, recipe, **values)

    @classmethod
    def parse_for(
        cls, model: PreTrainedConfig | None, length: int | str, recipe: str, **values: Any
    ) -> CalibrationConfig:
        """Build as `parse` does, with "4x" and `auto` resolved by a model's config; None for GAU-α."""
        trained = resolve_train_length(values.get("train_length"), model)
        tokens = parse_longer_length(length, trained)
        return cls.parse(tokens, choose_fitted_recipe(recipe, model, tokens, values.get("train_length")), **values)

    @property
    def recipes(self) -> list[str]:
        """The recipe, with every window and factor put in."""
        recipes = [self.recipe]
        for name, values in (("window", self.windows), ("factor", self.factors)):
            slot = f"{{{name}}}"
            if (slot in self.recipe) != bool(values):
                raise ValueError(
                    f"{name}s: expected numbers if, and only if, the recipe contains {slot}, "
                    f"got {list(values)} for {self.recipe!r}"
                )
            words = [f"{value:g}" if isinstance(value, float) else str(value) for value in values]
            recipes = [text.replace(slot, word) for text in recipes for word in words] if values else recipes
        return recipes


def resolve_train_length(given: int | None, model: PreTrainedConfig | None) -> int:
    """Return the length given, or the one that a model's config states; None for GAU-α, which states none."""
    trained = given or (read_train_length(model.get_text_config()) if model is not None else None)
    if trained is None:
        raise ValueError("train_length: expected a number, since this model's config has none")
    return trained


def choose_fitted_recipe(recipe: str, model: PreTrainedConfig | None, length: int, train_length: int | None) -> str:
    """Replace `auto` by what it stands for, with all far keys in sight where no law acts on those it chooses.

    Args:
        recipe: the text of one.
        model: its config; None for GAU-α.
        length: tokens read of each document.
        train_length: in place of the one in the config.
    """
    if model is None or not is_auto(recipe):
        return recipe
    train_length = resolve_train_length(train_length, model)
    (text,) = resolve_auto([recipe], model, length, train_length=train_length)
    chosen = parse_recipe(text, train_length=train_length)
    if chosen.retrieve is None or count_most_visible(chosen, length) > train_length:
        return text
    fitted = str(replace(parse_recipe(text), retrieve=None))
    warnings.warn(
        f"recipe 'auto': at {length} tokens it is {text}, under which a query sees no more keys than in training, so "
        f"that no law has an effect; {fitted} is fitted instead: compare the result with auto by isentrope evaluate",
        UserWarning,
        stacklevel=3,
    )
    return fitted


def parse_seconds(time: float | str | None) -> float | None:
    """Parse a time such as 90s, 10m or 2h; a number is in seconds already."""
    if time is None:
        return None
    try:
        seconds = float(time[:-1]) * SECONDS_PER_UNIT[time[-1:]] if isinstance(time, str) else float(time)
    except (ValueError, KeyError):
        seconds = -1.0
    if not 0 < seconds < inf:
        raise ValueError(f"budget: expected a time such as 90s, 10m or 2h, got {time!r}")
    return seconds


def _parse_list(name: str, values: str | Sequence[float] | None, kind: Callable[[str], Any]) -> tuple[Any, ...]:
    if isinstance(values, str):
        return parse_numbers(name, values, kind, "4,8")
    return tuple(values or ())


def _parse_levels(levels: str | Sequence[str] | None) -> tuple[str, ...]:
    if levels is None:
        return LEVELS
    return tuple(levels.split(",") if isinstance(levels, str) else levels)
