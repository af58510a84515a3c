"""A calibration as a table for a terminal and as rows of a model card."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from isentrope.evaluation.results import read_results
from isentrope.report.tables.numbers import format_length, format_perplexity
from isentrope.report.tables.perplexity import style_perplexity
from isentrope.report.tables.style import TABLE_STYLE
from isentrope.utils.files import RERUN_REMEDY

CANDIDATE_LABELS = {
    "none": "no temperature",
    "infoscale": "InfoScale",
    "logn": "LogN",
    "scalar": "fitted, one for all",
    "layer": "fitted, per layer",
    "head": "fitted, per head",
}


def read_calibration(results: Path) -> dict[str, Any]:
    """Read `calibrate.json`."""
    return read_results(results, RERUN_REMEDY, "candidates", "model", "recipe", "chosen")


def build_calibration_table(results: Path) -> Table:
    """Build a table of `calibrate.json`: a row for each candidate, a column for each bucket of positions."""
    data = read_calibration(results)
    rows = data["candidates"]
    table = Table(
        title=f"Held-out perplexity: {data['model']['name']}, {count_held_out(data)} texts, {escape(data['recipe'])}",
        caption=(
            f"beyond: past {data['train_length']} tokens, buckets weighted equally.\n"
            "%: change against InfoScale, with a 95 % interval over paired draws of the texts.\n"
            f"→ {escape(data['reason'])}"
        ),
        **TABLE_STYLE,
    )
    table.add_column("", no_wrap=True)
    table.add_column("temperature", no_wrap=True)
    for name in (*bucket_labels(data), "beyond"):
        table.add_column(name, justify="right")
    table.add_column("% (95 %)", justify="right", no_wrap=True)
    best = [min(values) for values in zip(*(row["perplexity"] for row in rows), strict=True)]
    for row in rows:
        change = [row["against"]["infoscale"][key][-1] for key in ("percent", "low", "high")]
        pairs = list(zip(row["perplexity"], best, strict=True))
        table.add_row(
            "→" if row["name"] == data["chosen"] else "",
            CANDIDATE_LABELS[row["name"]],
            format_perplexity(pairs[0][0]),  # the same for all candidates
            *(style_perplexity(x, bold=x == lowest) for x, lowest in pairs[1:]),
            "" if row["name"] == "infoscale" else "{:+.2f} ({:+.2f} … {:+.2f})".format(*change),
        )
    return table


def build_card_rows(results: Path) -> list[dict[str, Any]]:
    """Build rows of a model card: held-out perplexity of each candidate past the training length."""
    data = read_calibration(results)
    column = f"held-out perplexity past {format_length(data['train_length'])} tokens"
    return [
        {
            "temperature": CANDIDATE_LABELS[row["name"]] + (" (saved)" if row["name"] == data["chosen"] else ""),
            column: f"{row['perplexity'][-1]:.4g}",
            "against InfoScale": f"{row['against']['infoscale']['percent'][-1]:+.2f} %",
        }
        for row in data["candidates"]
    ]


def bucket_labels(data: dict[str, Any]) -> list[str]:
    return [f"{format_length(a)}–{format_length(b)}" for a, b in pairwise((0, *data["knots"]))]


def count_held_out(data: dict[str, Any]) -> int:
    return sum(text["part"] == "held-out" for text in data["texts"])
