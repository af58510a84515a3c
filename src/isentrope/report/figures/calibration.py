"""A calibration as a figure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from isentrope.report.figures.style import COLOURS, DASHES, GREY, LAW_STYLES, RC_PARAMS, save_figure, set_length_axis
from isentrope.report.tables.calibration import CANDIDATE_LABELS, bucket_labels, count_held_out, read_calibration

CANDIDATE_STYLES = {
    "none": LAW_STYLES["constant"],
    "infoscale": LAW_STYLES["infoscale"],
    "logn": LAW_STYLES["logn"],
    "scalar": (COLOURS[3], "o"),
    "layer": (COLOURS[1], "^"),
    "head": (COLOURS[4], "v"),
}
CANDIDATE_OFFSET = 0.09  # between the candidates of a bucket; buckets are 1 apart


def draw_calibration(results: Path) -> list[Path]:
    """Draw τ(n), the change of perplexity under each law, and entropies before and after, beside `calibrate.json`."""
    data = read_calibration(results)
    with matplotlib.rc_context(RC_PARAMS):
        figure = Figure(figsize=(15.5, 5.4), layout="constrained")
        tau, change, entropy = figure.subplots(1, 3)
        _draw_taus(tau, data)
        _draw_changes(change, data)
        _draw_entropies(entropy, data)
        names = [row["name"] for row in data["candidates"]]
        handles = [_legend_handle(name, data["chosen"]) for name in names]
        figure.legend(handles=handles, loc="outside lower center", ncols=len(names), frameon=False)
        figure.suptitle(
            f"{data['model']['name']}: {data['recipe']}, {count_held_out(data)} held-out texts", x=0.01, ha="left"
        )
        return save_figure(figure, results.with_suffix(""))


def _draw_taus(axes: Axes, data: dict[str, Any]) -> None:
    for row in data["candidates"]:
        colour, marker = CANDIDATE_STYLES[row["name"]]
        n, lines = row["tau"]["n"], row["tau"]["rows"]
        single, many = len(lines) == 1, len(lines) > 16
        points = marker if n == data["knots"] and not many else ""
        width, shade = (1.8, 1.0) if single else (0.7, 0.35 if many else 0.7)
        for line in lines:
            axes.plot(n, line, color=colour, marker=points, markersize=4, linewidth=width, alpha=shade)
    set_length_axis(axes, data["knots"])
    axes.set(ylabel="τ", title="Temperature τ(n)")


def _draw_changes(axes: Axes, data: dict[str, Any]) -> None:
    buckets = bucket_labels(data)
    centres = np.arange(len(buckets) + 1)
    rows = [row for row in data["candidates"] if row["name"] != "none"]
    axes.axhline(0, color=GREY, linestyle=DASHES, linewidth=1)
    for index, row in enumerate(rows):
        colour, marker = CANDIDATE_STYLES[row["name"]]
        middle, low, high = (np.array(row["against"]["none"][key]) for key in ("percent", "low", "high"))
        x = centres + CANDIDATE_OFFSET * (index - (len(rows) - 1) / 2)
        bars = np.maximum(0, (middle - low, high - middle))
        axes.errorbar(x, middle, bars, color=colour, marker=marker, markersize=5, linestyle="none", elinewidth=1.1)
    axes.axvline(len(buckets) - 0.5, color=GREY, linewidth=0.6)
    axes.set_xticks(centres, [*buckets, "all beyond"], rotation=45)
    axes.grid(axis="y", color="#E6E6E6", linewidth=0.6)
    axes.set(xlabel="position in the text (tokens)", ylabel="change of perplexity (%), 95 %")
    axes.set_title("Held-out text, against no temperature")


def _draw_entropies(axes: Axes, data: dict[str, Any]) -> None:
    """Draw heads as points and their means as lines, as shares of the entropy of uniform attention."""
    styles: dict[str, tuple[str, Any, str]] = {
        "trained": ("black", DASHES, f"{data['train_length']} tokens"),
        "before": (GREY, "-", f"{data['knots'][-1]} tokens, no temperature"),
    }
    if data["chosen"] != "none":
        styles["after"] = (
            CANDIDATE_STYLES[data["chosen"]][0],
            "-",
            f"{data['knots'][-1]} tokens, {CANDIDATE_LABELS[data['chosen']]}",
        )
    for shift, (when, (colour, dashes, label)) in zip((-0.12, 0, 0.12), styles.items(), strict=False):
        layers = [layer["index"] for layer in data["entropy"][when]]
        focus = [np.array(layer["entropy"]) / max(layer["uniform"], 1e-9) for layer in data["entropy"][when]]
        for layer, heads in zip(layers, focus, strict=True):
            axes.plot([layer + shift] * len(heads), heads, color=colour, marker=".", linestyle="none", alpha=0.45)
        axes.plot(layers, [heads.mean() for heads in focus], color=colour, linestyle=dashes, linewidth=1.6, label=label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="layer", ylabel="entropy, uniform attention = 1", ylim=(0, 1))
    axes.set_title("Focus of heads, and their mean")
    axes.legend(frameon=False, fontsize=9)
    axes.grid(axis="y", color="#E6E6E6", linewidth=0.6)


def _legend_handle(name: str, chosen: str) -> Line2D:
    colour, marker = CANDIDATE_STYLES[name]
    label = CANDIDATE_LABELS[name] + (" (chosen)" if name == chosen else "")
    return Line2D([], [], color=colour, marker=marker, label=label)
