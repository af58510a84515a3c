"""The list of plans; tables of a plan's results are in `plan_tables`."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from isentrope.report.tables.style import TABLE_STYLE


def build_plans_table(descriptions: list[dict[str, Any]]) -> Table:
    """Build a table of plans: their names, what they measure and how large they are."""
    table = Table(**TABLE_STYLE)
    for heading in ("plan", "in the paper", "what", "trainings", "cells"):
        table.add_column(heading, justify="right" if heading in ("trainings", "cells") else "left")
    for row in descriptions:
        table.add_row(row["name"], row["label"], row["title"], str(row["trainings"] or ""), str(row["cells"] or ""))
    return table
