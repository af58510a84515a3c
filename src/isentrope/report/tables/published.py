"""The paper's published numbers, and a comparison with the measured ones."""

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
from isentrope.report.tables.numbers import ACC_CAP, format_number

PublishedValue = float | str  # beyond its caps the paper prints ">500" and "<0.1"
NOT_MEASURED_TEXT = "–"
CAPPED_ACC_HEIGHT = ACC_CAP / 2  # where figures draw the accuracy "<0.1"
ROUNDING_NOTE = "Changes too small for the paper's digits are not counted."
FIGURE_CAPTION = (
    "Accuracy against length, a panel for each method: the paper's numbers dashed; ours solid, with 95 % intervals "
    f"over documents. An open marker at {CAPPED_ACC_HEIGHT} stands for the paper's <{ACC_CAP}."
)


@dataclass(frozen=True)
class PublishedTable:
    """A result table of the paper."""

    label: str
    values: dict[tuple[Row, int, str], PublishedValue]


@cache
def load_published_tables() -> dict[str, PublishedTable]:
    """Load the paper's result tables, by label."""
    data = json.loads(Path(__file__).with_name("published.json").read_text(encoding="utf-8"))
    tables = {}
    for name, plan in data["plans"].items():
        values = {
            (row, length, metric): value
            for row, metrics in _table_rows(data["plans"], name).items() for metric, series in metrics.items()
            for length, value in zip(data["lengths"], series, strict=True)
        }  # fmt: skip
        tables[plan["label"]] = PublishedTable(plan["label"], values)
    return tables


def _table_rows(plans: dict[str, Any], name: str) -> dict[Row, dict[str, list[PublishedValue]]]:
    """Return the rows that a table shares with another plan's, updated by its own."""
    plan = plans[name]
    shared = _table_rows(plans, plan["of"]) if "of" in plan else {}
    own = {Row(method, variant): row for method, rows in plan.get("rows", {}).items() for variant, row in rows.items()}
    return {row: values for row, values in shared.items() if row.variant in plan["variants"]} | own


def format_published(x: PublishedValue, metric: str) -> str:
    return x if isinstance(x, str) else format_number(x, metric)


def to_comparable(x: PublishedValue) -> float:
    """Return a number to compare with: infinite beyond a cap."""
    return x if isinstance(x, float) else -inf if x.startswith("<") else inf


def direction_of_change(before: PublishedValue, after: PublishedValue) -> int | None:
    """Return 1 if a number rises, −1 if it falls, None if its printed digits are equal."""
    a, b = to_comparable(before), to_comparable(after)
    return None if a == b else 1 if b > a else -1


@dataclass(frozen=True)
class PaperComparison:
    """A grid and the paper's table with its label: the rows and lengths that both have."""

    grid: Grid
    table: PublishedTable
    rows: list[Row]
    lengths: list[int]

    def number_rows(self, metric: str, labels: dict[Row, str], cap: bool = False) -> list[list[str]]:
        """Return `paper / ours` by row and length, below a row of headings."""
        lines = [[f"{METRICS[metric]}, paper / ours", *map(str, self.lengths)]]
        for row in self.rows:
            cells = [(self.table.values[row, n, metric], self.grid.value(row, n, metric)) for n in self.lengths]
            texts = [
                (format_published(a, metric), format_number(b.mean, metric, cap) if b else NOT_MEASURED_TEXT)
                for a, b in cells
            ]
            lines.append([labels[row], *map(" / ".join, texts)])
        return lines

    def agreement_rows(self, metric: str) -> list[list[str]]:
        """Return how many changes have the same sign in both, by comparison and length, below a row of headings."""
        lines = [[f"{METRICS[metric]} changes in the same direction", *map(str, self.lengths)]]
        for name, pairs in self.pairs.items():
            counts = [self.count_agreements(pairs, length, metric) for length in self.lengths]
            lines.append([name, *(f"{same} of {known}" if known else "" for same, known in counts)])
        return lines if any(any(line[1:]) for line in lines[1:]) else []

    @property
    def pairs(self) -> dict[str, list[tuple[Row, Row]]]:
        """Pairs to compare: a method's variants with its first, or methods with each other if all have one variant."""
        first, *others = dict.fromkeys(row.variant for row in self.rows)
        if not others:
            return {"pairs of methods": list(combinations(self.rows, 2))}
        starts = [row for row in self.rows if row.variant == first]
        pairs = {v: [(row, Row(row.method, v)) for row in starts if Row(row.method, v) in self.rows] for v in others}
        return {f"methods, {variant} against {first}": rows for variant, rows in pairs.items()}

    def count_agreements(self, pairs: Iterable[tuple[Row, Row]], length: int, metric: str) -> tuple[int, int]:
        """Count the changes with the same sign in both, and those known: printed by the paper and measured here."""
        same, known = 0, 0
        for before, after in pairs:
            theirs = direction_of_change(*(self.table.values[row, length, metric] for row in (before, after)))
            a, b = (self.grid.value(row, length, metric) for row in (before, after))
            if theirs is not None and a and b:
                known += 1
                same += direction_of_change(a.mean, b.mean) == theirs
        return same, known

    def summarize(self) -> str:
        """Say how many changes of ACC have the same sign at the longest length with any; empty without."""
        counts = {
            n: {name: self.count_agreements(pairs, n, "acc") for name, pairs in self.pairs.items()}
            for n in self.lengths
        }
        known_lengths = [n for n, by_name in counts.items() if any(known for _, known in by_name.values())]
        if not known_lengths:
            return ""
        length = max(known_lengths)
        clauses = [f"{same} of {known} {name}" for name, (same, known) in counts[length].items() if known]
        return f"ACC at {length} tokens changes as in the paper's {self.table.label} for {'; '.join(clauses)}."


def compare_with_paper(grid: Grid) -> PaperComparison | None:
    """Compare a grid with the paper's table of its plan's label; None if they have no measured number in common."""
    table = load_published_tables().get(str(grid.plan.metadata.get("label")))
    if table is None:
        return None
    keys = set(table.values)
    rows = [row for row in grid.plan.rows if row in {row for row, *_ in keys}]
    lengths = [length for length in grid.plan.lengths if length in {length for _, length, _ in keys}]
    measured = any(grid.value(row, n, metric) for row in rows for n in lengths for metric in grid.plan.metrics)
    return PaperComparison(grid, table, rows, lengths) if measured else None
