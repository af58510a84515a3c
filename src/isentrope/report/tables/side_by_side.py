"""A text beyond the training length, plain and extended, in a terminal."""

from __future__ import annotations

from itertools import pairwise
from math import exp, log
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from isentrope.report.figures.side_by_side import wrap_text
from isentrope.report.tables.numbers import format_length, format_perplexity
from isentrope.report.tables.style import TABLE_STYLE
from isentrope.utils.files import RERUN_REMEDY, read_fields

STYLES = ("red", "green", "blue", "magenta", "yellow")
BAR_WIDTH = 24


def build_side_by_side(results: Path) -> Group:
    """Build a chart of perplexity by position and, side by side, what each recipe writes next.

    Args:
        results: a `side_by_side.json`.
    """
    data = read_fields(results, RERUN_REMEDY, "rows", "edges", "length", "text", "model", "prompt_end")
    trained = data["train_length"]
    times = f" · trained at {trained}, {data['length'] / trained:.3g} times as far" if trained else ""
    title = Text.assemble((f"{data['model']['name']} reads {data['length']} tokens of {data['text']['name']}", "bold"))
    title.append(times)
    return Group(title, _build_chart(data), _build_texts(data))


def _build_chart(data: dict[str, Any]) -> Table:
    """Draw bars of perplexity on a logarithmic scale: a row for each bucket of positions, a column for each recipe."""
    table = Table(caption="Perplexity by position, bars on a logarithmic scale; lower is better.", **TABLE_STYLE)
    table.add_column("position")
    columns = [[exp(loss) for loss in row["loss"]] for row in data["rows"]]
    highest = log(max(value for column in columns for value in column) + 1e-9)
    for row in data["rows"]:
        table.add_column(row["recipe"], max_width=BAR_WIDTH + 8, overflow="fold")
    for index, (low, high) in enumerate(pairwise(data["edges"])):
        cells: list[RenderableType] = [f"{format_length(low)}–{format_length(high)}"]
        for column, style in zip(columns, STYLES * len(columns), strict=False):
            size = round(BAR_WIDTH * max(log(column[index]), 0) / highest) if highest > 0 else 0
            cells.append(Text.assemble((f"{format_perplexity(column[index]):>6} ", ""), ("█" * max(size, 1), style)))
        table.add_row(*cells)
    return table


def _build_texts(data: dict[str, Any]) -> Table:
    """Put what the author and each recipe wrote after the text into panels beside each other."""
    table = Table.grid(expand=False, padding=(0, 1))
    entries = [("the author", data["written_by_author"], "white")]
    entries += [
        (row["recipe"], row["continuation"], style)
        for row, style in zip(data["rows"], STYLES * len(data["rows"]), strict=False)
    ]
    prompt = data["prompt_end"].rpartition("\n")[2]  # of the line to be continued
    panels = [
        Panel(Text(prompt, "dim") + Text("\n".join(wrap_text(text, 36, 8))), title=Text(label, style), width=40)
        for label, text, style in entries
    ]
    table.add_row(*panels)
    return table
