"""Figures of a study over several pre-trainings: a forest plot of its claims, curves, and what its gain goes with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from scipy import stats

from isentrope.report.figures.style import COLOURS, GREY, INK, RC_PARAMS, save_figure, set_length_axis
from isentrope.report.load import METRICS, Grid, Row
from isentrope.report.verdicts import FAILS, HOLDS, OPEN, Verdict

VERDICT_COLOURS = {HOLDS: COLOURS[3], FAILS: COLOURS[5], OPEN: GREY}
PLAIN_VARIANTS = ("none", "plain")
INFOSCALE_VARIANTS = ("InfoScale", "I.S.")
MIN_POINTS = 3  # of a rank correlation


def draw_forest(verdicts: Sequence[Verdict], out: Path) -> list[Path]:
    """Draw the effect and 95 % interval of each decided claim, a panel for each metric, as `out`.png and .svg.

    Args:
        verdicts: of claims registered as superior or equivalent (`report.registered_claims`); others are left out.
        out: path without suffix.

    Returns:
        The files written; none where no claim was decided.
    """
    decided = [verdict for verdict in verdicts if "decision" in verdict]
    metrics = [metric for metric in ("acc", "ppl") if any(verdict["metric"] == metric for verdict in decided)]
    if not metrics:
        return []
    counts = [sum(verdict["metric"] == metric for verdict in decided) for metric in metrics]
    with matplotlib.rc_context(RC_PARAMS):
        height = 0.34 * len(decided) + 1.1 * len(metrics)
        figure = Figure(figsize=(9.5, height), layout="constrained")
        panels = figure.subplots(len(metrics), 1, squeeze=False, height_ratios=[count + 1 for count in counts])[:, 0]
        for axes, metric in zip(panels, metrics, strict=True):
            _draw_effects(axes, [verdict for verdict in decided if verdict["metric"] == metric], metric)
        handles = [
            Line2D([], [], color=colour, marker="o", linestyle="none", label=name)
            for name, colour in VERDICT_COLOURS.items()
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
        return save_figure(figure, out)


def _draw_effects(axes: Axes, verdicts: Sequence[Verdict], metric: str) -> None:
    axes.axvline(0, color=INK, linewidth=0.8)
    margin = float(verdicts[0]["numbers"][0]["margin"]) * (100 if metric == "ppl" else 1)
    axes.axvspan(-margin, margin, color="#EEEEEE", zorder=0)
    for y, verdict in enumerate(reversed(verdicts)):
        numbers = verdict["numbers"][0]
        colour = VERDICT_COLOURS.get(verdict["verdict"], GREY)
        axes.plot([numbers["low"], numbers["high"]], [y, y], color=colour, linewidth=1.6)
        axes.plot(numbers["difference"], y, color=colour, marker="o", markersize=5)
    axes.set_yticks(range(len(verdicts)), [verdict["text"] for verdict in reversed(verdicts)], fontsize=9)
    axes.set_ylim(-0.7, len(verdicts) - 0.3)
    unit = "perplexity lower by, %" if metric == "ppl" else f"difference of {METRICS[metric]}"
    basis = verdicts[0]
    axes.set_xlabel(
        f"{unit}; grey: no difference that matters; 95 % intervals over {basis['pretrainings']} pre-trainings, "
        f"{basis['documents']} documents",
        fontsize=9,
    )


def draw_pretraining_curves(grid: Grid, variants: Sequence[str], out: Path, metric: str = "acc") -> list[Path]:
    """Draw a metric against length, a panel for each method: a thin line for each pre-training, a thick one for all.

    Args:
        grid: the measured numbers.
        variants: which lines each panel has, where the method has them.
        out: path without suffix.
        metric: "acc" or "ppl".
    """
    methods = [m for m in dict.fromkeys(row.method for row in grid.plan.rows) if Row(m, variants[0]) in grid.plan.rows]
    columns = min(3, len(methods))
    height = -(-len(methods) // columns)
    with matplotlib.rc_context(RC_PARAMS):
        figure = Figure(figsize=(3.9 * columns, 2.9 * height + 0.5), layout="constrained")
        panels = figure.subplots(height, columns, sharex=True, sharey=True, squeeze=False)
        for axes, method in zip(panels.flat, methods, strict=False):
            for index, variant in enumerate(variants):
                _draw_lines(axes, grid, Row(method, variant), metric, COLOURS[(index + 1) % len(COLOURS)])
            set_length_axis(axes, grid.plan.lengths)
            axes.set_title(method)
        for axes in list(panels.flat)[len(methods) :]:
            axes.set_axis_off()
        for axes in panels[:, 0]:
            axes.set_ylabel(METRICS[metric])
        handles = [
            Line2D([], [], color=COLOURS[(index + 1) % len(COLOURS)], linewidth=2, label=variant)
            for index, variant in enumerate(variants)
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)
        return save_figure(figure, out)


def _draw_lines(axes: Axes, grid: Grid, row: Row, metric: str, colour: str) -> None:
    curves: dict[int, dict[int, float]] = {}  # by seed, then length
    for length in grid.plan.lengths:
        for seed, cell in grid.cells_by_seed.get((row, length), {}).items():
            if cell.get(metric) is not None:
                curves.setdefault(seed, {})[length] = float(cell[metric])
    for curve in curves.values():
        axes.plot(list(curve), list(curve.values()), color=colour, linewidth=0.6, alpha=0.6)
    means = {n: value.mean for n in grid.plan.lengths if (value := grid.value(row, n, metric)) is not None}
    axes.plot(list(means), list(means.values()), color=colour, linewidth=2)
    if metric == "ppl":
        axes.set_yscale("log")


@dataclass(frozen=True)
class GainPoint:
    """One method of one run: how far its entropy rises without InfoScale, and what InfoScale gains.

    Attributes:
        method: with its scores.
        seed: of the run.
        rise: mean over layers of the entropy at the last length over that at the training length, in nats.
        gain: of accuracy, at the last length.
    """

    method: str
    seed: int
    rise: float
    gain: float


def collect_gains(grid: Grid) -> list[GainPoint]:
    """Collect InfoScale's gain and the rise of entropy without it, for every method and run that has both."""
    length, points = max(grid.plan.lengths), []
    for plain in grid.plan.rows:
        scaled = next(
            (Row(plain.method, v) for v in INFOSCALE_VARIANTS if Row(plain.method, v) in grid.plan.rows), None
        )
        if plain.variant not in PLAIN_VARIANTS or scaled is None:
            continue
        before = grid.cells_by_seed.get((plain, length), {})
        after = grid.cells_by_seed.get((scaled, length), {})
        for seed in sorted(before.keys() & after.keys()):
            start, end = before[seed], after[seed]
            if start.get("acc") is None or end.get("acc") is None or not start.get("entropy"):
                continue
            entropy, ratio = np.array(start["entropy"]), np.array(start["entropy_ratio"])
            rise = float((entropy - entropy / ratio).mean())
            points.append(GainPoint(plain.method, seed, rise, float(end["acc"] - start["acc"])))
    return points


def rank_correlation(points: Sequence[GainPoint]) -> float | None:
    """Return Spearman's rank correlation of rise and gain; None for fewer than three points or a constant."""
    rise, gain = [point.rise for point in points], [point.gain for point in points]
    if len(points) < MIN_POINTS or len(set(rise)) < 2 or len(set(gain)) < 2:
        return None
    return float(stats.spearmanr(rise, gain).statistic)


def draw_gains(points: Sequence[GainPoint], out: Path, length: int) -> list[Path]:
    """Draw InfoScale's gain against the rise of entropy without it, a colour for each method, as `out`.png and .svg.

    Args:
        points: of `collect_gains`.
        out: path without suffix.
        length: at which both were measured.
    """
    if not points:
        return []
    methods = list(dict.fromkeys(point.method for point in points))
    rho = rank_correlation(points)
    with matplotlib.rc_context(RC_PARAMS):
        figure = Figure(figsize=(7.2, 4.6), layout="constrained")
        axes = figure.subplots()
        axes.axhline(0, color=INK, linewidth=0.8)
        for index, method in enumerate(methods):
            x, y = ([getattr(p, field) for p in points if p.method == method] for field in ("rise", "gain"))
            marker = "osD^vP"[index // len(COLOURS) % 6]
            axes.plot(x, y, marker, color=COLOURS[index % len(COLOURS)], markersize=5, label=method)
        axes.set_xlabel(f"rise of attention entropy without InfoScale, nats (training length to {length})")
        axes.set_ylabel(f"gain of ACC by InfoScale at {length}")
        if rho is not None:
            axes.set_title(f"Spearman {rho:.2f} over {len(points)} rows")
        figure.legend(loc="outside right center", frameon=False, fontsize=8)
        return save_figure(figure, out)


def draw_best_temperatures(
    measured: dict[str, dict[int, float]], laws: dict[str, dict[int, float]], out: Path, train_length: int
) -> list[Path]:
    """Draw fitted temperatures against ln s, s = n / n_tr, with the laws as lines, as `out`.png and .svg.

    Args:
        measured: for each model the best τ by length.
        laws: for each law its τ by length.
        out: path without suffix.
        train_length: n_tr.
    """
    with matplotlib.rc_context(RC_PARAMS):
        figure = Figure(figsize=(7.6, 4.6), layout="constrained")
        axes = figure.subplots()
        for index, (name, values) in enumerate(laws.items()):
            x = [log(n / train_length) for n in sorted(values)]
            colour = COLOURS[index % len(COLOURS)]
            axes.plot(x, [values[n] for n in sorted(values)], color=colour, linewidth=1.4, label=name)
        for index, (name, values) in enumerate(measured.items()):
            x = [log(n / train_length) for n in sorted(values)]
            marker = "osD^vPX*"[index % 8]
            axes.plot(x, [values[n] for n in sorted(values)], marker, color=INK, markersize=6, label=name)
        axes.set_xlabel("ln s, s = length / training length")
        axes.set_ylabel("τ of the lowest loss (points), of each law (lines)")
        axes.grid(color="#E6E6E6", linewidth=0.6)
        figure.legend(loc="outside right center", frameon=False, fontsize=8)
        return save_figure(figure, out)
