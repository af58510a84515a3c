"""Attention entropies, angles and heatmaps, of one model or of several side by side."""

from __future__ import annotations

from math import log
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from isentrope.report.figures.attention_heatmaps import (
    ATTENTION_COLOURS,
    MASKED_COLOUR,
    SCORE_COLOURS,
    InspectionResults,
    add_colour_bar,
    draw_heatmap,
    draw_scores,
    draw_with_inset,
    has_few_columns,
    hide_inner_labels,
    make_grid,
    shared_scale,
)
from isentrope.report.figures.style import (
    COLOURS,
    DASHES,
    DOTS,
    GREY,
    INK,
    RC_PARAMS,
    label_line_ends,
    save_figure,
    set_length_axis,
)

LARGE_FONTS: dict[Any, Any] = {"font.size": 13, "axes.titlesize": 13}  # readable at half the width of a page
COSINE_BINS = 50  # with narrower bins a query's own key, at cos θ = 1, would dwarf all others
MAX_LABELLED_LAYERS = 12  # with more, a colour bar replaces the labels


def draw_inspection(folder: Path) -> list[Path]:
    """Draw all figures of one model beside its `inspect.json`, as .png and .svg."""
    inspection = InspectionResults.read(folder)
    figures = {
        "entropy": _draw_entropy, "focus": _draw_focus, "angles": _draw_angles, "attention": _draw_own_attention,
        "rope": _draw_rope_scores,
    }  # fmt: skip
    with matplotlib.rc_context(RC_PARAMS | LARGE_FONTS):
        return [path for name, make in figures.items() for path in save_figure(make(inspection), folder / name)]


def draw_cosscale_panels(folders: list[Path], out: Path) -> list[Path]:
    """Draw angles above ln of the attention weights on one scale, a column for each model (the paper's f1).

    Args:
        folders: folders that `isentrope inspect` wrote.
        out: path of the figure without suffix.
    """
    inspections = _read_all(folders)
    with matplotlib.rc_context(RC_PARAMS | LARGE_FONTS):
        figure, axes = make_grid(2, len(inspections), head=0.4)
        arrays = [inspection.heatmap("attention") for inspection in inspections]
        scale = shared_scale(arrays)
        for inspection, array, (top, bottom) in zip(inspections, arrays, axes.T, strict=True):
            _draw_histogram(top, inspection, "after", legend=False)
            top.set_title(inspection.title)
            draw_heatmap(bottom, inspection, "attention", array, ATTENTION_COLOURS, scale)
        axes[0, 0].set_ylabel("density")
        figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False)
        hide_inner_labels(axes[1])
        add_colour_bar(figure, axes[1], scale, ATTENTION_COLOURS, "ln attention", arrays)
        return save_figure(figure, out)


def draw_scores_before_and_after_rope(folders: list[Path], out: Path) -> list[Path]:
    """Draw scores before the position method above those after it, a column for each model (the paper's f7).

    Both heatmaps of a column are scaled to [0, 1] by their common minimum and maximum.
    """
    inspections = _read_all(folders)
    with matplotlib.rc_context(RC_PARAMS | LARGE_FONTS):
        figure, axes = make_grid(2, len(inspections))
        for inspection, column in zip(inspections, axes.T, strict=True):
            draw_scores(column, inspection)
            column[0].set_title(inspection.title)
        for row, stage in zip(axes, ("before RoPE", "after RoPE"), strict=True):
            hide_inner_labels(row)
            row[0].set_ylabel(f"{stage}\n\nquery")
        for axis in axes[0]:
            axis.set_xlabel("")
        add_colour_bar(figure, axes, Normalize(0, 1), SCORE_COLOURS, "score, from minimum to maximum")
        return save_figure(figure, out)


def draw_peak_angles(folders: list[Path], out: Path) -> list[Path]:
    """Draw where cos θ peaks against CosScale, in theory and measured (the paper's f6)."""
    inspections = _read_all(folders)
    without = [inspection for inspection in inspections if inspection.data["theory"] is None]
    if without:
        raise ValueError(f"{without[0].folder}: expected a model with CosScale (cosine scores), got {without[0].title}")
    inspections.sort(key=lambda inspection: inspection.data["theory"]["alpha"])
    alpha = [inspection.data["theory"]["alpha"] for inspection in inspections]
    theory = [inspection.data["theory"]["peak_cosine"] for inspection in inspections]
    before, after = (_peaks(inspections, stage, "attention") for stage in ("before", "after"))
    lines = (
        ("η*, Eq. 18", theory, INK, "solid", ""),
        ("measured before RoPE, weighted by its softmax", before, COLOURS[1], DASHES, "o"),
        ("measured after RoPE, weighted by attention", after, COLOURS[2], DASHES, "s"),
        ("measured before RoPE, all pairs weighted equally", _peaks(inspections, "before", "pairs"), GREY, DOTS, "^"),
    )
    with matplotlib.rc_context(RC_PARAMS | LARGE_FONTS):
        figure = Figure(figsize=(7.4, 5.6), layout="constrained")
        axes = figure.subplots()
        for label, y, colour, dashes, marker in lines:
            axes.plot(alpha, y, color=colour, linestyle=dashes, marker=marker, linewidth=1.6, label=label)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(FixedLocator(alpha))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_ylim(top=1.02)
        axes.set(xlabel="CosScale α", ylabel="cos θ at the peak", title=f"Peak of cos θ, {inspections[0].location}")
        axes.grid(color="#E6E6E6", linewidth=0.6)
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", frameon=False, fontsize=11)
        return save_figure(figure, out)


def draw_attention(folders: list[Path], out: Path) -> list[Path]:
    """Draw ln of the attention weights of each model, with its inset if it has one (the paper's f2)."""
    inspections = _read_all(folders)
    panels = sum(1 + ("inset" in inspection.data["heatmaps"]) for inspection in inspections)
    with matplotlib.rc_context(RC_PARAMS | LARGE_FONTS):
        figure, axes = make_grid(1, panels, bars=len(inspections))
        free_axes = iter(axes[0])
        for letter, inspection in zip("abcdefghijklmnopqrstuvwxyz", inspections, strict=False):
            draw_with_inset(figure, free_axes, inspection, f"({letter}) {inspection.title}")
        return save_figure(figure, out)


def _draw_entropy(inspection: InspectionResults) -> Figure:
    """Draw entropy against length, a line for each layer."""
    data, lengths = inspection.data, inspection.data["lengths"]
    figure = Figure(figsize=(8.2, 5.4), layout="constrained")
    axes = figure.subplots()
    means = np.array([[np.mean(heads) for heads in row] for row in data["entropy"]])
    highest = np.array(data["uniform"]).max(1)
    set_length_axis(axes, lengths)
    edges = np.geomspace(*axes.get_xlim(), 50)
    axes.plot(edges, np.log(edges), color=GREY, linewidth=1.2)
    labels = [(log(lengths[-1]), "ln n", GREY)]
    if not np.allclose(highest, np.log(lengths), atol=1e-3):
        axes.plot(lengths, highest, color=GREY, linewidth=1.2, linestyle=DASHES)
        labels.append((float(highest[-1]), "uniform over visible keys", GREY))
    colours = matplotlib.colormaps[ATTENTION_COLOURS](np.linspace(0, 0.9, means.shape[1]))
    for layer, colour, line in zip(data["layers"], colours, means.T, strict=True):
        axes.plot(lengths, line, color=colour, marker="o", markersize=4, linewidth=1.6)
        labels.append((float(line[-1]), f"layer {layer}", colour))
    if data["train_length"] in lengths:
        axes.axvline(data["train_length"], color=GREY, linestyle=DOTS, linewidth=1.6, label="training length")
        axes.legend(loc="upper left", frameon=False, fontsize=11)
    axes.set_ylim(0, log(lengths[-1]) * 1.12)
    axes.set(xlabel="tokens n", ylabel="attention entropy (nats)", title=inspection.caption)
    if means.shape[1] > MAX_LABELLED_LAYERS:
        labels = [label for label in labels if not label[1].startswith("layer")]
        scale = Normalize(data["layers"][0], data["layers"][-1] / 0.9)
        figure.colorbar(ScalarMappable(scale, ATTENTION_COLOURS), ax=axes, label="layer", pad=0.16)
    label_line_ends(axes, lengths[-1], labels)
    return figure


def _draw_focus(inspection: InspectionResults) -> Figure:
    """Draw the entropy of each layer and head as a share of that of uniform attention."""
    data = inspection.data
    shares = [
        [[h / max(most, 1e-9) for h in heads] for heads, most in zip(row, uniform, strict=True)]
        for row, uniform in zip(data["entropy"], data["uniform"], strict=True)
    ]
    single = all(len(heads) == 1 for heads in shares[-1])
    if single:  # columns are lengths instead of heads
        table = np.array([[heads[0] for heads in row] for row in shares]).T
        names, label = [str(n) for n in data["lengths"]], "tokens n"
    else:
        table = np.full((len(shares[-1]), max(map(len, shares[-1]))), np.nan)
        for line, heads in zip(table, shares[-1], strict=True):
            line[: len(heads)] = heads
        names, label = [str(i) for i in range(table.shape[1])], f"head, at {data['lengths'][-1]} tokens"
    size = (max(5.0, 1.8 + 0.62 * table.shape[1]), max(3.2, 1.6 + 0.42 * table.shape[0]))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    scale = Normalize(0, 1)
    axes.imshow(np.ma.masked_invalid(table), cmap=ATTENTION_COLOURS, norm=scale, aspect="auto")
    axes.set_facecolor(MASKED_COLOUR)
    axes.set_xticks(range(len(names)), names)
    axes.set_yticks(range(len(table)), [str(layer) for layer in data["layers"]])
    axes.set(xlabel=label, ylabel="layer", title="Entropy, uniform attention = 1")
    if table.size <= 240:
        for (row, column), share in np.ndenumerate(table):
            colour = "white" if share < 0.6 else "black"
            axes.text(column, row, f"{share:.2f}", ha="center", va="center", color=colour, fontsize=10)
    figure.colorbar(ScalarMappable(scale, ATTENTION_COLOURS), ax=axes, label="focused → diffuse")
    return figure


def _draw_angles(inspection: InspectionResults) -> Figure:
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    row = figure.subplots(1, 2, sharex=True)
    for axes, stage, title in zip(row, ("before", "after"), ("before the position method", "after it"), strict=True):
        _draw_histogram(axes, inspection, stage, legend=stage == "before")
        axes.set_title(title)
    row[0].set_ylabel("density")
    figure.suptitle(f"{inspection.caption}\n{inspection.location}", fontsize=11)
    return figure


def _draw_histogram(axes: Axes, inspection: InspectionResults, stage: str, legend: bool) -> None:
    histograms = inspection.data["angles"][stage]
    edges = np.linspace(-1, 1, COSINE_BINS + 1)
    filled: dict[str, Any] = {"fill": True, "color": COLOURS[1], "alpha": 0.75, "linewidth": 0}
    outlined: dict[str, Any] = {"color": INK, "linewidth": 1.3}
    kinds = (("attention", "weighted by attention", filled), ("pairs", "all visible pairs", outlined))
    for key, label, style in kinds:
        mass = np.array(histograms[key]).reshape(COSINE_BINS, -1).sum(1)
        density = mass / mass.sum() * COSINE_BINS / 2
        axes.stairs(density, edges, label=label, **style)
    if inspection.data["theory"] is not None:
        peak = inspection.data["theory"]["peak_cosine"]
        axes.axvline(peak, color=GREY, linestyle=DASHES, linewidth=1.3, label="η*, Eq. 18")
    axes.set(xlabel="cos θ", xlim=(-1, 1), xticks=(-1, -0.5, 0, 0.5, 1) if has_few_columns(axes) else (-1, 0, 1))
    axes.set_ylim(bottom=0)
    if not has_few_columns(axes):
        axes.set_yticks([])
    if legend:
        axes.legend(frameon=False, fontsize=11, loc="upper left")


def _draw_own_attention(inspection: InspectionResults) -> Figure:
    figure, axes = make_grid(1, 1 + ("inset" in inspection.data["heatmaps"]), head=0.7)
    draw_with_inset(figure, iter(axes[0]), inspection, f"ln attention, {inspection.location}")
    figure.suptitle(inspection.caption, fontsize=11)
    return figure


def _draw_rope_scores(inspection: InspectionResults) -> Figure:
    figure, axes = make_grid(1, 2, head=0.9)
    draw_scores(axes[0], inspection)
    for panel, title in zip(axes[0], ("scores before the position method", "scores after it"), strict=True):
        panel.set_title(title)
    hide_inner_labels(axes[0])
    add_colour_bar(figure, axes, Normalize(0, 1), SCORE_COLOURS, "from minimum to maximum")
    figure.suptitle(f"{inspection.caption}\n{inspection.location}", fontsize=11)
    return figure


def _peaks(inspections: list[InspectionResults], stage: str, weighted: str) -> list[float]:
    return [inspection.data["angles"][stage][f"{weighted}_peak"] for inspection in inspections]


def _read_all(folders: list[Path]) -> list[InspectionResults]:
    if not folders:
        raise ValueError("folders: expected one or more that isentrope inspect wrote, got none")
    return [InspectionResults.read(folder) for folder in folders]
