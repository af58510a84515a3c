"""Policy: which recipe of a causal model is best, what counts as harm, and which recipes forget."""

from __future__ import annotations

from collections.abc import Collection
from math import comb, sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple, TypedDict, cast

from isentrope.evaluation.clusters import student_t
from isentrope.evaluation.metrics import percent_change
from isentrope.evaluation.results import ModelRecord, PerplexityResults, read_results
from isentrope.utils.files import RERUN_REMEDY

MAX_DEGRADATION_PERCENT = 0.5  # of perplexity inside the training length that a recipe may cost
MAX_CHANCE = 0.1  # that as many more passkeys are found by chance, where a recipe is left out for finding fewer


class RankedRecipe(TypedDict):
    """A recipe's numbers.

    ratio: perplexity in the last bucket to the plain model's in the last one inside its training length. inside:
    change of perplexity inside the training length, in per cent. cost: seconds to those of the plain model. losses:
    mean loss in the last bucket by text, and answers: the score of each passkey, by which recipes are paired.
    difference: perplexity in the last bucket against the first recipe's, in per cent, with its 95 % interval.
    """

    recipe: str
    texts: int
    perplexity: list[float]
    bits_per_byte: list[float] | None
    ratio: float | None
    inside: float | None
    cost: float | None
    retrieval: dict[str, float]
    losses: dict[str, float]
    answers: dict[str, float]
    difference: Difference | None


class Difference(TypedDict):
    """How much higher one perplexity is than another, in per cent; without an interval for a single text."""

    percent: float
    low: float | None
    high: float | None


class Choice(NamedTuple):
    """The recipe to use past the training length.

    Attributes:
        recipe: its text.
        ties: other recipes that cannot be told from it by the 95 % interval, paired over texts.
        fewer_answers: recipes left out since they find fewer passkeys.
    """

    recipe: str
    ties: tuple[str, ...] = ()
    fewer_answers: tuple[str, ...] = ()


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
        folder: holds `perplexity.json` and, where retrieval was measured, `retrieval.json`; `decoder.json`, where there
            is one, says in which fillers, since a folder keeps what was measured in others before.
    """
    needed = ("config", "rows", "texts", "cells")
    data = cast(PerplexityResults, read_results(folder / "perplexity.json", RERUN_REMEDY, *needed))
    retrieval, answers = _read_retrieval(folder / "retrieval.json", _read_fillers(folder / "decoder.json"))
    edges, trained = data["config"]["edges"], data.get("train_length")
    inside = {row["recipe"]: row["percent"] for row in data.get("inside", [])}
    plain = next((row for row in data["rows"] if row["recipe"] == "plain"), None)
    within = [i for i, edge in enumerate(edges[1:]) if trained is not None and edge <= trained]
    own = plain["perplexity"][within[-1]] if plain and within else None
    texts = {text["sha256"] for text in data["texts"]}  # a folder may hold cells of others, from before
    timed = [cell for cell in data["cells"] if cell["text"] in texts]
    seconds = {row["recipe"]: [c["seconds"] for c in timed if c["recipe"] == row["recipe"]] for row in data["rows"]}
    tokens = edges[-1] - max(edges[-2], 1)
    losses: dict[str, dict[str, float]] = {}
    for cell in timed:
        if "loss" in cell:
            losses.setdefault(cell["recipe"], {})[cell["text"]] = cell["loss"][-1] / tokens
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
            "losses": losses.get(recipe, {}),
            "answers": answers.get(recipe, {}),
            "difference": None,
        }
        for row in data["rows"]
    ]
    rows.sort(key=lambda row: row["perplexity"][-1])
    for row in rows[1:]:
        row["difference"] = compare_losses(row, rows[0])
    return {
        "model": data["model"],
        "train_length": trained,
        "texts": len({text["sha256"] for text in data["texts"]}),
        "edges": edges,
        "inside": own,
        "rows": rows,
    }


def _read_fillers(path: Path) -> list[str] | None:
    """Read the fillers of the last run; None where the file does not name them."""
    return read_results(path, RERUN_REMEDY).get("fillers") if path.exists() else None


def _read_retrieval(
    path: Path, fillers: Collection[str] | None
) -> tuple[dict[str, dict[str, float]], dict[str, dict[str, float]]]:
    """Read, under each recipe, the share of answers given or recalled by task and length, and every answer's score.

    Args:
        path: of `retrieval.json`.
        fillers: the texts to read it for; None for all.
    """
    shares: dict[str, dict[str, float]] = {}
    answers: dict[str, dict[str, float]] = {}
    if not path.exists():
        return shares, answers
    data = read_results(path, RERUN_REMEDY, "config", "rows")
    metric = "share" if data["config"]["score"] == "both" else "recalled"
    if fillers is None or "filler_rows" not in data:
        rows = data["rows"]
    else:
        rows = [row for row in data["filler_rows"] if row["filler"] in fillers]
    scores: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        # rows of earlier versions have the share of the answer's tokens alone
        score = row[metric] if metric == "share" else row.get(metric, row["likeliest"])
        if score is not None:
            scores.setdefault((row["recipe"], f"{row['task']} {row['length']}"), []).append(score)
    for (recipe, task), values in scores.items():
        shares.setdefault(recipe, {})[task] = fmean(values)
    for cell in data.get("cells", ()):
        if cell["length"] in data["config"]["lengths"] and (fillers is None or cell.get("filler") in fillers):
            for number, example in enumerate(cell.get("examples") or ()):
                if metric in example:
                    answers.setdefault(cell["recipe"], {})[_name_answer(cell, number)] = example[metric]
    return shares, answers


def _name_answer(cell: dict[str, Any], number: int) -> str:
    return f"{cell['task']} {cell['length']}, {cell.get('filler')} at {cell.get('depth')} %, {number}"


def compare_losses(row: RankedRecipe, other: RankedRecipe) -> Difference | None:
    """Compare two recipes in the last bucket, text by text: mean difference ± t s / √n of their losses, in per cent."""
    texts = [text for text in row["losses"] if text in other["losses"]]
    if not texts:
        return None
    differences = [row["losses"][text] - other["losses"][text] for text in texts]
    mean, low, high = fmean(differences), None, None
    if len(texts) > 1:
        reach = student_t(len(texts) - 1) * stdev(differences) / sqrt(len(texts))
        low, high = percent_change(mean - reach), percent_change(mean + reach)
    return {"percent": percent_change(mean), "low": low, "high": high}


def finds_fewer(row: RankedRecipe, other: RankedRecipe) -> bool:
    """Whether a recipe finds fewer of the same passkeys than another, by a one-sided sign test at `MAX_CHANCE`."""
    shared = [(row["answers"][key], other["answers"][key]) for key in row["answers"] if key in other["answers"]]
    more, fewer = sum(b > a for a, b in shared), sum(b < a for a, b in shared)
    trials = more + fewer
    return more > 0 and sum(comb(trials, k) for k in range(more, trials + 1)) / 2**trials <= MAX_CHANCE


def choose_best(board: Leaderboard, recipes: Collection[str], excluded: Collection[str] = ()) -> Choice | None:
    """Choose the recipe to use past the training length; None where none is worth using.

    Candidates are measured on all texts, better than the plain model in the last bucket, and harmless inside the
    training length. Those that find fewer passkeys than another candidate are left out; of the rest, the one with the
    lowest perplexity in the last bucket is chosen.

    Args:
        board: the numbers.
        recipes: those to choose from.
        excluded: recipes not to choose, such as those that forget.
    """
    rows = [row for row in board["rows"] if row["texts"] == board["texts"]]
    plain = next((row for row in rows if row["recipe"] == "plain"), None)
    candidates = [
        row
        for row in rows
        if row["recipe"] in recipes
        and row["recipe"] not in excluded
        and row["inside"] is not None
        and not is_degraded(row)
        and plain is not None
        and row["perplexity"][-1] < plain["perplexity"][-1]
    ]
    fewer = [row for row in candidates if any(finds_fewer(row, other) for other in candidates)]
    left = [row for row in candidates if row not in fewer]
    if not left:
        return None
    best, *others = left
    ties = [row["recipe"] for row in others if not _is_higher(compare_losses(row, best))]
    return Choice(best["recipe"], tuple(ties), tuple(row["recipe"] for row in fewer))


def _is_higher(difference: Difference | None) -> bool:
    return difference is not None and difference["low"] is not None and difference["low"] > 0


def is_degraded(row: RankedRecipe) -> bool:
    """Whether a recipe costs more than MAX_DEGRADATION_PERCENT of perplexity inside the training length."""
    return (row["inside"] or 0) > MAX_DEGRADATION_PERCENT


def forgets(recipe: str) -> bool:
    """Whether a recipe lets every layer see only a part of the text."""
    from isentrope.evaluation.recipe_texts import (
        parse_recipe,  # reports import this module to read files, without models
    )

    return all(one.mask is not None for one in parse_recipe(recipe).recipes)
