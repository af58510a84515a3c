"""Fitted temperatures of several models against the laws, a panel for each model."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, log
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from isentrope.report.best_temperatures import FittedModel, compute_laws
from isentrope.report.figures.style import COLOURS, INK, RC_PARAMS, save_figure

COLUMNS = 2
LINE_POINTS = 60  # of each law
MARKERS = "osD^vP"


def draw_fitted_models(models: Sequence[FittedModel], out: Path) -> list[Path]:
    """Draw the best τ against ln s, s = n / n_tr, with every law as a line, as `out`.png and .svg.

    Args:
        models: fitted temperatures, a panel each: laws depend on n_tr and the head size.
        out: path without suffix.

    Returns:
        The files written.
    """
    rows = ceil(len(models) / COLUMNS)
    methods = list(dict.fromkeys(method for model in models for method in model.fits))
    with matplotlib.rc_context(RC_PARAMS):
        figure = Figure(figsize=(4.2 * COLUMNS + 1.6, 3.1 * rows), layout="constrained")
        panels = np.atleast_1d(figure.subplots(rows, COLUMNS)).ravel()
        for axes in panels[len(models) :]:
            axes.set_visible(False)
        labelled = dict[str, Line2D]()
        for axes, model in zip(panels, models, strict=False):
            lengths = np.geomspace(model.train_length, model.lengths[-1], LINE_POINTS)
            laws = compute_laws([round(n) for n in lengths], model.train_length, model.head_size)
            for index, (name, values) in enumerate(laws.items()):
                x = [log(n / model.train_length) for n in values]
                (line,) = axes.plot(x, list(values.values()), color=COLOURS[index % len(COLOURS)], linewidth=1.4)
                labelled.setdefault(name, line)
            axes.axhline(1, color="#BBBBBB", linewidth=0.8)
            for method, fit in model.fits.items():
                x, marker = [log(n / model.train_length) for n in sorted(fit)], MARKERS[methods.index(method)]
                (points,) = axes.plot(x, [fit[n] for n in sorted(fit)], marker, color=INK, markersize=5.5)
                labelled.setdefault(f"fitted: {method}", points)
            axes.set_title(f"{model.name}: n_tr {model.train_length}, d {model.head_size}", fontsize=9)
            axes.set_xlabel("ln s, s = length / training length")
            axes.set_ylabel("τ")
            axes.grid(color="#E6E6E6", linewidth=0.6)
        figure.legend(list(labelled.values()), list(labelled), loc="outside right center", frameon=False, fontsize=8)
        return save_figure(figure, out)
