"""Policy: which recipe of a causal model is best, what counts as harm, and which recipes forget."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TypedDict, cast

from isentrope.evaluation.results import ModelRecord, PerplexityResults, read_results
from isentrope.utils.files import RERUN_REMEDY

MAX_DEGRADATION_PERCENT = 0.5  # of perplexity inside the training length that a recipe may cost


class RankedRecipe(TypedDict):
    """A recipe's numbers.

    ratio: perplexity in the last bucket to the plain model's in the last one inside its training length. inside:
    change of perplexity inside the training length, in per cent. cost: seconds to those of the plain model.
    """

    recipe: str
    texts: int
    perplexity: list[float]
    bits_per_byte: list[float] | None
    ratio: float | None
    inside: float | None
    cost: float | None
    retrieval: dict[str, float]


class Leaderboard(TypedDict):
    """Recipes by perplexity in the last bucket. inside: the plain model's in the last bucket it was trained for."""

    model: ModelRecord
    train_length: int | None
    texts: int
    edges: list[int]
    inside: float | None
    rows: list[RankedRecipe]


def rank_recipes(folder: Path) -> Leaderboard:
    """Rank the recipes in a folder by perplexity in the last bucket of positions.

    Args:
        folder: holds `perplexity.json` and, where retrieval was measured, `retrieval.json`.
    """
    needed = ("config", "rows", "texts", "cells")
    data = cast(PerplexityResults, read_results(folder / "perplexity.json", RERUN_REMEDY, *needed))
    retrieval = _read_retrieval(folder / "retrieval.json")
    edges, trained = data["config"]["edges"], data.get("train_length")
    inside = {row["recipe"]: row["percent"] for row in data.get("inside", [])}
    plain = next((row for row in data["rows"] if row["recipe"] == "plain"), None)
    within = [i for i, edge in enumerate(edges[1:]) if trained is not None and edge <= trained]
    own = plain["perplexity"][within[-1]] if plain and within else None
    texts = {text["sha256"] for text in data["texts"]}  # a folder may hold cells of others, from before
    timed = [cell for cell in data["cells"] if cell["text"] in texts]
    seconds = {row["recipe"]: [c["seconds"] for c in timed if c["recipe"] == row["recipe"]] for row in data["rows"]}
    mean = {recipe: sum(values) / len(values) for recipe, values in seconds.items()}
    rows: list[RankedRecipe] = [
        {
            "recipe": (recipe := row["recipe"]),
            "texts": row["texts"],
            "perplexity": row["perplexity"],
            "bits_per_byte": row.get("bits_per_byte"),
            "ratio": None if own is None else row["perplexity"][-1] / own,
            "inside": inside.get(recipe),
            "cost": mean[recipe] / mean["plain"] if "plain" in mean else None,
            "retrieval": retrieval.get(recipe, {}),
        }
        for row in data["rows"]
    ]
    rows.sort(key=lambda row: row["perplexity"][-1])
    return {
        "model": data["model"],
        "train_length": trained,
        "texts": len(data["texts"]),
        "edges": edges,
        "inside": own,
        "rows": rows,
    }


def _read_retrieval(path: Path) -> dict[str, dict[str, float]]:
    """Read the share of answers given, or recalled, under each recipe, by task and length."""
    if not path.exists():
        return {}
    data = read_results(path, RERUN_REMEDY, "config", "rows")
    generated = data["config"]["score"] == "both"
    shares: dict[str, dict[str, float]] = {}
    for row in data["rows"]:
        # rows of earlier versions have the share of the answer's tokens alone
        score = row["share"] if generated else row.get("recalled", row["likeliest"])
        if score is not None:
            shares.setdefault(row["recipe"], {})[f"{row['task']} {row['length']}"] = score
    return shares


def select_best(board: Leaderboard, recipes: Collection[str]) -> str | None:
    """Select the recipe to use past the training length; None where none is worth using.

    Of the given recipes measured on all texts: the one with the lowest perplexity in the last bucket, lower than the
    plain model's, among those that do no harm inside the training length.
    """
    rows = [row for row in board["rows"] if row["texts"] == board["texts"]]
    plain = next((row for row in rows if row["recipe"] == "plain"), None)
    for row in rows:
        harmless = row["inside"] is not None and row["inside"] <= MAX_DEGRADATION_PERCENT
        if row["recipe"] in recipes and harmless and plain and row["perplexity"][-1] < plain["perplexity"][-1]:
            return row["recipe"]
    return None


def is_degraded(row: RankedRecipe) -> bool:
    """Whether a recipe costs more than MAX_DEGRADATION_PERCENT of perplexity inside the training length."""
    return (row["inside"] or 0) > MAX_DEGRADATION_PERCENT


def forgets(recipe: str) -> bool:
    """Whether a recipe lets every layer see only a part of the text."""
    from isentrope.evaluation.recipe_texts import (
        parse_recipe,  # reports import this module to read files, without models
    )

    return all(one.mask is not None for one in parse_recipe(recipe).recipes)
