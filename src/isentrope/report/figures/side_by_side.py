"""A text beyond the training length, plain and extended: perplexity by position, and what each writes next."""

from __future__ import annotations

from itertools import pairwise
from math import exp
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from isentrope.report.figures.style import COLOURS, DASHES, GREY, INK, RC_PARAMS, save_figure
from isentrope.utils.files import RERUN_REMEDY, read_fields

TEXT_COLUMNS, TEXT_LINES = 44, 7
ROW_COLOURS = (COLOURS[5], COLOURS[1], COLOURS[3], COLOURS[6], COLOURS[4])


def draw_side_by_side(results: Path) -> list[Path]:
    """Draw `side_by_side.json` beside it: perplexity by position, and the text that each recipe writes next."""
    data = read_fields(results, RERUN_REMEDY, "rows", "length", "text", "model")
    rows = data["rows"]
    with matplotlib.rc_context(RC_PARAMS):
        figure = Figure(figsize=(12, max(4.6, 1.2 + 1.7 * (len(rows) + 1))), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(1.25, 1))
        ratio = data["length"] / data["train_length"] if data["train_length"] else None
        times = f", {ratio:.3g} times its training length" if ratio else ""
        figure.suptitle(f"{data['model']['name']} reads {data['length']} tokens{times}", x=0.01, ha="left")
        _draw_curves(left, data)
        _write_texts(right, data)
        return save_figure(figure, results.with_suffix(""))


def _draw_curves(axes: Axes, data: dict[str, Any]) -> None:
    for row, colour in zip(data["rows"], _colours(data["rows"]), strict=True):
        edges, losses = row["curve"]["edges"], row["curve"]["loss"]
        middles = [(low + high) / 2 for low, high in pairwise(edges)]
        axes.plot(middles, [exp(loss) for loss in losses], color=colour, linewidth=1.6, label=row["recipe"])
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    if data["train_length"]:
        axes.axvline(data["train_length"], color=GREY, linestyle=DASHES, linewidth=1)
        axes.annotate(
            "training length", (data["train_length"], 1.0), (4, -10), xycoords=("data", "axes fraction"),
            textcoords="offset points", color=INK, fontsize=8.5,
        )  # fmt: skip
    axes.set_title(f"Perplexity by position in {data['text']['name']}")
    axes.set_xlabel("position (tokens)")
    axes.set_ylabel("perplexity, lower is better")
    axes.grid(color="#E6E6E6", linewidth=0.6)
    axes.legend(frameon=False, fontsize=8.5, loc="upper center", bbox_to_anchor=(0.5, -0.12))


def _write_texts(axes: Axes, data: dict[str, Any]) -> None:
    axes.set_axis_off()
    axes.set_title("What comes next")
    entries = [("the author", data["written_by_author"], INK)]
    entries += [
        (row["recipe"], row["continuation"], colour)
        for row, colour in zip(data["rows"], _colours(data["rows"]), strict=True)
    ]
    for index, (label, text, colour) in enumerate(entries):
        top = 1 - index / len(entries)
        axes.text(0, top, label, color=colour, fontsize=9.5, fontweight="bold", va="top", transform=axes.transAxes)
        axes.text(
            0, top - 0.06, "\n".join(wrap_text(text)), color=INK, fontsize=9.5, va="top", family="DejaVu Sans Mono",
            transform=axes.transAxes, parse_math=False,
        )  # fmt: skip


def _colours(rows: list[dict[str, Any]]) -> list[str]:
    return [ROW_COLOURS[index % len(ROW_COLOURS)] for index in range(len(rows))]


def wrap_text(text: str, columns: int = TEXT_COLUMNS, lines: int = TEXT_LINES) -> list[str]:
    """Cut a text into lines of so many columns, keeping its own line breaks and spaces."""
    cut: list[str] = []
    for line in text.split("\n"):
        cut += [line[at : at + columns] for at in range(0, max(len(line), 1), columns)]
    return cut[:lines]
