"""The leaderboard of a comparison: perplexity and retrieval side by side, and what a recipe costs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from isentrope.evaluation.frontier import ComparedRecipe, ComparisonBoard, Retrieved, build_board
from isentrope.evaluation.ranking import MAX_DEGRADATION_PERCENT
from isentrope.report.tables.numbers import format_bucket, format_length, format_perplexity
from isentrope.report.tables.style import TABLE_STYLE
from isentrope.utils.files import write_atomically

GIB = 2**30
OVERALL, COST = "overall", "forward pass"  # groups of columns
RETRIEVED, RATIO = "found", "ratio"


@dataclass(frozen=True)
class Column:
    """A column of a leaderboard.

    Args:
        group: heading over it and its neighbours.
        head: its own heading.
        cells: text and value of each row; a value of None is not measured.
        ceiling: the plain model's, inside its training length.
        intervals: of each row, empty where there is none.
        lower_is_better: whether sorting starts with the smallest value.
    """

    group: str
    head: str
    cells: list[tuple[str, float | None]]
    ceiling: str = ""
    intervals: list[str] | None = None
    lower_is_better: bool = True


def build_columns(board: ComparisonBoard) -> list[Column]:
    """Build the columns that have numbers: both overall ones side by side, then kinds of text and filler, then cost."""
    rows, ceiling = board["rows"], board["ceiling"]
    intervals = [_format_ratio_interval(row) for row in rows]
    own_ratio = "1.000" if ceiling["perplexity"] else ""
    columns = [
        _build_retrieved(OVERALL, RETRIEVED, [row["retrieved"] for row in rows], ceiling["retrieved"]),
        Column(OVERALL, RATIO, _format([row["ratio"] for row in rows], "{:.3f}".format), own_ratio, intervals),
        Column(OVERALL, "inside", _format([row["inside"] for row in rows], "{:+.2f} %".format)),
    ]
    bucket = f"perplexity at {format_bucket(*board['edges'][-2:])}" if board["edges"] else ""
    for kind in board["texts"]:
        last = [row["perplexity"][kind][-1] if kind in row["perplexity"] else None for row in rows]
        own = ceiling["perplexity"].get(kind)
        columns.append(Column(bucket, kind, _format(last, format_perplexity), format_perplexity(own) if own else ""))
    group = f"found at {format_length(board['length'])}" if board["length"] else ""
    for kind in board["cells"]:
        answers = [row["fillers"].get(kind) for row in rows]
        columns.append(_build_retrieved(group, f"in {kind}", answers, ceiling["fillers"].get(kind)))
    columns.append(Column(COST, "time", _format([row["time"] for row in rows], "{:.2f} ×".format)))
    columns.append(Column(COST, "memory", _format([row["memory"] for row in rows], "{:.2f} ×".format)))
    return [column for column in columns if any(value is not None for _, value in column.cells)]


def _format(values: list[float | None], template: Callable[[float], str]) -> list[tuple[str, float | None]]:
    return [("–" if x is None else template(x), x) for x in values]


def _build_retrieved(group: str, head: str, answers: list[Retrieved | None], ceiling: Retrieved | None) -> Column:
    cells = [(_format_retrieved(x), None if x is None else x["share"]) for x in answers]
    intervals = ["" if x is None else format_interval(x) for x in answers]
    return Column(group, head, cells, "" if ceiling is None else _format_retrieved(ceiling), intervals, False)


def _format_retrieved(answers: Retrieved | None) -> str:
    return "–" if answers is None else f"{answers['hits']:.3g} / {answers['count']}"


def format_interval(answers: Retrieved) -> str:
    if answers["low"] is None or answers["high"] is None:
        return ""
    return f"{100 * answers['low']:.0f}–{100 * answers['high']:.0f} %"


def _format_ratio_interval(row: ComparedRecipe) -> str:
    low, high = row["ratio_low"], row["ratio_high"]
    return "" if low is None or high is None else f"{low:.3f}–{high:.3f}"


def describe_ceiling(board: ComparisonBoard) -> str:
    """Name the row of the plain model inside its training length."""
    length = board["ceiling"]["length"] or board["train_length"]
    return "plain, inside its training length" + (f" of {length}" if length else "")


def explain_columns(board: ComparisonBoard) -> str:
    """Say in a few sentences what the numbers are."""
    parts = []
    if board["cells"]:
        parts.append("Sorted by answers found, then by perplexity; on the front no other recipe is better in both.")
    elif board["texts"]:
        parts.append("Sorted by perplexity; retrieval is not measured.")
    else:
        parts.append("In the order of the plan; time alone is measured.")
    texts = ", ".join(f"{count} {kind}" for kind, count in board["texts"].items())
    if texts:
        has_intervals = any(row["ratio_low"] is not None for row in board["rows"])
        interval = ", with a 95 % interval over documents" if has_intervals else ""
        parts.append(
            f"Documents that every recipe has read: {texts}. Ratio: to the plain model in the last bucket inside its "
            f"training length, the geometric mean over kinds{interval}. Inside: change of perplexity inside the "
            f"training length, too much above {MAX_DEGRADATION_PERCENT} %."
        )
    if board["cells"]:
        parts.append(
            "Found: all tokens of the answer are the likeliest; intervals are 95 %, over all fillers clustered by "
            "filler and depth, and not claimed where these are too few."
        )
    plain = next((row for row in board["rows"] if row["recipe"] == "plain"), None)
    if plain and plain["seconds"]:
        peak = f" and {plain['peak_bytes'] / GIB:.1f} GiB at the peak" if plain["peak_bytes"] else ""
        parts.append(f"{_explain_times(board)} {plain['seconds']:.2f} s{peak}.")
    return " ".join(parts)


def _explain_times(board: ComparisonBoard) -> str:
    if (times := board["times"]) is None:
        return (
            f"Time and memory: of the fastest forward pass of {board['edges'][-1]:,} tokens that was made for "
            "perplexity, while other programs may have shared the device; plain"
        )
    is_slow = any(row["passes"] == 1 for row in board["rows"])
    once = f" (one where it takes over {times['slow_seconds']:g} s)" if is_slow else ""
    versions = f", under PyTorch and commits {', '.join(times['versions'])}" if times["versions"] else ""
    chunks = f" in {times['chunks']} chunks, as its mask would take gigabytes," if times["chunks"] > 1 else ""
    return (
        f"Time and memory: median of {times['passes']} passes over {times['length']:,} tokens{once}, one recipe after "
        f"another on {times['device']}, in a run meant to have it alone{versions}; plain{chunks}"
    )


def format_rows(board: ComparisonBoard) -> tuple[list[str], list[list[str]]]:
    """Format headings and rows as text, the ceiling first and recipes on the front in bold."""
    columns = build_columns(board)
    heads = ["", "recipe", *(column.head for column in columns)]
    rows = [["", f"*{describe_ceiling(board)}*", *(column.ceiling for column in columns)]]
    for i, row in enumerate(board["rows"]):
        name = f"**`{row['recipe']}`**" if row["front"] else f"`{row['recipe']}`"
        rows.append([str(row["number"]), name, *(_join(column, i) for column in columns)])
    return heads, rows


def _join(column: Column, row: int) -> str:
    """A cell, with its interval in the overall columns."""
    interval = column.intervals[row] if column.intervals and column.head in (RETRIEVED, RATIO) else ""
    return f"{column.cells[row][0]} ({interval})" if interval else column.cells[row][0]


def write_comparison_tables(board: ComparisonBoard, folder: Path) -> list[Path]:
    """Write leaderboard.json and leaderboard.md in the folder of a comparison."""
    heads, rows = format_rows(board)
    columns = build_columns(board)
    groups = ["", "", *(column.group for column in columns)]
    heads = [
        f"{group}: {head}" if group not in ("", OVERALL) and groups.index(group) == i else head
        for i, (head, group) in enumerate(zip(heads, groups, strict=True))
    ]
    lines = [heads, ["---:", "---"] + ["---:"] * len(columns), *rows]
    markdown = "".join(f"| {' | '.join(line)} |\n" for line in lines) + f"\n{explain_columns(board)}\n"
    if board["left_out"]:
        markdown += "\n" + "".join(f"- left out: `{name}`: {reason}\n" for name, reason in board["left_out"].items())
    texts = {"leaderboard.json": json.dumps(board, indent=1, ensure_ascii=False), "leaderboard.md": markdown}
    for name, text in texts.items():
        with write_atomically(folder / name) as file:
            file.write_text(text, encoding="utf-8")
    return [folder / name for name in texts]


def build_comparison_table(folder: Path) -> Table:
    """Build the table of a comparison for a terminal; recipes on the front are bold."""
    board = build_board(folder)
    columns = build_columns(board)
    caption = explain_columns(board)
    if any(any(column.intervals or ()) for column in columns):
        caption += " Intervals are in leaderboard.md."
    table = Table(title=f"{board['model']['name']}: {board['title']}", caption=caption, **TABLE_STYLE)
    table.add_column("", justify="right")
    table.add_column("recipe", overflow="fold", min_width=16)
    for column in columns:
        table.add_column(column.head, justify="right")
    table.add_row("", describe_ceiling(board), *(column.ceiling for column in columns), style="italic")
    for i, row in enumerate(board["rows"]):
        style = "bold" if row["front"] else "red" if _is_degraded(row) else None
        table.add_row(str(row["number"]), row["recipe"], *(column.cells[i][0] for column in columns), style=style)
    return table


def _is_degraded(row: ComparedRecipe) -> bool:
    return (row["inside"] or 0.0) > MAX_DEGRADATION_PERCENT
