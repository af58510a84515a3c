"""The section of a page that compares many recipes of one causal model: leaderboard, frontier, provenance."""

from __future__ import annotations

from html import escape
from itertools import pairwise
from pathlib import Path

from isentrope.evaluation.frontier import COMPARISON_FILE, ComparisonBoard, build_board
from isentrope.report.figures.frontier import draw_frontier
from isentrope.report.html.fragments import MIME_TYPES, render_details, render_figure, render_table
from isentrope.report.load import find_result_folders
from isentrope.report.tables.comparison import (
    COST,
    Column,
    build_columns,
    describe_ceiling,
    explain_columns,
    write_comparison_tables,
)
from isentrope.report.tables.numbers import format_bucket, format_perplexity
from isentrope.utils.files import RERUN_REMEDY, read_fields

CAPTION = (
    "Retrieval against perplexity, both past the training length: up and to the left is better. Filled points are on "
    "the front, where no other recipe is better in both; lines are 95 % intervals."
)


def find_comparison_folders(folder: Path) -> list[Path]:
    """Find folders that `isentrope compare` wrote: the folder itself, or those below it."""
    return find_result_folders(folder, COMPARISON_FILE)


def read_comparison_title(folder: Path) -> str:
    return str(read_fields(folder / COMPARISON_FILE, RERUN_REMEDY, "title")["title"])


def write_comparison(folder: Path) -> list[Path]:
    """Write leaderboard.json, leaderboard.md and the figure of the frontier beside the results."""
    board = build_board(folder)
    return [*write_comparison_tables(board, folder), *draw_frontier(board, folder)]


def render_comparison(folder: Path, name: str) -> str:
    """Render the section of one comparison; its figure is read from the folder."""
    board = build_board(folder)
    figures = {suffix: path for suffix in MIME_TYPES if (path := folder / f"frontier{suffix}").is_file()}
    figure = f"<h3>Frontier</h3>{render_figure(figures, CAPTION)}" if figures else ""
    left_out = render_details("Recipes left out", board["left_out"])
    settings = {key: board[key] for key in ("model", "train_length", "edges", "texts", "cells")}
    return (
        f'<section class="plan" id="{name}" aria-labelledby="{name}-title">'
        f'<p class="eyebrow">{escape(board["model"]["name"])}</p><h2 id="{name}-title">{escape(board["title"])}</h2>'
        f"{render_sheet(board)}{figure}{_render_positions(board)}"
        f"<h3>Configuration and provenance</h3>{left_out}{render_details('Run', board['run'])}"
        f"{render_details('Measured', settings)}</section>\n"
    )


def render_sheet(board: ComparisonBoard) -> str:
    """Render the table that the page's script sorts, with the ceiling under it."""
    columns = build_columns(board)
    groups: list[tuple[str, int]] = []
    for column in columns:
        last = groups[-1] if groups else ("", 0)
        groups[len(groups) - (last[0] == column.group) :] = [
            (column.group, last[1] + 1 if last[0] == column.group else 1)
        ]
    over = "".join(f'<th scope="colgroup" colspan="{count}">{escape(group)}</th>' for group, count in groups)
    heads = "".join(_render_head(column) for column in columns)
    body = []
    for i, row in enumerate(board["rows"]):
        text = f"{row['number']}. {row['recipe']}"
        breakable = escape(text).replace("+", "<wbr>+").replace(",", ",<wbr>").replace(":", ":<wbr>")
        label = f"<b>{breakable}</b>" if row["front"] else breakable
        cells = "".join(_render_cell(column, i) for column in columns)
        body.append(f'<tr><th scope="row" data-v="{escape(text)}">{label}</th>{cells}</tr>')
    own = "".join(f"<td>{escape(column.ceiling)}</td>" for column in columns)
    first = '<button type="button" data-first="ascending" aria-label="Sort by rank">Recipe</button>'
    return (
        '<h3>Leaderboard</h3><div class="sheet recipes" data-show="both"><div class="controls">'
        '<label class="check"><input type="checkbox" data-intervals> intervals</label>'
        '<span class="hint">Press a column’s head to sort; a third time restores the order.</span></div>'
        '<div class="scroll" tabindex="0" role="region" aria-label="Leaderboard, scrolls sideways"><table>'
        f'<thead><tr><td class="corner"></td>{over}</tr><tr><th scope="col" aria-sort="none">{first}</th>{heads}</tr>'
        f'</thead><tbody>{"".join(body)}</tbody><tfoot><tr><th scope="row">{escape(describe_ceiling(board))}</th>{own}'
        f'</tr></tfoot></table></div><p class="caption">{escape(explain_columns(board))}</p></div>'
    )


def _render_positions(board: ComparisonBoard) -> str:
    """Render folded tables of perplexity by position, one for each kind of text."""
    heads = ["Recipe", *(format_bucket(*edges) for edges in pairwise(board["edges"]))]
    folds = []
    for kind in board["texts"]:
        rows = [
            [f"{row['number']}. {row['recipe']}", *map(format_perplexity, row["perplexity"][kind])]
            for row in board["rows"]
            if kind in row["perplexity"]
        ]
        table = render_table([heads, *rows], f"Perplexity by position in {kind}")
        folds.append(f"<details><summary>{escape(kind)}</summary>{table}</details>")
    return f"<h3>Perplexity by position</h3>{''.join(folds)}" if folds else ""


def _render_head(column: Column) -> str:
    first = "ascending" if column.lower_is_better else "descending"
    label = escape(f"Sort by {column.group}: {column.head}")
    return (
        f'<th scope="col" aria-sort="none"><button type="button" data-first="{first}" aria-label="{label}">'
        f"{escape(column.head)}</button></th>"
    )


def _render_cell(column: Column, row: int) -> str:
    text, value = column.cells[row]
    if value is None:
        return '<td title="not measured">–</td>'
    values = [x for _, x in column.cells if x is not None]
    best = min(values) if column.lower_is_better else max(values)
    is_best = value == best and column.group != COST and min(values) < max(values)
    marked = f"<b>{escape(text)}</b>" if is_best else escape(text)
    interval = column.intervals[row] if column.intervals else ""
    more = f'<small class="interval">{escape(interval)}</small>' if interval else ""
    return f'<td data-v="{value!r}" title="{escape(interval)}">{marked}{more}</td>'
