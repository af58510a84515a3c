"""Tables of the entropy laws: measured entropies, and formulas."""

from __future__ import annotations

from math import ceil
from pathlib import Path

from rich.table import Table

from isentrope.evaluation.results import read_results
from isentrope.report.tables.style import TABLE_STYLE
from isentrope.utils.files import RERUN_REMEDY

MAX_LENGTHS = 4  # so that a table fits 80 columns
# laws of the paper's first table, and this project's
FORMULAS = {
    "constant": "1",
    "loglength": "ln n",
    "softmaxplus": "ln n / ln 512",
    "logn": "ln n / ln n_tr",
    "yarn": "(0.1 ln(n / n_tr) + 1)²",
    "infoscale": "√(f(n) / f(n_tr)), f(m) = 1 - e^{2ε/d} m^{-2/d}",
    "exact_matched": "g(n) / g(n_tr), g = √(1-y) / y, y = e^{-2(ln m - ε)/d}",
}


def build_laws_table(results: Path) -> Table:
    """Build a table of `laws.json`: entropy of each law at a few lengths, its drift and the theory's, and τ."""
    data = read_results(results, RERUN_REMEDY)
    config, lengths = data["config"], data["lengths"]
    first, last = lengths[0], lengths[-1]
    error = max(row["standard_error"] for row in data["rows"])
    table = Table(
        title=f"Attention entropy H (nats) over n keys, scores {config['alpha']:g} cos θ, d = {config['head_dim']}",
        caption=(
            f"H: mean over {config['queries']} queries, random unit vectors; standard error ≤ {error:.2f}.\n"
            f"drift: H({last}) - H({first}), measured. theory: the same for H = ln n - KL;\n"
            "* where too few keys carry the weight for it to hold.\n"
            f"τ: at n = {last}. All laws are the bare formulas (clamp=False)."
        ),
        **TABLE_STYLE,
        min_width=72,  # the title in one line
    )
    columns = select_lengths(lengths)
    table.add_column("law", no_wrap=True)
    for n in columns:
        table.add_column(f"n={n}" if n == first else str(n), justify="right")
    for name in ("drift", "theory", "τ"):
        table.add_column(name, justify="right")
    rows = {(row["law"], row["n"]): row for row in data["rows"]}
    for law in data["laws"]:
        start, end = rows[law["key"], first], rows[law["key"], last]
        table.add_row(
            law["label"],
            *(f"{rows[law['key'], n]['entropy']:.2f}" for n in columns),
            _format_drift(end["entropy"] - start["entropy"]),
            _format_drift(end["theory"] - start["theory"]) + (" " if start["settled"] and end["settled"] else "*"),
            f"{end['tau']:.2f}",
        )
    return table


def _format_drift(value: float) -> str:
    return f"{round(value, 2) + 0.0:+.2f}"  # + 0.0 makes -0.0 a plain zero


def select_lengths(lengths: list[int]) -> list[int]:
    """Select at most MAX_LENGTHS lengths, evenly, with the first and the last."""
    step = ceil((len(lengths) - 1) / (MAX_LENGTHS - 1))
    return [*lengths[:-1:step], lengths[-1]]


def build_formulas_table(results: Path) -> Table:
    """Build a table of each law's formula and its τ at the lengths of `laws.json`."""
    data = read_results(results, RERUN_REMEDY)
    lengths = data["lengths"][:: max(1, len(data["lengths"]) // MAX_LENGTHS)]
    table = Table(title="The score is multiplied by τ(n)", **TABLE_STYLE)
    for heading in ("law", "τ(n)", *(f"n={n}" for n in lengths)):
        table.add_column(heading, justify="right" if heading.startswith("n=") else "left")
    for law in data["laws"]:
        if law["key"] in FORMULAS:
            tau = {row["n"]: row["tau"] for row in data["rows"] if row["law"] == law["key"]}
            table.add_row(law["label"], FORMULAS[law["key"]], *(f"{tau[n]:.3f}" for n in lengths))
    return table
