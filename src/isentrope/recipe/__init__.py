"""Recipes: which score, position method, temperature, mask and share law attention uses."""

from isentrope.recipe.kinds import KINDS, LAYERS, OWN_PARTS, PARTS, PLAIN, hash_own_parts, register_part
from isentrope.recipe.layers import LayerRecipes
from isentrope.recipe.recipe import Recipe, as_recipe

__all__ = [
    "KINDS",
    "LAYERS",
    "OWN_PARTS",
    "PARTS",
    "PLAIN",
    "LayerRecipes",
    "Recipe",
    "as_recipe",
    "hash_own_parts",
    "register_part",
]
