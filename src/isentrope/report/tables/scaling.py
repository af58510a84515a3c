"""Tables of predicted prefills."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.table import Table

from isentrope.report.tables.style import TABLE_STYLE
from isentrope.utils.files import RERUN_REMEDY, read_fields

HEADINGS = ("tokens", "GPUs", "exchange", "time", "attention", "waiting", "MB a layer", "memory GB")


def build_scale_tables(results: Path) -> Iterator[Table]:
    """Build a table of `plan-scale.json` for each model and recipe."""
    data = read_fields(results, RERUN_REMEDY, "rows", "device", "link")
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in data["rows"]:
        groups.setdefault((row["model"], row["recipe"]), []).append(row)
    limit = data["device"]["memory_bytes"]
    for (model, recipe), rows in groups.items():
        table = Table(
            title=f"Prefill of {model} under {recipe}",
            caption=f"{data['device']['name']}, link {data['link']['name']}. waiting: for the link. memory: of each "
            f"GPU; * above its {limit / 1e9:.0f} GB.\nrefused: the heads cannot be divided among so many GPUs.",
            **TABLE_STYLE,
        )
        cells = [[f"{row['tokens']:,}", str(row["gpus"]), row["exchange"], *_format_cells(row)] for row in rows]
        for name, column in zip(HEADINGS, zip(*cells, strict=True), strict=True):
            justify: Any = "left" if name == "exchange" else "right"
            table.add_column(name, justify=justify, no_wrap=True, min_width=max(map(len, (name, *column))))
        for line in cells:
            table.add_row(*line)
        yield table


def _format_cells(row: dict[str, Any]) -> list[str]:
    if row["refused"] is not None:
        return ["refused", "", "", "", ""]
    times = [format_seconds(row[key]) for key in ("seconds", "attention_seconds", "waiting_seconds")]
    memory = f"{row['memory_bytes'] / 1e9:,.0f}{' ' if row['fits'] else '*'}"
    return [*times, f"{row['layer_bytes'] / 1e6:,.0f}", memory]


def format_seconds(seconds: float) -> str:
    """Return a time to three figures, in the unit that suits it."""
    if seconds >= 7200:
        return f"{seconds / 3600:.3g} h"
    if seconds >= 120:
        return f"{seconds / 60:.3g} min"
    return f"{seconds:.3g} s" if seconds >= 0.1 or not seconds else f"{seconds * 1000:.3g} ms"
