"""Recipes: which score, position method, temperature, mask and share law attention uses."""

from isentrope.recipe.kinds import KINDS, PARTS, PLAIN
from isentrope.recipe.recipe import Recipe, as_recipe

__all__ = ["KINDS", "PARTS", "PLAIN", "Recipe", "as_recipe"]
