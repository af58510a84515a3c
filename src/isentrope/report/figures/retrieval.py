"""Retrieval as heatmaps of depth and length."""

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

from isentrope.report.figures.style import RC_PARAMS, save_figure
from isentrope.report.tables.retrieval import METRIC_TITLES, read_retrieval

COLOUR_MAP = "cividis"  # perceptually uniform, also without colours
MISSING_COLOUR = "#E4E4E4"
MAX_COLUMNS = 4
MIN_PANEL_INCHES = 2.6  # for the longest parts of recipes, which a title does not break


def draw_heatmaps(results: Path) -> list[Path]:
    """Draw depth × length (without depths, recipe × length) for each task of `retrieval.json`, beside it."""
    data, metric = read_retrieval(results)
    drawn = []
    for task in data["config"]["tasks"]:
        with matplotlib.rc_context(RC_PARAMS):
            drawn += save_figure(_draw_task(data, task, metric), results.with_name(f"retrieval-{task}"))
    return drawn


def _draw_task(data: dict[str, Any], task: str, metric: str) -> Figure:
    lengths, recipes = data["config"]["lengths"], data["config"]["recipes"]
    cells = _average_fillers([cell for cell in data["cells"] if cell["task"] == task], metric)
    depths = sorted({depth for _, _, depth in cells if depth is not None})
    panel_width = max(MIN_PANEL_INCHES, 1.4 + 0.55 * len(lengths))  # inches
    if depths:
        panels = {
            _wrap_recipe(recipe, int(8.5 * panel_width)): {
                f"{depth:g}": [cells.get((recipe, n, depth)) for n in lengths] for depth in depths
            }
            for recipe in recipes
        }
    else:
        panels = {"": {_wrap_recipe(recipe): [cells.get((recipe, n, None)) for n in lengths] for recipe in recipes}}
    rows = ceil(len(panels) / MAX_COLUMNS)
    columns = ceil(len(panels) / rows)
    width = max(5.5, panel_width * columns + 1.5)
    height = (1.5 + 0.36 * len(next(iter(panels.values())))) * rows + 0.4
    figure = Figure(figsize=(width, height), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes, (title, panel) in zip(grid.flat, panels.items(), strict=False):
        _draw_heatmap(axes, panel, [str(n) for n in lengths], metric)
        axes.set_title(title, fontsize=9)
        axes.set(xlabel="tokens", ylabel="depth, %" if depths else "")
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    title = f"{task}: {data['model']['name']}{_describe_ceiling(data, task)}"
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, weight="bold")
    figure.colorbar(ScalarMappable(Normalize(0, 100), COLOUR_MAP), ax=grid, label=fill(METRIC_TITLES[metric], 30))
    return figure


def _average_fillers(cells: list[dict[str, Any]], metric: str) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Average the cells of one recipe, length and depth over fillers; one that failed makes the average fail."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for cell in cells:
        groups.setdefault((cell["recipe"], cell["length"], cell["depth"]), []).append(cell)
    averages = {}
    for key, group in groups.items():
        failed = next((cell["failed"] for cell in group if cell["failed"]), None)
        scores = [cell[metric] for cell in group if cell[metric] is not None]
        averages[key] = {"failed": failed, metric: sum(scores) / len(group) if len(scores) == len(group) else None}
    return averages


def _describe_ceiling(data: dict[str, Any], task: str) -> str:
    """Say what the plain model finds inside its training length."""
    ceiling = next((row["ceiling"] for row in data["rows"] if row["task"] == task and row.get("ceiling")), None)
    return "" if ceiling is None else f" (plain at {ceiling['length']}: {100 * ceiling['score']:.0f})"


def _draw_heatmap(axes: Axes, rows: dict[str, list[dict[str, Any] | None]], columns: list[str], metric: str) -> None:
    """Draw the share of each cell; grey if there is none, with a cross if it failed."""
    values = [[np.nan if c is None or c[metric] is None else 100 * c[metric] for c in row] for row in rows.values()]
    axes.imshow(np.ma.masked_invalid(values), cmap=COLOUR_MAP, norm=Normalize(0, 100), aspect="auto")
    axes.set_facecolor(MISSING_COLOUR)
    axes.set_xticks(range(len(columns)), columns, rotation=45)
    axes.set_yticks(range(len(rows)), list(rows))
    for y, (row, shares) in enumerate(zip(rows.values(), values, strict=True)):
        for x, (cell, share) in enumerate(zip(row, shares, strict=True)):
            if not np.isnan(share):
                axes.text(x, y, f"{share:.0f}", ha="center", va="center", color="white" if share < 55 else "black")
            elif cell is not None and cell["failed"]:
                axes.text(x, y, "×", ha="center", va="center")


def _wrap_recipe(recipe: str, width: int = 32) -> str:
    return fill(recipe.replace("+", " + ").replace(",", ", "), width, break_long_words=False)
