"""Results as figures, PNG and SVG."""

from __future__ import annotations

from itertools import pairwise
from math import inf, log, nan
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, NullLocator

from isentrope.utils.files import RERUN_REMEDY, read_fields, write_atomically

# Paul Tol's "muted", safe for colour-blind readers, with a marker each for readers in grey
STYLES: dict[str, tuple[str, str]] = {
    "constant": ("#777777", "s"),
    "loglength": ("#999933", "v"),
    "softmaxplus": ("#56B4E9", "P"),
    "logn": ("#332288", "D"),
    "yarn": ("#117733", "^"),
    "infoscale": ("#CC6677", "X"),
    "infoscale_matched": ("#AA4499", "p"),
    "exact_matched": ("#882255", "o"),
    "invariant": ("#000000", "o"),
}
RC: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#444444",
    "axes.axisbelow": True,
    "svg.hashsalt": "isentrope",
}
# drawn as a ring, since InfoScaleExact lies within it
RING = "invariant"
GREY, INK = "#888888", "#444444"
DASHES, DOTS = (0, (5, 3)), (0, (1, 1.5))
# smallest distance between labels, as a share of the panel's height
LABEL_GAP = 0.043


def laws(results: Path) -> list[Path]:
    """Entropy and τ against n for each law of `laws.json`, drawn beside it as `laws.png` and `laws.svg`."""
    data = read_fields(results, RERUN_REMEDY)
    with matplotlib.rc_context(RC):
        figure = Figure(figsize=(13, 5.8), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(1.35, 1))
        _entropy_panel(left, data)
        _tau_panel(right, data)
        return [save(figure, results.with_suffix(suffix)) for suffix in (".png", ".svg")]


def _entropy_panel(axes: Axes, data: dict[str, Any]) -> None:
    lengths, target, config = data["lengths"], data["train_entropy"], data["config"]
    _length_axis(axes, lengths)
    edges = axes.get_xlim()
    uniform = [log(n) for n in edges]
    top = uniform[1] * 1.05
    axes.fill_between(edges, uniform, top, color="#F2F2F2", linewidth=0)
    axes.plot(edges, uniform, color="#BBBBBB", linewidth=1)
    axes.axhline(target, color=GREY, linestyle=DASHES, linewidth=1)
    labels = [(log(lengths[-1]), "ln n: uniform attention", GREY)]
    for law in data["laws"]:
        rows = _rows(data, law)
        colour, style = _style(law)
        n, entropy = [row["n"] for row in rows], [row["entropy"] for row in rows]
        axes.plot(n, entropy, color=colour, linewidth=3, alpha=0.18, solid_capstyle="round")
        _theory_line(axes, rows, colour)
        axes.errorbar(
            n, entropy, [row["standard_error"] for row in rows], linestyle="none", elinewidth=0.9, zorder=3, **style
        )
        below = " (theory below 0)" if rows[-1]["theory"] < 0 else ""
        labels.append((entropy[-1], law["label"] + below, colour))
    axes.set_ylim(0, top)
    axes.set_ylabel("H (nats)")
    axes.set_title("Attention entropy over n random unit vectors")
    _label_ends(axes, lengths[-1], labels)
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


def _tau_panel(axes: Axes, data: dict[str, Any]) -> None:
    lengths = data["lengths"]
    axes.axhline(1, color=GREY, linestyle=DASHES, linewidth=1)
    labels = []
    for law in data["laws"]:
        tau = [row["tau"] for row in _rows(data, law)]
        colour, style = _style(law)
        axes.plot(lengths, tau, linewidth=0 if law["key"] == RING else 1.2, **style)
        labels.append((tau[-1], law["label"], colour))
    _length_axis(axes, lengths)
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(
        FixedLocator([t for t in (0.25, 0.5, 0.7, 1, 1.5, 2, 3, 5, 7, 10, 20) if low < t < high])
    )
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_ylabel("τ")
    axes.set_title("Temperature τ(n) on the score")
    _label_ends(axes, lengths[-1], labels)


def _rows(data: dict[str, Any], law: dict[str, Any]) -> list[dict[str, Any]]:
    rows = [row for row in data["rows"] if row["law"] == law["key"]]
    return sorted(rows, key=lambda row: row["n"])


def _style(law: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    colour, marker = STYLES[law["key"]]
    if law["key"] == RING:
        return colour, {"color": colour, "marker": marker, "markersize": 9, "markerfacecolor": "none"}
    return colour, {"color": colour, "marker": marker, "markersize": 5, "markeredgewidth": 0}


def _theory_line(axes: Axes, rows: list[dict[str, Any]], colour: str) -> None:
    n, entropy = [row["n"] for row in rows], [row["theory"] for row in rows]
    axes.plot(n, entropy, color=colour, linewidth=1.1, linestyle=DOTS)
    settled = [row["theory"] if row["settled"] else nan for row in rows]
    axes.plot(n, settled, color=colour, linewidth=1.3)


def _length_axis(axes: Axes, lengths: list[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xlim(lengths[0] / 2**0.3, lengths[-1] * 2**0.3)
    axes.xaxis.set_major_locator(FixedLocator(lengths))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.tick_params(axis="x", labelrotation=45, labelsize=9)
    axes.set_xlabel("keys n")
    axes.grid(color="#E6E6E6", linewidth=0.6)


def _label_ends(axes: Axes, last: int, labels: list[tuple[float, str, str]]) -> None:
    """Name each line beside its last point, at the right edge, moved up or down as far as the others demand."""
    to_axes = axes.transData + axes.transAxes.inverted()
    labels = sorted(labels)
    at = [float(to_axes.transform((last, value))[1]) for value, _, _ in labels]
    start = float(to_axes.transform((last, labels[0][0]))[0])
    for y, placed, (_, text, colour) in zip(at, _apart(at, LABEL_GAP), labels, strict=True):
        leader = Line2D(
            [start + 0.015, 1.0, 1.04, 1.05],
            [y, y, placed, placed],
            transform=axes.transAxes,
            color=colour,
            linewidth=0.7,
            alpha=0.7,
            clip_on=False,
        )
        axes.add_line(leader)
        axes.text(1.06, placed, text, color=colour, transform=axes.transAxes, va="center", fontsize=9.5)


def _apart(places: list[float], gap: float) -> list[float]:
    """The sorted places moved as little as possible (least squares) until neighbours are a gap apart."""
    blocks: list[list[float]] = []  # [mean of place - index · gap, members], increasing: isotonic regression
    for index, place in enumerate(places):
        blocks.append([place - index * gap, 1])
        while len(blocks) > 1 and blocks[-2][0] >= blocks[-1][0]:
            mean, count = blocks.pop()
            total = blocks[-1][1] + count
            blocks[-1] = [(blocks[-1][0] * blocks[-1][1] + mean * count) / total, total]
    means = [mean for mean, count in blocks for _ in range(int(count))]
    return [mean + index * gap for index, mean in enumerate(means)]


def save(figure: Figure, path: Path) -> Path:
    """The same bytes for the same results."""
    kind = path.suffix[1:]
    with write_atomically(path) as file:
        figure.savefig(file, format=kind, dpi=160, metadata={"Date": None} if kind == "svg" else None)
    return path


HOLDS = 1.5  # times the best recipe's worst bucket: what the second panel of `perplexity` shows
# Paul Tol's "bright" and "muted", one colour a position method, and where these end another marker; how a line is drawn
# says which temperature
COLOURS = ("#777777", "#4477AA", "#66CCEE", "#228833", "#CCBB44", "#EE6677", "#AA3377", "#882255", "#332288", "#999933")
MARKERS = "os^D"


def perplexity(results: Path) -> list[Path]:
    """Perplexity against position for each recipe of `perplexity.json`, drawn beside it: all, and those that hold."""
    data = read_fields(results, RERUN_REMEDY)
    edges, rows = data["config"]["edges"], data["rows"]
    middles = [(a + b) / 2 for a, b in pairwise(edges)]
    methods: dict[str, tuple[str, str]] = {}
    temperatures: dict[str, Any] = {}
    lines = ("-", DASHES, DOTS, "-.")
    holding = HOLDS * min(max(row["perplexity"]) for row in rows)
    with matplotlib.rc_context(RC):
        figure = Figure(figsize=(13, 5.2), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(1, 1.5))
        for row in rows:
            method, temperature = _split(row["recipe"])
            again, which = divmod(len(methods), len(COLOURS))
            colour, marker = methods.setdefault(method, (COLOURS[which], MARKERS[again % len(MARKERS)]))
            line = temperatures.setdefault(temperature, lines[len(temperatures) % len(lines)])
            for axes in (left, right) if max(row["perplexity"]) <= holding else (left,):
                look = {"color": colour, "linestyle": line, "marker": marker, "markersize": 4, "linewidth": 1.4}
                axes.plot(middles, row["perplexity"], **look)
        left.set_yscale("log")
        texts = max(row["texts"] for row in rows)
        figure.suptitle(f"Perplexity by position: {data['model']['name']}, {texts} texts", x=0.01, ha="left")
        left.set_title("All recipes")
        right.set_title("Those that hold")
        for axes in (left, right):
            # labels any closer would overlap
            apart = [e for e, after in pairwise((*edges, inf)) if after - e >= 0.05 * edges[-1]]
            axes.set_xticks(apart, [f"{e // 1024}k" if e >= 1024 else str(e) for e in apart], rotation=45)
            axes.set_xlabel("position in the text (tokens)")
        left.set_ylabel("perplexity")
        handles = [
            Line2D([], [], color=colour, marker=marker, markersize=4, label=name)
            for name, (colour, marker) in methods.items()
        ]
        handles += [Line2D([], [], color=INK, linestyle=line, label=name) for name, line in temperatures.items()]
        right.legend(handles=handles, frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
        return [save(figure, results.with_suffix(suffix)) for suffix in (".png", ".svg")]


def _split(recipe: str) -> tuple[str, str]:
    """A recipe's text as its method and its temperature."""
    laws = ("infoscale", "logn", "yarntemperature", "loglength", "softmaxplus", "llama4", "fitted", "ssmax", "constant")
    parts = recipe.split("+")
    temperature = [part.split(":")[0] for part in parts if part.startswith(laws)]
    method = "+".join(part for part in parts if not part.startswith(laws)) or "plain"
    return method, f"+ {temperature[0]}" if temperature else "no temperature"
