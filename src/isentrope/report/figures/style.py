"""Colours, markers, axes and saving that all figures share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, NullLocator

from isentrope.utils.files import write_atomically

RC_PARAMS: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#444444",
    "axes.axisbelow": True,
}
# Paul Tol's "bright" and "muted", safe for colour-blind readers
COLOURS = ("#777777", "#4477AA", "#66CCEE", "#228833", "#CCBB44", "#EE6677", "#AA3377", "#882255", "#332288", "#999933")
# the colour of each temperature law, with a marker for readers without colours
LAW_STYLES: dict[str, tuple[str, str]] = {
    "constant": ("#777777", "s"),
    "loglength": ("#999933", "v"),
    "softmaxplus": ("#56B4E9", "P"),
    "logn": ("#332288", "D"),
    "yarn": ("#117733", "^"),
    "infoscale": ("#CC6677", "X"),
    "infoscale_matched": ("#AA4499", "p"),
    "exact_matched": ("#882255", "o"),
    "invariant": ("#000000", "o"),
    "share_050": ("#88CCEE", "v"),
    "share_075": ("#44AA99", "^"),
    "share_100": ("#117733", "P"),
    "prior": ("#000000", "o"),
    "logn_far": ("#DDAA33", "p"),
    "both": ("#AA4499", "*"),
}
GREY, INK = "#888888", "#444444"
DASHES, DOTS = (0, (5, 3)), (0, (1, 1.5))
DOTS_PER_INCH = 160
MIN_LABEL_GAP = 0.043  # share of the panel's height between the labels of two lines


def save_figure(figure: Figure, path: Path) -> list[Path]:
    """Save a figure as `path` with the suffixes .png and .svg; the same figure gives the same bytes."""
    paths = [path.with_name(path.name + suffix) for suffix in (".png", ".svg")]
    figure.set_dpi(DOTS_PER_INCH)
    if engine := figure.get_layout_engine():  # once: `savefig` does it again, and draws the figure to do so
        engine.execute(figure)
        figure.set_layout_engine(None)
    for target, kind in zip(paths, ("png", "svg"), strict=True):
        with write_atomically(target) as file, matplotlib.rc_context({"svg.hashsalt": "isentrope"}):
            metadata = {"Date": None} if kind == "svg" else None
            figure.savefig(file, format=kind, dpi=DOTS_PER_INCH, metadata=metadata)
    return paths


def set_length_axis(axes: Axes, lengths: list[int]) -> None:
    """Make x a logarithmic axis of the number of keys, with a tick at each length."""
    axes.set_xscale("log", base=2)
    axes.set_xlim(lengths[0] / 2**0.3, lengths[-1] * 2**0.3)
    axes.xaxis.set_major_locator(FixedLocator(lengths))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.tick_params(axis="x", labelrotation=45, labelsize=9)
    axes.set_xlabel("keys n")
    axes.grid(color="#E6E6E6", linewidth=0.6)


def label_line_ends(axes: Axes, last: int, labels: list[tuple[float, str, str]]) -> None:
    """Write each line's (last value, text, colour) at the right edge, moved vertically so that none overlap."""
    to_axes = axes.transData + axes.transAxes.inverted()
    labels = sorted(labels)
    at = [float(to_axes.transform((last, value))[1]) for value, _, _ in labels]
    start = float(to_axes.transform((last, labels[0][0]))[0])
    for y, label_y, (_, text, colour) in zip(at, spread_apart(at, MIN_LABEL_GAP), labels, strict=True):
        leader = Line2D(
            [start + 0.015, 1.0, 1.04, 1.05],
            [y, y, label_y, label_y],
            transform=axes.transAxes,
            color=colour,
            linewidth=0.7,
            alpha=0.7,
            clip_on=False,
        )
        axes.add_line(leader)
        axes.text(1.06, label_y, text, color=colour, transform=axes.transAxes, va="center", fontsize=9.5)


def spread_apart(heights: list[float], gap: float) -> list[float]:
    """Move the sorted heights as little as possible (least squares) until neighbours are a gap apart."""
    blocks: list[list[float]] = []  # [mean of height - index · gap, members], increasing: isotonic regression
    for index, height in enumerate(heights):
        blocks.append([height - index * gap, 1])
        while len(blocks) > 1 and blocks[-2][0] >= blocks[-1][0]:
            mean, count = blocks.pop()
            total = blocks[-1][1] + count
            blocks[-1] = [(blocks[-1][0] * blocks[-1][1] + mean * count) / total, total]
    means = [mean for mean, count in blocks for _ in range(int(count))]
    return [mean + index * gap for index, mean in enumerate(means)]
