"""Recipes: which score, position method, temperature, mask and share law attention uses."""

from isentrope.recipe.kinds import KINDS, LAYERS, PARTS, PLAIN, register_part
from isentrope.recipe.layers import LayerRecipes
from isentrope.recipe.recipe import Recipe, as_recipe

__all__ = ["KINDS", "LAYERS", "PARTS", "PLAIN", "LayerRecipes", "Recipe", "as_recipe", "register_part"]
