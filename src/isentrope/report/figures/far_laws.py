"""Share of far keys, entropy within them and share of a relevant far key against the number of keys."""

from __future__ import annotations

from math import log
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from isentrope.evaluation.results import read_results
from isentrope.report.figures.style import (
    DASHES,
    GREY,
    INK,
    LAW_STYLES,
    RC_PARAMS,
    label_line_ends,
    save_figure,
    set_length_axis,
)
from isentrope.utils.files import RERUN_REMEDY

PANELS = {
    "far_share": ("Share of far keys", "share of attention"),
    "far_entropy": ("Entropy within the far keys", "nats"),
    "needle_share": ("Share of one relevant far key", "share of attention"),
}


def draw_far_laws(results: Path) -> list[Path]:
    """Draw the quantities of `far_laws.json` against n for each law, beside it as `far_laws.png` and `far_laws.svg`.

    Args:
        results: the file that `compute_far_laws` wrote.

    Returns:
        The paths of the figures.
    """
    data = read_results(results, RERUN_REMEDY)
    with matplotlib.rc_context(RC_PARAMS):
        figure = Figure(figsize=(17, 5.4), layout="constrained")
        for axes, quantity in zip(figure.subplots(1, len(PANELS)), PANELS, strict=True):
            _draw_quantity(axes, data, quantity)
        return save_figure(figure, results.with_suffix(""))


def _draw_quantity(axes: Axes, data: dict[str, Any], quantity: str) -> None:
    lengths, config, labels = data["lengths"], data["config"], []
    set_length_axis(axes, lengths)
    for law in data["laws"]:
        rows = sorted((row for row in data["rows"] if row["law"] == law["key"]), key=lambda row: row["n"])
        colour, marker = LAW_STYLES[law["key"]]
        sampled = [row["sampled"][quantity] for row in rows]
        axes.plot([row["n"] for row in rows], [row[quantity] for row in rows], color=colour, linewidth=1.3)
        axes.errorbar(
            [row["n"] for row in rows],
            [value["mean"] for value in sampled],
            [value["standard_error"] for value in sampled],
            linestyle="none",
            color=colour,
            marker=marker,
            markersize=5,
            markeredgewidth=0,
            elinewidth=0.9,
        )
        labels.append((rows[-1][quantity], law["label"], colour))
    title, unit = PANELS[quantity]
    axes.set_title(title)
    axes.set_ylabel(unit)
    if quantity == "far_entropy":
        uniform = [log(n - config["window"]) for n in lengths]
        axes.plot(lengths, uniform, color=GREY, linestyle=DASHES, linewidth=1)
        labels = [*_merge_labels(labels), (uniform[-1], "ln m: uniform", GREY)]
        axes.legend(handles=_build_legend(config), loc="upper left", frameon=False, fontsize=8.5)
        axes.set_ylim(axes.get_ylim())  # label positions need the limits that drawing would set
    else:
        axes.set_ylim(0, 1)
    label_line_ends(axes, lengths[-1], labels)


def _merge_labels(labels: list[tuple[float, str, str]]) -> list[tuple[float, str, str]]:
    """Give lines that end at the same value one label: the kinds of their laws, and the colour of the first."""
    groups: dict[float, list[tuple[float, str, str]]] = {}
    for label in labels:
        groups.setdefault(round(label[0], 6), []).append(label)
    return [
        (group[0][0], " / ".join(dict.fromkeys(text.replace(",", "").split()[0] for _, text, _ in group)), group[0][2])
        for group in groups.values()
    ]


def _build_legend(config: dict[str, Any]) -> list[Line2D]:
    scores = f"σ = {config['sigma']:g}, near keys + {config['near_mean']:g}"
    return [
        Line2D([], [], color=INK, marker="o", markersize=5, linestyle="none", label="sampled ± standard error"),
        Line2D([], [], color=INK, label=f"exact; scores: {scores}"),
    ]
