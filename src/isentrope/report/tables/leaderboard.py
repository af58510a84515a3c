"""Recipes of one causal model, best first: perplexity past its training length, retrieval and cost."""

from __future__ import annotations

import json
from collections.abc import Collection
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from isentrope.evaluation.metrics import wilson_interval
from isentrope.evaluation.ranking import (
    MAX_DEGRADATION_PERCENT,
    Choice,
    Leaderboard,
    RankedRecipe,
    choose_best,
    is_degraded,
    rank_recipes,
)
from isentrope.report.tables.numbers import format_bucket, format_length, format_perplexity
from isentrope.report.tables.perplexity import label_recipe
from isentrope.report.tables.style import TABLE_STYLE
from isentrope.utils.files import write_atomically

CAPTION = (
    "Sorted by perplexity in the last bucket; above: how much higher it is than the first recipe's, with a 95 % "
    "interval paired over texts; ratio: perplexity relative to the plain model's inside its training length; inside: "
    f"change there, too much above {MAX_DEGRADATION_PERCENT} %; cost: time of a pass, relative to the plain model's."
)
ANSWERS_CAPTION = " passkey N and other tasks: answers found in N tokens, with a 95 % interval."


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
    """Say which recipe is best, or which it cannot be told from, then which cost too much inside the training length.

    Args:
        folder: folder with `perplexity.json`.
        recipes: the recipes to choose from.
        forgetful: recipes that see only a part of the text; they are never the best, and one that has a lower
            perplexity is named.
    """
    board = rank_recipes(folder)
    rows = {row["recipe"]: row for row in board["rows"]}
    plain = rows.get("plain")
    if plain is None or board["inside"] is None:
        return []
    choice = choose_best(board, recipes, forgetful)
    lines = list(map(Text, describe_choice(choice, board, plain) if choice else [_describe_none(board)]))
    window = choose_best(board, [recipe for recipe in recipes if recipe in forgetful])
    last = None if choice is None else rows[choice.recipe]["perplexity"][-1]
    if window is not None and (last is None or rows[window.recipe]["perplexity"][-1] < last):
        lower = format_perplexity(rows[window.recipe]["perplexity"][-1])
        lines.append(
            Text(
                f"{window.recipe}: perplexity {lower}, lower, but it forgets text outside its window; "
                "--allow-forgetting lets evaluate --save take it"
            )
        )
    for row in board["rows"]:
        if row["recipe"] in recipes and is_degraded(row):
            why = f"its perplexity inside the training length is {row['inside']:.2f} % higher"
            lines.append(Text(f"{row['recipe']}: left out, {why}", style="red"))
    return lines


def describe_choice(choice: Choice, board: Leaderboard, plain: RankedRecipe) -> list[str]:
    """Describe a choice, a fact a line; "best" is said only of a recipe that no other may equal."""
    row = next(row for row in board["rows"] if row["recipe"] == choice.recipe)
    own, others = (format_perplexity(each["perplexity"][-1]) for each in (row, plain))
    lines = [
        f"{'chosen' if choice.ties else 'best'}: {choice.recipe}: perplexity {own} at "
        f"{format_bucket(*board['edges'][-2:])}, where plain has {others}; inside the training length "
        f"{row['inside']:+.2f} %"
    ]
    if choice.ties:
        texts = board["texts"]
        why = f"by a 95 % interval over {texts} texts" if texts > 1 else "an interval takes two texts or more"
        lines.append(f"may be as good ({why}): {', '.join(choice.ties)}")
    if choice.fewer_answers:
        lines.append(f"left out, fewer passkeys found: {', '.join(choice.fewer_answers)}")
    return lines


def _describe_none(board: Leaderboard) -> str:
    cost = f"costs {MAX_DEGRADATION_PERCENT} % or less inside the training length"
    return f"chosen: plain: no recipe that {cost} is better at {format_bucket(*board['edges'][-2:])}"


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


def describe_columns(board: Leaderboard) -> str:
    """Say what the columns of a leaderboard are."""
    return CAPTION + (ANSWERS_CAPTION if any(row["retrieval"] for row in board["rows"]) else "")


def build_leaderboard_table(folder: Path) -> Table:
    """Build a table of recipes, best first; those that cost too much inside the training length are red."""
    board = rank_recipes(folder)
    heads, rows = format_rows(board)
    table = Table(title=f"Recipes: {board['model']['name']}", caption=describe_columns(board), **TABLE_STYLE)
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
    columns["above"] = [_format_difference(row) for row in ranked]
    columns["ratio"] = [_format(row["ratio"], ".3f") for row in ranked]
    columns["inside"] = [_format(row["inside"], "+.2f", " %") for row in ranked]
    columns["cost"] = [_format(row["cost"], ".2f") for row in ranked]
    for task in dict.fromkeys(name for row in ranked for name in row["retrieval"]):
        columns[task] = [_format_answers(row, task) for row in ranked]
    columns = {head: cells for head, cells in columns.items() if any(cell is not None for cell in cells)}
    labels = [label_recipe(row, board["texts"]) for row in ranked]
    return ["recipe", *columns], [
        [label, *(cells[i] or "" for cells in columns.values())] for i, label in enumerate(labels)
    ]


def _format_difference(row: RankedRecipe) -> str | None:
    if (difference := row["difference"]) is None:
        return None
    low, high = difference["low"], difference["high"]
    interval = "" if low is None or high is None else f" ({_format_percent(low)} … {_format_percent(high)})"
    return f"{_format_percent(difference['percent'])} %{interval}"


def _format_percent(x: float) -> str:
    return f"{x:+.1f}" if abs(x) < 1000 else f"{x:+,.0f}" if abs(x) < 1e6 else f"{x:+.0e}"


def _format_answers(row: RankedRecipe, task: str) -> str | None:
    scores = [score for name, score in row["answers"].items() if name.startswith(f"{task},")]
    if not scores:  # files of earlier versions have shares alone
        return None if task not in row["retrieval"] else f"{100 * row['retrieval'][task]:.0f} %"
    low, high = wilson_interval(sum(scores), len(scores))
    return f"{sum(scores):.3g} / {len(scores)} ({100 * low:.0f}–{100 * high:.0f} %)"


def _format(x: float | None, spec: str, unit: str = "") -> str | None:
    return None if x is None else f"{x:{spec}}{unit}"
