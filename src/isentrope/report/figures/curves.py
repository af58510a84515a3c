"""A study's results as curves against length: accuracy, perplexity, and attention entropy."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from math import ceil, log
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, LogFormatter, NullLocator

from isentrope.report.figures.laws import COLOURS, DASHES, GREY, INK, RC, save
from isentrope.report.load import Row
from isentrope.report.tables.published import FLOOR, Beside
from isentrope.utils.files import RERUN_REMEDY, read_fields

MARKERS = "osD^vPX*pd"
TOGETHER = 9  # rows that one panel shows; more get a panel for each method
METRICS = {"acc": "accuracy", "ppl": "perplexity"}


def curves(folder: Path) -> list[Path]:
    """Figures of one plan's folder, drawn into its `figures/`, with captions in `figures.json`."""
    plan = read_fields(folder / "plan.json", RERUN_REMEDY, "protocol", "rows")
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
    known = read_fields(captions_file, "delete it, and run the plan again") if captions_file.exists() else {}
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
                axes.yaxis.set_major_formatter(LogFormatter())  # 20, not 2 × 10¹
                axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.5)))
        _frame(grid, len(groups), word)
        _legend(figure, _handles(grid), beside=together)
        return figure


def _line(axes: Axes, rows: list[dict[str, Any]], metric: str, index: int, label: str) -> None:
    """One row of the table, several seeds averaged."""
    lengths = sorted({row["length"] for row in rows})
    if not lengths:
        return
    at = [[row for row in rows if row["length"] == length] for length in lengths]
    y, low, high = ([_mean(row[f"{metric}{end}"] for row in here) for here in at] for end in ("", "_low", "_high"))
    _bars(axes, lengths, y, low, high, index, label)


def _bars(
    axes: Axes, x: list[int], y: list[float], low: list[float], high: list[float], index: int, label: str
) -> None:
    """A line with intervals, in the colour and with the marker of this place."""
    bars = [[a - b for a, b in zip(y, low, strict=True)], [b - a for a, b in zip(y, high, strict=True)]]
    axes.errorbar(
        x, y, [[max(0.0, bar) for bar in side] for side in bars], color=COLOURS[index % len(COLOURS)],
        marker=MARKERS[index % len(MARKERS)], markersize=4.5, linewidth=1.4, elinewidth=0.8, label=label,
    )  # fmt: skip


def draw_beside(found: Beside, out: Path) -> list[Path]:
    """The paper's accuracies and ours, a panel for each method, drawn as `out` with the suffixes .png and .svg."""
    told = found.grid.plan.told
    methods = list(dict.fromkeys(row.method for row in found.rows))
    variants = list(dict.fromkeys(row.variant for row in found.grid.plan.rows))
    columns = min(3, len(methods))
    height = -(-len(methods) // columns)
    with matplotlib.rc_context(RC):
        figure = Figure(figsize=(max(5.5, 4.2 * columns), 3.1 * height + 0.5), layout="constrained")
        grid = figure.subplots(height, columns, sharex=True, sharey=True, squeeze=False)
        for axes, method in zip(grid.flat, methods, strict=False):
            for row in (row for row in found.rows if row.method == method):
                _both(axes, found, row, variants.index(row.variant))
            _lengths(axes, found.lengths, told.get("train_length"))
            axes.set_title(method)
        grid[0][0].set_ylim(0, 1)
        _frame(grid, len(methods), "accuracy")
        shown = [variant for variant in variants if variant in {row.variant for row in found.rows}]
        handles = [_handle(variants.index(variant), variant) for variant in shown]
        handles += [Line2D([], [], color=INK, linestyle=DASHES, label="paper"), Line2D([], [], color=INK, label="here")]
        _legend(figure, handles)
        return [save(figure, out.with_name(out.name + suffix)) for suffix in (".png", ".svg")]


def _both(axes: Axes, found: Beside, row: Row, index: int) -> None:
    """A row's accuracies in the paper, with open markers where it prints no more than a bound, and here."""
    theirs = [found.table.values[row, length, "acc"] for length in found.lengths]
    y = [FLOOR if isinstance(x, str) else x for x in theirs]
    colour, marker = COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)]
    axes.plot(found.lengths, y, color=colour, linestyle=DASHES, linewidth=1)
    for is_open in (True, False):
        at = [place for place, x in enumerate(theirs) if isinstance(x, str) is is_open]
        face = "white" if is_open else colour
        axes.plot(
            [found.lengths[i] for i in at], [y[i] for i in at], color=colour, marker=marker, markersize=3.5,
            markerfacecolor=face, linestyle="none",
        )  # fmt: skip
    ours = {length: value for length in found.lengths if (value := found.grid.value(row, length, "acc"))}
    mean, low, high = ([getattr(value, end) for value in ours.values()] for end in ("mean", "low", "high"))
    _bars(axes, list(ours), mean, low, high, index, row.variant)


def _handle(index: int, label: str) -> Line2D:
    return Line2D([], [], color=COLOURS[index % len(COLOURS)], marker=MARKERS[index % len(MARKERS)], label=label)


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
        _frame(grid, len(shown), "entropy, nats")
        _legend(figure, _handles(grid))
        return figure


def _handles(grid: Any) -> list[Artist]:
    """What the panels show, each label once, in the order they first have it."""
    found: dict[str, Artist] = {}
    for axes in grid.flat:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    return list(found.values())


def _legend(figure: Figure, handles: Sequence[Artist], beside: bool = False) -> None:
    """One legend for all panels, where it hides none of them: at the right, or below in as few lines as hold it."""
    if beside:
        figure.legend(handles=handles, loc="outside right center", frameon=False, fontsize=9)
        return
    for lines in range(1, len(handles) + 1):
        columns = ceil(len(handles) / lines)
        legend = figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)
        if columns == 1 or legend.get_window_extent().width <= figure.bbox.width:
            return
        legend.remove()


def _frame(grid: Any, panels: int, word: str) -> None:
    """Names the outer axes of a grid of panels; those beyond the last panel are not drawn."""
    columns = len(grid[0])
    for axes in list(grid.flat)[panels:]:
        axes.set_axis_off()
    for axes in list(grid.flat)[max(0, panels - columns) : panels]:  # the lowest panel of each column
        axes.set_xlabel("tokens")
        axes.tick_params(labelbottom=True)
    for row_of_axes in grid:
        row_of_axes[0].set_ylabel(word)


def _lengths(axes: Axes, lengths: list[int], train_length: int | None) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(lengths))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(lengths, [f"{n // 1024}k" if n % 1024 == 0 else str(n) for n in lengths], fontsize=8)
    if train_length:
        axes.axvline(train_length, color=GREY, linewidth=0.8, linestyle=":")
    axes.grid(axis="y", color="#EEEEEE")


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)
