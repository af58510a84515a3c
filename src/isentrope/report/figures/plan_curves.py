"""Accuracy, perplexity and attention entropy of a plan against length."""

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

from isentrope.report.figures.style import COLOURS, DASHES, GREY, INK, RC_PARAMS, save_figure
from isentrope.report.load import Row
from isentrope.report.tables.numbers import format_length
from isentrope.report.tables.published import CAPPED_ACC_HEIGHT, PaperComparison
from isentrope.utils.files import RERUN_REMEDY, read_fields

MARKERS = "osD^vPX*pd"
MAX_ROWS_PER_PANEL = 9  # with more, each method has a panel
MAX_RATIO_TO_BEST = 1.5  # of perplexities at the longest length, up to which a row holds
PLAIN_RECIPES = ("plain", "rope")
METRIC_NAMES = {"acc": "accuracy", "ppl": "perplexity"}


def draw_curves(folder: Path) -> list[Path]:
    """Draw the figures of a plan's folder into its `figures/`, with captions in `figures.json`."""
    plan = read_fields(folder / "plan.json", RERUN_REMEDY, "protocol", "rows")
    lines = (folder / "results.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if not row["failed"]]
    if not rows:
        return []
    out = folder / "figures"
    out.mkdir(exist_ok=True)
    paths: list[Path] = []
    captions = {}
    protocol = "one token masked at a time" if plan["protocol"] == "single" else "15 % of the tokens masked at once"
    for metric, name in METRIC_NAMES.items():
        paths += save_figure(_draw_metric(plan, rows, metric), out / metric)
        captions[f"{metric}.svg"] = (
            f"{name.capitalize()} against length, {protocol}; bars: 95 % intervals over documents."
        )
    if stable := _select_stable(plan, rows):
        paths += save_figure(_draw_metric(plan | {"rows": stable}, rows, "ppl"), out / "ppl_stable")
        captions["ppl_stable.svg"] = (
            f"Perplexity of the rows that hold, {protocol}: at the longest length within {MAX_RATIO_TO_BEST:g} times "
            "the best; plain is left out."
        )
    if any(row["entropy"] for row in rows):
        paths += save_figure(_draw_entropies(plan, rows), out / "entropy")
        captions["entropy.svg"] = "Attention entropy of each layer against length; grey: ln n, uniform attention."
    captions_file = out / "figures.json"
    known = read_fields(captions_file, "delete it, and run the plan again") if captions_file.exists() else {}
    captions_file.write_text(json.dumps(known | captions, indent=1, ensure_ascii=False), encoding="utf-8")
    return paths


def _select_stable(plan: dict[str, Any], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the plan's rows whose perplexity at the longest length is near the best, without plain attention.

    Empty where that leaves one row or all: the figure would show nothing new.
    """
    last = max(row["length"] for row in rows)
    plain = {(row["method"], row["variant"]) for row in plan["rows"] if row.get("recipe") in PLAIN_RECIPES}
    final: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        if row["length"] == last and (row["method"], row["variant"]) not in plain:
            final.setdefault((row["method"], row["variant"]), []).append(row["ppl"])
    means = {pair: _mean(values) for pair, values in final.items()}
    limit = MAX_RATIO_TO_BEST * min(means.values(), default=0.0)
    stable = [row for row in plan["rows"] if means.get((row["method"], row["variant"]), limit + 1) <= limit]
    return stable if 1 < len(stable) < len(plan["rows"]) else []


def _draw_metric(plan: dict[str, Any], rows: list[dict[str, Any]], metric: str) -> Figure:
    pairs = [(row["method"], row["variant"]) for row in plan["rows"]]
    methods = list(dict.fromkeys(method for method, _ in pairs))
    variants = list(dict.fromkeys(variant for _, variant in pairs))
    together = len(pairs) <= MAX_ROWS_PER_PANEL
    groups = [pairs] if together else [[pair for pair in pairs if pair[0] == method] for method in methods]
    columns = min(3, len(groups))
    height = -(-len(groups) // columns)
    with matplotlib.rc_context(RC_PARAMS):
        figure = Figure(
            figsize=(7.5 if together else 4.2 * columns, 4.6 if together else 3.1 * height), layout="constrained"
        )
        grid = figure.subplots(height, columns, sharex=True, sharey=True, squeeze=False)
        for axes, group in zip(grid.flat, groups, strict=False):
            for method, variant in group:
                index = group.index((method, variant)) if together else variants.index(variant)
                label = f"{method}, {variant}" if together and len(methods) > 1 else variant
                cells = [row for row in rows if (row["method"], row["variant"]) == (method, variant)]
                _draw_row(axes, cells, metric, index, label)
            _set_length_axis(axes, plan["lengths"], plan["train_length"])
            axes.set_title("" if together else group[0][0])
            if metric == "ppl":
                axes.set_yscale("log")
                axes.yaxis.set_major_formatter(LogFormatter())  # 20, not 2 × 10¹
                axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.5)))
        _label_grid(grid, len(groups), METRIC_NAMES[metric])
        _add_legend(figure, _collect_handles(grid), at_right=together)
        return figure


def _draw_row(axes: Axes, rows: list[dict[str, Any]], metric: str, index: int, label: str) -> None:
    """Draw one row of the table, averaged over seeds."""
    lengths = sorted({row["length"] for row in rows})
    if not lengths:
        return
    by_length = [[row for row in rows if row["length"] == length] for length in lengths]
    y, low, high = (
        [_mean(row[f"{metric}{end}"] for row in seeds) for seeds in by_length] for end in ("", "_low", "_high")
    )
    _draw_intervals(axes, lengths, y, low, high, index, label)


def _draw_intervals(
    axes: Axes, x: list[int], y: list[float], low: list[float], high: list[float], index: int, label: str
) -> None:
    """Draw a line with intervals, in the colour and with the marker of this index."""
    bars = [[a - b for a, b in zip(y, low, strict=True)], [b - a for a, b in zip(y, high, strict=True)]]
    axes.errorbar(
        x, y, [[max(0.0, bar) for bar in side] for side in bars], color=COLOURS[index % len(COLOURS)],
        marker=MARKERS[index % len(MARKERS)], markersize=4.5, linewidth=1.4, elinewidth=0.8, label=label,
    )  # fmt: skip


def draw_comparison(comparison: PaperComparison, out: Path) -> list[Path]:
    """Draw the paper's accuracies and ours, a panel for each method, as `out` with the suffixes .png and .svg."""
    plan = comparison.grid.plan
    methods = list(dict.fromkeys(row.method for row in comparison.rows))
    variants = list(dict.fromkeys(row.variant for row in plan.rows))
    columns = min(3, len(methods))
    height = -(-len(methods) // columns)
    with matplotlib.rc_context(RC_PARAMS):
        figure = Figure(figsize=(max(5.5, 4.2 * columns), 3.1 * height + 0.5), layout="constrained")
        grid = figure.subplots(height, columns, sharex=True, sharey=True, squeeze=False)
        for axes, method in zip(grid.flat, methods, strict=False):
            for row in (row for row in comparison.rows if row.method == method):
                _draw_both(axes, comparison, row, variants.index(row.variant))
            _set_length_axis(axes, comparison.lengths, plan.metadata.get("train_length"))
            axes.set_title(method)
        grid[0][0].set_ylim(0, 1)
        _label_grid(grid, len(methods), "accuracy")
        present = [variant for variant in variants if variant in {row.variant for row in comparison.rows}]
        handles = [_legend_handle(variants.index(variant), variant) for variant in present]
        handles += [Line2D([], [], color=INK, linestyle=DASHES, label="paper"), Line2D([], [], color=INK, label="here")]
        _add_legend(figure, handles)
        return save_figure(figure, out)


def _draw_both(axes: Axes, comparison: PaperComparison, row: Row, index: int) -> None:
    """Draw a row's accuracies in the paper, with open markers where it prints only a bound, and ours."""
    theirs = [comparison.table.values[row, length, "acc"] for length in comparison.lengths]
    y = [CAPPED_ACC_HEIGHT if isinstance(x, str) else x for x in theirs]
    colour, marker = COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)]
    axes.plot(comparison.lengths, y, color=colour, linestyle=DASHES, linewidth=1)
    for is_open in (True, False):
        marked = [i for i, x in enumerate(theirs) if isinstance(x, str) is is_open]
        face = "white" if is_open else colour
        x = [comparison.lengths[i] for i in marked]
        style: dict[str, Any] = {"marker": marker, "markersize": 3.5, "markerfacecolor": face, "linestyle": "none"}
        axes.plot(x, [y[i] for i in marked], color=colour, **style)
    ours = {length: value for length in comparison.lengths if (value := comparison.grid.value(row, length, "acc"))}
    mean, low, high = ([getattr(value, end) for value in ours.values()] for end in ("mean", "low", "high"))
    _draw_intervals(axes, list(ours), mean, low, high, index, row.variant)


def _legend_handle(index: int, label: str) -> Line2D:
    return Line2D([], [], color=COLOURS[index % len(COLOURS)], marker=MARKERS[index % len(MARKERS)], label=label)


def _draw_entropies(plan: dict[str, Any], rows: list[dict[str, Any]]) -> Figure:
    """Draw a panel for each row of the table, a line for each layer."""
    pairs = [(row["method"], row["variant"]) for row in plan["rows"]]
    measured = [pair for pair in pairs if any((r["method"], r["variant"]) == pair and r["entropy"] for r in rows)]
    columns = min(4, len(measured))
    height = -(-len(measured) // columns)
    with matplotlib.rc_context(RC_PARAMS):
        figure = Figure(figsize=(3.3 * columns, 2.7 * height), layout="constrained")
        grid = figure.subplots(height, columns, sharex=True, sharey=True, squeeze=False)
        for axes, pair in zip(grid.flat, measured, strict=False):
            cells = [row for row in rows if (row["method"], row["variant"]) == pair and row["entropy"]]
            lengths = sorted({row["length"] for row in cells})
            layers = len(cells[0]["entropy"])
            axes.plot(lengths, [log(n) for n in lengths], color=GREY, linewidth=1)
            for layer in range(layers):
                y = [_mean(row["entropy"][layer] for row in cells if row["length"] == n) for n in lengths]
                shade = matplotlib.colormaps["cividis"](layer / max(1, layers - 1))
                axes.plot(lengths, y, color=shade, marker="o", markersize=3, linewidth=1.2, label=f"layer {layer + 1}")
            _set_length_axis(axes, plan["lengths"], plan["train_length"])
            axes.set_title(", ".join(pair), fontsize=9)
        _label_grid(grid, len(measured), "entropy, nats")
        _add_legend(figure, _collect_handles(grid))
        return figure


def _collect_handles(grid: Any) -> list[Artist]:
    """Collect the legend handles of all panels, each label once."""
    handles: dict[str, Artist] = {}
    for axes in grid.flat:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    return list(handles.values())


def _add_legend(figure: Figure, handles: Sequence[Artist], at_right: bool = False) -> None:
    """Add one legend for all panels outside of them: at the right, or below in as few lines as fit."""
    if at_right:
        figure.legend(handles=handles, loc="outside right center", frameon=False, fontsize=9)
        return
    for lines in range(1, len(handles) + 1):
        columns = ceil(len(handles) / lines)
        legend = figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)
        if columns == 1 or legend.get_window_extent().width <= figure.bbox.width:
            return
        legend.remove()


def _label_grid(grid: Any, panels: int, label: str) -> None:
    """Label the outer axes of a grid and hide those beyond the last panel."""
    columns = len(grid[0])
    for axes in list(grid.flat)[panels:]:
        axes.set_axis_off()
    for axes in list(grid.flat)[max(0, panels - columns) : panels]:  # the lowest panel of each column
        axes.set_xlabel("tokens")
        axes.tick_params(labelbottom=True)
    for row_of_axes in grid:
        row_of_axes[0].set_ylabel(label)


def _set_length_axis(axes: Axes, lengths: list[int], train_length: int | None) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(lengths))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(lengths, [format_length(n) for n in lengths], fontsize=8)
    if train_length:
        axes.axvline(train_length, color=GREY, linewidth=0.8, linestyle=":")
    axes.grid(axis="y", color="#EEEEEE")


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers)
