"""Entropy and temperature laws against the number of keys."""

from __future__ import annotations

from math import log, nan
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, NullLocator

from isentrope.evaluation.results import read_results
from isentrope.report.figures.style import (
    DASHES,
    DOTS,
    GREY,
    INK,
    LAW_STYLES,
    RC_PARAMS,
    label_line_ends,
    save_figure,
    set_length_axis,
)
from isentrope.utils.files import RERUN_REMEDY

RING = "invariant"  # a law drawn as a ring, since InfoScaleExact lies inside it


def draw_laws(results: Path) -> list[Path]:
    """Draw entropy and τ against n for each law of `laws.json`, beside it as `laws.png` and `laws.svg`."""
    data = read_results(results, RERUN_REMEDY)
    with matplotlib.rc_context(RC_PARAMS):
        figure = Figure(figsize=(13, 5.8), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(1.35, 1))
        _draw_entropy(left, data)
        _draw_tau(right, data)
        return save_figure(figure, results.with_suffix(""))


def _draw_entropy(axes: Axes, data: dict[str, Any]) -> None:
    lengths, target, config = data["lengths"], data["train_entropy"], data["config"]
    set_length_axis(axes, lengths)
    edges = axes.get_xlim()
    uniform = [log(n) for n in edges]
    top = uniform[1] * 1.05
    axes.fill_between(edges, uniform, top, color="#F2F2F2", linewidth=0)
    axes.plot(edges, uniform, color="#BBBBBB", linewidth=1)
    axes.axhline(target, color=GREY, linestyle=DASHES, linewidth=1)
    labels = [(log(lengths[-1]), "ln n: uniform attention", GREY)]
    for law in data["laws"]:
        rows = _law_rows(data, law)
        colour, style = _law_style(law)
        n, entropy = [row["n"] for row in rows], [row["entropy"] for row in rows]
        axes.plot(n, entropy, color=colour, linewidth=3, alpha=0.18, solid_capstyle="round")
        _draw_theory(axes, rows, colour)
        axes.errorbar(
            n, entropy, [row["standard_error"] for row in rows], linestyle="none", elinewidth=0.9, zorder=3, **style
        )
        below = " (theory below 0)" if rows[-1]["theory"] < 0 else ""
        labels.append((entropy[-1], law["label"] + below, colour))
    axes.set_ylim(0, top)
    axes.set_ylabel("H (nats)")
    axes.set_title("Attention entropy over n random unit vectors")
    label_line_ends(axes, lengths[-1], labels)
    axes.legend(
        handles=[
            Line2D([], [], color=INK, marker="o", markersize=5, linestyle="none", label="measured ± standard error"),
            Line2D([], [], color=INK, label="theory: ln n − KL"),
            Line2D([], [], color=INK, linestyle=DOTS, label="theory where too few keys carry the weight"),
            Line2D(
                [],
                [],
                color=GREY,
                linestyle=DASHES,
                label=f"theory at n = {config['train_length']}, the training length",
            ),
        ],
        title=f"scores {config['alpha']:g} cos θ, d = {config['head_dim']}",
        alignment="left",
        loc="upper left",
        frameon=False,
        fontsize=9,
        handlelength=2.4,
    )


def _draw_tau(axes: Axes, data: dict[str, Any]) -> None:
    lengths = data["lengths"]
    axes.axhline(1, color=GREY, linestyle=DASHES, linewidth=1)
    labels = []
    for law in data["laws"]:
        tau = [row["tau"] for row in _law_rows(data, law)]
        colour, style = _law_style(law)
        axes.plot(lengths, tau, linewidth=0 if law["key"] == RING else 1.2, **style)
        labels.append((tau[-1], law["label"], colour))
    set_length_axis(axes, lengths)
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(
        FixedLocator([t for t in (0.25, 0.5, 0.7, 1, 1.5, 2, 3, 5, 7, 10, 20) if low < t < high])
    )
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_ylabel("τ")
    axes.set_title("Temperature τ(n) on the score")
    label_line_ends(axes, lengths[-1], labels)


def _law_rows(data: dict[str, Any], law: dict[str, Any]) -> list[dict[str, Any]]:
    rows = [row for row in data["rows"] if row["law"] == law["key"]]
    return sorted(rows, key=lambda row: row["n"])


def _law_style(law: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    colour, marker = LAW_STYLES[law["key"]]
    if law["key"] == RING:
        return colour, {"color": colour, "marker": marker, "markersize": 9, "markerfacecolor": "none"}
    return colour, {"color": colour, "marker": marker, "markersize": 5, "markeredgewidth": 0}


def _draw_theory(axes: Axes, rows: list[dict[str, Any]], colour: str) -> None:
    n, entropy = [row["n"] for row in rows], [row["theory"] for row in rows]
    axes.plot(n, entropy, color=colour, linewidth=1.1, linestyle=DOTS)
    settled = [row["theory"] if row["settled"] else nan for row in rows]
    axes.plot(n, settled, color=colour, linewidth=1.3)
