"""What a model found again in long texts: a table for a terminal, and heatmaps."""

from __future__ import annotations

from math import ceil
from pathlib import Path
from textwrap import fill
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from rich.table import Table

from isentrope.report.figures.laws import RC, save
from isentrope.report.tables.terminal import STYLE
from isentrope.utils.files import RERUN_REMEDY, read_fields

# which number stands for a cell, by what was asked for
METRICS = {"both": "share", "forced": "likeliest"}
WORDS = {
    "share": "Percent of the answers found in what the model says",
    "likeliest": "Percent of the answer's tokens that are the model's likeliest",
}
COLOURS, FAILED = "cividis", "#E4E4E4"  # even in lightness, for readers who see few colours or none
COLUMNS = 4  # heatmaps side by side


def table(results: Path) -> Table:
    """One row for each recipe and task of `retrieval.json`, one column for each length."""
    data, metric = _read(results)
    lengths, rows = data["config"]["lengths"], {(r["recipe"], r["task"], r["length"]): r for r in data["rows"]}
    below = [row["length"] - row["tokens"][0] for row in rows.values() if row["tokens"]]
    notes = [f"{WORDS[metric]}, over all depths; {data['config']['examples']} examples a depth."]
    notes += [f"Real lengths: up to {max(below)} below these."] if below else []
    notes += ["* where some depths failed."] if any(row["failed"] for row in rows.values()) else []
    shown = Table(title=f"Retrieval: {data['model']['name']}", caption="\n".join(notes), min_width=60, **STYLE)
    shown.add_column("task")
    shown.add_column("recipe", overflow="fold")
    for length in lengths:
        shown.add_column(str(length), justify="right")
    for task in data["config"]["tasks"]:
        for i, recipe in enumerate(data["config"]["recipes"]):
            numbers = (_number(rows.get((recipe, task, length)), metric) for length in lengths)
            shown.add_row("" if i else task, recipe, *numbers)
    return shown


def heatmaps(results: Path) -> list[Path]:
    """Beside `retrieval.json`, for each task: depth × length for each recipe; without depths, recipe × length."""
    data, metric = _read(results)
    drawn = []
    for task in data["config"]["tasks"]:
        with matplotlib.rc_context(RC):
            figure = _figure(data, task, metric)
            drawn += [save(figure, results.with_name(f"retrieval-{task}{suffix}")) for suffix in (".png", ".svg")]
    return drawn


def _read(results: Path) -> tuple[dict[str, Any], str]:
    data = read_fields(results, RERUN_REMEDY, "config", "cells", "rows")
    return data, METRICS[data["config"]["score"]]


def _number(row: dict[str, Any] | None, metric: str) -> str:
    if row is None:
        return "–"
    if row[metric] is None:
        return "failed" if row["failed"] else "–"
    return f"{100 * row[metric]:.0f}" + ("*" if row["failed"] else "")


def _figure(data: dict[str, Any], task: str, metric: str) -> Figure:
    lengths, recipes = data["config"]["lengths"], data["config"]["recipes"]
    found = {(cell["recipe"], cell["length"], cell["depth"]): cell for cell in data["cells"] if cell["task"] == task}
    depths = sorted({depth for _, _, depth in found if depth is not None})
    room = 1.4 + 0.55 * len(lengths)  # inches of a panel
    if depths:
        panels = {
            _folded(recipe, int(10 * room)): {
                f"{depth:g}": [found.get((recipe, n, depth)) for n in lengths] for depth in depths
            }
            for recipe in recipes
        }
    else:
        panels = {"": {_folded(recipe): [found.get((recipe, n, None)) for n in lengths] for recipe in recipes}}
    lines = ceil(len(panels) / COLUMNS)
    columns = ceil(len(panels) / lines)
    width = max(5.5, room * columns + 1.5)
    height = (1.5 + 0.36 * len(next(iter(panels.values())))) * lines + 0.4
    figure = Figure(figsize=(width, height), layout="constrained")
    grid = figure.subplots(lines, columns, squeeze=False)
    for axes, (title, rows) in zip(grid.flat, panels.items(), strict=False):
        _heatmap(axes, rows, [str(n) for n in lengths], metric)
        axes.set_title(title, fontsize=9)
        axes.set(xlabel="tokens", ylabel="depth, %" if depths else "")
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    figure.suptitle(f"{task}: {data['model']['name']}", x=0.01, ha="left", fontsize=11, weight="bold")
    figure.colorbar(ScalarMappable(Normalize(0, 100), COLOURS), ax=grid, label=fill(WORDS[metric], 30))
    return figure


def _heatmap(axes: Axes, rows: dict[str, list[dict[str, Any] | None]], columns: list[str], metric: str) -> None:
    """A share for each cell; grey where there is none, with a cross where it failed."""
    values = [[np.nan if c is None or c[metric] is None else 100 * c[metric] for c in row] for row in rows.values()]
    axes.imshow(np.ma.masked_invalid(values), cmap=COLOURS, norm=Normalize(0, 100), aspect="auto")
    axes.set_facecolor(FAILED)
    axes.set_xticks(range(len(columns)), columns, rotation=45)
    axes.set_yticks(range(len(rows)), list(rows))
    for y, (row, shares) in enumerate(zip(rows.values(), values, strict=True)):
        for x, (cell, share) in enumerate(zip(row, shares, strict=True)):
            if not np.isnan(share):
                axes.text(x, y, f"{share:.0f}", ha="center", va="center", color="white" if share < 55 else "black")
            elif cell is not None and cell["failed"]:
                axes.text(x, y, "×", ha="center", va="center")


def _folded(recipe: str, width: int = 32) -> str:
    return fill(recipe.replace("+", " + ").replace(",", ", "), width, break_long_words=False)
