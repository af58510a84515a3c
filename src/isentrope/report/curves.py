"""A study's results as curves against length: accuracy, perplexity, and attention entropy."""

from __future__ import annotations

import json
from collections.abc import Iterable
from math import log
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from isentrope.report.figures import COLOURS, GREY, RC, save

MARKERS = "osD^vPX*pd"
TOGETHER = 9  # rows that one panel shows; more get a panel for each method
METRICS = {"acc": "accuracy", "ppl": "perplexity"}


def curves(folder: Path) -> list[Path]:
    """Figures of one plan's folder, drawn into its `figures/`, with captions in `figures.json`."""
    plan = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    lines = (folder / "results.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if not row["failed"]]
    if not rows:
        return []
    out = folder / "figures"
    out.mkdir(exist_ok=True)
    drawn, captions = [], {}
    how = "one token masked at a time" if plan["protocol"] == "single" else "15 % of the tokens masked at once"
    for metric, word in METRICS.items():
        figure = _panels(plan, rows, metric, word)
        drawn += [save(figure, out / f"{metric}{suffix}") for suffix in (".png", ".svg")]
        captions[f"{metric}.svg"] = f"{word.capitalize()} against length, {how}; bars: 95 % intervals over documents."
    if any(row["entropy"] for row in rows):
        drawn += [save(_entropies(plan, rows), out / f"entropy{suffix}") for suffix in (".png", ".svg")]
        captions["entropy.svg"] = (
            "Attention entropy by layer against length; the line above is ln n, uniform attention."
        )
    captions_file = out / "figures.json"
    known = json.loads(captions_file.read_text(encoding="utf-8")) if captions_file.exists() else {}
    captions_file.write_text(json.dumps(known | captions, indent=1, ensure_ascii=False), encoding="utf-8")
    return drawn


def _panels(plan: dict[str, Any], rows: list[dict[str, Any]], metric: str, word: str) -> Figure:
    wanted = [(row["method"], row["variant"]) for row in plan["rows"]]
    methods = list(dict.fromkeys(method for method, _ in wanted))
    variants = list(dict.fromkeys(variant for _, variant in wanted))
    together = len(wanted) <= TOGETHER
    groups = [wanted] if together else [[pair for pair in wanted if pair[0] == method] for method in methods]
    columns = min(3, len(groups))
    height = -(-len(groups) // columns)
    with matplotlib.rc_context(RC):
        figure = Figure(
            figsize=(7.5 if together else 4.2 * columns, 4.6 if together else 3.1 * height), layout="constrained"
        )
        grid = figure.subplots(height, columns, sharex=True, sharey=True, squeeze=False)
        for axes, group in zip(grid.flat, groups, strict=False):
            for method, variant in group:
                index = group.index((method, variant)) if together else variants.index(variant)
                label = f"{method}, {variant}" if together and len(methods) > 1 else variant
                found = [row for row in rows if (row["method"], row["variant"]) == (method, variant)]
                _line(axes, found, metric, index, label)
            _lengths(axes, plan["lengths"], plan["train_length"])
            axes.set_title("" if together else group[0][0])
            if metric == "ppl":
                axes.set_yscale("log")
        for axes in list(grid.flat)[len(groups) :]:
            axes.set_axis_off()
        for axes in grid[-1]:
            axes.set_xlabel("tokens")
        for row_of_axes in grid:
            row_of_axes[0].set_ylabel(word)
        (grid[0][0] if together else grid.flat[0]).legend(frameon=False, fontsize=8)
        return figure


def _line(axes: Axes, rows: list[dict[str, Any]], metric: str, index: int, label: str) -> None:
    """One row of the table, several seeds averaged."""
    lengths = sorted({row["length"] for row in rows})
    if not lengths:
        return
    at = [[row for row in rows if row["length"] == length] for length in lengths]
    y, low, high = ([_mean(row[f"{metric}{end}"] for row in here) for here in at] for end in ("", "_low", "_high"))
    bars = [[a - b for a, b in zip(y, low, strict=True)], [b - a for a, b in zip(y, high, strict=True)]]
    axes.errorbar(
        lengths, y, [[max(0.0, bar) for bar in side] for side in bars], color=COLOURS[index % len(COLOURS)],
        marker=MARKERS[index % len(MARKERS)], markersize=4.5, linewidth=1.4, elinewidth=0.8, label=label,
    )  # fmt: skip


def _entropies(plan: dict[str, Any], rows: list[dict[str, Any]]) -> Figure:
    """A panel for each row of the table, a line for each layer."""
    wanted = [(row["method"], row["variant"]) for row in plan["rows"]]
    shown = [pair for pair in wanted if any((r["method"], r["variant"]) == pair and r["entropy"] for r in rows)]
    columns = min(4, len(shown))
    height = -(-len(shown) // columns)
    with matplotlib.rc_context(RC):
        figure = Figure(figsize=(3.3 * columns, 2.7 * height), layout="constrained")
        grid = figure.subplots(height, columns, sharex=True, sharey=True, squeeze=False)
        for axes, pair in zip(grid.flat, shown, strict=False):
            found = [row for row in rows if (row["method"], row["variant"]) == pair and row["entropy"]]
            lengths = sorted({row["length"] for row in found})
            layers = len(found[0]["entropy"])
            axes.plot(lengths, [log(n) for n in lengths], color=GREY, linewidth=1)
            for layer in range(layers):
                y = [_mean(row["entropy"][layer] for row in found if row["length"] == n) for n in lengths]
                shade = matplotlib.colormaps["cividis"](layer / max(1, layers - 1))
                axes.plot(lengths, y, color=shade, marker="o", markersize=3, linewidth=1.2, label=f"layer {layer + 1}")
            _lengths(axes, plan["lengths"], plan["train_length"])
            axes.set_title(", ".join(pair), fontsize=9)
        for axes in list(grid.flat)[len(shown) :]:
            axes.set_axis_off()
        for axes in grid[-1]:
            axes.set_xlabel("tokens")
        for row_of_axes in grid:
            row_of_axes[0].set_ylabel("entropy, nats")
        grid[0][0].legend(frameon=False, fontsize=7)
        return figure


def _lengths(axes: Axes, lengths: list[int], train_length: int) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(lengths))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(lengths, [f"{n // 1024}k" if n % 1024 == 0 else str(n) for n in lengths], fontsize=8)
    axes.axvline(train_length, color=GREY, linewidth=0.8, linestyle=":")
    axes.grid(axis="y", color="#EEEEEE")


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)
