"""Compare recipes by two numbers at once: perplexity past the training length, and what is found in the text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from math import exp
from pathlib import Path
from statistics import median
from typing import Any, TypedDict

import numpy as np
from scipy import stats

from isentrope.evaluation.clusters import ScoredExample, clustered_interval
from isentrope.evaluation.metrics import perplexity, wilson_interval
from isentrope.evaluation.results import PERPLEXITY, RETRIEVAL, TIMES, ModelRecord, read_results
from isentrope.utils.files import RERUN_REMEDY, read_fields

COMPARISON_FILE = "comparison.json"
FILLER_SUFFIX = "-filler"  # of the folders of retrieval, one for each kind of filler
PLAIN = "plain"
MIN_DOCUMENTS = 6  # of each kind, for an interval: fewer cannot carry one


class Retrieved(TypedDict):
    """Answers retrieved, a part of an example's where it has several, of the examples there are.

    low, high: ends of a 95 % interval of the share; over several fillers it is clustered by filler and depth, and None
    where these are too few (`clusters.py`). In one filler it is Wilson's.
    """

    hits: float
    count: int
    share: float
    low: float | None
    high: float | None


class ComparedRecipe(TypedDict):
    """A recipe's numbers; None and missing kinds are not measured.

    perplexity: by kind of text, in every bucket. ratio: of perplexity in the last bucket to the plain model's in the
    last one inside its training length, the geometric mean over kinds; ratio_low, ratio_high: ends of its 95 % interval
    over documents, None below MIN_DOCUMENTS of a kind. inside: change of perplexity inside the
    training length in per cent, the same. fillers: answers at the longest length, by kind of filler; retrieved: in
    all of them. seconds, peak_bytes: of a forward pass of the longest length, the median of `passes` made to time it,
    or without `times.json` the fastest of those made for perplexity; time, memory: the same relative to the plain
    model. front: no other recipe is better in ratio and retrieved.
    """

    number: int
    recipe: str
    forgets: bool
    front: bool
    perplexity: dict[str, list[float]]
    ratio: float | None
    ratio_low: float | None
    ratio_high: float | None
    inside: float | None
    inside_by_kind: dict[str, float]
    fillers: dict[str, Retrieved]
    tasks: dict[str, Retrieved]
    retrieved: Retrieved | None
    seconds: float | None
    peak_bytes: int | None
    passes: int
    time: float | None
    memory: float | None


class Ceiling(TypedDict):
    """The plain model inside its training length: perplexity in its last bucket there, answers found at `length`."""

    length: int | None
    perplexity: dict[str, float]
    fillers: dict[str, Retrieved]
    retrieved: Retrieved | None


class TimedPasses(TypedDict):
    """Passes made to be timed.

    passes: of each recipe; one that takes longer than `slow_seconds` is not repeated. chunks: in which the plain model
    read the text. versions: of PyTorch and isentrope, where there were several.
    """

    device: str
    length: int
    passes: int
    slow_seconds: float
    chunks: int
    versions: list[str]


class ComparisonBoard(TypedDict):
    """Recipes on one model, best first.

    texts, cells: documents and places that every recipe was measured on. times: None without `times.json`.
    """

    title: str
    model: ModelRecord
    train_length: int | None
    edges: list[int]
    texts: dict[str, int]
    length: int | None
    cells: dict[str, int]
    ceiling: Ceiling
    times: TimedPasses | None
    rows: list[ComparedRecipe]
    left_out: dict[str, str]
    run: dict[str, Any] | None


def build_board(folder: Path) -> ComparisonBoard:
    """Build the leaderboard of a folder that `isentrope compare` wrote.

    Recipes are compared on the documents, and on the places of a filler, that all of them were measured on. An overall
    number needs every kind that has results.

    Args:
        folder: holds comparison.json, KIND/perplexity.json, KIND-filler/retrieval.json and times.json.

    Raises:
        ValueError: a file is broken, or there are no results.
    """
    plan = read_fields(folder / COMPARISON_FILE, RERUN_REMEDY, "title", "recipes", "forgetful")
    files = {path.parent.name: _read(path, "texts") for path in sorted(folder.glob(f"*/{PERPLEXITY.file}"))}
    retrieval = {
        path.parent.name.removesuffix(FILLER_SUFFIX): _read(path) for path in sorted(folder.glob(f"*/{RETRIEVAL.file}"))
    }
    kinds = {kind: KindLosses(data) for kind, data in files.items() if data["cells"]}
    length = max(
        (n for data in retrieval.values() for n in data["config"]["lengths"] if _is_compared(data, n)), default=None
    )
    fillers = {kind: _select_answers(data, length) for kind, data in retrieval.items()}
    fillers = {kind: answers for kind, answers in fillers.items() if answers}
    times = _read(path, "device") if (path := folder / TIMES.file).exists() else None
    sources = [*files.values(), *retrieval.values(), *([] if times is None else [times])]
    if not kinds and not fillers and times is None:
        raise ValueError(f"{folder}: expected results of isentrope compare, got none; run the plan")
    measured: list[Iterable[str]] = [*(kind.losses for kind in kinds.values()), *fillers.values()]
    if not measured and times is not None:
        measured = [[cell["recipe"] for cell in times["cells"]]]
    recipes = [recipe for recipe in plan["recipes"] if any(recipe in group for group in measured)]
    rows = [_build_row(recipe, recipe in plan["forgetful"], kinds, fillers) for recipe in recipes]
    _add_costs(rows, kinds, times)
    mark_front(rows)
    rows.sort(key=_rank)
    for number, row in enumerate(rows, 1):
        row["number"] = number
    first = next(iter(kinds.values()), None)
    return {
        "title": plan["title"],
        "model": sources[0]["model"],
        "train_length": first.train_length if first else None,
        "edges": first.edges if first else [],
        "texts": {kind: len(losses.texts) for kind, losses in kinds.items()},
        "length": length,
        "cells": {kind: len(next(iter(answers.values()))) for kind, answers in fillers.items()},
        "ceiling": _build_ceiling(plan.get("ceiling"), kinds, retrieval),
        "times": None if times is None else _describe_times(times),
        "rows": rows,
        "left_out": plan.get("left_out") or {},
        "run": next((data["run"] for data in reversed(sources) if "run" in data), None),
    }


def _describe_times(times: dict[str, Any]) -> TimedPasses:
    config, runs = times["config"], [cell["run"] for cell in times["cells"] if "run" in cell]
    versions = sorted({f"{run['torch']} at {run['commit']}" for run in runs})
    return {
        "device": times["device"],
        "length": config["length"],
        "passes": config["passes"],
        "slow_seconds": config["slow_seconds"],
        "chunks": next((cell.get("chunks", 1) for cell in times["cells"] if cell["recipe"] == PLAIN), 1),
        "versions": versions if len(versions) > 1 else [],
    }


def _read(path: Path, *needed: str) -> dict[str, Any]:
    return read_results(path, RERUN_REMEDY, "model", "config", "cells", *needed)


class KindLosses:
    """Mean losses of one kind of text, by recipe and document, and what passes cost.

    Args:
        data: the content of `perplexity.json`.
    """

    def __init__(self, data: dict[str, Any]) -> None:
        self.edges: list[int] = data["config"]["edges"]
        self.train_length: int | None = data.get("train_length")
        self.counts = [b - max(a, 1) for a, b in pairwise(self.edges)]
        self.inside = [i for i, edge in enumerate(self.edges[1:]) if edge <= (self.train_length or 0)]
        self.cells: dict[str, list[dict[str, Any]]] = {}
        self.losses: dict[str, dict[str, list[float]]] = {}
        for cell in data["cells"]:
            means = [loss / count for loss, count in zip(cell["loss"], self.counts, strict=True)]
            self.losses.setdefault(cell["recipe"], {})[cell["text"]] = means
            self.cells.setdefault(cell["recipe"], []).append(cell)
        common = set.intersection(*(set(texts) for texts in self.losses.values()))
        self.texts = [text for text in next(iter(self.losses.values())) if text in common]

    def mean(self, recipe: str, bucket: int) -> float | None:
        """Compute the mean loss of a recipe in a bucket over the documents that all recipes have."""
        if recipe not in self.losses or not self.texts:
            return None
        return sum(self.losses[recipe][text][bucket] for text in self.texts) / len(self.texts)

    def log_ratio(self, recipe: str) -> float | None:
        """Compute ln of a recipe's perplexity in the last bucket over the plain model's in the last one inside."""
        own = self.mean(PLAIN, self.inside[-1]) if self.inside else None
        last = self.mean(recipe, -1)
        return None if own is None or last is None else last - own

    def log_ratios(self, recipe: str) -> list[float]:
        """Compute ln of the same ratio for each document that all recipes have; none where one is not measured."""
        if not self.inside or recipe not in self.losses or PLAIN not in self.losses:
            return []
        own, last = self.losses[PLAIN], self.losses[recipe]
        return [last[text][-1] - own[text][self.inside[-1]] for text in self.texts]

    def log_change(self, recipe: str) -> float | None:
        """Compute ln of a recipe's perplexity inside the training length over the plain model's there."""
        pairs = [(self.mean(recipe, i), self.mean(PLAIN, i), self.counts[i]) for i in self.inside]
        changes = [(a - b) * count for a, b, count in pairs if a is not None and b is not None]
        return sum(changes) / sum(count for *_, count in pairs) if pairs and len(changes) == len(pairs) else None


Answers = dict[str, dict[tuple[Any, ...], dict[str, Any]]]  # cells by recipe, then task, length and depth


def _is_compared(data: dict[str, Any], length: int) -> bool:
    """Whether recipes were asked at a length, not the plain model alone: that is the ceiling."""
    return any(cell["length"] == length and cell["recipe"] != PLAIN for cell in data["cells"])


def _select_answers(data: dict[str, Any], length: int | None) -> Answers:
    """Select the measured cells of a length that all recipes have."""
    answers: Answers = {}
    for cell in data["cells"]:
        if cell["length"] == length and cell.get("failed") is None:
            key = tuple(cell.get(name) for name in RETRIEVAL.cell_key[1:])
            answers.setdefault(cell["recipe"], {})[key] = cell
    common = set.intersection(*(set(cells) for cells in answers.values())) if answers else set()
    return {recipe: {key: cells[key] for key in cells if key in common} for recipe, cells in answers.items() if common}


def count_retrieved(fillers: Mapping[str, Iterable[dict[str, Any]]]) -> Retrieved | None:
    """Add up what greedy decoding would give word for word of the answers of cells; None where there are none.

    Args:
        fillers: cells by kind of filler.
    """
    examples = [
        ScoredExample(_score(example), kind, cell["depth"])
        for kind, cells in fillers.items()
        for cell in cells
        for example in cell["examples"]
    ]
    if not examples:
        return None
    count, hits = len(examples), sum(example.score for example in examples)
    low: float | None
    high: float | None
    if len(fillers) == 1:
        low, high = wilson_interval(hits, count)
    else:
        interval = clustered_interval(examples)
        low, high = interval["low"], interval["high"]
    return {"hits": hits, "count": count, "share": hits / count, "low": low, "high": high}


def _count_each(groups: Mapping[str, Mapping[str, Iterable[dict[str, Any]]]]) -> dict[str, Retrieved]:
    return {name: answers for name, fillers in groups.items() if (answers := count_retrieved(fillers))}


def _score(example: Mapping[str, Any]) -> float:
    """Share of an example's answers that are recalled; files of earlier versions have all of them or none."""
    return float(example.get("recalled", example["likeliest"] == example["answer"]))


def _build_row(
    recipe: str, is_forgetful: bool, kinds: dict[str, KindLosses], fillers: dict[str, Answers]
) -> ComparedRecipe:
    ratios = [kind.log_ratio(recipe) for kind in kinds.values()]
    interval = _ratio_interval([kind.log_ratios(recipe) for kind in kinds.values()])
    changes = {name: kind.log_change(recipe) for name, kind in kinds.items()}
    changes = dict.fromkeys(changes) if recipe == PLAIN else changes
    by_filler = {name: list(answers[recipe].values()) for name, answers in fillers.items() if recipe in answers}
    tasks: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for name, cells in by_filler.items():
        for cell in cells:
            tasks.setdefault(cell["task"], {}).setdefault(name, []).append(cell)
    return {
        "number": 0,
        "recipe": recipe,
        "forgets": is_forgetful,
        "front": False,
        "perplexity": {
            name: [perplexity(kind.mean(recipe, i) or 0.0) for i in range(len(kind.counts))]
            for name, kind in kinds.items()
            if recipe in kind.losses and kind.texts
        },
        "ratio": _exp_mean(ratios),
        "ratio_low": interval[0],
        "ratio_high": interval[1],
        "inside": None if (change := _exp_mean(changes.values())) is None else 100 * (change - 1),
        "inside_by_kind": {name: 100 * (exp(x) - 1) for name, x in changes.items() if x is not None},
        "fillers": _count_each({name: {name: cells} for name, cells in by_filler.items()}),
        "tasks": _count_each(tasks),
        "retrieved": count_retrieved(by_filler) if len(by_filler) == len(fillers) else None,
        "seconds": None,
        "peak_bytes": None,
        "passes": 0,
        "time": None,
        "memory": None,
    }


def _ratio_interval(kinds: Sequence[Sequence[float]]) -> tuple[float | None, float | None]:
    """Compute a 95 % interval of the geometric mean over kinds: a t interval over the documents of each.

    The variance of the mean over k kinds is the sum of those of their means, divided by k²; its degrees of freedom are
    those of the kind with the fewest documents, which errs on the safe side.
    """
    if not kinds or min(map(len, kinds)) < MIN_DOCUMENTS:
        return None, None
    means = [np.mean(kind) for kind in kinds]
    error = float(np.sqrt(sum(np.var(kind, ddof=1) / len(kind) for kind in kinds))) / len(kinds)
    reach = float(stats.t.ppf(0.975, min(map(len, kinds)) - 1)) * error
    return exp(float(np.mean(means)) - reach), exp(float(np.mean(means)) + reach)


def _exp_mean(logs: Iterable[float | None]) -> float | None:
    """exp of the mean; None where a number is missing or there are none."""
    values = list(logs)
    numbers = [x for x in values if x is not None]
    return perplexity(sum(numbers) / len(numbers)) if numbers and len(numbers) == len(values) else None


def _add_costs(rows: Sequence[ComparedRecipe], kinds: dict[str, KindLosses], times: dict[str, Any] | None) -> None:
    """Add what a pass costs: of those that were timed alone, or where none were of those made for perplexity."""
    timed = {cell["recipe"]: cell for cell in times["cells"] if cell["failed"] is None} if times is not None else {}
    for row in rows:
        if times is None:
            cells = [cell for kind in kinds.values() for cell in kind.cells.get(row["recipe"], [])]
            row["seconds"] = min((cell["seconds"] for cell in cells), default=None)
            row["peak_bytes"] = max((cell.get("peak_bytes") or 0 for cell in cells), default=0) or None
            row["passes"] = len(cells)
        elif cell := timed.get(row["recipe"]):
            row["seconds"], row["passes"] = median(cell["seconds"]), len(cell["seconds"])
            row["peak_bytes"] = cell["peak_bytes"]
    plain = next((row for row in rows if row["recipe"] == PLAIN), None)
    for row in rows:
        if plain and plain["seconds"] and row["seconds"]:
            row["time"] = row["seconds"] / plain["seconds"]
        if plain and plain["peak_bytes"] and row["peak_bytes"]:
            row["memory"] = row["peak_bytes"] / plain["peak_bytes"]


def mark_front(rows: Sequence[ComparedRecipe]) -> None:
    """Mark the recipes that none beats in both perplexity and answers found."""
    points = [
        (row["ratio"], row["retrieved"]["share"], row) for row in rows if row["ratio"] is not None and row["retrieved"]
    ]
    for ratio, share, row in points:
        row["front"] = not any(
            other_ratio <= ratio and other_share >= share and (other_ratio, other_share) != (ratio, share)
            for other_ratio, other_share, _ in points
        )


def _rank(row: ComparedRecipe) -> tuple[float, float]:
    """Rank by answers found, then by perplexity; what lacks a number comes after what has it."""
    share = row["retrieved"]["share"] if row["retrieved"] else -1.0
    return -share, row["ratio"] if row["ratio"] is not None else float("inf")


def _build_ceiling(length: int | None, kinds: dict[str, KindLosses], retrieval: dict[str, dict[str, Any]]) -> Ceiling:
    fillers: dict[str, list[dict[str, Any]]] = {}
    for name, data in retrieval.items():
        cells = [c for c in data["cells"] if (c["recipe"], c["length"]) == (PLAIN, length) and c.get("failed") is None]
        if cells:
            fillers[name] = cells
    own = {name: kind.mean(PLAIN, kind.inside[-1]) for name, kind in kinds.items() if kind.inside}
    return {
        "length": length,
        "perplexity": {name: perplexity(loss) for name, loss in own.items() if loss is not None},
        "fillers": _count_each({name: {name: cells} for name, cells in fillers.items()}),
        "retrieved": count_retrieved(fillers),
    }
