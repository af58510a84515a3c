"""What was seen inside a model, as figures: entropies, angles and heatmaps, of one model or of several side by side."""

from __future__ import annotations

from dataclasses import dataclass
from math import log
from pathlib import Path
from textwrap import fill
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator

from isentrope.report.figures.laws import COLOURS, DASHES, DOTS, GREY, INK, RC, _label_ends, _length_axis, save
from isentrope.utils.files import RERUN_REMEDY, read_fields

LARGE: dict[Any, Any] = {"font.size": 13, "axes.titlesize": 13}  # legible at half the width of a page
ATTENTION, SCORES = "viridis", "cividis"  # both even in lightness, for readers who see few colours or none
UNSEEN = "#E4E4E4"
FAINTEST = -20.0  # ln of the smallest weight that colours tell apart
DRAWN_BINS = 50  # of cosines: a query's own key, at cos θ = 1, would tower over everything in narrower ones
NAMED_LAYERS = 12  # lines that have room for their names; beyond, a colour bar
HEATMAP = 4.6  # inches
FEW = 3  # columns of a figure that have room for all their labels


@dataclass(frozen=True)
class Look:
    """A folder that `isentrope inspect` wrote."""

    folder: Path
    data: dict[str, Any]

    @classmethod
    def read(cls, folder: Path) -> Look:
        results = folder / "inspect.json"
        if not results.is_file():
            raise ValueError(f"{folder}: expected a folder that isentrope inspect wrote, with inspect.json")
        return cls(folder, read_fields(results, RERUN_REMEDY, "heatmaps", "entropy", "lengths"))

    @property
    def title(self) -> str:
        """The CosScale, where there is one; else the recipe."""
        theory, text = self.data["theory"], self.data["recipe"]["text"]
        return text if theory is None else f"CosScale {theory['alpha']:g}" + (", windowed" if "window:" in text else "")

    @property
    def caption(self) -> str:
        return fill(f"{self.data['model']['name']}: {self.data['recipe']['text']}".replace("+", " + "), 64)

    @property
    def where(self) -> str:
        return f"layer {self.data['layer']}, {self.data['lengths'][-1]} tokens"

    def heatmap(self, kind: str) -> Any:
        """The cells, those that show nothing masked."""
        array = np.load(self.folder / self.data["heatmaps"][kind]["file"], allow_pickle=False)
        return np.ma.masked_invalid(array)


def draw(folder: Path) -> list[Path]:
    """All figures of one model, beside its inspect.json, as .png and .svg."""
    look = Look.read(folder)
    pictures = {"entropy": _entropy, "focus": _focus, "angles": _angles, "attention": _attention, "rope": _rope}
    with matplotlib.rc_context(RC | LARGE):
        return [path for name, make in pictures.items() for path in _saved(make(look), folder / name)]


def cosscale_panels(folders: list[Path], out: Path) -> list[Path]:
    """Angles on top, ln of the attention weights below on one scale, a column for each model (the paper's f1)."""
    looks = _several(folders)
    with matplotlib.rc_context(RC | LARGE):
        figure, axes = _grid(2, len(looks), head=0.4)
        arrays = [look.heatmap("attention") for look in looks]
        scale = _scale(arrays)
        for look, array, (top, bottom) in zip(looks, arrays, axes.T, strict=True):
            _histogram(top, look, "after", legend=False)
            top.set_title(look.title)
            _image(bottom, look, "attention", array, ATTENTION, scale)
        axes[0, 0].set_ylabel("density")
        figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False)
        _only_first_row_label(axes[1])
        _bar(figure, axes[1], scale, ATTENTION, "ln attention", arrays)
        return _saved(figure, out)


def before_and_after_rope(folders: list[Path], out: Path) -> list[Path]:
    """Scores before the position method on top and after it below, a column for each model (the paper's f7).

    Both of a column are put between 0 and 1 by the least and largest score of the two.
    """
    looks = _several(folders)
    with matplotlib.rc_context(RC | LARGE):
        figure, axes = _grid(2, len(looks))
        for look, column in zip(looks, axes.T, strict=True):
            _scores(column, look)
            column[0].set_title(look.title)
        for row, stage in zip(axes, ("before RoPE", "after RoPE"), strict=True):
            _only_first_row_label(row)
            row[0].set_ylabel(f"{stage}\n\nquery")
        for axis in axes[0]:
            axis.set_xlabel("")
        _bar(figure, axes, Normalize(0, 1), SCORES, "score, from least to largest")
        return _saved(figure, out)


def peak_angles(folders: list[Path], out: Path) -> list[Path]:
    """Where cos θ peaks against CosScale, in theory and measured (the paper's f6)."""
    looks = _several(folders)
    without = [look for look in looks if look.data["theory"] is None]
    if without:
        raise ValueError(f"{without[0].folder}: expected a model with CosScale (cosine scores), got {without[0].title}")
    looks.sort(key=lambda look: look.data["theory"]["alpha"])
    alpha = [look.data["theory"]["alpha"] for look in looks]
    lines = (
        ("η*, Eq. 18", [look.data["theory"]["peak_cosine"] for look in looks], INK, "solid", ""),
        (
            "measured before RoPE, weighted by its softmax",
            _peaks(looks, "before", "attention"),
            COLOURS[1],
            DASHES,
            "o",
        ),
        ("measured after RoPE, weighted by attention", _peaks(looks, "after", "attention"), COLOURS[2], DASHES, "s"),
        ("measured before RoPE, all pairs alike", _peaks(looks, "before", "pairs"), GREY, DOTS, "^"),
    )
    with matplotlib.rc_context(RC | LARGE):
        figure = Figure(figsize=(7.4, 5.6), layout="constrained")
        axes = figure.subplots()
        for label, y, colour, dashes, marker in lines:
            axes.plot(alpha, y, color=colour, linestyle=dashes, marker=marker, linewidth=1.6, label=label)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(FixedLocator(alpha))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_ylim(top=1.02)
        axes.set(xlabel="CosScale α", ylabel="cos θ at the peak", title=f"Peak of cos θ, {looks[0].where}")
        axes.grid(color="#E6E6E6", linewidth=0.6)
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", frameon=False, fontsize=11)
        return _saved(figure, out)


def attention_at(folders: list[Path], out: Path) -> list[Path]:
    """ln of the attention weights of each model, with its inset where it has one (the paper's f2)."""
    looks = _several(folders)
    panels = sum(1 + ("inset" in look.data["heatmaps"]) for look in looks)
    with matplotlib.rc_context(RC | LARGE):
        figure, axes = _grid(1, panels, bars=len(looks))
        rest = iter(axes[0])
        for letter, look in zip("abcdefghijklmnopqrstuvwxyz", looks, strict=False):
            _with_inset(figure, rest, look, f"({letter}) {look.title}")
        return _saved(figure, out)


def _entropy(look: Look) -> Figure:
    """Entropy against length, a line for each layer."""
    data, lengths = look.data, look.data["lengths"]
    figure = Figure(figsize=(8.2, 5.4), layout="constrained")
    axes = figure.subplots()
    means = np.array([[np.mean(heads) for heads in row] for row in data["entropy"]])
    highest = np.array(data["uniform"]).max(1)
    _length_axis(axes, lengths)
    edges = np.geomspace(*axes.get_xlim(), 50)
    axes.plot(edges, np.log(edges), color=GREY, linewidth=1.2)
    labels = [(log(lengths[-1]), "ln n", GREY)]
    if not np.allclose(highest, np.log(lengths), atol=1e-3):
        axes.plot(lengths, highest, color=GREY, linewidth=1.2, linestyle=DASHES)
        labels.append((float(highest[-1]), "all visible keys alike", GREY))
    colours = matplotlib.colormaps[ATTENTION](np.linspace(0, 0.9, means.shape[1]))
    for layer, colour, line in zip(data["layers"], colours, means.T, strict=True):
        axes.plot(lengths, line, color=colour, marker="o", markersize=4, linewidth=1.6)
        labels.append((float(line[-1]), f"layer {layer}", colour))
    if data["train_length"] in lengths:
        axes.axvline(data["train_length"], color=GREY, linestyle=DOTS, linewidth=1.6, label="training length")
        axes.legend(loc="upper left", frameon=False, fontsize=11)
    axes.set_ylim(0, log(lengths[-1]) * 1.12)
    axes.set(xlabel="tokens n", ylabel="attention entropy (nats)", title=look.caption)
    if means.shape[1] > NAMED_LAYERS:
        labels = [label for label in labels if not label[1].startswith("layer")]
        scale = Normalize(data["layers"][0], data["layers"][-1] / 0.9)
        figure.colorbar(ScalarMappable(scale, ATTENTION), ax=axes, label="layer", pad=0.16)
    _label_ends(axes, lengths[-1], labels)
    return figure


def _focus(look: Look) -> Figure:
    """Which layers and heads are focused or diffuse: entropy as a share of that of uniform attention."""
    data = look.data
    shares = [
        [[h / max(most, 1e-9) for h in heads] for heads, most in zip(row, uniform, strict=True)]
        for row, uniform in zip(data["entropy"], data["uniform"], strict=True)
    ]
    single = all(len(heads) == 1 for heads in shares[-1])
    if single:  # then there is room for every length
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
    axes.imshow(np.ma.masked_invalid(table), cmap=ATTENTION, norm=scale, aspect="auto")
    axes.set_facecolor(UNSEEN)
    axes.set_xticks(range(len(names)), names)
    axes.set_yticks(range(len(table)), [str(layer) for layer in data["layers"]])
    axes.set(xlabel=label, ylabel="layer", title="Entropy, uniform attention = 1")
    if table.size <= 240:
        for (row, column), share in np.ndenumerate(table):
            colour = "white" if share < 0.6 else "black"
            axes.text(column, row, f"{share:.2f}", ha="center", va="center", color=colour, fontsize=10)
    figure.colorbar(ScalarMappable(scale, ATTENTION), ax=axes, label="focused → diffuse")
    return figure


def _angles(look: Look) -> Figure:
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    row = figure.subplots(1, 2, sharex=True)
    for axes, stage, title in zip(row, ("before", "after"), ("before the position method", "after it"), strict=True):
        _histogram(axes, look, stage, legend=stage == "before")
        axes.set_title(title)
    row[0].set_ylabel("density")
    figure.suptitle(f"{look.caption}\n{look.where}", fontsize=11)
    return figure


def _histogram(axes: Axes, look: Look, stage: str, legend: bool) -> None:
    found = look.data["angles"][stage]
    edges = np.linspace(-1, 1, DRAWN_BINS + 1)
    filled: dict[str, Any] = {"fill": True, "color": COLOURS[1], "alpha": 0.75, "linewidth": 0}
    outlined: dict[str, Any] = {"color": INK, "linewidth": 1.3}
    kinds = (("attention", "weighted by attention", filled), ("pairs", "all visible pairs", outlined))
    for key, label, style in kinds:
        mass = np.array(found[key]).reshape(DRAWN_BINS, -1).sum(1)
        density = mass / mass.sum() * DRAWN_BINS / 2
        axes.stairs(density, edges, label=label, **style)
    if look.data["theory"] is not None:
        peak = look.data["theory"]["peak_cosine"]
        axes.axvline(peak, color=GREY, linestyle=DASHES, linewidth=1.3, label="η*, Eq. 18")
    axes.set(xlabel="cos θ", xlim=(-1, 1), xticks=(-1, -0.5, 0, 0.5, 1) if _roomy(axes) else (-1, 0, 1))
    axes.set_ylim(bottom=0)
    if not _roomy(axes):
        axes.set_yticks([])
    if legend:
        axes.legend(frameon=False, fontsize=11, loc="upper left")


def _attention(look: Look) -> Figure:
    figure, axes = _grid(1, 1 + ("inset" in look.data["heatmaps"]), head=0.7)
    _with_inset(figure, iter(axes[0]), look, f"ln attention, {look.where}")
    figure.suptitle(look.caption, fontsize=11)
    return figure


def _with_inset(figure: Figure, rest: Any, look: Look, title: str) -> None:
    """A heatmap and, on the next panel, its inset: then both have the inset's scale."""
    array, axes = look.heatmap("attention"), [next(rest)]
    has_inset = "inset" in look.data["heatmaps"]
    inset = look.heatmap("inset") if has_inset else array
    scale = _scale([inset])
    _image(axes[0], look, "attention", array, ATTENTION, scale)
    axes[0].set_title(title)
    if has_inset:
        axes.append(next(rest))
        at = look.data["heatmaps"]["inset"]
        _image(axes[1], look, "inset", inset, ATTENTION, scale)
        axes[1].set_title(f"queries {at['first']}–{at['last'] - 1}, keys {at['low']}–{at['high'] - 1}")
        sides = at["high"] - at["low"], at["last"] - at["first"]
        axes[0].add_patch(Rectangle((at["low"], at["first"]), *sides, fill=False, edgecolor="white", linewidth=3.2))
        axes[0].add_patch(Rectangle((at["low"], at["first"]), *sides, fill=False, edgecolor="#CC3311", linewidth=1.6))
    _bar(figure, np.array(axes), scale, ATTENTION, "ln attention", [array, inset])


def _rope(look: Look) -> Figure:
    figure, axes = _grid(1, 2, head=0.9)
    _scores(axes[0], look)
    for panel, title in zip(axes[0], ("scores before the position method", "scores after it"), strict=True):
        panel.set_title(title)
    _only_first_row_label(axes[0])
    _bar(figure, axes, Normalize(0, 1), SCORES, "from least to largest")
    figure.suptitle(f"{look.caption}\n{look.where}", fontsize=11)
    return figure


def _scores(axes: Any, look: Look) -> None:
    """Scores before and after the position method, between 0 and 1 by the least and largest of both."""
    maps = look.data["heatmaps"]
    kinds = ("scores_before", "scores_after")
    seen = [maps[kind] for kind in kinds if maps[kind]["least"] is not None]
    low, high = min((x["least"] for x in seen), default=0.0), max((x["largest"] for x in seen), default=1.0)
    for panel, kind in zip(axes, kinds, strict=True):
        _image(panel, look, kind, (look.heatmap(kind) - low) / max(high - low, 1e-9), SCORES, Normalize(0, 1))


def _image(axes: Axes, look: Look, kind: str, array: Any, colours: str, scale: Normalize) -> None:
    at = look.data["heatmaps"][kind]
    extent = (at["low"], at["high"], at["last"], at["first"])
    axes.imshow(array, cmap=colours, norm=scale, extent=extent, interpolation="nearest", aspect="auto")
    axes.set_facecolor(UNSEEN)
    axes.set_box_aspect((at["last"] - at["first"]) / (at["high"] - at["low"]))
    axes.set(xlabel="key", ylabel="query")
    for axis, start, end in ((axes.xaxis, at["low"], at["high"]), (axes.yaxis, at["first"], at["last"])):
        few = FixedLocator([start, (start + end) // 2])  # without the last, which would run into the next panel's first
        axis.set_major_locator(MaxNLocator(5, integer=True) if _roomy(axes) else few)


def _roomy(axes: Axes) -> bool:
    place = axes.get_subplotspec()
    return place is None or place.get_gridspec().ncols <= FEW


def _scale(arrays: list[Any]) -> Normalize:
    """One scale for all, down to weights that do not matter."""
    values = np.ma.concatenate([array.compressed() for array in arrays])
    if not values.size:
        return Normalize(FAINTEST, 0)
    return Normalize(max(float(values.min()), FAINTEST), max(float(values.max()), FAINTEST + 1))


def _bar(
    figure: Figure, axes: Any, scale: Normalize, colours: str, label: str, arrays: list[Any] | None = None
) -> None:
    """A colour bar, pointed where some values lie beyond it."""
    values = [array for array in arrays or [] if array.count()]
    under, over = any(x.min() < scale.vmin for x in values), any(x.max() > scale.vmax for x in values)
    extend = "both" if under and over else "min" if under else "max" if over else "neither"
    figure.colorbar(ScalarMappable(scale, colours), ax=axes, label=label, extend=extend, pad=0.02)


def _peaks(looks: list[Look], stage: str, weighted: str) -> list[float]:
    return [look.data["angles"][stage][f"{weighted}_peak"] for look in looks]


def _several(folders: list[Path]) -> list[Look]:
    if not folders:
        raise ValueError("folders: expected one or more that isentrope inspect wrote, got none")
    return [Look.read(folder) for folder in folders]


def _grid(rows: int, columns: int, size: float = HEATMAP, bars: int = 1, head: float = 0.0) -> tuple[Figure, Any]:
    """Square panels of this size in inches, with room for their labels, colour bars and a heading."""
    many = columns > FEW
    size = min(size, max(1.8, 12 / columns)) if many else size  # smaller, so that the text beside them stays legible
    width, height = (size + (0.25 if many else 0.7)) * columns + 1.2 * bars, (size + 0.85) * rows + head
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.09, h_pad=0.07)  # type: ignore[union-attr, call-arg]
    return figure, figure.subplots(rows, columns, squeeze=False)


def _only_first_row_label(row: Any) -> None:
    """Queries are named on the left alone."""
    for axes in row[1:]:
        axes.set_ylabel("")
        axes.tick_params(labelleft=False)


def _saved(figure: Figure, out: Path) -> list[Path]:
    return [save(figure, out.with_name(out.name + suffix)) for suffix in (".png", ".svg")]
