"""Predicted time of a prefill against the number of devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, NullLocator

from isentrope.report.figures.style import COLOURS, INK, RC_PARAMS, save_figure
from isentrope.utils.files import RERUN_REMEDY, read_fields

KEY_COLOURS = {"dense": COLOURS[1], "retrieved": COLOURS[3], "windowed": COLOURS[5]}
EXCHANGE_STYLES: dict[str, tuple[Any, str]] = {
    "gather": ("-", "o"),
    "all-gather": ((0, (7, 1.5, 1, 1.5)), "D"),
    "ring": ((0, (5, 2)), "s"),
    "ulysses": ((0, (1, 1.5)), "^"),
}


def draw_scaling(results: Path) -> list[Path]:
    """Draw a panel for each model and length of `plan-scale.json`, beside it; open marks do not fit into memory."""
    data = read_fields(results, RERUN_REMEDY, "rows", "device", "link")
    rows = [row for row in data["rows"] if row["refused"] is None]
    models = list(dict.fromkeys(row["model"] for row in rows))
    lengths = list(dict.fromkeys(row["tokens"] for row in rows))
    with matplotlib.rc_context(RC_PARAMS):
        figure = Figure(figsize=(1.2 + 4.2 * len(lengths), 1.6 + 3.1 * len(models)), layout="constrained")
        panels = figure.subplots(len(models), len(lengths), squeeze=False, sharex=True)
        for across, model in zip(panels, models, strict=True):
            for axes, tokens in zip(across, lengths, strict=True):
                _draw_panel(axes, [row for row in rows if (row["model"], row["tokens"]) == (model, tokens)])
                axes.set_title(f"{model}, {tokens:,} tokens")
            across[0].set_ylabel("prefill (s)")
        for axes in panels[-1]:
            axes.set_xlabel("GPUs")
        keys = [Line2D([], [], color=colour, linewidth=3, label=f"{kind} keys") for kind, colour in KEY_COLOURS.items()]
        ways = [
            Line2D([], [], color=INK, linestyle=style, marker=marker, markersize=4, label=name)
            for name, (style, marker) in EXCHANGE_STYLES.items()
        ]
        open_mark = Line2D([], [], color=INK, marker="o", markerfacecolor="white", linestyle="none", label="too large")
        figure.legend(handles=[*keys, *ways, open_mark], loc="outside lower center", ncols=8, frameon=False, fontsize=9)
        figure.suptitle(f"Predicted: {data['device']['name']}, link {data['link']['name']}", x=0.01, ha="left")
        return save_figure(figure, results.with_suffix(""))


def _draw_panel(axes: Axes, rows: list[dict[str, Any]]) -> None:
    for recipe, exchange in dict.fromkeys((row["recipe"], row["exchange"]) for row in rows):
        line = [row for row in rows if (row["recipe"], row["exchange"]) == (recipe, exchange)]
        style, marker = EXCHANGE_STYLES[exchange]
        colour = KEY_COLOURS[line[0]["keys"]]
        gpus, seconds = [row["gpus"] for row in line], [row["seconds"] for row in line]
        axes.plot(gpus, seconds, color=colour, linestyle=style, linewidth=1.3)
        for row in line:
            face = colour if row["fits"] else "white"
            axes.plot(row["gpus"], row["seconds"], color=colour, marker=marker, markersize=4.5, markerfacecolor=face)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(FixedLocator(sorted({row["gpus"] for row in rows})))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.grid(color="#E6E6E6", linewidth=0.6)
