"""Retrieval as a table for a terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.table import Table

from isentrope.evaluation.results import read_results
from isentrope.report.tables.style import TABLE_STYLE
from isentrope.utils.files import RERUN_REMEDY

# the number of a cell, by how answers were scored
METRIC_OF_SCORE = {"both": "share", "forced": "likeliest"}
METRIC_TITLES = {
    "share": "Percent of the answers found in the model's reply",
    "likeliest": "Percent of the answer's tokens that the model ranks first",
}


def read_retrieval(results: Path) -> tuple[dict[str, Any], str]:
    """Read `retrieval.json`; returns its content and the metric of its cells."""
    data = read_results(results, RERUN_REMEDY, "config", "cells", "rows")
    return data, METRIC_OF_SCORE[data["config"]["score"]]


def build_retrieval_table(results: Path) -> Table:
    """Build a table of `retrieval.json`: a row for each task and recipe, a column for each length."""
    data, metric = read_retrieval(results)
    lengths, rows = data["config"]["lengths"], {(r["recipe"], r["task"], r["length"]): r for r in data["rows"]}
    shortfalls = [row["length"] - row["tokens"][0] for row in rows.values() if row["tokens"]]
    notes = [f"{METRIC_TITLES[metric]}, over all depths; {data['config']['examples']} examples per depth."]
    notes += [f"Examples are up to {max(shortfalls)} tokens shorter."] if shortfalls else []
    notes += ["*: some depths failed."] if any(row["failed"] for row in rows.values()) else []
    table = Table(title=f"Retrieval: {data['model']['name']}", caption="\n".join(notes), min_width=60, **TABLE_STYLE)
    table.add_column("task")
    table.add_column("recipe", overflow="fold")
    for length in lengths:
        table.add_column(str(length), justify="right")
    for task in data["config"]["tasks"]:
        for i, recipe in enumerate(data["config"]["recipes"]):
            cells = (_format_cell(rows.get((recipe, task, length)), metric) for length in lengths)
            table.add_row("" if i else task, recipe, *cells)
    return table


def _format_cell(row: dict[str, Any] | None, metric: str) -> str:
    if row is None:
        return "–"
    if row[metric] is None:
        return "failed" if row["failed"] else "–"
    return f"{100 * row[metric]:.0f}" + ("*" if row["failed"] else "")
