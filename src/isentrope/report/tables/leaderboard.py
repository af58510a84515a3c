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

from isentrope.report.figures.laws import COLOURS, GREY, INK, RC, save
from isentrope.report.tables.terminal import DEGRADED, STYLE, named, thousands
from isentrope.utils.files import RERUN_REMEDY, read_fields, write_atomically

CAPTION = f"By perplexity in the last bucket; inside: change inside the training length, too much above {DEGRADED} %."
RED = "#B2182B"
WIDEST = 10  # per cent: how far bars of the figure go


def rank(folder: Path) -> dict[str, Any]:
    """What `perplexity.json` and, where there is one, `retrieval.json` say of each recipe, by perplexity at the end.

    ratio: perplexity in the last bucket to that of the plain model in the last one inside its training length.
    inside: change of perplexity inside the training length, in per cent. cost: seconds to those of the plain model.
    """
    data = read_fields(folder / "perplexity.json", RERUN_REMEDY, "config", "rows", "texts", "cells")
    found = _retrieved(folder / "retrieval.json")
    edges, trained = data["config"]["edges"], data.get("train_length")
    inside = {row["recipe"]: row for row in data.get("inside", [])}
    plain = next((row for row in data["rows"] if row["recipe"] == "plain"), None)
    within = [i for i, edge in enumerate(edges[1:]) if trained is not None and edge <= trained]
    own = plain["perplexity"][within[-1]] if plain and within else None
    texts = {text["sha256"] for text in data["texts"]}  # a folder may hold cells of others, from before
    timed = [cell for cell in data["cells"] if cell["text"] in texts]
    seconds = {row["recipe"]: [c["seconds"] for c in timed if c["recipe"] == row["recipe"]] for row in data["rows"]}
    mean = {recipe: sum(values) / len(values) for recipe, values in seconds.items()}
    rows = []
    for row in data["rows"]:
        recipe = row["recipe"]
        rows.append({
            "recipe": recipe,
            "texts": row["texts"],
            "perplexity": row["perplexity"],
            "bits_per_byte": row.get("bits_per_byte"),
            "ratio": None if own is None else row["perplexity"][-1] / own,
            "inside": inside.get(recipe, {}).get("percent"),
            "cost": mean[recipe] / mean["plain"] if "plain" in mean else None,
            "retrieval": found.get(recipe, {}),
        })  # fmt: skip
    rows.sort(key=lambda row: row["perplexity"][-1])
    head = {"model": data["model"], "train_length": trained, "texts": len(data["texts"]), "edges": edges}
    return head | {"inside": own, "rows": rows}


def best(folder: Path, recipes: Collection[str]) -> str | None:
    """Of these recipes the one with the lowest perplexity at the end, lower than the plain model's, among those that
    cost no more than DEGRADED inside the training length; None where there is none."""
    return next((row["recipe"] for row in _better(rank(folder), recipes) if row["inside"] <= DEGRADED), None)


def measured(folder: Path, recipe: str) -> list[dict[str, Any]]:
    """Perplexity of a recipe beside the plain model's, bucket by bucket, as rows of a model card."""
    board = rank(folder)
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
    board = rank(folder)
    plain = next((row for row in board["rows"] if row["recipe"] == "plain"), None)
    if plain is None or board["inside"] is None:
        return []
    rows = {row["recipe"]: row for row in board["rows"]}
    found, others = best(folder, recipes), [recipe for recipe in recipes if recipe not in forgetful]
    lines = [Text(f"best: {_told(rows[found], plain, board)}" if found else _none(board))]
    if found in forgetful:
        other = best(folder, others)
        words = _told(rows[other], plain, board) if other else "none is better than plain"
        lines += [Text(f"It forgets what its window has left behind. Of those that see all of the text: {words}")]
    for row in board["rows"]:
        if row["recipe"] in recipes and (row["inside"] or 0) > DEGRADED:
            words = f"{row['recipe']}: {row['inside']:+.2f} % of perplexity inside the training length"
            lines.append(Text(words, style="red"))
    return lines


def _better(board: dict[str, Any], recipes: Collection[str]) -> list[dict[str, Any]]:
    """Rows on all texts that are better than the plain model's at the end, the best first."""
    rows = [row for row in board["rows"] if row["texts"] == board["texts"]]
    plain = next((row for row in rows if row["recipe"] == "plain"), None)
    asked = [row for row in rows if row["recipe"] in recipes and row["inside"] is not None]
    return [row for row in asked if plain and row["perplexity"][-1] < plain["perplexity"][-1]]


def _told(row: dict[str, Any], plain: dict[str, Any], board: dict[str, Any]) -> str:
    last, there = row["perplexity"][-1], plain["perplexity"][-1]
    return (
        f"{row['recipe']}: perplexity {_number(last)} at {_last(board)}, "
        f"{last / there:.3g} of plain's {_number(there)} there and {row['ratio']:.3f} of "
        f"its {_number(board['inside'])} inside the training length, where the recipe costs {row['inside']:+.2f} %"
    )


def _none(board: dict[str, Any]) -> str:
    cost = f"costs {DEGRADED} % or less inside the training length"
    return f"best: plain: no recipe that {cost} is better at {_last(board)}"


def _last(board: dict[str, Any]) -> str:
    return "–".join(map(thousands, board["edges"][-2:]))


def write(folder: Path) -> list[Path]:
    """leaderboard.json, .md, .png and .svg beside the results."""
    board = rank(folder)
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
    board = rank(folder)
    heads, rows = cells(board)
    shown = Table(title=f"Recipes: {board['model']['name']}", caption=CAPTION, **STYLE)
    shown.add_column(heads[0], overflow="fold", min_width=16)
    for head in heads[1:]:
        shown.add_column(head, justify="right")
    for told, row in zip(board["rows"], rows, strict=True):
        shown.add_row(*row, style="red" if (told["inside"] or 0) > DEGRADED else None)
    return shown


def _retrieved(path: Path) -> dict[str, dict[str, float]]:
    """The share found of each recipe, by task and length."""
    if not path.exists():
        return {}
    data = read_fields(path, RERUN_REMEDY, "config", "rows")
    metric = "share" if data["config"]["score"] == "both" else "likeliest"
    found: dict[str, dict[str, float]] = {}
    for row in data["rows"]:
        if row[metric] is not None:
            found.setdefault(row["recipe"], {})[f"{row['task']} {row['length']}"] = row[metric]
    return found


def cells(board: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
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


def _figure(board: dict[str, Any]) -> Figure:
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
    colours = [RED if change > DEGRADED else COLOURS[1] for change in changes]
    right.barh(places, [max(-WIDEST, min(change, WIDEST)) for change in changes], color=colours, height=0.62)
    for place, change in zip(places, changes, strict=True):
        if abs(change) > WIDEST:
            at = (WIDEST if change > 0 else 0, place)
            right.annotate(f"{change:+.0f} %", at, (4, 0), textcoords="offset points", va="center", color=INK)
    right.axvline(DEGRADED, color=RED, linewidth=1)
    right.axvline(0, color=GREY, linewidth=0.8)
    right.set_title("change inside the training length, %")
    for axes in (left, right):
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x", color="#E8E8E8")
    figure.suptitle(board["model"]["name"], x=0.01, ha="left")
    return figure
