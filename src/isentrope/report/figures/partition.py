"""A partition as a figure: features, clusters and the test documents drawn from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from isentrope.report.figures.laws import GREY, INK, RC, save
from isentrope.utils.files import RERUN_REMEDY, read_fields

# Paul Tol's "bright": blue and red differ for colour-blind readers, and so do the markers
CLUSTERS = (("#4477AA", "o"), ("#EE6677", "^"))
LARGE: dict[Any, Any] = {"font.size": 14, "axes.titlesize": 15}  # legible at half the width of a page
DRAWN: dict[str, Any] = {"s": 120, "alpha": 1, "edgecolors": INK, "linewidths": 1.3, "zorder": 3}


def partition(manifest: Path, out: Path | None = None) -> list[Path]:
    """The three panels of the paper's appendix A.1, as `partition.png` and `.svg` beside the manifest, or as `out`."""
    data = read_fields(manifest, RERUN_REMEDY, "documents")
    held = [row for row in data["documents"] if "pca" in row]
    with matplotlib.rc_context(RC | LARGE):
        figure = Figure(figsize=(13, 5.2), layout="constrained")
        features, clusters, test = figure.subplots(1, 3, sharex=True, sharey=True)
        _points(features, held, f"{len(held)} held out", color=GREY, marker="o")
        for cluster, (colour, marker) in enumerate(CLUSTERS):
            rows = [row for row in held if row["cluster"] == cluster]
            drawn = [row for row in rows if row["set"] == "test"]
            _points(clusters, rows, f"cluster {cluster} ({len(rows)})", color=colour, marker=marker)
            _points(test, rows, None, color=colour, marker=marker, alpha=0.2)
            _points(test, drawn, f"{len(drawn)} of cluster {cluster}", color=colour, marker=marker, **DRAWN)
        titles = ("(a) Features, PCA", "(b) Clusters", "(c) Test documents")
        for axes, title in zip((features, clusters, test), titles, strict=True):
            axes.set_title(title)
            axes.set_xlabel("first component")
            axes.legend(
                loc="upper center",
                bbox_to_anchor=(0.5, -0.17),
                frameon=False,
                ncols=2,
                handletextpad=0.1,
                columnspacing=1,
            )
        features.set_ylabel("second component")
        out = out or manifest.with_name("partition")
        return [save(figure, out.with_name(out.name + suffix)) for suffix in (".png", ".svg")]


def _points(axes: Axes, rows: list[dict[str, Any]], label: str | None, **style: Any) -> None:
    if rows:
        x, y = zip(*(row["pca"] for row in rows), strict=True)
        axes.scatter(x, y, label=label, **({"s": 28, "alpha": 0.75, "linewidths": 0} | style))
