"""The table of attention entropies of one model, under one recipe or several."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from isentrope.evaluation.results import read_results
from isentrope.report.tables.numbers import format_length
from isentrope.report.tables.style import TABLE_STYLE
from isentrope.utils.files import RERUN_REMEDY

CAPTION = "Mean attention entropy of all layers and heads, in nats, and its share of uniform attention's."


def build_inspection_table(folders: Sequence[Path]) -> Table:
    """Build a table of `inspect.json` in each folder: a row for each recipe, a column for each length."""
    (heads, *rows), notes = format_inspections(folders)
    table = Table(title=notes[0], caption="\n".join(notes[1:]), **TABLE_STYLE)
    table.add_column(heads[0], overflow="fold", min_width=16)
    for head in heads[1:]:
        table.add_column(head, justify="right")
    for row in rows:
        table.add_row(*row)
    return table


def format_inspections(folders: Sequence[Path]) -> tuple[list[list[str]], list[str]]:
    """Format headings and a row for each folder.

    Args:
        folders: folders that `isentrope inspect` wrote for one model and text.

    Returns:
        The rows, the headings first; and a title with a caption and, if known, the training length.
    """
    needed = ("recipe", "lengths", "entropy", "uniform")
    inspections = [read_results(folder / "inspect.json", RERUN_REMEDY, *needed) for folder in folders]
    first = inspections[0]
    rows = [["recipe", *(f"{format_length(length)} tokens" for length in first["lengths"])]]
    rows += [[inspection["recipe"]["text"], *_format_entropies(inspection)] for inspection in inspections]
    notes = [f"Attention of {first['model']['name']} reading {first['text']['name']}", CAPTION]
    if first.get("train_length"):
        notes.append(f"Training length: {first['train_length']} tokens.")
    return rows, notes


def _format_entropies(inspection: dict[str, Any]) -> list[str]:
    cells = []
    for entropy, uniform in zip(inspection["entropy"], inspection["uniform"], strict=True):
        mean = np.mean([np.mean(heads) for heads in entropy])
        share = np.mean([np.mean(heads) / max(most, 1e-9) for heads, most in zip(entropy, uniform, strict=True)])
        cells.append(f"{mean:.2f} ({100 * share:.0f} %)")
    return cells
