"""A calibration as a table and a figure."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from rich.markup import escape
from rich.table import Table

from isentrope.report.figures.laws import COLOURS, DASHES, GREY, RC, STYLES, _length_axis, save
from isentrope.report.tables.terminal import STYLE, perplexity_cell, thousands
from isentrope.utils.files import RERUN_REMEDY, read_fields

LABELS = {
    "none": "no temperature",
    "infoscale": "InfoScale",
    "logn": "LogN",
    "scalar": "fitted, one for all",
    "layer": "fitted, per layer",
    "head": "fitted, per head",
}
LOOKS = {
    "none": STYLES["constant"],
    "infoscale": STYLES["infoscale"],
    "logn": STYLES["logn"],
    "scalar": (COLOURS[3], "o"),
    "layer": (COLOURS[1], "^"),
    "head": (COLOURS[4], "v"),
}
SPREAD = 0.09  # between the candidates of one bucket, buckets being 1 apart


def table(results: Path) -> Table:
    """Held-out perplexity of each candidate of `calibrate.json`, by position and beyond the training length."""
    data = read_fields(results, RERUN_REMEDY, "candidates", "model", "recipe", "chosen")
    rows = data["candidates"]
    told = Table(
        title=f"Held-out perplexity: {data['model']['name']}, {_held(data)} texts, {escape(data['recipe'])}",
        caption=(
            f"beyond: past {data['train_length']} tokens, all buckets alike. %: its change against InfoScale,\n"
            f"with 95 % of paired draws of the texts.\n→ {escape(data['reason'])}"
        ),
        **STYLE,
    )
    told.add_column("", no_wrap=True)
    told.add_column("temperature", no_wrap=True)
    for name in (*_buckets(data), "beyond"):
        told.add_column(name, justify="right")
    told.add_column("% (95 %)", justify="right", no_wrap=True)
    best = [min(values) for values in zip(*(row["perplexity"] for row in rows), strict=True)]
    for row in rows:
        change = [row["against"]["infoscale"][key][-1] for key in ("percent", "low", "high")]
        pairs = list(zip(row["perplexity"], best, strict=True))
        told.add_row(
            "→" if row["name"] == data["chosen"] else "",
            LABELS[row["name"]],
            perplexity_cell(pairs[0][0], bold=False),  # where nothing changes
            *(perplexity_cell(x, bold=x == least) for x, least in pairs[1:]),
            "" if row["name"] == "infoscale" else "{:+.2f} ({:+.2f} … {:+.2f})".format(*change),
        )
    return told


def measured(results: Path) -> list[dict[str, Any]]:
    """Held-out perplexity of each candidate beyond the training length, as rows of a model card."""
    data = read_fields(results, RERUN_REMEDY, "candidates", "model", "recipe", "chosen")
    past = f"held-out perplexity past {thousands(data['train_length'])} tokens"
    return [
        {
            "temperature": LABELS[row["name"]] + (" (saved)" if row["name"] == data["chosen"] else ""),
            past: f"{row['perplexity'][-1]:.4g}",
            "against InfoScale": f"{row['against']['infoscale']['percent'][-1]:+.2f} %",
        }
        for row in data["candidates"]
    ]


def draw(results: Path) -> list[Path]:
    """τ against n, what each law changes, and entropies before and after, beside `calibrate.json` as .png and .svg."""
    data = read_fields(results, RERUN_REMEDY, "candidates", "model", "recipe", "chosen")
    with matplotlib.rc_context(RC):
        figure = Figure(figsize=(15.5, 5.4), layout="constrained")
        tau, change, entropy = figure.subplots(1, 3)
        _taus(tau, data)
        _changes(change, data)
        _entropies(entropy, data)
        rows = [row["name"] for row in data["candidates"]]
        handles = [
            Line2D([], [], color=LOOKS[name][0], marker=LOOKS[name][1], label=_label(name, data)) for name in rows
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=len(rows), frameon=False)
        figure.suptitle(f"{data['model']['name']}: {data['recipe']}, {_held(data)} held-out texts", x=0.01, ha="left")
        return [save(figure, results.with_suffix(suffix)) for suffix in (".png", ".svg")]


def _taus(axes: Axes, data: dict[str, Any]) -> None:
    for row in data["candidates"]:
        colour, marker = LOOKS[row["name"]]
        n, lines = row["tau"]["n"], row["tau"]["rows"]
        few, many = len(lines) == 1, len(lines) > 16
        points = marker if n == data["knots"] and not many else ""
        width, shade = (1.8, 1.0) if few else (0.7, 0.35 if many else 0.7)
        for line in lines:
            axes.plot(n, line, color=colour, marker=points, markersize=4, linewidth=width, alpha=shade)
    _length_axis(axes, data["knots"])
    axes.set(ylabel="τ", title="Temperature τ(n)")


def _changes(axes: Axes, data: dict[str, Any]) -> None:
    buckets = _buckets(data)
    places = np.arange(len(buckets) + 1)
    rows = [row for row in data["candidates"] if row["name"] != "none"]
    axes.axhline(0, color=GREY, linestyle=DASHES, linewidth=1)
    for index, row in enumerate(rows):
        colour, marker = LOOKS[row["name"]]
        middle, low, high = (np.array(row["against"]["none"][key]) for key in ("percent", "low", "high"))
        at = places + SPREAD * (index - (len(rows) - 1) / 2)
        bars = np.maximum(0, (middle - low, high - middle))
        axes.errorbar(at, middle, bars, color=colour, marker=marker, markersize=5, linestyle="none", elinewidth=1.1)
    axes.axvline(len(buckets) - 0.5, color=GREY, linewidth=0.6)
    axes.set_xticks(places, [*buckets, "all beyond"], rotation=45)
    axes.grid(axis="y", color="#E6E6E6", linewidth=0.6)
    axes.set(xlabel="position in the text (tokens)", ylabel="change of perplexity (%), 95 %")
    axes.set_title("Held-out text, against no temperature")


def _entropies(axes: Axes, data: dict[str, Any]) -> None:
    """Heads as points, their means as lines; entropy of uniform attention is 1, so that lengths compare."""
    looks: dict[str, tuple[str, Any, str]] = {
        "trained": ("black", DASHES, f"{data['train_length']} tokens"),
        "before": (GREY, "-", f"{data['knots'][-1]} tokens, no temperature"),
    }
    if data["chosen"] != "none":
        looks["after"] = (LOOKS[data["chosen"]][0], "-", f"{data['knots'][-1]} tokens, {LABELS[data['chosen']]}")
    for shift, (when, (colour, dashes, label)) in zip((-0.12, 0, 0.12), looks.items(), strict=False):
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


def _label(name: str, data: dict[str, Any]) -> str:
    return LABELS[name] + (" (chosen)" if name == data["chosen"] else "")


def _buckets(data: dict[str, Any]) -> list[str]:
    return [f"{thousands(a)}–{thousands(b)}" for a, b in pairwise((0, *data["knots"]))]


def _held(data: dict[str, Any]) -> int:
    return sum(text["part"] == "held-out" for text in data["texts"])
