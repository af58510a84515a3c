"""Retrieval against perplexity: one point for each recipe, and the front of those that none beats in both."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from math import cos, pi, sin
from pathlib import Path
from textwrap import wrap
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from isentrope.evaluation.frontier import ComparedRecipe, ComparisonBoard
from isentrope.report.figures.style import GREY, INK, RC_PARAMS, save_figure
from isentrope.report.tables.numbers import format_bucket, format_length

WIDTH = 4.2  # inches: on a screen of 375 px a point of text is 1.2 pixels
PLOT_HEIGHT, LINE_HEIGHT = 3.7, 0.16  # inches, of the plot and of a line of the key
KEY_CHARACTERS = 41  # of a line of the key
FRONT_COLOUR = "#004488"
FORGETFUL_MARKER, CHOOSING_MARKER, MARKER = "s", "D", "o"
MARKER_MEANINGS = {
    FORGETFUL_MARKER: "squares: see only a part of the text",
    CHOOSING_MARKER: "diamonds: choose far keys",
}
OTHER_COLOUR = "#7A7A7A"
MAX_RATIO_TO_BEST = 2.0  # points further to the right are drawn at the edge
LABEL_RADII = (9.0, 13.0, 18.0, 24.0, 31.0, 39.0, 48.0, 60.0, 75.0)  # points, tried in this order
LABEL_ANGLES = 16
Box = tuple[float, float, float, float]  # left, bottom, right, top


def draw_frontier(board: ComparisonBoard, folder: Path) -> list[Path]:
    """Draw `frontier.png` and `.svg` in a folder; nothing where no recipe has both numbers."""
    rows = [row for row in board["rows"] if row["ratio"] is not None and row["retrieved"] is not None]
    if not rows:
        return []
    with matplotlib.rc_context(RC_PARAMS | {"font.size": 9}):
        return save_figure(draw_board(board, rows), folder / "frontier")


def draw_board(board: ComparisonBoard, rows: Sequence[ComparedRecipe]) -> Figure:
    """Draw the points with their numbers, and a key of the numbers below."""
    key = [(row, wrap(_spell(row["recipe"]), KEY_CHARACTERS, break_long_words=True)) for row in rows]
    lines = sum(len(text) for _, text in key)
    height = PLOT_HEIGHT + LINE_HEIGHT * (lines + 2)
    figure = Figure(figsize=(WIDTH, height))
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.155, 1 - (PLOT_HEIGHT - 0.5) / height, 0.81, (PLOT_HEIGHT - 1.1) / height))
    points = _draw_points(axes, rows)
    _set_axes(axes, board, rows)
    ceiling = board["ceiling"]["retrieved"]
    if ceiling is not None:
        axes.axhline(ceiling["share"], color=GREY, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
    axes.axvline(1, color=GREY, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
    place_numbers(axes, points, rows)
    figure.text(0.02, 1 - 0.1 / height, board["model"]["name"], weight="bold", fontsize=10, va="top")
    figure.text(0.02, 1 - 0.27 / height, _describe_lines(board, rows), fontsize=7.8, color=INK, va="top")
    _draw_key(figure, key, height)
    return figure


def _describe_lines(board: ComparisonBoard, rows: Sequence[ComparedRecipe]) -> str:
    """Say what the dashed lines are, and what the markers that were drawn mean."""
    length = board["ceiling"]["length"] or board["train_length"]
    where = f" of {format_length(length)}" if length else ""
    drawn = {choose_marker(row, _limit(rows)) for row in rows}
    meanings = [meaning for marker, meaning in MARKER_MEANINGS.items() if marker in drawn]
    return f"dashed: the plain model inside its training length{where}\n{'; '.join(meanings)}"


def choose_marker(row: ComparedRecipe, limit: float) -> str:
    """Choose a marker: beyond the axis, forgetful, choosing its far keys (`retrieve`), or any other recipe."""
    if (row["ratio"] or 1.0) > limit:
        return ">"
    if row["forgets"]:
        return FORGETFUL_MARKER
    return CHOOSING_MARKER if re.search(r"(^|[+=])retrieve\b", row["recipe"]) else MARKER


def _limit(rows: Sequence[ComparedRecipe]) -> float:
    """Return the largest ratio on the axis; recipes beyond are drawn there."""
    return MAX_RATIO_TO_BEST * min(max(1.0, row["ratio"] or 1.0) for row in rows)


def _draw_points(axes: Axes, rows: Sequence[ComparedRecipe]) -> list[tuple[float, float]]:
    limit, points = _limit(rows), list[tuple[float, float]]()
    for row in rows:
        answers, ratio = row["retrieved"], row["ratio"]
        assert answers is not None and ratio is not None  # selected by the caller
        x, y = min(ratio, limit), answers["share"]
        colour = FRONT_COLOUR if row["front"] else OTHER_COLOUR
        marker = choose_marker(row, limit)
        if answers["low"] is not None and answers["high"] is not None:
            axes.vlines(x, answers["low"], answers["high"], color=colour, linewidth=0.8, alpha=0.35, zorder=2)
        face = colour if row["front"] else "white"
        size = (5.5 if row["front"] else 4.5) - (marker == CHOOSING_MARKER)  # a diamond's diagonal is longer
        axes.plot(x, y, marker, color=colour, markerfacecolor=face, markersize=size, zorder=4, clip_on=False)
        points.append((x, y))
    front = sorted(point for point, row in zip(points, rows, strict=True) if row["front"])
    steps = [front[0], *(p for a, b in pairwise(front) for p in ((b[0], a[1]), b))] if front else []
    axes.plot([x for x, _ in steps], [y for _, y in steps], color=FRONT_COLOUR, linewidth=1.3, alpha=0.7, zorder=3)
    return points


def _set_axes(axes: Axes, board: ComparisonBoard, rows: Sequence[ComparedRecipe]) -> None:
    limit = _limit(rows)
    ratios = [min(row["ratio"] or 1.0, limit) for row in rows]
    low, high = min(0.97, *ratios), max(1.05, *ratios)
    margin = (high / low) ** 0.08
    axes.set_xscale("log")
    axes.set_xlim(low / margin, high * margin)
    axes.set_ylim(-0.06, 1.06)
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.3g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{100 * y:.0f} %"))
    axes.grid(color="#EDEDED", linewidth=0.6)
    bucket = format_bucket(*board["edges"][-2:])
    axes.set_xlabel(f"perplexity at {bucket}, relative to plain inside its length", fontsize=8.5)
    axes.set_ylabel(f"answers found at {format_length(board['length'] or 0)}", fontsize=8.5)
    axes.tick_params(labelsize=8)


def place_numbers(axes: Axes, points: Sequence[tuple[float, float]], rows: Sequence[ComparedRecipe]) -> list[Box]:
    """Write each recipe's number beside its point where it covers neither another number nor a point.

    Returns:
        The boxes of the numbers, in pixels.
    """
    pixels = [tuple(axes.transData.transform(point)) for point in points]
    scale = axes.figure.dpi / 72
    frame = axes.get_window_extent()
    taken: list[Box] = [_box(x, y, 7 * scale, 7 * scale) for x, y in pixels]
    placed: list[Box] = []
    for (x, y), row in sorted(zip(pixels, rows, strict=True), key=lambda item: not item[1]["front"]):
        text = str(row["number"])
        width, height = (2 + 5.2 * len(text)) * scale, 9.5 * scale
        box = _find_place(x, y, width, height, taken, (frame.x0, frame.y0, frame.x1, frame.y1), scale)
        taken.append(box)
        placed.append(box)
        colour = FRONT_COLOUR if row["front"] else INK
        centre = ((box[0] + box[2]) / 2, (box[1] + box[3]) / 2)
        at = axes.transData.inverted().transform(centre)
        is_far = abs(centre[0] - x) + abs(centre[1] - y) > 14 * scale
        if is_far:
            start = axes.transData.inverted().transform((x, y))
            axes.plot([start[0], at[0]], [start[1], at[1]], color=colour, linewidth=0.5, alpha=0.6, zorder=2)
        background = {"facecolor": "white", "edgecolor": "none", "pad": 0.4, "alpha": 0.85} if is_far else None
        axes.text(
            at[0], at[1], text, ha="center", va="center", fontsize=8, color=colour, zorder=5,
            weight="bold" if row["front"] else "normal", bbox=background,
        )  # fmt: skip
    return placed


def _find_place(x: float, y: float, width: float, height: float, taken: Sequence[Box], frame: Box, scale: float) -> Box:
    """Find the nearest free box around a point inside the frame, at least the one that overlaps least."""
    best: tuple[float, Box] | None = None
    for radius in LABEL_RADII:
        for step in range(LABEL_ANGLES):
            angle = pi / 4 + (-1) ** step * ((step + 1) // 2) * 2 * pi / LABEL_ANGLES  # up and right first
            box = _box(x + radius * scale * cos(angle), y + radius * scale * sin(angle), width, height)
            overlap = sum(_overlap(box, other) for other in taken)
            outside = width * height - _overlap(box, frame)
            if overlap + outside <= 1e-9 * width * height:
                return box
            if best is None or overlap + outside < best[0]:
                best = overlap + outside, box
    assert best is not None  # radii and angles are not empty
    return best[1]


def _box(x: float, y: float, width: float, height: float) -> Box:
    return x - width / 2, y - height / 2, x + width / 2, y + height / 2


def _overlap(a: Box, b: Box) -> float:
    """Area that two boxes share."""
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    return max(width, 0.0) * max(height, 0.0)


def _spell(recipe: str) -> str:
    """A recipe's text that can be wrapped between its parts."""
    return recipe.replace("+", " + ").replace(",", ", ")


def _draw_key(figure: Figure, key: Sequence[tuple[ComparedRecipe, list[str]]], height: float) -> None:
    top = 1 - (PLOT_HEIGHT + 0.12) / height
    step = LINE_HEIGHT / height
    figure.text(0.06, top, "#", fontsize=7.8, ha="right", color=INK)
    figure.text(0.08, top, "recipe", fontsize=7.8, color=INK)
    figure.text(0.985, top, "found · ratio", fontsize=7.8, ha="right", color=INK)
    line = 1
    for row, texts in key:
        answers, ratio = row["retrieved"], row["ratio"]
        assert answers is not None and ratio is not None  # selected by the caller
        style: dict[str, Any] = (
            {"color": FRONT_COLOUR, "weight": "bold"} if row["front"] else {"color": "#222222", "weight": "normal"}
        )
        y = top - line * step
        figure.text(0.06, y, str(row["number"]), fontsize=7.8, ha="right", **style)
        figure.text(0.985, y, f"{100 * answers['share']:.0f} % · {ratio:.3g}", fontsize=7.8, ha="right", **style)
        for text in texts:
            figure.text(0.08, top - line * step, text, fontsize=7.8, **style)
            line += 1
