"""The settings of a calibration."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any

from isentrope.calibration.select import LEVELS
from isentrope.evaluation.recipe_texts import PLAIN, parse_recipe
from isentrope.recipe import LayerRecipes
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
        """Build from command-line values: lists separated by commas, the budget as 10m; None for defaults."""
        for name, kind in (("windows", int), ("factors", float)):
            text = values.get(name)
            values[name] = () if text is None else parse_numbers(name, text, kind, "4,8")
        levels = values.pop("levels", None)
        levels = LEVELS if levels is None else tuple(levels.split(","))
        return cls(length, recipe, levels=levels, budget=parse_seconds(values.pop("budget", None)), **values)

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


def parse_seconds(text: str | None) -> float | None:
    """Parse a time such as 90s, 10m or 2h."""
    if text is None:
        return None
    number, unit = text[:-1], text[-1:]
    try:
        seconds = float(number) * SECONDS_PER_UNIT[unit]
    except (ValueError, KeyError):
        seconds = -1.0
    if not 0 < seconds < inf:
        raise ValueError(f"budget: expected a time such as 90s, 10m or 2h, got {text!r}")
    return seconds
