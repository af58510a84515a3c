"""Table of the laws for far keys."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table

from isentrope.evaluation.results import read_results
from isentrope.report.tables.style import TABLE_STYLE
from isentrope.utils.files import RERUN_REMEDY


def build_far_laws_table(results: Path) -> Table:
    """Build a table of `far_laws.json`: τ, bias, share, entropy and a relevant key's share at the longest length.

    Args:
        results: the file that `compute_far_laws` wrote.

    Returns:
        One row for each law, and one for the training length.
    """
    data = read_results(results, RERUN_REMEDY)
    config, last = data["config"], data["lengths"][-1]
    table = Table(
        title=f"{config['window']} near keys and {last - config['window']} far ones, far logits τ s - b",
        caption="share, H: attention on far keys, and its entropy within them;\nneedle: share of one relevant far key.",
        **TABLE_STYLE,
        min_width=72,
    )
    table.add_column("law", no_wrap=True)
    for name in ("τ near", "τ far", "b", "share", "H", "needle"):
        table.add_column(name, justify="right")
    rows = {(row["law"], row["n"]): row for row in data["rows"]}
    first = data["laws"][0]["key"], config["train_length"]
    named = [(f"at n = {config['train_length']}", rows[first])]
    named += [(law["label"], rows[law["key"], last]) for law in data["laws"]]
    for label, row in named:
        values = (row["near_tau"], row["far_tau"], row["bias"], row["far_share"], row["far_entropy"])
        table.add_row(label, *(f"{value:.2f}" for value in values), f"{row['needle_share']:.2f}")
    return table
