"""Recipes of one causal model, best first: perplexity past its training length, retrieval and cost."""

from __future__ import annotations

import json
from collections.abc import Collection
from itertools import pairwise
from pathlib import Path
from typing import Any

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
from isentrope.report.tables.numbers import format_bucket, format_length, format_perplexity
from isentrope.report.tables.perplexity import label_recipe
from isentrope.report.tables.style import TABLE_STYLE
from isentrope.utils.files import write_atomically

CAPTION = (
    "Sorted by perplexity in the last bucket; "
    f"inside: change inside the training length, too much above {MAX_DEGRADATION_PERCENT} %."
)


def build_card_rows(folder: Path, recipe: str) -> list[dict[str, Any]]:
    """Build rows of a model card: perplexity of a recipe and of the plain model in each bucket."""
    board = rank_recipes(folder)
    rows = {row["recipe"]: row["perplexity"] for row in board["rows"]}
    return [
        {
            "tokens": f"{low}–{high}",
            "perplexity, plain": format_perplexity(rows["plain"][i]) if "plain" in rows else "",
            "perplexity, extended": format_perplexity(rows[recipe][i]),
            "texts": board["texts"],
        }
        for i, (low, high) in enumerate(pairwise(map(format_length, board["edges"])))
    ]


def summarize_ranking(folder: Path, recipes: Collection[str], forgetful: Collection[str] = ()) -> list[Text]:
    """Say which recipe is best and by how much, then which cost too much inside the training length.

    Args:
        folder: folder with `perplexity.json`.
        recipes: the recipes to choose from.
        forgetful: recipes that see only a part of the text; if one is best, the best of the others is named too.
    """
    board = rank_recipes(folder)
    rows = {row["recipe"]: row for row in board["rows"]}
    plain = rows.get("plain")
    if plain is None or board["inside"] is None:
        return []
    best = select_best(board, recipes)
    lines = [Text(f"best: {_describe(rows[best], plain, board)}" if best else _describe_none(board))]
    if best in forgetful:
        other = select_best(board, [recipe for recipe in recipes if recipe not in forgetful])
        description = _describe(rows[other], plain, board) if other else "none is better than plain"
        lines.append(Text(f"It forgets text outside its window. Best with the whole text: {description}"))
    for row in board["rows"]:
        if row["recipe"] in recipes and is_degraded(row):
            text = f"{row['recipe']}: {row['inside']:+.2f} % of perplexity inside the training length"
            lines.append(Text(text, style="red"))
    return lines


def _describe(row: RankedRecipe, plain: RankedRecipe, board: Leaderboard) -> str:
    last, plain_last, inside = row["perplexity"][-1], plain["perplexity"][-1], board["inside"]
    assert inside is not None  # checked by the caller
    return (
        f"{row['recipe']}: perplexity {format_perplexity(last)} at {format_bucket(*board['edges'][-2:])}, "
        f"{last / plain_last:.3g} of plain's {format_perplexity(plain_last)} there and {row['ratio']:.3f} of "
        f"its {format_perplexity(inside)} inside the training length, where the recipe costs {row['inside']:+.2f} %"
    )


def _describe_none(board: Leaderboard) -> str:
    cost = f"costs {MAX_DEGRADATION_PERCENT} % or less inside the training length"
    return f"best: plain: no recipe that {cost} is better at {format_bucket(*board['edges'][-2:])}"


def write_leaderboard(folder: Path) -> list[Path]:
    """Write leaderboard.json, .md, .png and .svg beside the results."""
    from isentrope.report.figures.leaderboard import draw_leaderboard  # imports matplotlib only to draw

    board = rank_recipes(folder)
    heads, rows = format_rows(board)
    lines = [heads, ["---"] + ["---:"] * (len(heads) - 1), *rows]
    texts = {
        "leaderboard.json": json.dumps(board, indent=1, ensure_ascii=False),
        "leaderboard.md": "".join(f"| {' | '.join(line)} |\n" for line in lines),
    }
    for name, text in texts.items():
        with write_atomically(folder / name) as file:
            file.write_text(text, encoding="utf-8")
    return [*(folder / name for name in texts), *draw_leaderboard(board, folder)]


def build_leaderboard_table(folder: Path) -> Table:
    """Build a table of recipes, best first; those that cost too much inside the training length are red."""
    board = rank_recipes(folder)
    heads, rows = format_rows(board)
    table = Table(title=f"Recipes: {board['model']['name']}", caption=CAPTION, **TABLE_STYLE)
    table.add_column(heads[0], overflow="fold", min_width=16)
    for head in heads[1:]:
        table.add_column(head, justify="right")
    for ranked, row in zip(board["rows"], rows, strict=True):
        table.add_row(*row, style="red" if is_degraded(ranked) else None)
    return table


def format_rows(board: Leaderboard) -> tuple[list[str], list[list[str]]]:
    """Format headings and rows; columns without any number are left out."""
    ranked = board["rows"]
    columns: dict[str, list[str | None]] = {}
    for i, (low, high) in enumerate(pairwise(map(format_length, board["edges"]))):
        columns[f"{low}–{high}"] = [format_perplexity(row["perplexity"][i]) for row in ranked]
    columns["ratio"] = [_format(row["ratio"], ".3f") for row in ranked]
    columns["inside"] = [_format(row["inside"], "+.2f", " %") for row in ranked]
    columns["cost"] = [_format(row["cost"], ".2f") for row in ranked]
    for task in dict.fromkeys(name for row in ranked for name in row["retrieval"]):
        shares = [row["retrieval"].get(task) for row in ranked]
        columns[task] = [None if share is None else f"{100 * share:.0f} %" for share in shares]
    columns = {head: cells for head, cells in columns.items() if any(cell is not None for cell in cells)}
    labels = [label_recipe(row, board["texts"]) for row in ranked]
    return ["recipe", *columns], [
        [label, *(cells[i] or "" for cells in columns.values())] for i, label in enumerate(labels)
    ]


def _format(x: float | None, spec: str, unit: str = "") -> str | None:
    return None if x is None else f"{x:{spec}}{unit}"
