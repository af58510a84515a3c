"""Results as tables for a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from math import ceil
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from isentrope.evaluation.ranking import MAX_DEGRADATION_PERCENT
from isentrope.evaluation.results import read_results
from isentrope.report.tables.numbers import format_length, format_perplexity
from isentrope.utils.files import RERUN_REMEDY, read_fields

TABLE_STYLE: dict[str, Any] = {
    "box": box.SIMPLE_HEAD,
    "title_style": "bold",
    "title_justify": "left",
    "caption_justify": "left",
    "pad_edge": False,
    "collapse_padding": True,
}
MAX_LENGTHS = 4  # so that a table fits 80 columns


def build_laws_table(results: Path) -> Table:
    """Build a table of `laws.json`: entropy of each law at a few lengths, its drift and the theory's, and τ."""
    data = read_results(results, RERUN_REMEDY)
    config, lengths = data["config"], data["lengths"]
    first, last = lengths[0], lengths[-1]
    error = max(row["standard_error"] for row in data["rows"])
    table = Table(
        title=f"Attention entropy H (nats) over n keys, scores {config['alpha']:g} cos θ, d = {config['head_dim']}",
        caption=(
            f"H: mean over {config['queries']} queries, random unit vectors; standard error ≤ {error:.2f}.\n"
            f"drift: H({last}) - H({first}), measured. theory: the same for H = ln n - KL;\n"
            "* where too few keys carry the weight for it to hold.\n"
            f"τ: at n = {last}. All laws are the bare formulas (clamp=False)."
        ),
        **TABLE_STYLE,
        min_width=72,  # the title in one line
    )
    columns = select_lengths(lengths)
    table.add_column("law", no_wrap=True)
    for n in columns:
        table.add_column(f"n={n}" if n == first else str(n), justify="right")
    for name in ("drift", "theory", "τ"):
        table.add_column(name, justify="right")
    rows = {(row["law"], row["n"]): row for row in data["rows"]}
    for law in data["laws"]:
        start, end = rows[law["key"], first], rows[law["key"], last]
        table.add_row(
            law["label"],
            *(f"{rows[law['key'], n]['entropy']:.2f}" for n in columns),
            _format_drift(end["entropy"] - start["entropy"]),
            _format_drift(end["theory"] - start["theory"]) + (" " if start["settled"] and end["settled"] else "*"),
            f"{end['tau']:.2f}",
        )
    return table


def _format_drift(value: float) -> str:
    return f"{round(value, 2) + 0.0:+.2f}"  # + 0.0 makes -0.0 a plain zero


def select_lengths(lengths: list[int]) -> list[int]:
    """Select at most MAX_LENGTHS lengths, evenly, with the first and the last."""
    step = ceil((len(lengths) - 1) / (MAX_LENGTHS - 1))
    return [*lengths[:-1:step], lengths[-1]]


def build_perplexity_table(results: Path) -> Table:
    """Build a table of `perplexity.json`: a row for each recipe, a column for each bucket of positions."""
    data = read_results(results, RERUN_REMEDY)
    edges = data["config"]["edges"]
    texts = len(data["texts"])
    inside = {row["recipe"]: row["percent"] for row in data.get("inside", [])}
    table = Table(
        title=f"Perplexity by position: {data['model']['name']}, {texts} texts",
        caption="The best recipe of each bucket is bold."
        + (" Inside: change inside the training length, red above 0.5 %." if inside else ""),
        **TABLE_STYLE,
    )
    table.add_column("recipe")
    for low, high in pairwise(edges):
        table.add_column(f"{format_length(low)}–{format_length(high)}", justify="right")
    if inside:
        table.add_column("inside", justify="right")
    complete = [row["perplexity"] for row in data["rows"] if row["texts"] == texts]  # means over the same texts
    best = [min(values) for values in zip(*complete, strict=True)] or [None] * (len(edges) - 1)
    for row in data["rows"]:
        pairs = zip(row["perplexity"], best, strict=True)
        cells = [style_perplexity(x, bold=x == lowest) for x, lowest in pairs]
        if inside:
            cells.append(_format_degradation(inside.get(row["recipe"])))
        table.add_row(label_recipe(row, texts), *cells)
    return table


def label_recipe(row: Mapping[str, Any], texts: int) -> str:
    """Return a recipe's text, with the number of texts if it was not measured on all."""
    return row["recipe"] if row["texts"] == texts else f"{row['recipe']} ({row['texts']} of {texts} texts)"


def _format_degradation(percent: float | None) -> str:
    if percent is None:
        return ""
    return f"[red]{percent:+.2f} %[/red]" if percent > MAX_DEGRADATION_PERCENT else f"{percent:+.2f} %"


def build_partition_table(manifest: Path) -> Table:
    """Build a table of the documents and lengths in each set of `manifest.json`, as in the paper's appendix A.1."""
    data = read_fields(manifest, RERUN_REMEDY, "statistics", "counts")
    statistics, counts, near = data["statistics"], data["counts"], data["near_duplicates"]
    table = Table(
        title=f"{Path(data['source']['name']).name}: documents over {data['options']['longer_than']} tokens",
        caption=(
            f"{counts['read']} read, {counts['too_short']} too short, {counts['duplicates']} exact duplicates;\n"
            f"{near['documents']} documents in {near['clusters']} clusters of near-duplicates, "
            f"{statistics['left out']['documents']} left out."
        ),
        **TABLE_STYLE,
        min_width=60,
    )
    sets = ("train", "validation", "test")
    table.add_column("")
    for name in sets:
        table.add_column(name.capitalize(), justify="right")
    rows = {"number of samples": "documents", "average length": "mean", "min length": "min", "max length": "max"}
    for label, key in rows.items():
        table.add_row(label, *(f"{statistics[name][key]:.0f}" for name in sets))
    return table


def style_perplexity(x: float, bold: bool) -> str:
    return f"[bold]{format_perplexity(x)}[/bold]" if bold else format_perplexity(x)


# laws of the paper's first table, and this project's
FORMULAS = {
    "constant": "1",
    "loglength": "ln n",
    "softmaxplus": "ln n / ln 512",
    "logn": "ln n / ln n_tr",
    "yarn": "(0.1 ln(n / n_tr) + 1)²",
    "infoscale": "√(f(n) / f(n_tr)), f(m) = 1 - e^{2ε/d} m^{-2/d}",
    "exact_matched": "g(n) / g(n_tr), g = √(1-y) / y, y = e^{-2(ln m - ε)/d}",
}


def build_formulas_table(results: Path) -> Table:
    """Build a table of each law's formula and its τ at the lengths of `laws.json`."""
    data = read_results(results, RERUN_REMEDY)
    lengths = data["lengths"][:: max(1, len(data["lengths"]) // MAX_LENGTHS)]
    table = Table(title="The score is multiplied by τ(n)", **TABLE_STYLE)
    for heading in ("law", "τ(n)", *(f"n={n}" for n in lengths)):
        table.add_column(heading, justify="right" if heading.startswith("n=") else "left")
    for law in data["laws"]:
        if law["key"] in FORMULAS:
            tau = {row["n"]: row["tau"] for row in data["rows"] if row["law"] == law["key"]}
            table.add_row(law["label"], FORMULAS[law["key"]], *(f"{tau[n]:.3f}" for n in lengths))
    return table


def build_plans_table(descriptions: list[dict[str, Any]]) -> Table:
    """Build a table of plans: their names, what they measure and how large they are."""
    table = Table(**TABLE_STYLE)
    for heading in ("plan", "in the paper", "what", "trainings", "cells"):
        table.add_column(heading, justify="right" if heading in ("trainings", "cells") else "left")
    for row in descriptions:
        table.add_row(row["name"], row["label"], row["title"], str(row["trainings"] or ""), str(row["cells"] or ""))
    return table
