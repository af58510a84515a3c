"""A recipe per layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import inf
from typing import Any, NamedTuple, NoReturn

from isentrope.recipe.kinds import KINDS, LAYERS
from isentrope.recipe.layer_sets import LayerSet, find_overlaps, format_spans, group_indices
from isentrope.recipe.parsing import split_text
from isentrope.recipe.recipe import Recipe, as_recipe
from isentrope.utils.messages import format_value, truncate

EXAMPLE = "layers:0-2=sink:size=1024;3-=rerope:window=4096+share"


class LayerGroup(NamedTuple):
    """Layers, and the recipe that they follow."""

    layers: LayerSet
    recipe: Recipe


class LayerRecipes(Recipe):
    """A recipe per layer: softmax(τ_l(n) · s_l(R_l q, R_l k) + b_l + M_l) v in layer l.

    Tables of a law with a row for each layer count the layers of the model, not those of a group. The parts themselves
    (`position` and the others) belong to the recipe of one layer, which `for_layer` returns.

    Args:
        recipes: recipes or their text by layers: {"0-2": "sink:size=1024", "3-": Recipe(…)}, or pairs of these.
            Layers are counted from 0; "0-2" includes both ends, "3-" goes to the last layer, "0,5,7" is a list, and "*"
            stands for all the rest.

    Attributes:
        groups: layers and their recipe, in the order of the layers.

    Raises:
        ValueError: a layer is given twice, or a recipe is not one for all of its layers.
    """

    groups: tuple[LayerGroup, ...]

    def __init__(self, recipes: Mapping[Any, Recipe | str] | Iterable[tuple[Any, Recipe | str]]) -> None:
        pairs = recipes.items() if isinstance(recipes, Mapping) else recipes
        groups = [LayerGroup(_as_layer_set(layers), _as_one_recipe(recipe)) for layers, recipe in pairs]
        if not groups:
            raise ValueError("layers: expected a recipe for some layers or more, got none")
        if sum(group.layers.rest for group in groups) > 1:
            raise ValueError("layers given twice: * for all the rest; keep one recipe for it")
        if twice := find_overlaps(span for group in groups for span in group.layers.spans):
            raise ValueError(f"layers given twice: {format_spans(twice)}; keep one recipe for each")
        vars(self)["groups"] = tuple(sorted(groups, key=lambda group: (group.layers.rest, group.layers.spans)))

    @property
    def recipes(self) -> tuple[Recipe, ...]:
        return tuple(group.recipe for group in self.groups)

    @property
    def parts(self) -> tuple[Any, ...]:
        """All parts of all layers, each object once."""
        return tuple({id(part): part for recipe in self.recipes for part in recipe.parts}.values())

    def idle(self, length: int) -> bool:
        return all(recipe.idle(length) for recipe in self.recipes)

    def map_recipes(self, function: Callable[[Recipe], Recipe]) -> LayerRecipes:
        return LayerRecipes((group.layers, function(group.recipe)) for group in self.groups)

    def resolve(self) -> LayerRecipes:
        """Return the recipes with missing training lengths taken from the temperature of each."""
        return self.map_recipes(lambda recipe: recipe.resolve())

    def fill_train_length(self, train_length: int | None) -> LayerRecipes:
        """Return the recipes with what they leave out, from a training length; see `Recipe.fill_train_length`.

        Args:
            train_length: for recipes whose temperature has none.
        """
        return self.map_recipes(lambda recipe: recipe.fill_train_length(train_length))

    def for_layer(self, layer: int) -> Recipe:
        """Return the recipe of one layer.

        Raises:
            ValueError: no recipe is for it.
        """
        for group in self.groups:
            if group.layers.rest or layer in group.layers:  # the rest comes last
                return group.recipe.for_layer(layer)
        raise ValueError(f"layers without a recipe: {layer}; add it, or '*=plain' for all the rest")

    def check_layers(self, indices: Iterable[int]) -> None:
        """Check that every layer of a model has a recipe, and every recipe a layer.

        Args:
            indices: of the model's layers.

        Raises:
            ValueError: layers have no recipe, or are not the model's.
        """
        left = set(indices)
        last = max(left)
        for layers, _ in self.groups:
            own = {index for index in left if layers.rest or index in layers}
            beyond = [(max(first, last + 1), end) for first, end in layers.spans if first > last or last < end < inf]
            if beyond:
                raise ValueError(f"layers that the model does not have: {format_spans(beyond)}; its own are 0 … {last}")
            if not own:
                raise ValueError(f"layers: {layers} stands for none of the model's, which are 0 … {last}; leave it out")
            left -= own
        if left:
            missing = format_spans(group_indices(left))
            raise ValueError(f"layers without a recipe: {missing}; add them, or '*=plain' for all the rest")

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON: a list of recipes, each with its layers."""
        return {LAYERS: [{LAYERS: str(layers)} | recipe.to_dict() for layers, recipe in self.groups]}

    @classmethod
    def from_dict(cls, data: dict[str, Any], **defaults: Any) -> LayerRecipes:
        """Build the recipes from what `to_dict` returned; see `Recipe.from_dict`."""
        groups = data.get(LAYERS) if isinstance(data, dict) else None
        valid = isinstance(groups, list) and all(isinstance(group, dict) and LAYERS in group for group in groups)
        if not valid or len(data) > 1:
            raise ValueError(
                'LayerRecipes.from_dict: expected {"layers": [{"layers": "0-2", …}, …]} and nothing beside it, got '
                f"{format_value(data)}"
            )
        return cls(
            (group[LAYERS], Recipe.from_dict({key: part for key, part in group.items() if key != LAYERS}, **defaults))
            for group in groups or ()
        )

    @classmethod
    def parse(cls, text: str, **defaults: Any) -> LayerRecipes:
        """Parse `layers:` and recipes `layers=recipe` separated by `;`; see `Recipe.parse`."""
        return cls((layers, Recipe.parse(recipe, **defaults)) for layers, recipe in split_layers(text))

    def __str__(self) -> str:
        return f"{LAYERS}:" + ";".join(f"{layers}={recipe}" for layers, recipe in self.groups)

    def __repr__(self) -> str:
        return f"LayerRecipes({ {str(layers): recipe for layers, recipe in self.groups} })"

    def __eq__(self, other: object) -> bool:
        return self.groups == other.groups if isinstance(other, LayerRecipes) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.groups)


def split_layers(text: str) -> list[tuple[str, str]]:
    """Split the text of recipes per layer into the texts of layers and of their recipes."""
    name, _, rest = text.partition(":")
    pairs = []
    for item in split_text(rest, ";"):
        layers, equals, recipe = item.partition("=")
        if name.strip() != LAYERS or not equals or not recipe.strip():
            raise ValueError(f"layers: expected layers=recipe, as in {EXAMPLE!r}, got {format_value(item)}")
        pairs.append((layers.strip(), recipe.strip()))
    return pairs


def add_parts(text: str, parts: Iterable[str]) -> str:
    """Add the texts of parts to that of a recipe, or to each where it is a recipe per layer."""
    parts = list(parts)
    if text.partition(":")[0].strip() != LAYERS:
        return "+".join([text, *parts])
    return f"{LAYERS}:" + ";".join(f"{layers}={'+'.join([recipe, *parts])}" for layers, recipe in split_layers(text))


def _as_layer_set(layers: Any) -> LayerSet:
    return layers if isinstance(layers, LayerSet) else LayerSet.parse(layers)


def _as_one_recipe(recipe: Recipe | str) -> Recipe:
    one = as_recipe(recipe)
    if isinstance(one, LayerRecipes):
        raise ValueError(f"layers: expected one recipe for these layers, got a recipe per layer, {truncate(str(one))}")
    return one


def _refuse_part(recipe: LayerRecipes) -> NoReturn:
    raise ValueError(
        f"recipe: expected that of one layer, got a recipe per layer, {truncate(str(recipe))!r}; pass "
        "recipe.for_layer(i), the recipe of layer i"
    )


for _kind in KINDS:  # code that reads a part of all layers at once would be wrong for some of them
    setattr(LayerRecipes, _kind, property(_refuse_part))
