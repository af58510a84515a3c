"""Recipes of a causal model: perplexity at the end, and the change inside the training length."""

from __future__ import annotations

from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter

from isentrope.evaluation.ranking import MAX_DEGRADATION_PERCENT, Leaderboard
from isentrope.report.figures.style import COLOURS, GREY, INK, RC_PARAMS, save_figure
from isentrope.report.tables.numbers import format_bucket, format_perplexity

DEGRADED_COLOUR = "#B2182B"
MAX_BAR_PERCENT = 10  # longer bars are cut here and labelled


def draw_leaderboard(board: Leaderboard, folder: Path) -> list[Path]:
    """Draw a leaderboard as `leaderboard.png` and `.svg` in a folder."""
    with matplotlib.rc_context(RC_PARAMS):
        return save_figure(draw_board(board), folder / "leaderboard")


def draw_board(board: Leaderboard) -> Figure:
    rows = board["rows"][::-1]
    names, heights = [row["recipe"].replace("+", " + ") for row in rows], range(len(rows))
    figure = Figure(figsize=(12, 1.4 + 0.34 * len(rows)), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.4, 1), sharey=True)
    last = [row["perplexity"][-1] for row in rows]
    left.hlines(heights, min(last), last, color="#DDDDDD", linewidth=1.5)
    left.plot(last, heights, "o", color=COLOURS[1])
    left.set_xscale("log")
    left.xaxis.set_major_formatter(LogFormatter())
    left.xaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1, 0.4)))
    for height, value in zip(heights, last, strict=True):
        left.annotate(
            format_perplexity(value), (value, height), (7, 0), textcoords="offset points", va="center", color=INK
        )
    left.set_yticks(heights, names)
    left.set_title(f"perplexity at {format_bucket(*board['edges'][-2:])}")
    changes = [row["inside"] or 0.0 for row in rows]
    colours = [DEGRADED_COLOUR if change > MAX_DEGRADATION_PERCENT else COLOURS[1] for change in changes]
    right.barh(
        heights, [max(-MAX_BAR_PERCENT, min(change, MAX_BAR_PERCENT)) for change in changes], color=colours, height=0.62
    )
    for height, change in zip(heights, changes, strict=True):
        if abs(change) > MAX_BAR_PERCENT:
            at = (MAX_BAR_PERCENT if change > 0 else 0, height)
            right.annotate(f"{change:+.0f} %", at, (4, 0), textcoords="offset points", va="center", color=INK)
    right.axvline(MAX_DEGRADATION_PERCENT, color=DEGRADED_COLOUR, linewidth=1)
    right.axvline(0, color=GREY, linewidth=0.8)
    right.set_title("change inside the training length, %")
    for axes in (left, right):
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x", color="#E8E8E8")
    figure.suptitle(board["model"]["name"], x=0.01, ha="left")
    return figure
