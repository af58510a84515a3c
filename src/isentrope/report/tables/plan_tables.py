"""A plan's tables: for a terminal, in Markdown and LaTeX as the paper prints them, and every number as CSV."""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite
from pathlib import Path

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from isentrope.report.claims import evaluate_claims, format_verdict
from isentrope.report.load import METRICS, PROTOCOLS, Grid, PlanResults, Row, Value, load_plans
from isentrope.report.tables.numbers import format_number
from isentrope.report.tables.published import (
    FIGURE_CAPTION,
    NOT_MEASURED_TEXT,
    ROUNDING_NOTE,
    PaperComparison,
    compare_with_paper,
)
from isentrope.report.tables.style import TABLE_STYLE
from isentrope.utils.files import write_atomically

FAILED_TEXT, MISSING_TEXT = "–", ""
CSV_COLUMNS = (
    "plan", "protocol", "method", "variant", "checkpoint", "seed", "recipe", "length", "documents", "skipped",
    "predictions", "ppl", "ppl_low", "ppl_high", "acc", "acc_low", "acc_high", "entropy", "entropy_ratio",
    "seconds", "tokens_per_second", "peak_bytes", "failed", "key",
)  # fmt: skip


@dataclass(frozen=True)
class TableCell:
    """A formatted cell; rank 1 is bold and 2 underlined."""

    text: str
    rank: int
    value: Value | None


@dataclass(frozen=True)
class GridTable:
    """A grid formatted for any kind of output."""

    grid: Grid
    labels: dict[Row, str]
    cells: dict[tuple[Row, int, str], TableCell]
    caption: str
    notes: list[str]

    def starts_group(self, row: Row) -> bool:
        """Whether the row is the first of its method, where methods have several rows."""
        rows = self.grid.plan.rows
        index = rows.index(row)
        grouped = any(a.method == b.method for a, b in pairwise(rows))
        return grouped and (index == 0 or rows[index - 1].method != row.method)


def format_grid(grid: Grid, cap: bool = False) -> GridTable:
    """Format a grid's cells, labels, caption and notes; cap: print >500 and <0.1 as the paper does."""
    plan = grid.plan
    variants = {row.variant for row in plan.rows}
    shared = len(variants) == 1 and len(plan.rows) > 1
    labels = {row: row.method if shared else row.label for row in plan.rows}
    cells = {}
    for length in plan.lengths:
        for metric in plan.metrics:
            ranks = grid.ranks(length, metric)
            for row in plan.rows:
                value = grid.value(row, length, metric)
                text = MISSING_TEXT if value is None else format_number(value.mean, metric, cap)
                if value is None and grid.failures(row, length):
                    text = FAILED_TEXT
                # beyond the cap all cells have the same text, and no rank
                rank = 0 if text.startswith(("<", ">")) else ranks.get(row, 0)
                cells[row, length, metric] = TableCell(text, rank, value)
    common = f" All with {next(iter(variants)).rstrip('.')}." if shared and variants - {"plain", "", "both"} else ""
    return GridTable(grid, labels, cells, write_caption(grid) + common, list_notes(grid))


def write_caption(grid: Grid) -> str:
    """Describe in one paragraph how the numbers were measured."""
    plan, metadata = grid.plan, grid.plan.metadata
    meaning = {"ppl": "perplexity (PPL, lower is better)", "acc": "accuracy (ACC, higher is better)"}
    what = " and ".join(meaning[metric] for metric in plan.metrics)
    trained = f", trained at {metadata['train_length']}" if metadata.get("train_length") else ""
    masked = PROTOCOLS.get(grid.protocol, grid.protocol) + _describe_positions(grid)
    documents = grid.documents
    most = max(documents.values(), default=0)
    fewer = ", ".join(f"{count} at {length}" for length, count in documents.items() if count < most)
    tested = f"{most} document{'s' * (most != 1)}" + (f" ({fewer}: the others are shorter)" if fewer else "")
    corpus = Path(str((metadata.get("data") or {}).get("name") or "")).name
    return (
        f"{what[0].upper()}{what[1:]} by length in tokens{trained}. Protocol: {masked}; {tested}"
        f"{f' of {corpus}' if corpus else ''}; {_describe_seeds(grid)}. "
        "Bold: best, underlined: second best of each column."
    )


def _describe_positions(grid: Grid) -> str:
    """Describe how many predictions each document has."""
    metadata = grid.plan.metadata
    if grid.protocol == metadata["protocol"] == "single" and not metadata.get("positions"):
        return ", every position"
    counts = {document["count"] for cell in grid.cells for document in cell.get("documents") or []}
    if not counts:
        return f", {metadata['positions']} positions per document" if metadata.get("positions") else ""
    low, high = min(counts), max(counts)
    return f", {low if low == high else f'{low}–{high}'} positions per document"


def _describe_seeds(grid: Grid) -> str:
    if len(grid.seeds) < 2:
        return f"seed {grid.seeds[0]}" if grid.seeds else "no seed yet"
    spreads = []
    for metric in grid.plan.metrics:
        differences = [
            (v.most - v.least) if metric == "acc" else (v.most / v.least - 1)
            for row in grid.plan.rows for length in grid.plan.lengths
            if (v := grid.value(row, length, metric)) and v.seeds > 1 and isfinite(v.most)
        ]  # fmt: skip
        if differences:
            spreads.append(
                f"{max(differences):.3f} in ACC"
                if metric == "acc"
                else f"{_format_ratio(max(differences))} in {METRICS[metric]}"
            )
    apart = f", which differ by at most {' and '.join(spreads)}" if spreads else ""
    return f"mean over {len(grid.seeds)} training seeds{apart}"


def _format_ratio(x: float) -> str:
    return f"{100 * x:.1f} %" if x < 1 else f"a factor of {1 + x:.3g}"


def list_notes(grid: Grid) -> list[str]:
    """List failures with their reasons, missing cells, cells with fewer seeds, and the plan's own notes."""
    plan = grid.plan
    # rows with the same failure at the same lengths share a note
    failures: dict[tuple[str, tuple[int, ...], tuple[int, ...]], list[Row]] = {}
    missing = 0
    fewer: dict[tuple[int, bool, tuple[int, ...]], list[Row]] = {}  # by seeds, whether rows are ranked, and lengths
    for row in plan.rows:
        reasons: dict[tuple[str, tuple[int, ...]], list[int]] = {}
        counts: dict[tuple[int, bool], list[int]] = {}
        for length in plan.lengths:
            cells, failed = grid.cells_by_seed.get((row, length), {}), grid.failures(row, length)
            missing += not cells
            for reason in dict.fromkeys(failed.values()):
                seeds = tuple(sorted(seed for seed, why in failed.items() if why == reason))
                reasons.setdefault((reason, seeds), []).append(length)
            count = len(cells) - len(failed)
            ranked = count == grid.count_most_seeds(length)
            if count and (count < len(grid.seeds) if not failed else not ranked):
                counts.setdefault((count, ranked), []).append(length)
        for (reason, seeds), lengths in reasons.items():
            failures.setdefault((reason, seeds, tuple(lengths)), []).append(row)
        for (count, ranked), lengths in counts.items():
            fewer.setdefault((count, ranked, tuple(lengths)), []).append(row)
    notes = []
    for (reason, seeds, lengths_failed), rows in failures.items():
        some = len(seeds) < len(grid.seeds)
        which = f", seed {', '.join(map(str, seeds))} alone" if some else ""
        names = "; ".join(row.label for row in rows)
        notes.append(f"{FAILED_TEXT} {names} at {', '.join(map(str, lengths_failed))}{which}: failed, {reason}")
    for (count, ranked, lengths_measured), rows in fewer.items():
        where = "" if lengths_measured == tuple(plan.lengths) else f" at {', '.join(map(str, lengths_measured))}"
        names = "; ".join(row.label for row in rows)
        unranked = "" if ranked else ", and so neither bold nor underlined"
        notes.append(f"{count} of {len(grid.seeds)} seeds{unranked}: {names}{where}")
    if missing:
        total = len(plan.rows) * len(plan.lengths)
        notes.append(f"Empty: not measured yet ({missing} of {total} cells).")
    if grid.unplanned_count:
        notes.append(f"{grid.unplanned_count} measured cells belong to no row of the plan; they are in table.csv.")
    return notes + [str(note) for note in plan.metadata.get("notes") or []]


def write_tables(folder: Path, cap: bool = False) -> list[Path]:
    """Write `table.md`, `.tex`, `.csv`, `claims.json` and, if the paper has its table, `beside.md` for each plan.

    Args:
        folder: a plan's folder, or one whose subfolders are.
        cap: whether to print >500 and <0.1 as the paper does.
    """
    written = []
    for plan in load_plans(folder):
        tables = [format_grid(grid, cap) for grid in plan.grids]
        verdicts = [verdict for grid in plan.grids for verdict in evaluate_claims(grid)]
        texts = {
            "table.md": "\n".join(map(render_markdown, tables)),
            "table.tex": "\n".join(map(render_latex, tables)),
            "table.csv": render_csv(plan),
            "claims.json": json.dumps(verdicts, indent=1, ensure_ascii=False) + "\n",
        }
        drawn = compare_with_paper(plan.grids[0]) if "acc" in plan.metrics else None
        sections = [
            render_comparison(comparison, table.labels, cap)
            for table in tables
            if (comparison := compare_with_paper(table.grid))
        ]
        if sections:
            image = [f"![{_escape_markdown(FIGURE_CAPTION)}](beside.png)\n"] if drawn else []
            texts["beside.md"] = "\n".join(sections + image)
        for name, text in texts.items():
            with write_atomically(plan.folder / name) as file:
                file.write_text(text, encoding="utf-8", newline="\n")
            written.append(plan.folder / name)
        if drawn:
            from isentrope.report.figures.plan_curves import draw_comparison  # imports matplotlib only to draw

            written += draw_comparison(drawn, plan.folder / "beside")
    return written


def render_terminal(folder: Path, cap: bool = False) -> Group:
    """Render the tables of each plan in a folder and the verdicts on its claims."""
    parts: list[RenderableType] = []
    for grid in (grid for plan in load_plans(folder) for grid in plan.grids):
        table = format_grid(grid, cap)
        parts += [_render_metric(table, metric) for metric in grid.plan.metrics if grid.plan.rows]
        parts += [Text(text) for text in (table.caption, *table.notes)]
        if (comparison := compare_with_paper(grid)) and (sentence := comparison.summarize()):
            parts.append(Text(sentence))
        for verdict in evaluate_claims(grid):
            numbers = "; ".join([verdict["words"], *([verdict["paper"]["words"]] if verdict["paper"] else [])])
            parts.append(Text(f"{format_verdict(verdict)}: {verdict['text']} ({numbers})"))
    return Group(*parts)


def _render_metric(table: GridTable, metric: str) -> Table:
    """Render one metric, so that six lengths fit 80 columns."""
    plan = table.grid.plan
    rendered = Table(title=escape(f"{plan.title}: {METRICS[metric]}"), **TABLE_STYLE)
    rendered.add_column("method")
    for length in plan.lengths:
        rendered.add_column(str(length), justify="right", no_wrap=True)
    for row in plan.rows:
        if table.starts_group(row) and row != plan.rows[0]:
            rendered.add_section()
        cells = [table.cells[row, length, metric] for length in plan.lengths]
        texts = [Text(cell.text, ("", "bold", "underline")[cell.rank]) for cell in cells]
        rendered.add_row(Text(table.labels[row]), *texts)
    return rendered


def render_markdown(table: GridTable) -> str:
    plan = table.grid.plan
    columns = [(length, metric) for length in plan.lengths for metric in plan.metrics]
    lines = [f"## {_escape_markdown(plan.title)}", "", _escape_markdown(table.caption), ""]
    if plan.rows:
        lines.append("| Method | " + " | ".join(f"{length} {METRICS[metric]}" for length, metric in columns) + " |")
        lines.append("|:--|" + "--:|" * len(columns))
    for row in plan.rows:
        cells = [table.cells[row, *column] for column in columns]
        marked = [("{}", "**{}**", "<u>{}</u>")[cell.rank].format(_escape_markdown(cell.text)) for cell in cells]
        lines.append(f"| {_escape_markdown(table.labels[row])} | " + " | ".join(marked) + " |")
    if table.notes:
        lines += ["", *(f"- {_escape_markdown(note)}" for note in table.notes)]
    return "\n".join(lines) + "\n"


def render_comparison(comparison: PaperComparison, labels: dict[Row, str], cap: bool = False) -> str:
    """Render the paper's numbers and ours in Markdown, a table for each metric, and how many changes agree."""
    grid = comparison.grid
    protocol = PROTOCOLS.get(grid.protocol, grid.protocol)
    about = f"The paper's {comparison.table.label} / this study, {protocol}; {NOT_MEASURED_TEXT}: not measured."
    lines = [f"## {_escape_markdown(grid.plan.title)}: comparison with the paper", "", _escape_markdown(about)]
    if sentence := comparison.summarize():
        lines += ["", _escape_markdown(f"{sentence} {ROUNDING_NOTE}")]
    for metric in reversed(grid.plan.metrics):
        tables = (comparison.number_rows(metric, labels, cap), comparison.agreement_rows(metric))
        for heads, *rows in filter(None, tables):
            lines += ["", _markdown_row(heads), "|:--|" + "--:|" * (len(heads) - 1), *map(_markdown_row, rows)]
    return "\n".join(lines) + "\n"


def _markdown_row(cells: list[str]) -> str:
    return f"| {' | '.join(map(_escape_markdown, cells))} |"


def render_latex(table: GridTable) -> str:
    """Render a `table*` in the paper's layout, PPL and ACC under each length; needs the package booktabs."""
    plan = table.grid.plan
    lengths, wide = plan.lengths, len(plan.metrics)
    ends = [(2 + wide * i, 1 + wide * (i + 1)) for i in range(len(lengths))]
    group = r"@{\hspace{0.25cm}}" + "r" * wide
    label = plan.metadata.get("label") or "table " + re.sub(r"[^\w.-]", "-", plan.name)
    lines = [
        r"% \usepackage{booktabs}",
        r"\begin{table*}[t]",
        rf"\caption{{{_escape_latex(plan.title)}. {_escape_latex(table.caption)}}}",
        rf"\label{{{label}}}",
        r"\centering",
        rf"\begin{{tabular}}{{l{group * len(lengths)}}}",
        r"\toprule",
    ]
    if lengths:
        lines += [
            rf" & \multicolumn{{{wide * len(lengths)}}}{{c}}{{Evaluation length}} \\",
            rf"\cmidrule(l){{2-{ends[-1][1]}}}",
            " & " + " & ".join(rf"\multicolumn{{{wide}}}{{c}}{{{length}}}" for length in lengths) + r" \\",
            " ".join(rf"\cmidrule(lr){{{first}-{last}}}" for first, last in ends),
        ]
    lines.append("Methods & " + " & ".join(METRICS[metric] for _ in lengths for metric in plan.metrics) + r" \\")
    for row in plan.rows:
        if table.starts_group(row) or row == plan.rows[0]:
            lines.append(r"\midrule")
        cells = [table.cells[row, length, metric] for length in lengths for metric in plan.metrics]
        marked = [
            ("{}", r"\textbf{{{}}}", r"\underline{{{}}}")[cell.rank].format(_escape_latex(cell.text)) for cell in cells
        ]
        lines.append(" & ".join([_escape_latex(table.labels[row]), *marked]) + r" \\")
    lines += [r"\bottomrule", r"\end{tabular}"]
    lines += [rf"\par\smallskip{{\footnotesize {_escape_latex(note)}}}" for note in table.notes]
    return "\n".join([*lines, r"\end{table*}"]) + "\n"


def render_csv(plan: PlanResults) -> str:
    """Render every cell of every protocol and seed as measured; lists as JSON."""
    file = io.StringIO()
    writer = csv.DictWriter(file, CSV_COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for cell in plan.cells:
        documents = cell.get("documents") or []
        row = {"plan": plan.name} | plan.timings.get(str(cell.get("key")), {}) | cell
        row |= {"documents": len(documents), "predictions": sum(document["count"] for document in documents)}
        for key in ("entropy", "entropy_ratio"):
            row[key] = json.dumps(row[key]) if row.get(key) is not None else ""
        writer.writerow(row)
    return file.getvalue()


def _escape_markdown(text: str) -> str:
    text = re.sub(r"([\\`*_|\[\]#~])", r"\\\1", " ".join(text.split()))
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


TEX_ESCAPES = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"$<$", ">": r"$>$", "–": "--", "—": "---",
    "…": r"\dots{}", "×": r"$\times$", "≥": r"$\geq$", "≤": r"$\leq$", "−": r"$-$", "∞": r"$\infty$", "→": r"$\to$",
    "α": r"$\alpha$", "β": r"$\beta$", "γ": r"$\gamma$", "ε": r"$\epsilon$", "η": r"$\eta$", "θ": r"$\theta$",
    "λ": r"$\lambda$", "σ": r"$\sigma$", "τ": r"$\tau$",
}  # fmt: skip


def _escape_latex(text: str) -> str:
    return "".join(TEX_ESCAPES.get(letter, letter) for letter in " ".join(text.split()))
