"""Recipes by their text, as commands and results files name them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

from transformers import PreTrainedModel

from isentrope.hf.extend import extended
from isentrope.hf.generation import without_length_warnings
from isentrope.recipe import Recipe

PLAIN = "plain"  # the model as it is
PLACEHOLDERS = {"train_length": 2, "heads": 1, "dim": 4}  # for what a recipe leaves to the model


def parse_recipe(text: str, **known: int) -> Recipe:
    """Parse a recipe before its model is known, with placeholders for what the model would fill in."""
    return Recipe.parse(text, **(PLACEHOLDERS | known))


def check_recipes(recipes: Sequence[str]) -> None:
    """Raise a ValueError unless there are recipes, each can be parsed, and none is there twice."""
    if not recipes or len(set(recipes)) != len(recipes):
        raise ValueError(f"recipes: expected one or more, each once, got {list(recipes)}")
    for recipe in recipes:
        parse_recipe(recipe)


def under_recipe(model: PreTrainedModel, recipe: Recipe | str) -> AbstractContextManager[object]:
    """Extend a model while the block lasts; leave it as it is under `plain`."""
    return without_length_warnings(model) if recipe in (PLAIN, Recipe()) else extended(model, recipe)


def pair_with_untempered(recipes: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each recipe with a temperature or a share law and the one among the others that is the same without."""
    parsed = {text: parse_recipe(text) for text in recipes}
    for text, recipe in parsed.items():
        bare = recipe.map_recipes(lambda one: replace(one, temperature=None, share=None))
        for other, candidate in parsed.items():
            if recipe != bare and candidate == bare:
                yield text, other
