"""The section of a page that compares many recipes of one causal model: leaderboard, frontier, provenance."""

from __future__ import annotations

from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from isentrope.evaluation.frontier import COMPARISON_FILE, ComparisonBoard, build_board
from isentrope.report.figures.frontier import draw_frontier
from isentrope.report.html.fragments import Section, break_recipe, embed_figure, find_figure, list_names, render
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

CAPTION = (
    "Retrieval against perplexity, both past the training length: up and to the left is better. Filled points are on "
    "the front, where no other recipe is better in both; lines are 95 % intervals."
)


def find_comparison_folders(folder: Path) -> list[Path]:
    """Find folders that `isentrope compare` wrote: the folder itself, or those below it."""
    return find_result_folders(folder, COMPARISON_FILE)


def write_comparison(folder: Path) -> list[Path]:
    """Write leaderboard.json, leaderboard.md and the figure of the frontier beside the results."""
    board = build_board(folder)
    return [*write_comparison_tables(board, folder), *draw_frontier(board, folder)]


def build_comparison_section(folder: Path, name: str) -> Section:
    """Build the section of one comparison; its figures are read from the folder."""
    board = build_board(folder)
    figure = find_figure(folder / "frontier")
    by_position = {kind: find_figure(folder / kind / "perplexity") for kind in board["texts"]}
    settings = {key: board[key] for key in ("model", "train_length", "edges", "texts", "cells")}
    body = render(
        "comparison.html",
        sheet=_build_sheet(board, name),
        figure=embed_figure(figure, CAPTION) if figure else None,
        by_position=[
            embed_figure(paths, f"Perplexity by position: {kind}.") for kind, paths in by_position.items() if paths
        ],
        positions=_list_positions(board),
        provenance=[
            ("Recipes left out", board["left_out"]),
            ("Run", board["run"]),
            ("Times", board["times"]),
            ("Measured", settings),
        ],
    )
    model, texts = (
        str(board["model"]["name"]),
        list_names(f"{kind} ({count} texts)" for kind, count in board["texts"].items()),
    )
    return Section(name, board["title"], "Leaderboard of recipes", model, texts, body)


def _build_sheet(board: ComparisonBoard, name: str) -> dict[str, Any]:
    """Build the table that the page's script sorts, with the ceiling under it."""
    columns = build_columns(board)
    rows = [
        {
            "key": (text := f"{row['number']}. {row['recipe']}"),
            "label": break_recipe(text),
            "is_best": row["front"],
            "starts_group": False,
            "cells": [_build_cell(column, i) for column in columns],
        }
        for i, row in enumerate(board["rows"])
    ]
    heads = [
        {
            "kind": "",
            "order": "ascending" if column.lower_is_better else "descending",
            "name": f"{column.group}: {column.head}",
            "label": column.head,
        }
        for column in columns
    ]
    groups = [
        {"label": label, "columns": len(list(members)), "kind": "", "note": ""}
        for label, members in groupby(columns, key=lambda column: column.group)
    ]
    return {
        "title": "Leaderboard", "classes": "sheet recipes", "name": name, "choices": [], "groups": groups,
        "heads": heads, "first": "Recipe", "sort_first_by": "rank", "rows": rows,
        "footer": [describe_ceiling(board), *(column.ceiling for column in columns)], "caption": explain_columns(board),
    }  # fmt: skip


def _build_cell(column: Column, row: int) -> dict[str, Any]:
    text, value = column.cells[row]
    if value is None:
        return {"kind": "", "value": None, "shade": None, "hint": "not measured", "rank": 0, "text": "–", "notes": []}
    values = [x for _, x in column.cells if x is not None]
    best = min(values) if column.lower_is_better else max(values)
    is_best = value == best and column.group != COST and min(values) < max(values)
    interval = column.intervals[row] if column.intervals else ""
    return {
        "kind": "", "value": repr(value), "shade": None, "hint": interval, "rank": int(is_best), "text": text,
        "notes": [interval] if interval else [],
    }  # fmt: skip


def _list_positions(board: ComparisonBoard) -> list[tuple[str, list[list[str]]]]:
    """List tables of perplexity by position, one for each kind of text."""
    heads = ["Recipe", *(format_bucket(*edges) for edges in pairwise(board["edges"]))]
    return [
        (
            kind,
            [heads]
            + [
                [f"{row['number']}. {row['recipe']}", *map(format_perplexity, row["perplexity"][kind])]
                for row in board["rows"]
                if kind in row["perplexity"]
            ],
        )
        for kind in board["texts"]
    ]
