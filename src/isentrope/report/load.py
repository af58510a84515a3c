"""What a study left in a folder: its plans, and their cells averaged over training seeds, one grid a protocol."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cached_property
from math import isnan
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from isentrope.utils.files import RERUN_REMEDY, read_json

PROTOCOLS = {"single": "one token masked at a time", "random": "15 % masked at once"}
METRICS = {"ppl": "PPL", "acc": "ACC"}
LOWER_IS_BETTER = {"ppl"}
DRAWS = 2000  # of the bootstrap
Cell = dict[str, Any]


class Row(NamedTuple):
    """A line of a table: a position method, and what scales its scores."""

    method: str
    variant: str

    @property
    def label(self) -> str:
        """As the paper writes it: `ReRoPE`, `ReRoPE w/ C.S., I.S.`"""
        scales = {"plain": "", "": "", "both": "C.S., I.S."}.get(self.variant, self.variant)
        return f"{self.method} w/ {scales}" if scales else self.method


@dataclass(frozen=True)
class Value:
    """A metric's mean over training seeds, its least and most among them, and the widest interval over documents."""

    mean: float
    least: float
    most: float
    low: float
    high: float
    seeds: int

    def overlaps(self, other: Value) -> bool:
        return self.low <= other.high and other.low <= self.high


@dataclass(frozen=True)
class Plan:
    """A folder with `plan.json`, and the cells of its `results.jsonl` as far as they are there."""

    folder: Path
    told: dict[str, Any]
    cells: list[Cell]
    timings: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return str(self.told["name"])

    @property
    def title(self) -> str:
        return str(self.told.get("title") or self.name)

    @cached_property
    def rows(self) -> list[Row]:
        return list(dict.fromkeys(Row(str(row["method"]), str(row["variant"])) for row in self.told["rows"]))

    @property
    def lengths(self) -> list[int]:
        return list(self.told["lengths"])

    @property
    def metrics(self) -> list[str]:
        return list(self.told.get("metrics") or METRICS)

    @cached_property
    def grids(self) -> list[Grid]:
        """The plan's own protocol, then any other that cells were measured under: numbers of two never meet."""
        protocols = dict.fromkeys([str(self.told["protocol"]), *(cell["protocol"] for cell in self.cells)])
        return [Grid(self, name, [cell for cell in self.cells if cell["protocol"] == name]) for name in protocols]


@dataclass(frozen=True)
class Grid:
    """The cells of one plan under one protocol: rows × lengths, each with as many cells as there are seeds."""

    plan: Plan
    protocol: str
    cells: list[Cell]

    @cached_property
    def placed(self) -> dict[tuple[Row, int], dict[int, Cell]]:
        """Cells by row, length and seed; of two for one place the later line counts, as after a failure repaired."""
        rows, lengths = set(self.plan.rows), set(self.plan.lengths)
        found: dict[tuple[Row, int], dict[int, Cell]] = {}
        for cell in self.cells:
            row = Row(cell["method"], cell["variant"])
            if row in rows and cell["length"] in lengths:
                found.setdefault((row, cell["length"]), {})[cell.get("seed") or 0] = cell
        return found

    @property
    def stray(self) -> int:
        """Cells that belong to no row or length of the plan: in the CSV alone."""
        rows, lengths = set(self.plan.rows), set(self.plan.lengths)
        return sum(
            Row(cell["method"], cell["variant"]) not in rows or cell["length"] not in lengths for cell in self.cells
        )

    @cached_property
    def seeds(self) -> list[int]:
        return sorted({seed for cells in self.placed.values() for seed in cells})

    def value(self, row: Row, length: int, metric: str) -> Value | None:
        """Mean over the seeds that were measured; None where none was."""
        cells = [cell for cell in self._measured(row, length).values() if _number(cell, metric) is not None]
        if not cells:
            return None
        values = [float(cell[metric]) for cell in cells]
        lows, highs = (
            [float(cell[metric] if _number(cell, f"{metric}_{end}") is None else cell[f"{metric}_{end}"])
             for cell in cells] for end in ("low", "high")
        )  # fmt: skip
        return Value(sum(values) / len(values), min(values), max(values), min(lows), max(highs), len(values))

    def difference(self, before: Row, after: Row, length: int, metric: str) -> tuple[float, float] | None:
        """95 % interval of the change, by bootstrap over the documents that all cells of both rows have."""
        both = [
            [{document["sha256"]: document for document in cell.get("documents") or []} for cell in cells.values()]
            for row in (before, after) if (cells := self._measured(row, length))
        ]  # fmt: skip
        if len(both) < 2:
            return None
        shared = sorted(set.intersection(*(set(documents) for row in both for documents in row)))
        if not shared:
            return None
        draws = np.random.default_rng(0).integers(0, len(shared), (DRAWS, len(shared)))
        scores = [[[documents[name] for name in shared] for documents in row] for row in both]
        start, end = (np.mean([_drawn(cell, draws, metric) for cell in row], 0) for row in scores)
        low, high = np.percentile(end - start, (2.5, 97.5))
        return float(low), float(high)

    def _measured(self, row: Row, length: int) -> dict[int, Cell]:
        cells = self.placed.get((row, length), {})
        return {seed: cell for seed, cell in cells.items() if failure(cell) is None}

    def failed(self, row: Row, length: int) -> dict[int, str]:
        """The reason of each seed whose cell failed."""
        cells = self.placed.get((row, length), {})
        return {seed: reason for seed, cell in cells.items() if (reason := failure(cell)) is not None}

    def ranks(self, length: int, metric: str) -> dict[Row, int]:
        """1 for the best rows and 2 for the second best by the numbers as measured; equal ones share."""
        values = {row: self.value(row, length, metric) for row in self.plan.rows}
        found = {row: float(f"{value.mean:.9g}") for row, value in values.items() if value}  # not by rounding errors
        if len(found) < 2:
            return {}
        order = sorted(set(found.values()), reverse=metric not in LOWER_IS_BETTER)[:2]
        return {row: order.index(value) + 1 for row, value in found.items() if value in order}

    @property
    def documents(self) -> dict[int, int]:
        """Documents measured at each length; those too short for one are not among them."""
        counts: dict[int, int] = {}
        for (_, length), cells in self.placed.items():
            for cell in cells.values():
                if failure(cell) is None:
                    counts[length] = max(counts.get(length, 0), len(cell.get("documents") or []))
        return dict(sorted(counts.items()))


def _drawn(documents: list[dict[str, Any]], draws: NDArray[np.int64], metric: str) -> NDArray[np.float64]:
    """A cell's metric over each draw of its documents."""
    key = "loss" if metric == "ppl" else "hits"
    total, count = (np.array([float(document[k]) for document in documents])[draws].sum(1) for k in (key, "count"))
    # a perplexity past all numbers is as good as this one
    return np.exp(np.minimum(total / count, 700.0)) if metric == "ppl" else total / count


def failure(cell: Cell) -> str | None:
    """Why a cell has no numbers; None where it has them."""
    if cell.get("failed"):
        return str(cell["failed"])
    if all(_number(cell, metric) is None for metric in METRICS):
        return "not a number"
    return None


def read(folder: Path, needed: bool = True) -> list[Plan]:
    """The plan that lies in a folder, or those in its subfolders, by name."""
    if not folder.is_dir():
        raise ValueError(f"{folder}: expected a folder that isentrope study run wrote, got no folder")
    here = [folder] if (folder / "plan.json").is_file() else []
    found = here or sorted(path.parent for path in folder.glob("*/plan.json"))
    if needed and not found:
        raise ValueError(f"{folder}: expected plan.json or decoder.json in it or in its subfolders, got none")
    return [_plan(path) for path in found]


def _plan(folder: Path) -> Plan:
    path = folder / "plan.json"
    told = read_json(path, RERUN_REMEDY)
    needed = {"name": str, "lengths": list, "protocol": str, "rows": list}
    for key, kind in needed.items():
        if not isinstance(told, dict) or not isinstance(told.get(key), kind):
            raise ValueError(f"{path}: expected {key!r}, a {kind.__name__}, got {_get(told, key)!r}")
    for row in told["rows"]:
        if not isinstance(row, dict) or not {"method", "variant"} <= set(row):
            raise ValueError(f"{path}: rows: expected 'method' and 'variant' in each, got {row!r}")
    for metric in told.get("metrics") or ():
        if metric not in METRICS:
            raise ValueError(f"{path}: metrics: expected some of {', '.join(METRICS)}, got {metric!r}")
    cells = _lines(folder / "results.jsonl", {"method": str, "variant": str, "length": int, "protocol": str})
    timings = _lines(folder / "timings.jsonl", {"key": str})
    return Plan(folder, told, cells, {row["key"]: row for row in timings})


def _lines(path: Path, needed: dict[str, type]) -> list[dict[str, Any]]:
    """JSON objects, one a line; a file that is not there yet has none."""
    if not path.is_file():
        return []
    found = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}, line {number}: expected JSON ({error}); {RERUN_REMEDY}") from None
        for key, kind in needed.items():
            if not isinstance(row, dict) or not isinstance(row.get(key), kind):
                raise ValueError(
                    f"{path}, line {number}: expected {key!r}, a {kind.__name__}, got {_get(row, key)!r}; "
                    f"{RERUN_REMEDY}"
                )
        found.append(row)
    return found


def _get(found: Any, key: str) -> Any:
    return found.get(key) if isinstance(found, dict) else found


def _number(cell: Cell, key: str) -> float | None:
    value = cell.get(key)
    return None if not isinstance(value, int | float) or isnan(value) else float(value)
