"""Recipes of one causal model, the best first: perplexity past its training length, what it finds again, its cost."""

from __future__ import annotations

import json
from collections.abc import Collection
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter
from rich.table import Table
from rich.text import Text

from isentrope.evaluation.ranking import (
    MAX_DEGRADATION_PERCENT,
    Leaderboard,
    RankedRecipe,
    is_degraded,
    rank_recipes,
    select_best,
)
from isentrope.report.figures.laws import COLOURS, GREY, INK, RC, save
from isentrope.report.tables.terminal import STYLE, named, thousands
from isentrope.utils.files import write_atomically

CAPTION = (
    "By perplexity in the last bucket; "
    f"inside: change inside the training length, too much above {MAX_DEGRADATION_PERCENT} %."
)
RED = "#B2182B"
WIDEST = 10  # per cent: how far bars of the figure go


def measured(folder: Path, recipe: str) -> list[dict[str, Any]]:
    """Perplexity of a recipe beside the plain model's, bucket by bucket, as rows of a model card."""
    board = rank_recipes(folder)
    rows = {row["recipe"]: row["perplexity"] for row in board["rows"]}
    return [
        {
            "tokens": f"{low}–{high}",
            "perplexity, plain": _number(rows["plain"][i]) if "plain" in rows else "",
            "perplexity, extended": _number(rows[recipe][i]),
            "texts": board["texts"],
        }
        for i, (low, high) in enumerate(pairwise(map(thousands, board["edges"])))
    ]


def verdict(folder: Path, recipes: Collection[str], forgetful: Collection[str] = ()) -> list[Text]:
    """The best of these recipes and by how much, then those that cost too much inside the training length.

    forgetful: recipes that see only a part of the text, beside which the best of the others is named.
    """
    board = rank_recipes(folder)
    plain = next((row for row in board["rows"] if row["recipe"] == "plain"), None)
    if plain is None or board["inside"] is None:
        return []
    rows = {row["recipe"]: row for row in board["rows"]}
    found, others = select_best(board, recipes), [recipe for recipe in recipes if recipe not in forgetful]
    lines = [Text(f"best: {_told(rows[found], plain, board)}" if found else _none(board))]
    if found in forgetful:
        other = select_best(board, others)
        words = _told(rows[other], plain, board) if other else "none is better than plain"
        lines += [Text(f"It forgets what its window has left behind. Of those that see all of the text: {words}")]
    for row in board["rows"]:
        if row["recipe"] in recipes and is_degraded(row):
            words = f"{row['recipe']}: {row['inside']:+.2f} % of perplexity inside the training length"
            lines.append(Text(words, style="red"))
    return lines


def _told(row: RankedRecipe, plain: RankedRecipe, board: Leaderboard) -> str:
    last, there, inside = row["perplexity"][-1], plain["perplexity"][-1], board["inside"]
    assert inside is not None  # without it there is no verdict
    return (
        f"{row['recipe']}: perplexity {_number(last)} at {_last(board)}, "
        f"{last / there:.3g} of plain's {_number(there)} there and {row['ratio']:.3f} of "
        f"its {_number(inside)} inside the training length, where the recipe costs {row['inside']:+.2f} %"
    )


def _none(board: Leaderboard) -> str:
    cost = f"costs {MAX_DEGRADATION_PERCENT} % or less inside the training length"
    return f"best: plain: no recipe that {cost} is better at {_last(board)}"


def _last(board: Leaderboard) -> str:
    return "–".join(map(thousands, board["edges"][-2:]))


def write(folder: Path) -> list[Path]:
    """leaderboard.json, .md, .png and .svg beside the results."""
    board = rank_recipes(folder)
    paths = [folder / "leaderboard.json", folder / "leaderboard.md"]
    heads, rows = cells(board)
    lines = [heads, ["---"] + ["---:"] * (len(heads) - 1), *rows]
    for path, text in zip(paths, (json.dumps(board, indent=1, ensure_ascii=False), _markdown(lines)), strict=True):
        with write_atomically(path) as partial:
            partial.write_text(text, encoding="utf-8")
    with matplotlib.rc_context(RC):
        figure = _figure(board)
        return paths + [save(figure, folder / f"leaderboard{suffix}") for suffix in (".png", ".svg")]


def table(folder: Path) -> Table:
    board = rank_recipes(folder)
    heads, rows = cells(board)
    shown = Table(title=f"Recipes: {board['model']['name']}", caption=CAPTION, **STYLE)
    shown.add_column(heads[0], overflow="fold", min_width=16)
    for head in heads[1:]:
        shown.add_column(head, justify="right")
    for told, row in zip(board["rows"], rows, strict=True):
        shown.add_row(*row, style="red" if is_degraded(told) else None)
    return shown


def cells(board: Leaderboard) -> tuple[list[str], list[list[str]]]:
    """The table in words; columns that nobody has a number for are left out."""
    asked = list(dict.fromkeys(name for row in board["rows"] for name in row["retrieval"]))
    columns: list[tuple[str, Any]] = [
        (f"{thousands(a)}–{thousands(b)}", lambda row, i=i: _number(row["perplexity"][i]))
        for i, (a, b) in enumerate(pairwise(board["edges"]))
    ]
    columns += [
        ("ratio", lambda row: None if row["ratio"] is None else f"{row['ratio']:.3f}"),
        ("inside", lambda row: None if row["inside"] is None else f"{row['inside']:+.2f} %"),
        ("cost", lambda row: None if row["cost"] is None else f"{row['cost']:.2f}"),
    ]
    columns += [(name, lambda row, name=name: _share(row["retrieval"].get(name))) for name in asked]
    columns = [(head, cell) for head, cell in columns if any(cell(row) is not None for row in board["rows"])]
    rows = [[named(row, board["texts"]), *(cell(row) or "" for _, cell in columns)] for row in board["rows"]]
    return ["recipe", *(head for head, _ in columns)], rows


def _markdown(lines: list[list[str]]) -> str:
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _number(x: float) -> str:
    return f"{x:.3g}" if x >= 100 else f"{x:.2f}"


def _share(x: float | None) -> str | None:
    return None if x is None else f"{100 * x:.0f} %"


def _figure(board: Leaderboard) -> Figure:
    """Perplexity at the end, and the change inside the training length with the line it should not pass."""
    rows = board["rows"][::-1]
    names, places = [row["recipe"].replace("+", " + ") for row in rows], range(len(rows))
    figure = Figure(figsize=(12, 1.4 + 0.34 * len(rows)), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.4, 1), sharey=True)
    last = [row["perplexity"][-1] for row in rows]
    left.hlines(places, min(last), last, color="#DDDDDD", linewidth=1.5)
    left.plot(last, places, "o", color=COLOURS[1])
    left.set_xscale("log")
    left.xaxis.set_major_formatter(LogFormatter())
    left.xaxis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.5)))
    for place, value in zip(places, last, strict=True):
        left.annotate(_number(value), (value, place), (7, 0), textcoords="offset points", va="center", color=INK)
    left.set_yticks(places, names)
    left.set_title(f"perplexity at {_last(board)}")
    changes = [row["inside"] or 0.0 for row in rows]
    colours = [RED if change > MAX_DEGRADATION_PERCENT else COLOURS[1] for change in changes]
    right.barh(places, [max(-WIDEST, min(change, WIDEST)) for change in changes], color=colours, height=0.62)
    for place, change in zip(places, changes, strict=True):
        if abs(change) > WIDEST:
            at = (WIDEST if change > 0 else 0, place)
            right.annotate(f"{change:+.0f} %", at, (4, 0), textcoords="offset points", va="center", color=INK)
    right.axvline(MAX_DEGRADATION_PERCENT, color=RED, linewidth=1)
    right.axvline(0, color=GREY, linewidth=0.8)
    right.set_title("change inside the training length, %")
    for axes in (left, right):
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x", color="#E8E8E8")
    figure.suptitle(board["model"]["name"], x=0.01, ha="left")
    return figure
