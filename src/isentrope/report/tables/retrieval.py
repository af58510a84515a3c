"""Retrieval as a table for a terminal or a page."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.table import Table

from isentrope.evaluation.clusters import MIN_CLUSTERS
from isentrope.evaluation.results import read_results
from isentrope.report.tables.style import TABLE_STYLE
from isentrope.utils.files import RERUN_REMEDY

METRIC_TITLES = {
    "share": "Percent of the answers found in the model's reply",
    "recalled": "Percent of the answers all of whose tokens the model ranks first",
    "likeliest": "Percent of the answer's tokens that the model ranks first",
}
ALL_TASKS = "all tasks"


def read_retrieval(results: Path) -> tuple[dict[str, Any], str]:
    """Read `retrieval.json`; returns its content and the metric of its cells."""
    data = read_results(results, RERUN_REMEDY, "config", "cells", "rows")
    if data["config"]["score"] == "both":
        return data, "share"
    # results of earlier versions have the share of tokens alone
    return data, "recalled" if all("recalled" in row for row in data["rows"]) else "likeliest"


def build_retrieval_table(results: Path) -> Table:
    """Build a table of `retrieval.json`: a row for each task and recipe, a column for each length, the ceiling last."""
    data, metric = read_retrieval(results)
    heads, rows = format_retrieval(data, metric)
    title = f"Retrieval: {data['model']['name']}"
    notes = "\n".join(describe_retrieval(data, metric))
    table = Table(title=title, caption=notes, min_width=60, **TABLE_STYLE)
    table.add_column(heads[0])
    table.add_column(heads[1], overflow="fold")
    for head in heads[2:]:
        table.add_column(head, justify="right")
    for before, row in zip([None, *rows], rows, strict=False):
        table.add_row("" if before and before[0] == row[0] else row[0], *row[1:])
    return table


def format_retrieval(data: dict[str, Any], metric: str) -> tuple[list[str], list[list[str]]]:
    """Format headings and rows of a table.

    Args:
        data: content of `retrieval.json`.
        metric: the number shown, one of METRIC_TITLES.
    """
    lengths, recipes = data["config"]["lengths"], data["config"]["recipes"]
    rows = {(row["recipe"], row["task"], row["length"]): row for row in data["rows"]}
    # totals are of the metric `score` alone, which old files and the share of tokens have none of
    if len(data["config"]["tasks"]) > 1 and metric != "likeliest":
        rows |= {
            (row["recipe"], ALL_TASKS, row["length"]): row | {metric: row["score"]} for row in data.get("totals", [])
        }
    ceiling = data["config"].get("ceiling")
    heads = ["task", "recipe", *map(str, lengths), *([f"plain at {ceiling}"] if ceiling else [])]
    lines = []
    for task in (*data["config"]["tasks"], ALL_TASKS):
        for recipe in recipes:
            group = [rows.get((recipe, task, length)) for length in lengths]
            if task == ALL_TASKS and not any(group):
                continue
            cells = [_format_cell(row, metric) for row in group]
            lines.append([task, recipe, *cells, *([_format_ceiling(group)] if ceiling else [])])
    return heads, lines


def describe_retrieval(data: dict[str, Any], metric: str) -> list[str]:
    """Write notes below a table: what the numbers are, over what, and what their intervals claim.

    Args:
        data: content of `retrieval.json`.
        metric: the number shown, one of METRIC_TITLES.
    """
    config, rows = data["config"], data["rows"]
    shortfalls = [row["length"] - row["tokens"][0] for row in rows if row["tokens"]]
    fillers = config.get("fillers", [])
    over = f"all depths and {len(fillers)} fillers ({', '.join(fillers)})" if len(fillers) > 1 else "all depths"
    examples = "1 example" if config["examples"] == 1 else f"{config['examples']} examples"
    notes = [f"{METRIC_TITLES[metric]}, over {over}; {examples} per depth."]
    notes += [f"Examples are up to {max(shortfalls)} tokens shorter."] if any(shortfalls) else []
    notes += ["*: some depths failed."] if any(row["failed"] for row in rows) else []
    intervals = [row["interval"] for row in (*rows, *data.get("totals", [])) if row.get("interval")]
    if any(interval["low"] is not None for interval in intervals):
        alone = "" if len(fillers) > 1 else "; they say nothing about other fillers"
        notes.append(f"In brackets: 95 % intervals, clustered by filler and depth{alone}.")
    if any(interval["low"] is None for interval in intervals):
        notes.append(f"No interval is claimed for fewer than {MIN_CLUSTERS} pairs of filler and depth.")
    if config.get("ceiling"):
        notes.append("Last column: the plain model inside its training length on the same tasks and fillers.")
    return notes


def _format_cell(row: dict[str, Any] | None, metric: str) -> str:
    if row is None:
        return "–"
    if row[metric] is None:
        return "failed" if row.get("failed") else "–"
    return _format_score(row[metric], row.get("interval")) + ("*" if row.get("failed") else "")


def _format_ceiling(rows: Iterable[dict[str, Any] | None]) -> str:
    ceiling = next((row["ceiling"] for row in rows if row and row.get("ceiling")), None)
    return "–" if ceiling is None else _format_score(ceiling["score"], ceiling["interval"])


def _format_score(score: float, interval: dict[str, Any] | None) -> str:
    text = f"{100 * score:.0f}"
    if interval is None or interval["low"] is None:
        return text
    return f"{text} [{100 * interval['low']:.0f}–{100 * interval['high']:.0f}]"
