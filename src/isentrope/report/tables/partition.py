"""The table of a corpus's training, validation and test sets."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table

from isentrope.report.tables.style import TABLE_STYLE
from isentrope.utils.files import RERUN_REMEDY, read_fields


def build_partition_table(manifest: Path) -> Table:
    """Build a table of the documents and lengths in each set of `manifest.json`, as in the paper's appendix A.1."""
    data = read_fields(manifest, RERUN_REMEDY, "statistics", "counts")
    statistics, counts, near = data["statistics"], data["counts"], data["near_duplicates"]
    table = Table(
        title=f"{Path(data['source']['name']).name}: documents over {data['options']['longer_than']} tokens",
        caption=(
            f"{counts['read']} read, {counts['too_short']} too short, {counts['duplicates']} exact duplicates;\n"
            f"{near['documents']} documents in {near['clusters']} clusters of near-duplicates, "
            f"{statistics['left out']['documents']} left out."
        ),
        **TABLE_STYLE,
        min_width=60,
    )
    sets = ("train", "validation", "test")
    table.add_column("")
    for name in sets:
        table.add_column(name.capitalize(), justify="right")
    rows = {"number of samples": "documents", "average length": "mean", "min length": "min", "max length": "max"}
    for label, key in rows.items():
        table.add_row(label, *(f"{statistics[name][key]:.0f}" for name in sets))
    return table
