"""How many keys queries see, and how the queries of a text are spread over processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from isentrope.evaluation.recipe_texts import parse_recipe
from isentrope.masks import Causal, Full, Lambda, Sink, Window
from isentrope.parallel.split import LAYOUTS, Split
from isentrope.positions import ALiBi
from isentrope.recipe import Recipe


@dataclass(frozen=True)
class Visibility:
    """Query i of causal attention sees min(i + 1, budget) keys.

    Attributes:
        kind: "dense", "windowed", or "retrieved" for far keys by choice.
        window: near keys, the query's own included; None where all keys are near and far at once (dense).
        budget: keys that a query sees at most; None for all.
        pool: queries of a mean that chooses, where far keys are chosen.
    """

    kind: str
    window: int | None = None
    budget: int | None = None
    pool: int | None = None

    def count_pairs(self, start: int, stop: int) -> int:
        """Count the pairs of queries start … stop - 1 with the keys they see."""
        budget = stop if self.budget is None else self.budget
        full = max(start, min(stop, budget))  # queries from here on see `budget` keys
        return (full * (full + 1) - start * (start + 1)) // 2 + (stop - full) * budget

    def count_far_pairs(self, start: int, stop: int) -> int:
        """Count the pairs of queries start … stop - 1 with all keys outside the window, seen or not."""
        return Visibility("dense").count_pairs(start, stop) - Visibility("near", None, self.window).count_pairs(
            start, stop
        )


def read_visibility(recipe: Recipe | str) -> Visibility:
    """Return which keys a recipe lets queries see.

    Raises:
        ValueError: the recipe differs by layer, or is one whose kernel has no measured rate.
    """
    recipe = (parse_recipe(recipe) if isinstance(recipe, str) else recipe).resolve()
    if len(recipe.recipes) > 1:
        raise ValueError("recipe: expected one for all layers, got a recipe per layer; predict each by itself")
    if isinstance(recipe.position, ALiBi):
        raise ValueError("recipe: the cost model has no measured rates for alibi; use another method")
    if recipe.retrieve is not None:
        choice, window = recipe.retrieve, recipe.position.near_window
        if choice.score != "representative":
            raise ValueError(f"recipe: expected retrieve with score=representative, got score={choice.score}")
        always = choice.first_block * choice.size + choice.size + choice.queries - 2
        return Visibility("retrieved", window, window + choice.blocks * choice.size + always, choice.pool)
    mask = recipe.mask
    if mask is None or isinstance(mask, Full | Causal):
        return Visibility("dense")
    if isinstance(mask, Window):
        return Visibility("windowed", mask.size, mask.size)
    if isinstance(mask, Sink | Lambda):
        size = mask.size if isinstance(mask, Sink) else mask.window
        return Visibility("windowed", size, size + mask.sinks)
    raise ValueError(f"recipe: expected a window, sink or lambda mask, or none, got {mask}")


def list_parts(tokens: int, processes: int, process: int, layout: str) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of the parts of a text that a process holds, in a layout of `ContextParallel`."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout: expected one of {', '.join(LAYOUTS)}, got {layout!r}")
    for part in Split(tokens, processes, layout == "zigzag").chunks(process):
        yield part.start, part.stop


def count_busiest(visibility: Visibility, tokens: int, processes: int, layout: str) -> tuple[float, float]:
    """Return the largest number of visible pairs that a process has, and of pairs outside the window."""
    parts_of = [list(list_parts(tokens, processes, process, layout)) for process in range(processes)]
    pairs = max(sum(visibility.count_pairs(*part) for part in parts) for parts in parts_of)
    far = max(sum(visibility.count_far_pairs(*part) for part in parts) for parts in parts_of)
    return pairs, far
