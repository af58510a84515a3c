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

from isentrope.report.figures.style import (
    COLOURS,
    DASHES,
    DOTS,
    GREY,
    INK,
    LAW_STYLES,
    RC_PARAMS,
    save_figure,
    set_length_axis,
)
from isentrope.report.tables.calibration import CANDIDATE_LABELS, bucket_labels, count_held_out, read_calibration

CANDIDATE_STYLES = {
    "none": LAW_STYLES["constant"],
    "infoscale": LAW_STYLES["infoscale"],
    "logn": LAW_STYLES["logn"],
    "power": (COLOURS[7], "P"),
    "closed": (COLOURS[2], "D"),
    "given": (COLOURS[6], "d"),
    "scalar": (COLOURS[3], "o"),
    "layer": (COLOURS[1], "^"),
    "head": (COLOURS[4], "v"),
    "near": (INK, "*"),
}
CANDIDATE_OFFSET = 0.09  # between the candidates of a bucket; buckets are 1 apart


def draw_calibration(results: Path) -> list[Path]:
    """Draw the laws, the change of perplexity under each, and entropies before and after, beside `calibrate.json`."""
    data = read_calibration(results)
    has_bias = all("bias" in row for row in data["candidates"])
    with matplotlib.rc_context(RC_PARAMS):
        panels = 4 if has_bias else 3
        figure = Figure(figsize=(5.2 * panels, 5.4), layout="constrained")
        tau, *bias, change, entropy = figure.subplots(1, panels)
        _draw_curves(tau, data, "tau")
        tau.set(ylabel="τ", title="Temperature τ(n) of far keys, near dotted" if has_bias else "Temperature τ(n)")
        if has_bias:
            _draw_curves(tau, data, "tau_near")
            _draw_curves(bias[0], data, "bias")
            bias[0].set(ylabel="bias (nats)", title="Bias of far keys")
        _draw_changes(change, data)
        _draw_entropies(entropy, data)
        names = [row["name"] for row in data["candidates"]]
        handles = [_legend_handle(name, data["chosen"]) for name in names]
        figure.legend(handles=handles, loc="outside lower center", ncols=len(names), frameon=False)
        figure.suptitle(
            f"{data['model']['name']}: {data['recipe']}, {count_held_out(data)} held-out texts", x=0.01, ha="left"
        )
        return save_figure(figure, results.with_suffix(""))


def _draw_curves(axes: Axes, data: dict[str, Any], curve: str) -> None:
    for row in data["candidates"]:
        colour, marker = CANDIDATE_STYLES[row["name"]]
        n, lines = row[curve]["n"], row[curve]["rows"]
        single, many = len(lines) == 1, len(lines) > 16
        points = marker if n == data["knots"] and not many else ""
        width, shade = (1.8, 1.0) if single else (0.7, 0.35 if many else 0.7)
        for line in lines:
            style = DOTS if curve == "tau_near" else "-"
            axes.plot(n, line, color=colour, marker=points, markersize=4, linewidth=width, alpha=shade, linestyle=style)
    set_length_axis(axes, data["knots"])


def _draw_changes(axes: Axes, data: dict[str, Any]) -> None:
    buckets = bucket_labels(data)
    centres = np.arange(len(buckets) + 1)
    has_interval = data["candidates"][0]["low"] is not None
    rows = [row for row in data["candidates"] if row["name"] != "none"]
    axes.axhline(0, color=GREY, linestyle=DASHES, linewidth=1)
    for index, row in enumerate(rows):
        colour, marker = CANDIDATE_STYLES[row["name"]]
        against = row["against"]["none"]
        middle = np.array(against["percent"])
        # too few texts carry no interval
        low, high = (np.array(against[key]) if against[key] is not None else middle for key in ("low", "high"))
        x = centres + CANDIDATE_OFFSET * (index - (len(rows) - 1) / 2)
        bars = np.maximum(0, (middle - low, high - middle))
        axes.errorbar(x, middle, bars, color=colour, marker=marker, markersize=5, linestyle="none", elinewidth=1.1)
    axes.axvline(len(buckets) - 0.5, color=GREY, linewidth=0.6)
    axes.set_xticks(centres, [*buckets, "all beyond"], rotation=45)
    axes.grid(axis="y", color="#E6E6E6", linewidth=0.6)
    axes.set(
        xlabel="position in the text (tokens)",
        ylabel="change of perplexity (%), 95 %" if has_interval else "change of perplexity (%)",
    )
    axes.set_title("Held-out text, against no law")


def _draw_entropies(axes: Axes, data: dict[str, Any]) -> None:
    """Draw heads as points and their means as lines, as shares of the entropy of uniform attention."""
    styles: dict[str, tuple[str, Any, str]] = {
        "trained": ("black", DASHES, f"{data['train_length']} tokens"),
        "before": (GREY, "-", f"{data['knots'][-1]} tokens, no law"),
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
