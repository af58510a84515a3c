"""The table of perplexities by position."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.table import Table

from isentrope.evaluation.ranking import MAX_DEGRADATION_PERCENT
from isentrope.evaluation.results import read_results
from isentrope.report.tables.numbers import format_length, format_perplexity
from isentrope.report.tables.style import TABLE_STYLE
from isentrope.utils.files import RERUN_REMEDY


def build_perplexity_table(results: Path) -> Table:
    """Build a table of `perplexity.json`: a row for each recipe, a column for each bucket of positions."""
    data = read_results(results, RERUN_REMEDY)
    edges = data["config"]["edges"]
    texts = len(data["texts"])
    inside = {row["recipe"]: row["percent"] for row in data.get("inside", [])}
    table = Table(
        title=f"Perplexity by position: {data['model']['name']}, {texts} text{'s' if texts > 1 else ''}",
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


def style_perplexity(x: float, bold: bool) -> str:
    return f"[bold]{format_perplexity(x)}[/bold]" if bold else format_perplexity(x)
