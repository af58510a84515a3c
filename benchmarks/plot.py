"""The plots of a results file of `run.py`, PNG and SVG, beside it.

    python benchmarks/plot.py benchmarks/results/NAME.json

NAME-scaling: time against n, with the exponent of each method and the least time the card allows. NAME-targets: every
ratio that has a target, as a share of it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib
from limits import find_peak
from matplotlib.figure import Figure
from measure import exponent

from isentrope.report.figures.style import COLOURS, DASHES, DOTS, GREY, INK, RC_PARAMS, save_figure

MARKERS = "osD^vPX"
MET, MISSED = "#228833", "#EE6677"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    results = parser.parse_args().results
    if not results.is_file():
        parser.error(f"expected a results file, got {results}")
    drawn = plots(results)
    print("\n".join(map(str, drawn)) or "nothing to draw: expected rows of the group scaling, or rows with targets")


def plots(results: Path) -> list[Path]:
    """Both pictures, or as many as there are rows for."""
    data = json.loads(results.read_text(encoding="utf-8"))
    drawn: list[Path] = []
    with matplotlib.rc_context(RC_PARAMS):
        for name, figure in (("scaling", scaling(data)), ("targets", targets(data))):
            if figure is not None:
                drawn += save_figure(figure, results.with_name(f"{results.stem}-{name}"))
    return drawn


def scaling(data: dict[str, Any]) -> Figure | None:
    """Time against n, both logarithmic."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in data["rows"]:
        if row["group"] == "scaling" and row["ms"] is not None and row["method"] != "one million tokens":
            lines.setdefault(row["method"], []).append((row["n"], row["ms"]))
    if not lines:
        return None
    lengths = sorted({n for points in lines.values() for n, _ in points})
    figure = Figure(figsize=(10, 6), layout="constrained")
    axes = figure.subplots()
    for place, (method, points) in enumerate(lines.items()):
        slope = exponent(points)
        label = method if slope is None else f"{method}: n^{slope:.2f}"
        axes.plot(
            *zip(*sorted(points), strict=True), color=COLOURS[place % len(COLOURS)], label=label, linewidth=1.3,
            linestyle="-" if place < len(COLOURS) else DOTS, marker=MARKERS[place % len(MARKERS)], markersize=4,
        )  # fmt: skip
    if (least := roofline(data, lengths)) is not None:
        axes.plot(lengths, least, color=INK, linestyle=DASHES, linewidth=1.2, label="roofline of causal attention")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(lengths, [short(n) for n in lengths], rotation=45)
    axes.minorticks_off()
    axes.set_xlabel("tokens n")
    axes.set_ylabel("ms")
    size = data["sizes"]
    shape = f"{size['dtype']}, {size['heads']} heads, d = {size['size']}"
    axes.set_title(f"One forward pass of one layer: {data['provenance']['hardware']}, {shape}")
    axes.grid(color="#E6E6E6", linewidth=0.6)
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5), title="fitted exponent")
    return figure


def short(n: int) -> str:
    return f"{n >> 20}M" if n >= 1 << 20 else f"{n >> 10}k" if n >= 1 << 10 else str(n)


def roofline(data: dict[str, Any], lengths: list[int]) -> list[float] | None:
    """Milliseconds of a causal triangle's FLOPs or of reading q, k, v and writing o, whichever takes longer."""
    peak = find_peak(data["provenance"]["hardware"])
    if peak is None:
        return None
    width = data["sizes"]["heads"] * data["sizes"]["size"]
    return [1000 * max(2 * n * n * width / peak.flops, 4 * n * width * 2 / peak.bandwidth) for n in lengths]


def targets(data: dict[str, Any]) -> Figure | None:
    """Each ratio as a share of its target: 1 is the target, left of it is met."""
    rows = [row for row in data["rows"] if row["target"] and row["ratio"] is not None]  # a count of 0 has no share
    if not rows:
        return None
    figure = Figure(figsize=(10, 1.4 + 0.24 * len(rows)), layout="constrained")
    axes = figure.subplots()
    places = range(len(rows))
    shares = [row["ratio"] / row["target"] for row in rows]
    axes.scatter([1] * len(rows), places, marker="|", s=90, color=INK, linewidth=1.5, label="target")
    for met, colour, label in ((True, MET, "met"), (False, MISSED, "missed")):
        chosen = [(share, at) for share, at, row in zip(shares, places, rows, strict=True) if row["met"] is met]
        if chosen:
            axes.scatter(*zip(*chosen, strict=True), s=26, color=colour, label=label, zorder=3)
    edge = max(1.0, *shares) * 1.04
    for at, row in zip(places, rows, strict=True):
        axes.text(edge, at, f"{row['ratio']:.3g}, target {row['target']:.3g}", va="center", fontsize=8, color=GREY)
        if at and rows[at - 1]["group"] != row["group"]:
            axes.axhline(at - 0.5, color="#DDDDDD", linewidth=0.8)
    axes.set_yticks(places, [f"{row['group']}: {row['method']}, {row['n']:,}" for row in rows], fontsize=8)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, edge)
    axes.set_xlabel("ratio as a share of its target")
    figure.suptitle(f"Ratios against targets: {data['provenance']['hardware']}", x=0.01, ha="left", fontweight="bold")
    axes.grid(axis="x", color="#E6E6E6", linewidth=0.6)
    axes.legend(frameon=False, fontsize=8, loc="lower right", bbox_to_anchor=(1, 1), ncols=3)
    return figure


if __name__ == "__main__":
    main()
