"""Load the results of a study: its plans, and their cells averaged over training seeds, one grid per protocol."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cached_property
from math import isnan
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from isentrope.evaluation.metrics import difference_interval
from isentrope.utils.files import RERUN_REMEDY, read_json, read_plain_or_gzip

PROTOCOLS = {"single": "one token masked at a time", "random": "15 % masked at once"}
MAX_DEPTH = 3  # results/evaluate/MODEL-LENGTH is two folders below results
INTERNAL_FOLDERS = ("checkpoints", "cells", "figures", "jobs")
METRICS = {"ppl": "PPL", "acc": "ACC"}
LOWER_IS_BETTER = {"ppl"}
Cell = dict[str, Any]


class Row(NamedTuple):
    """A row of a table: a position method, and the variant of its scores and temperature."""

    method: str
    variant: str

    @property
    def label(self) -> str:
        """The row's name in the paper: `ReRoPE`, `ReRoPE w/ C.S., I.S.`"""
        scales = {"plain": "", "": "", "both": "C.S., I.S."}.get(self.variant, self.variant)
        return f"{self.method} w/ {scales}" if scales else self.method


@dataclass(frozen=True)
class Value:
    """A metric's mean over training seeds, its minimum and maximum, and the widest 95 % interval over documents."""

    mean: float
    least: float
    most: float
    low: float
    high: float
    seeds: int

    def overlaps(self, other: Value) -> bool:
        return self.low <= other.high and other.low <= self.high


@dataclass(frozen=True)
class PlanResults:
    """A folder with `plan.json`, and the cells of its `results.jsonl` measured so far."""

    folder: Path
    metadata: dict[str, Any]
    cells: list[Cell]
    timings: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return str(self.metadata["name"])

    @property
    def title(self) -> str:
        return str(self.metadata.get("title") or self.name)

    @cached_property
    def rows(self) -> list[Row]:
        return list(dict.fromkeys(Row(str(row["method"]), str(row["variant"])) for row in self.metadata["rows"]))

    @property
    def lengths(self) -> list[int]:
        return list(self.metadata["lengths"])

    @property
    def metrics(self) -> list[str]:
        return list(self.metadata.get("metrics") or METRICS)

    @cached_property
    def grids(self) -> list[Grid]:
        """One grid for the plan's own protocol, then for each other one: numbers of two protocols are never mixed."""
        protocols = dict.fromkeys([str(self.metadata["protocol"]), *(cell["protocol"] for cell in self.cells)])
        return [Grid(self, name, [cell for cell in self.cells if cell["protocol"] == name]) for name in protocols]


@dataclass(frozen=True)
class Grid:
    """The cells of one plan under one protocol: rows × lengths, each with a cell per seed."""

    plan: PlanResults
    protocol: str
    cells: list[Cell]

    @cached_property
    def cells_by_seed(self) -> dict[tuple[Row, int], dict[int, Cell]]:
        """Cells by row and length, then seed; a later line replaces an earlier one, as when a failed cell is rerun."""
        rows, lengths = set(self.plan.rows), set(self.plan.lengths)
        cells: dict[tuple[Row, int], dict[int, Cell]] = {}
        for cell in self.cells:
            row = Row(cell["method"], cell["variant"])
            if row in rows and cell["length"] in lengths:
                cells.setdefault((row, cell["length"]), {})[cell.get("seed") or 0] = cell
        return cells

    @property
    def unplanned_count(self) -> int:
        """The number of cells that belong to no row or length of the plan; only the CSV has them."""
        rows, lengths = set(self.plan.rows), set(self.plan.lengths)
        return sum(
            Row(cell["method"], cell["variant"]) not in rows or cell["length"] not in lengths for cell in self.cells
        )

    @cached_property
    def seeds(self) -> list[int]:
        return sorted({seed for cells in self.cells_by_seed.values() for seed in cells})

    def value(self, row: Row, length: int, metric: str) -> Value | None:
        """Average a metric over the measured seeds; None if there are none."""
        key = row, length, metric
        if key not in self._values:
            self._values[key] = self._compute_value(*key)
        return self._values[key]

    @cached_property
    def _values(self) -> dict[tuple[Row, int, str], Value | None]:
        """Those computed already: tables, claims and figures want them many times."""
        return {}

    def _compute_value(self, row: Row, length: int, metric: str) -> Value | None:
        cells = [cell for cell in self._measured_cells(row, length).values() if _get_number(cell, metric) is not None]
        if not cells:
            return None
        values = [float(cell[metric]) for cell in cells]
        lows, highs = (
            [float(cell[metric] if _get_number(cell, f"{metric}_{end}") is None else cell[f"{metric}_{end}"])
             for cell in cells] for end in ("low", "high")
        )  # fmt: skip
        return Value(sum(values) / len(values), min(values), max(values), min(lows), max(highs), len(values))

    def difference(self, before: Row, after: Row, length: int, metric: str) -> tuple[float, float] | None:
        """Compute the 95 % interval of the change over documents that all cells of both rows have, if any."""
        both = [
            [{document["sha256"]: document for document in cell.get("documents") or []} for cell in cells.values()]
            for row in (before, after) if (cells := self._measured_cells(row, length))
        ]  # fmt: skip
        if len(both) < 2:
            return None
        shared = sorted(set.intersection(*(set(documents) for row in both for documents in row)))
        if not shared:
            return None
        start, end = ([[documents[sha] for sha in shared] for documents in row] for row in both)
        return difference_interval(start, end, metric)

    def differences(self, before: Row, after: Row, length: int, metric: str) -> list[NDArray[np.float64]]:
        """Return by how much one row is better than another, for each pre-training an array (seeds, documents).

        Accuracies, or logarithms of perplexity, of the documents and seeds that both rows have; none if there are none.
        Results without a pre-training are of one.
        """
        start, end = self._measured_cells(before, length), self._measured_cells(after, length)
        seeds = sorted(set(start) & set(end))
        scores = {
            (side, seed): {d["sha256"]: _score_document(d, metric) for d in cells[seed].get("documents") or []}
            for side, cells in enumerate((start, end)) for seed in seeds
        }  # fmt: skip
        shared = sorted(set.intersection(*map(set, scores.values()))) if scores else []
        if not shared:
            return []
        runs: dict[str, list[list[float]]] = {}
        for seed in seeds:
            changes = [scores[1, seed][document] - scores[0, seed][document] for document in shared]
            runs.setdefault(str(end[seed].get("pretraining") or ""), []).append(changes)
        return [np.array(run) for run in runs.values()]

    def _measured_cells(self, row: Row, length: int) -> dict[int, Cell]:
        cells = self.cells_by_seed.get((row, length), {})
        return {seed: cell for seed, cell in cells.items() if get_failure(cell) is None}

    def failures(self, row: Row, length: int) -> dict[int, str]:
        """Return the reason of each seed whose cell failed."""
        cells = self.cells_by_seed.get((row, length), {})
        return {seed: reason for seed, cell in cells.items() if (reason := get_failure(cell)) is not None}

    def count_most_seeds(self, length: int) -> int:
        """Count the seeds of the row that has most at a length; rows with fewer have no rank."""
        return max((len(self._measured_cells(row, length)) for row in self.plan.rows), default=0)

    def ranks(self, length: int, metric: str) -> dict[Row, int]:
        """Rank the best rows 1 and the second best 2, ties alike; rows with fewer seeds than others have no rank."""
        values = {row: value for row in self.plan.rows if (value := self.value(row, length, metric))}
        most = max((value.seeds for value in values.values()), default=0)
        # nine digits, so that rounding errors break no tie
        means = {row: float(f"{value.mean:.9g}") for row, value in values.items() if value.seeds == most}
        if len(means) < 2:
            return {}
        order = sorted(set(means.values()), reverse=metric not in LOWER_IS_BETTER)[:2]
        return {row: order.index(value) + 1 for row, value in means.items() if value in order}

    @property
    def documents(self) -> dict[int, int]:
        """The number of documents measured at each length, without those that are too short."""
        counts: dict[int, int] = {}
        for (_, length), cells in self.cells_by_seed.items():
            for cell in cells.values():
                if get_failure(cell) is None:
                    counts[length] = max(counts.get(length, 0), len(cell.get("documents") or []))
        return dict(sorted(counts.items()))


def _score_document(document: dict[str, Any], metric: str) -> float:
    """Return the accuracy on a document, or minus the logarithm of its perplexity: more is better."""
    total = -document["loss"] if metric == "ppl" else document["hits"]
    return float(total / document["count"])


def get_failure(cell: Cell) -> str | None:
    """Return why a cell has no numbers, or None if it has them."""
    if cell.get("failed"):
        return str(cell["failed"])
    if all(_get_number(cell, metric) is None for metric in METRICS):
        return "not a number"
    return None


def load_plans(folder: Path, required: bool = True) -> list[PlanResults]:
    """Load the plan in a folder, or those in its subfolders by name.

    Raises:
        ValueError: if there is no such folder, a file in it is broken, or it has no plan although one is required.
    """
    exists = folder.is_dir()
    folders = find_result_folders(folder, "plan.json")
    if not exists or (required and not folders):
        raise ValueError(
            f"{folder}: expected plan.json or decoder.json in it or in its subfolders, got "
            f"{'none' if exists else 'no folder'}; name the folder that was --out of study run, evaluate or compare"
        )
    return [_load_plan(path) for path in folders]


def find_result_folders(folder: Path, file: str) -> list[Path]:
    """Find folders with results, by name: the folder itself if it has the file, or those below it that do.

    Args:
        folder: where to look; at most MAX_DEPTH folders down, outside those of checkpoints and of single results.
        file: what every folder with results has, such as plan.json.
    """
    if (folder / file).is_file():
        return [folder]
    results, level = list[Path](), [folder] if folder.is_dir() else []
    for _ in range(MAX_DEPTH):
        level = [path for each in level for path in each.iterdir() if path.is_dir() and not _is_internal(path)]
        results += [path for path in level if (path / file).is_file()]
        level = [path for path in level if not (path / file).is_file()]
    return sorted(results)


def _is_internal(folder: Path) -> bool:
    return folder.name in INTERNAL_FOLDERS or folder.name.startswith(".") or folder.is_symlink()


def _load_plan(folder: Path) -> PlanResults:
    path = folder / "plan.json"
    metadata = read_json(path, RERUN_REMEDY)
    required = {"name": str, "lengths": list, "protocol": str, "rows": list}
    for key, kind in required.items():
        if not isinstance(metadata, dict) or not isinstance(metadata.get(key), kind):
            raise ValueError(f"{path}: expected {key!r}, a {kind.__name__}, got {_get_field(metadata, key)!r}")
    for row in metadata["rows"]:
        if not isinstance(row, dict) or not {"method", "variant"} <= set(row):
            raise ValueError(f"{path}: rows: expected 'method' and 'variant' in each, got {row!r}")
    for metric in metadata.get("metrics") or ():
        if metric not in METRICS:
            raise ValueError(f"{path}: metrics: expected some of {', '.join(METRICS)}, got {metric!r}")
    cells = _read_json_lines(folder / "results.jsonl", {"method": str, "variant": str, "length": int, "protocol": str})
    timings = _read_json_lines(folder / "timings.jsonl", {"key": str})
    return PlanResults(folder, metadata, cells, {row["key"]: row for row in timings})


def _read_json_lines(path: Path, required: dict[str, type]) -> list[dict[str, Any]]:
    """Read one JSON object per line; a missing file has none."""
    if (content := read_plain_or_gzip(path)) is None:
        return []
    rows = []
    for number, line in enumerate(content.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}, line {number}: expected JSON ({error}); {RERUN_REMEDY}") from None
        for key, kind in required.items():
            if not isinstance(row, dict) or not isinstance(row.get(key), kind):
                raise ValueError(
                    f"{path}, line {number}: expected {key!r}, a {kind.__name__}, got {_get_field(row, key)!r}; "
                    f"{RERUN_REMEDY}"
                )
        rows.append(row)
    return rows


def _get_field(content: Any, key: str) -> Any:
    return content.get(key) if isinstance(content, dict) else content


def _get_number(cell: Cell, key: str) -> float | None:
    value = cell.get(key)
    return None if not isinstance(value, int | float) or isnan(value) else float(value)
