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
from isentrope.utils.files import RERUN_REMEDY, read_fields

STYLE: dict[str, Any] = {
    "box": box.SIMPLE_HEAD,
    "title_style": "bold",
    "title_justify": "left",
    "caption_justify": "left",
    "pad_edge": False,
    "collapse_padding": True,
}
# lengths a table shows, so that it fits 80 columns; the results file has them all
SHOWN = 4


def laws(results: Path) -> Table:
    """One row for each law of `laws.json`: measured entropy at a few lengths, its drift and the theory's, and τ."""
    data = read_fields(results, RERUN_REMEDY)
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
        **STYLE,
        min_width=72,  # the title in one line
    )
    shown = _thinned(lengths)
    table.add_column("law", no_wrap=True)
    for n in shown:
        table.add_column(f"n={n}" if n == first else str(n), justify="right")
    for name in ("drift", "theory", "τ"):
        table.add_column(name, justify="right")
    rows = {(row["law"], row["n"]): row for row in data["rows"]}
    for law in data["laws"]:
        start, end = rows[law["key"], first], rows[law["key"], last]
        table.add_row(
            law["label"],
            *(f"{rows[law['key'], n]['entropy']:.2f}" for n in shown),
            _signed(end["entropy"] - start["entropy"]),
            _signed(end["theory"] - start["theory"]) + (" " if start["settled"] and end["settled"] else "*"),
            f"{end['tau']:.2f}",
        )
    return table


def _signed(value: float) -> str:
    return f"{round(value, 2) + 0.0:+.2f}"  # + 0.0 makes -0.0 a plain zero


def _thinned(lengths: list[int]) -> list[int]:
    """At most SHOWN of the lengths, evenly, the first and the last among them."""
    step = ceil((len(lengths) - 1) / (SHOWN - 1))
    return [*lengths[:-1:step], lengths[-1]]


def perplexity(results: Path) -> Table:
    """One row for each recipe of `perplexity.json`, one column for each bucket of positions."""
    data = read_fields(results, RERUN_REMEDY)
    edges = data["config"]["edges"]
    texts = len(data["texts"])
    inside = {row["recipe"]: row["percent"] for row in data.get("inside", [])}
    table = Table(
        title=f"Perplexity by position: {data['model']['name']}, {texts} texts",
        caption="The best recipe of each bucket is bold."
        + (" Inside: change inside the training length, red where it costs more than 0.5 %." if inside else ""),
        **STYLE,
    )
    table.add_column("recipe")
    for low, high in pairwise(edges):
        table.add_column(f"{thousands(low)}–{thousands(high)}", justify="right")
    if inside:
        table.add_column("inside", justify="right")
    whole = [row["perplexity"] for row in data["rows"] if row["texts"] == texts]  # others are means over other texts
    best = [min(values) for values in zip(*whole, strict=True)] or [None] * (len(edges) - 1)
    for row in data["rows"]:
        pairs = zip(row["perplexity"], best, strict=True)
        cells = [perplexity_cell(x, bold=x == least) for x, least in pairs]
        if inside:
            cells.append(_inside(inside.get(row["recipe"])))
        table.add_row(named(row, texts), *cells)
    return table


def named(row: Mapping[str, Any], texts: int) -> str:
    """A recipe, with how many of the texts it was measured on where those are not all."""
    return row["recipe"] if row["texts"] == texts else f"{row['recipe']} ({row['texts']} of {texts} texts)"


def _inside(percent: float | None) -> str:
    if percent is None:
        return ""
    return f"[red]{percent:+.2f} %[/red]" if percent > MAX_DEGRADATION_PERCENT else f"{percent:+.2f} %"


def partition(manifest: Path) -> Table:
    """Documents and their lengths in each set of `manifest.json`, as in the paper's appendix A.1."""
    data = read_fields(manifest, RERUN_REMEDY, "statistics", "counts")
    statistics, counts, near = data["statistics"], data["counts"], data["near_duplicates"]
    table = Table(
        title=f"{Path(data['source']['name']).name}: documents over {data['options']['longer_than']} tokens",
        caption=(
            f"{counts['read']} read, {counts['too_short']} too short, {counts['duplicates']} exact duplicates;\n"
            f"{near['documents']} documents in {near['clusters']} clusters of near-duplicates, "
            f"{statistics['left out']['documents']} left out."
        ),
        **STYLE,
        min_width=60,
    )
    shown = ("train", "validation", "test")
    table.add_column("")
    for name in shown:
        table.add_column(name.capitalize(), justify="right")
    rows = {"number of samples": "documents", "average length": "mean", "min length": "min", "max length": "max"}
    for label, key in rows.items():
        table.add_row(label, *(f"{statistics[name][key]:.0f}" for name in shown))
    return table


def perplexity_cell(x: float, bold: bool) -> str:
    text = f"{x:.3g}" if x >= 100 else f"{x:.2f}"
    return f"[bold]{text}[/bold]" if bold else text


def thousands(n: int) -> str:
    return f"{n // 1024}k" if n and n % 1024 == 0 else str(n)


# the laws of the paper's first table, and ours
FORMULAS = {
    "constant": "1",
    "loglength": "ln n",
    "softmaxplus": "ln n / ln 512",
    "logn": "ln n / ln n_tr",
    "yarn": "(0.1 ln(n / n_tr) + 1)²",
    "infoscale": "√(f(n) / f(n_tr)), f(m) = 1 - e^{2ε/d} m^{-2/d}",
    "exact_matched": "g(n) / g(n_tr), g = √(1-y) / y, y = e^{-2(ln m - ε)/d}",
}


def formulas(results: Path) -> Table:
    """Each law as a formula, and τ at the lengths of `laws.json`."""
    data = read_fields(results, RERUN_REMEDY)
    lengths = data["lengths"][:: max(1, len(data["lengths"]) // SHOWN)]
    table = Table(title="The score is multiplied by τ(n)", **STYLE)
    for heading in ("law", "τ(n)", *(f"n={n}" for n in lengths)):
        table.add_column(heading, justify="right" if heading.startswith("n=") else "left")
    for law in data["laws"]:
        if law["key"] in FORMULAS:
            tau = {row["n"]: row["tau"] for row in data["rows"] if row["law"] == law["key"]}
            table.add_row(law["label"], FORMULAS[law["key"]], *(f"{tau[n]:.3f}" for n in lengths))
    return table


def plans(found: list[dict[str, Any]]) -> Table:
    """The studies there are."""
    table = Table(**STYLE)
    for heading in ("plan", "in the paper", "what", "trainings", "cells"):
        table.add_column(heading, justify="right" if heading in ("trainings", "cells") else "left")
    for row in found:
        table.add_row(row["name"], row["label"], row["title"], str(row["trainings"] or ""), str(row["cells"] or ""))
    return table
