"""A partition: features of documents, their clusters, and the test documents drawn from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from isentrope.report.figures.style import GREY, INK, RC_PARAMS, save_figure
from isentrope.utils.files import RERUN_REMEDY, read_fields

# Paul Tol's "bright" blue and red, which colour-blind readers can tell apart
CLUSTER_STYLES = (("#4477AA", "o"), ("#EE6677", "^"))
LARGE_FONTS: dict[Any, Any] = {"font.size": 14, "axes.titlesize": 15}  # readable at half the width of a page
TEST_STYLE: dict[str, Any] = {"s": 120, "alpha": 1, "edgecolors": INK, "linewidths": 1.3, "zorder": 3}


def draw_partition(manifest: Path, out: Path | None = None) -> list[Path]:
    """Draw the panels of the paper's appendix A.1 as `partition.png` and `.svg` beside the manifest, or as `out`."""
    data = read_fields(manifest, RERUN_REMEDY, "documents")
    held_out = [row for row in data["documents"] if "pca" in row]
    with matplotlib.rc_context(RC_PARAMS | LARGE_FONTS):
        figure = Figure(figsize=(13, 5.2), layout="constrained")
        features, clusters, test = figure.subplots(1, 3, sharex=True, sharey=True)
        _draw_points(features, held_out, f"{len(held_out)} held out", color=GREY, marker="o")
        for cluster, (colour, marker) in enumerate(CLUSTER_STYLES):
            rows = [row for row in held_out if row["cluster"] == cluster]
            tested = [row for row in rows if row["set"] == "test"]
            _draw_points(clusters, rows, f"cluster {cluster} ({len(rows)})", color=colour, marker=marker)
            _draw_points(test, rows, None, color=colour, marker=marker, alpha=0.2)
            _draw_points(test, tested, f"{len(tested)} of cluster {cluster}", color=colour, marker=marker, **TEST_STYLE)
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
        return save_figure(figure, out or manifest.with_name("partition"))


def _draw_points(axes: Axes, rows: list[dict[str, Any]], label: str | None, **style: Any) -> None:
    if rows:
        x, y = zip(*(row["pca"] for row in rows), strict=True)
        axes.scatter(x, y, label=label, **({"s": 28, "alpha": 0.75, "linewidths": 0} | style))
