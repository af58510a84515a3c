"""The paper's own numbers, and ours beside them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from math import inf
from pathlib import Path
from typing import Any

from isentrope.report.load import METRICS, Grid, Row
from isentrope.report.tables.numbers import ACC_CAP, number

Printed = float | str  # beyond its caps the paper prints ">500" and "<0.1"
NOTHING = "–"
FLOOR = ACC_CAP / 2  # where a figure has an accuracy of which no more is known than <0.1
UNSHOWN = "Changes that the paper's digits do not show are not counted."
CAPTION = (
    "Accuracy against length, a panel for each method: the paper's numbers dashed; ours solid, with 95 % intervals "
    f"over documents. An open marker at {FLOOR} stands for the paper's <{ACC_CAP}."
)


@dataclass(frozen=True)
class Published:
    """A result table of the paper."""

    label: str
    values: dict[tuple[Row, int, str], Printed]


@cache
def tables() -> dict[str, Published]:
    """The paper's result tables, by label."""
    told = json.loads(Path(__file__).with_name("published.json").read_text(encoding="utf-8"))
    found = {}
    for name, plan in told["plans"].items():
        values = {
            (row, length, metric): value
            for row, metrics in _rows(told["plans"], name).items() for metric, series in metrics.items()
            for length, value in zip(told["lengths"], series, strict=True)
        }  # fmt: skip
        found[plan["label"]] = Published(plan["label"], values)
    return found


def _rows(plans: dict[str, Any], name: str) -> dict[Row, dict[str, list[Printed]]]:
    """A table's rows: those it shares with another plan's, then its own, which count where both have one."""
    told = plans[name]
    shared = _rows(plans, told["of"]) if "of" in told else {}
    own = {Row(method, variant): row for method, rows in told.get("rows", {}).items() for variant, row in rows.items()}
    return {row: values for row, values in shared.items() if row.variant in told["variants"]} | own


def printed(x: Printed, metric: str) -> str:
    return x if isinstance(x, str) else number(x, metric)


def bound(x: Printed) -> float:
    """A number to compare with others: what lies beyond a cap is beyond all of them."""
    return x if isinstance(x, float) else -inf if x.startswith("<") else inf


def step(before: Printed, after: Printed) -> int | None:
    """1 where a number rises, −1 where it falls, None where its digits do not tell."""
    a, b = bound(before), bound(after)
    return None if a == b else 1 if b > a else -1


@dataclass(frozen=True)
class Beside:
    """A grid beside the paper's table of its label: the rows and lengths that both have."""

    grid: Grid
    table: Published
    rows: list[Row]
    lengths: list[int]

    def numbers(self, metric: str, labels: dict[Row, str], cap: bool = False) -> list[list[str]]:
        """`paper / ours` by row and length, under a line of headings."""
        lines = [[f"{METRICS[metric]}, paper / ours", *map(str, self.lengths)]]
        for row in self.rows:
            cells = [(self.table.values[row, n, metric], self.grid.value(row, n, metric)) for n in self.lengths]
            texts = [(printed(a, metric), number(b.mean, metric, cap) if b else NOTHING) for a, b in cells]
            lines.append([labels[row], *map(" / ".join, texts)])
        return lines

    def counts(self, metric: str) -> list[list[str]]:
        """How many changes go the same way in both, by comparison and length, under a line of headings."""
        lines = [[f"{METRICS[metric]} goes the same way", *map(str, self.lengths)]]
        for name, pairs in self.pairs.items():
            alike = [self.alike(pairs, length, metric) for length in self.lengths]
            lines.append([name, *(f"{same} of {all_}" if all_ else "" for same, all_ in alike)])
        return lines if any(any(line[1:]) for line in lines[1:]) else []

    @property
    def pairs(self) -> dict[str, list[tuple[Row, Row]]]:
        """What is compared: a method's variants with its first; methods with each other where they have but one."""
        first, *others = dict.fromkeys(row.variant for row in self.rows)
        if not others:
            return {"pairs of methods": list(combinations(self.rows, 2))}
        starts = [row for row in self.rows if row.variant == first]
        pairs = {v: [(row, Row(row.method, v)) for row in starts if Row(row.method, v) in self.rows] for v in others}
        return {f"methods, {variant} against {first}": found for variant, found in pairs.items()}

    def alike(self, pairs: Iterable[tuple[Row, Row]], length: int, metric: str) -> tuple[int, int]:
        """Changes that go the same way in both, of those that the paper's digits show and that are measured here."""
        same, known = 0, 0
        for before, after in pairs:
            theirs = step(*(self.table.values[row, length, metric] for row in (before, after)))
            a, b = (self.grid.value(row, length, metric) for row in (before, after))
            if theirs is not None and a and b:
                known += 1
                same += step(a.mean, b.mean) == theirs
        return same, known

    def sentence(self) -> str:
        """How many changes of ACC go the same way at the longest length that shows any; empty where none does."""
        told = {n: {name: self.alike(pairs, n, "acc") for name, pairs in self.pairs.items()} for n in self.lengths}
        shown = [n for n, counts in told.items() if any(known for _, known in counts.values())]
        if not shown:
            return ""
        length = max(shown)
        clauses = [f"{same} of {known} {name}" for name, (same, known) in told[length].items() if known]
        paper = f"the paper's {self.table.label}"
        return f"ACC at {length} tokens goes the same way as in {paper} for {'; '.join(clauses)}."


def beside(grid: Grid) -> Beside | None:
    """The grid beside the paper's table of its plan's label; None where they have no measured number in common."""
    table = tables().get(str(grid.plan.told.get("label")))
    if table is None:
        return None
    rows, lengths = {row for row, *_ in table.values}, {length for _, length, _ in table.values}
    found = [row for row in grid.plan.rows if row in rows], [n for n in grid.plan.lengths if n in lengths]
    measured = any(grid.value(row, n, metric) for row in found[0] for n in found[1] for metric in grid.plan.metrics)
    return Beside(grid, table, *found) if measured else None
