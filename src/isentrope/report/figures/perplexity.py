"""Perplexity against position in the text."""

from __future__ import annotations

from itertools import pairwise
from math import exp, inf
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from isentrope.evaluation.frontier import KindLosses
from isentrope.evaluation.results import read_results
from isentrope.report.figures.style import COLOURS, DASHES, DOTS, INK, RC_PARAMS, save_figure
from isentrope.utils.files import RERUN_REMEDY

MAX_RATIO_TO_BEST = 1.5  # of the worst buckets: recipes up to here are in the second panel
MARKERS = "os^D"
TEMPERATURES = (
    "infoscale", "infoscaleexact", "logn", "power", "yarntemperature", "loglength", "softmaxplus", "llama4", "fitted",
    "ssmax", "adaptive", "scaleinvariant", "constant",
)  # fmt: skip
SHARE = "share"


def draw_perplexity(results: Path) -> list[Path]:
    """Draw perplexity against position for each recipe of `perplexity.json`, beside it: all, and those that hold.

    A colour (and, when colours run out, a marker) stands for a position method, a dash pattern for temperatures
    and a share law. Where a run was stopped, recipes are compared on the texts that all of them have read; there is no
    figure without one.
    """
    data = read_results(results, RERUN_REMEDY)
    edges, rows = data["config"]["edges"], _select_rows(data)
    if not rows:
        return []
    middles = [(a + b) / 2 for a, b in pairwise(edges)]
    methods: dict[str, tuple[str, str]] = {}
    temperatures: dict[str, Any] = {}
    patterns = ("-", DASHES, DOTS, "-.")
    limit = MAX_RATIO_TO_BEST * min(max(row["perplexity"]) for row in rows)
    with matplotlib.rc_context(RC_PARAMS):
        figure = Figure(figsize=(13, 5.2), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(1, 1.5))
        for row in rows:
            method, temperature = _split_recipe(row["recipe"])
            repeat, index = divmod(len(methods), len(COLOURS))
            colour, marker = methods.setdefault(method, (COLOURS[index], MARKERS[repeat % len(MARKERS)]))
            pattern = temperatures.setdefault(temperature, patterns[len(temperatures) % len(patterns)])
            style = {"color": colour, "linestyle": pattern, "marker": marker, "markersize": 4, "linewidth": 1.4}
            # plain is never among them: where it nearly holds, it would still flatten the others
            stable = method != "plain" and max(row["perplexity"]) <= limit
            for axes in (left, right) if stable else (left,):
                axes.plot(middles, row["perplexity"], **style)
        left.set_yscale("log")
        texts = max(row["texts"] for row in rows)
        figure.suptitle(
            f"Perplexity by position: {data['model']['name']}, {texts} text{'s' if texts > 1 else ''}",
            x=0.01,
            ha="left",
        )
        left.set_title("All recipes")
        right.set_title(f"Those that hold, within {MAX_RATIO_TO_BEST:g} × of the best; without plain")
        for axes in (left, right):
            # labels any closer would overlap
            ticks = [edge for edge, after in pairwise((*edges, inf)) if after - edge >= 0.05 * edges[-1]]
            axes.set_xticks(ticks, [f"{n // 1024}k" if n >= 1024 else str(n) for n in ticks], rotation=45)
            axes.set_xlabel("position in the text (tokens)")
        left.set_ylabel("perplexity")
        handles = [
            Line2D([], [], color=colour, marker=marker, markersize=4, label=name)
            for name, (colour, marker) in methods.items()
        ]
        handles += [Line2D([], [], color=INK, linestyle=line, label=name) for name, line in temperatures.items()]
        right.legend(handles=handles, frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
        return save_figure(figure, results.with_suffix(""))


def _select_rows(data: dict[str, Any]) -> list[dict[str, Any]]:
    """Return perplexity by recipe, over the same texts for all."""
    rows: list[dict[str, Any]] = data["rows"]
    if len({row["texts"] for row in rows}) < 2:
        return rows
    named = {text["sha256"] for text in data["texts"]}  # a file may hold others from before
    losses = KindLosses(data | {"cells": [cell for cell in data["cells"] if cell["text"] in named]})
    selected = []
    for recipe in losses.losses if losses.texts else ():
        means = [losses.mean(recipe, bucket) for bucket in range(len(losses.counts))]
        perplexity = [exp(mean) for mean in means if mean is not None]
        selected.append({"recipe": recipe, "texts": len(losses.texts), "perplexity": perplexity})
    return selected


def _split_recipe(recipe: str) -> tuple[str, str]:
    """Split a recipe's text into its method and its laws: temperatures and a share law."""
    parts = [recipe] if recipe.startswith("layers:") else recipe.split("+")
    laws = [part for part in parts if part.startswith((*TEMPERATURES, SHARE))]
    method = "+".join(part for part in parts if part not in laws) or "plain"
    return method, " ".join(f"+ {_shorten_law(law)}" for law in laws) or "no law"


def _shorten_law(law: str) -> str:
    """Return a law's name, with the keys it is for and a β that is one number."""
    name, _, options = law.partition(":")
    values = [option.partition("=")[2] for option in options.split(",") if option.startswith(("keys=", "beta="))]
    return " ".join([name, *(value for value in values if "(" not in value)])
