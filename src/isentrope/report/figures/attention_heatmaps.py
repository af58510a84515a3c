"""Heatmaps of attention and scores, their grids and colour bars."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FixedLocator, MaxNLocator

from isentrope.evaluation.results import read_results
from isentrope.utils.files import RERUN_REMEDY

ATTENTION_COLOURS, SCORE_COLOURS = "viridis", "cividis"  # perceptually uniform, also without colours
MASKED_COLOUR = "#E4E4E4"
MIN_LOG_WEIGHT = -20.0  # smaller weights get the colour of this one
HEATMAP_INCHES = 4.6
MAX_WIDE_COLUMNS = 3  # with more, panels are smaller and have fewer labels


@dataclass(frozen=True)
class InspectionResults:
    """The results of `isentrope inspect` in a folder."""

    folder: Path
    data: dict[str, Any]

    @classmethod
    def read(cls, folder: Path) -> InspectionResults:
        results = folder / "inspect.json"
        if not results.is_file():
            raise ValueError(f"{folder}: expected a folder that isentrope inspect wrote, with inspect.json")
        return cls(folder, read_results(results, RERUN_REMEDY, "heatmaps", "entropy", "lengths"))

    @property
    def title(self) -> str:
        """The CosScale, or without one the recipe."""
        theory, text = self.data["theory"], self.data["recipe"]["text"]
        return text if theory is None else f"CosScale {theory['alpha']:g}" + (", windowed" if "window:" in text else "")

    @property
    def caption(self) -> str:
        return fill(f"{self.data['model']['name']}: {self.data['recipe']['text']}".replace("+", " + "), 64)

    @property
    def location(self) -> str:
        return f"layer {self.data['layer']}, {self.data['lengths'][-1]} tokens"

    def heatmap(self, kind: str) -> Any:
        """Load a heatmap, with cells without a visible key masked."""
        array = np.load(self.folder / self.data["heatmaps"][kind]["file"], allow_pickle=False)
        return np.ma.masked_invalid(array)


def make_grid(
    rows: int, columns: int, size: float = HEATMAP_INCHES, bars: int = 1, head: float = 0.0
) -> tuple[Figure, Any]:
    """Make square panels of this size in inches, with space for labels, colour bars and a heading."""
    many = columns > MAX_WIDE_COLUMNS
    size = min(size, max(1.8, 12 / columns)) if many else size  # keeps the text readable
    width, height = (size + (0.25 if many else 0.7)) * columns + 1.2 * bars, (size + 0.85) * rows + head
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.09, h_pad=0.07)  # type: ignore[union-attr, call-arg]
    return figure, figure.subplots(rows, columns, squeeze=False)


def draw_heatmap(
    axes: Axes, inspection: InspectionResults, kind: str, array: Any, colours: str, scale: Normalize
) -> None:
    at = inspection.data["heatmaps"][kind]
    extent = (at["low"], at["high"], at["last"], at["first"])
    axes.imshow(array, cmap=colours, norm=scale, extent=extent, interpolation="nearest", aspect="auto")
    axes.set_facecolor(MASKED_COLOUR)
    axes.set_box_aspect((at["last"] - at["first"]) / (at["high"] - at["low"]))
    axes.set(xlabel="key", ylabel="query")
    for axis, start, end in ((axes.xaxis, at["low"], at["high"]), (axes.yaxis, at["first"], at["last"])):
        sparse = FixedLocator([start, (start + end) // 2])  # the last would run into the next panel's first
        axis.set_major_locator(MaxNLocator(5, integer=True) if has_few_columns(axes) else sparse)


def draw_with_inset(figure: Figure, free_axes: Any, inspection: InspectionResults, title: str) -> None:
    """Draw a heatmap and, on the next panel, its inset, both on the inset's colour scale."""
    array, axes = inspection.heatmap("attention"), [next(free_axes)]
    has_inset = "inset" in inspection.data["heatmaps"]
    inset = inspection.heatmap("inset") if has_inset else array
    scale = shared_scale([inset])
    draw_heatmap(axes[0], inspection, "attention", array, ATTENTION_COLOURS, scale)
    axes[0].set_title(title)
    if has_inset:
        axes.append(next(free_axes))
        at = inspection.data["heatmaps"]["inset"]
        draw_heatmap(axes[1], inspection, "inset", inset, ATTENTION_COLOURS, scale)
        axes[1].set_title(f"queries {at['first']}–{at['last'] - 1}, keys {at['low']}–{at['high'] - 1}")
        sides = at["high"] - at["low"], at["last"] - at["first"]
        axes[0].add_patch(Rectangle((at["low"], at["first"]), *sides, fill=False, edgecolor="white", linewidth=3.2))
        axes[0].add_patch(Rectangle((at["low"], at["first"]), *sides, fill=False, edgecolor="#CC3311", linewidth=1.6))
    add_colour_bar(figure, np.array(axes), scale, ATTENTION_COLOURS, "ln attention", [array, inset])


def draw_scores(axes: Any, inspection: InspectionResults) -> None:
    """Draw scores before and after the position method, scaled to [0, 1] by their common minimum and maximum."""
    maps = inspection.data["heatmaps"]
    kinds = ("scores_before", "scores_after")
    bounds = [maps[kind] for kind in kinds if maps[kind]["least"] is not None]
    low, high = min((x["least"] for x in bounds), default=0.0), max((x["largest"] for x in bounds), default=1.0)
    for panel, kind in zip(axes, kinds, strict=True):
        scaled = (inspection.heatmap(kind) - low) / max(high - low, 1e-9)
        draw_heatmap(panel, inspection, kind, scaled, SCORE_COLOURS, Normalize(0, 1))


def shared_scale(arrays: list[Any]) -> Normalize:
    """Return one colour scale for all arrays, cut off at MIN_LOG_WEIGHT."""
    values = np.ma.concatenate([array.compressed() for array in arrays])
    if not values.size:
        return Normalize(MIN_LOG_WEIGHT, 0)
    return Normalize(max(float(values.min()), MIN_LOG_WEIGHT), max(float(values.max()), MIN_LOG_WEIGHT + 1))


def add_colour_bar(
    figure: Figure, axes: Any, scale: Normalize, colours: str, label: str, arrays: list[Any] | None = None
) -> None:
    """Add a colour bar, with pointed ends if some values lie outside."""
    values = [array for array in arrays or [] if array.count()]
    under, over = any(x.min() < scale.vmin for x in values), any(x.max() > scale.vmax for x in values)
    extend = "both" if under and over else "min" if under else "max" if over else "neither"
    figure.colorbar(ScalarMappable(scale, colours), ax=axes, label=label, extend=extend, pad=0.02)


def hide_inner_labels(row: Any) -> None:
    """Keep the query labels of the leftmost panel only."""
    for axes in row[1:]:
        axes.set_ylabel("")
        axes.tick_params(labelleft=False)


def has_few_columns(axes: Axes) -> bool:
    panel = axes.get_subplotspec()
    return panel is None or panel.get_gridspec().ncols <= MAX_WIDE_COLUMNS
