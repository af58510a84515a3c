"""A study's tables: for a terminal, in Markdown and LaTeX as the paper prints them, and every number as CSV."""

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

from isentrope.report.claims import judge, said
from isentrope.report.load import METRICS, PROTOCOLS, Grid, Plan, Row, Value, read
from isentrope.report.tables.numbers import number
from isentrope.report.tables.published import CAPTION, NOTHING, UNSHOWN, Beside, beside
from isentrope.report.tables.terminal import STYLE
from isentrope.utils.files import write_atomically

FAILED, ABSENT = "–", ""
COLUMNS = (
    "plan", "protocol", "method", "variant", "checkpoint", "seed", "recipe", "length", "documents", "skipped",
    "predictions", "ppl", "ppl_low", "ppl_high", "acc", "acc_low", "acc_high", "entropy", "entropy_ratio",
    "seconds", "tokens_per_second", "peak_bytes", "failed", "key",
)  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """A cell as it is printed; rank 1 is bold and 2 underlined."""

    text: str
    rank: int
    value: Value | None


@dataclass(frozen=True)
class Sheet:
    """A grid as it is printed, whatever the format."""

    grid: Grid
    labels: dict[Row, str]
    entries: dict[tuple[Row, int, str], Entry]
    caption: str
    notes: list[str]

    def starts_group(self, row: Row) -> bool:
        """Whether the row is the first of its method, where methods have several rows."""
        rows = self.grid.plan.rows
        place = rows.index(row)
        grouped = any(a.method == b.method for a, b in pairwise(rows))
        return grouped and (place == 0 or rows[place - 1].method != row.method)


def sheet(grid: Grid, cap: bool = False) -> Sheet:
    plan = grid.plan
    variants = {row.variant for row in plan.rows}
    shared = len(variants) == 1 and len(plan.rows) > 1
    labels = {row: row.method if shared else row.label for row in plan.rows}
    entries = {}
    for length in plan.lengths:
        for metric in plan.metrics:
            ranks = grid.ranks(length, metric)
            for row in plan.rows:
                value = grid.value(row, length, metric)
                text = ABSENT if value is None else number(value.mean, metric, cap)
                if value is None and grid.failed(row, length):
                    text = FAILED
                # beyond the cap all look alike, and none is singled out
                rank = 0 if text.startswith(("<", ">")) else ranks.get(row, 0)
                entries[row, length, metric] = Entry(text, rank, value)
    common = f" All with {next(iter(variants)).rstrip('.')}." if shared and variants - {"plain", "", "both"} else ""
    return Sheet(grid, labels, entries, caption(grid) + common, notes(grid))


def caption(grid: Grid) -> str:
    """How the numbers came about, in one paragraph."""
    plan, told = grid.plan, grid.plan.told
    meaning = {"ppl": "perplexity (PPL, lower is better)", "acc": "accuracy (ACC, higher is better)"}
    what = " and ".join(meaning[metric] for metric in plan.metrics)
    trained = f", trained at {told['train_length']}" if told.get("train_length") else ""
    masked = PROTOCOLS.get(grid.protocol, grid.protocol) + _positions(grid)
    documents = grid.documents
    most = max(documents.values(), default=0)
    fewer = ", ".join(f"{count} at {length}" for length, count in documents.items() if count < most)
    tested = f"{most} document{'s' * (most != 1)}" + (f" ({fewer}: the others are shorter)" if fewer else "")
    corpus = Path(str((told.get("data") or {}).get("name") or "")).name
    return (
        f"{what[0].upper()}{what[1:]} by length in tokens{trained}. Protocol: {masked}; {tested}"
        f"{f' of {corpus}' if corpus else ''}; {_seeds(grid)}. Bold: best, underlined: second best of each column."
    )


def _positions(grid: Grid) -> str:
    """Predictions a document, as they were counted."""
    told = grid.plan.told
    if grid.protocol == told["protocol"] == "single" and not told.get("positions"):
        return ", every position"
    counts = {document["count"] for cell in grid.cells for document in cell.get("documents") or []}
    if not counts:
        return f", {told['positions']} positions a document" if told.get("positions") else ""
    low, high = min(counts), max(counts)
    return f", {low if low == high else f'{low}–{high}'} positions a document"


def _seeds(grid: Grid) -> str:
    if len(grid.seeds) < 2:
        return f"seed {grid.seeds[0]}" if grid.seeds else "no seed yet"
    spreads = []
    for metric in grid.plan.metrics:
        found = [
            (v.most - v.least) if metric == "acc" else (v.most / v.least - 1)
            for row in grid.plan.rows for length in grid.plan.lengths
            if (v := grid.value(row, length, metric)) and v.seeds > 1 and isfinite(v.most)
        ]  # fmt: skip
        if found:
            spreads.append(
                f"{max(found):.3f} in ACC" if metric == "acc" else f"{_share(max(found))} in {METRICS[metric]}"
            )
    apart = f", which differ by at most {' and '.join(spreads)}" if spreads else ""
    return f"mean over {len(grid.seeds)} training seeds{apart}"


def _share(x: float) -> str:
    return f"{100 * x:.1f} %" if x < 1 else f"a factor of {1 + x:.3g}"


def notes(grid: Grid) -> list[str]:
    """What a reader must know about single cells: failures with their reasons, gaps, fewer seeds; the plan's notes."""
    plan = grid.plan
    # rows that failed alike at the same lengths share a line
    alike: dict[tuple[str, tuple[int, ...], tuple[int, ...]], list[Row]] = {}
    missing, fewer = 0, []
    for row in plan.rows:
        reasons: dict[tuple[str, tuple[int, ...]], list[int]] = {}
        for length in plan.lengths:
            cells, failed = grid.placed.get((row, length), {}), grid.failed(row, length)
            missing += not cells
            for reason in dict.fromkeys(failed.values()):
                seeds = tuple(sorted(seed for seed, why in failed.items() if why == reason))
                reasons.setdefault((reason, seeds), []).append(length)
            if cells and not failed and len(cells) < len(grid.seeds):
                fewer.append(f"{row.label} at {length} ({len(cells)} of {len(grid.seeds)})")
        for (reason, seeds), lengths in reasons.items():
            alike.setdefault((reason, seeds, tuple(lengths)), []).append(row)
    found = []
    for (reason, seeds, at), rows in alike.items():
        some = len(seeds) < len(grid.seeds)
        which = f", seed {', '.join(map(str, seeds))} alone" if some else ""
        names = "; ".join(row.label for row in rows)
        found.append(f"{FAILED} {names} at {', '.join(map(str, at))}{which}: failed, {reason}")
    if fewer:
        more = f" and {len(fewer) - 6} more" if len(fewer) > 6 else ""
        found.append(f"Fewer seeds: {', '.join(fewer[:6])}{more}.")
    if missing:
        total = len(plan.rows) * len(plan.lengths)
        found.append(f"Empty: not measured yet ({missing} of {total} cells).")
    if grid.stray:
        found.append(f"{grid.stray} measured cells belong to no row of the plan; they are in table.csv.")
    return found + [str(note) for note in plan.told.get("notes") or []]


def write(folder: Path, cap: bool = False) -> list[Path]:
    """Write `table.md`, `.tex`, `.csv`, `claims.json` and, where the paper has its table, `beside.md` for each plan."""
    written = []
    for plan in read(folder):
        sheets = [sheet(grid, cap) for grid in plan.grids]
        verdicts = [verdict for grid in plan.grids for verdict in judge(grid)]
        texts = {
            "table.md": "\n".join(map(markdown, sheets)),
            "table.tex": "\n".join(map(latex, sheets)),
            "table.csv": comma_separated(plan),
            "claims.json": json.dumps(verdicts, indent=1, ensure_ascii=False) + "\n",
        }
        drawn = beside(plan.grids[0]) if "acc" in plan.metrics else None
        pages = [beside_markdown(both, page.labels, cap) for page in sheets if (both := beside(page.grid))]
        if pages:
            texts["beside.md"] = "\n".join(pages + ([f"![{_md(CAPTION)}](beside.png)\n"] if drawn else []))
        for name, text in texts.items():
            with write_atomically(plan.folder / name) as file:
                file.write_text(text, encoding="utf-8", newline="\n")
            written.append(plan.folder / name)
        if drawn:
            from isentrope.report.figures.curves import draw_beside  # matplotlib, where there is something to draw

            written += draw_beside(drawn, plan.folder / "beside")
    return written


def terminal(folder: Path, cap: bool = False) -> Group:
    """The tables of each plan in a folder and what became of its claims."""
    parts: list[RenderableType] = []
    for grid in (grid for plan in read(folder) for grid in plan.grids):
        page = sheet(grid, cap)
        parts += [_terminal(page, metric) for metric in grid.plan.metrics if grid.plan.rows]
        parts += [Text(text) for text in (page.caption, *page.notes)]
        parts += [Text(found.sentence()) for found in [beside(grid)] if found and found.sentence()]
        for verdict in judge(grid):
            numbers = "; ".join([verdict["words"], *([verdict["paper"]["words"]] if verdict["paper"] else [])])
            parts.append(Text(f"{said(verdict)}: {verdict['text']} ({numbers})"))
    return Group(*parts)


def _terminal(page: Sheet, metric: str) -> Table:
    """One table a metric, so that six lengths fit 80 columns."""
    plan = page.grid.plan
    table = Table(title=escape(f"{plan.title}: {METRICS[metric]}"), **STYLE)
    table.add_column("method")
    for length in plan.lengths:
        table.add_column(str(length), justify="right", no_wrap=True)
    for row in plan.rows:
        if page.starts_group(row) and row != plan.rows[0]:
            table.add_section()
        entries = [page.entries[row, length, metric] for length in plan.lengths]
        cells = [Text(entry.text, ("", "bold", "underline")[entry.rank]) for entry in entries]
        table.add_row(Text(page.labels[row]), *cells)
    return table


def markdown(page: Sheet) -> str:
    plan = page.grid.plan
    columns = [(length, metric) for length in plan.lengths for metric in plan.metrics]
    lines = [f"## {_md(plan.title)}", "", _md(page.caption), ""]
    if plan.rows:
        lines.append("| Method | " + " | ".join(f"{length} {METRICS[metric]}" for length, metric in columns) + " |")
        lines.append("|:--|" + "--:|" * len(columns))
    for row in plan.rows:
        entries = [page.entries[row, *column] for column in columns]
        marked = [("{}", "**{}**", "<u>{}</u>")[entry.rank].format(_md(entry.text)) for entry in entries]
        lines.append(f"| {_md(page.labels[row])} | " + " | ".join(marked) + " |")
    if page.notes:
        lines += ["", *(f"- {_md(note)}" for note in page.notes)]
    return "\n".join(lines) + "\n"


def beside_markdown(found: Beside, labels: dict[Row, str], cap: bool = False) -> str:
    """The paper's numbers and ours, a table for each metric, and how many changes go the same way."""
    plan, how = found.grid.plan, PROTOCOLS.get(found.grid.protocol, found.grid.protocol)
    about = f"The paper's {found.table.label} beside what was measured here, {how}; {NOTHING} where nothing was."
    lines = [f"## {_md(plan.title)}, beside the paper", "", _md(about)]
    if sentence := found.sentence():
        lines += ["", _md(f"{sentence} {UNSHOWN}")]
    for metric in reversed(plan.metrics):
        for heads, *rows in filter(None, (found.numbers(metric, labels, cap), found.counts(metric))):
            lines += ["", _line(heads), "|:--|" + "--:|" * (len(heads) - 1), *map(_line, rows)]
    return "\n".join(lines) + "\n"


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(map(_md, cells))} |"


def latex(page: Sheet) -> str:
    """A `table*` in the paper's arrangement: PPL and ACC under each length; needs the package booktabs."""
    plan = page.grid.plan
    lengths, wide = plan.lengths, len(plan.metrics)
    ends = [(2 + wide * i, 1 + wide * (i + 1)) for i in range(len(lengths))]
    group = r"@{\hspace{0.25cm}}" + "r" * wide
    label = plan.told.get("label") or "table " + re.sub(r"[^\w.-]", "-", plan.name)
    lines = [
        r"% \usepackage{booktabs}",
        r"\begin{table*}[t]",
        rf"\caption{{{_tex(plan.title)}. {_tex(page.caption)}}}",
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
        if page.starts_group(row) or row == plan.rows[0]:
            lines.append(r"\midrule")
        entries = [page.entries[row, length, metric] for length in lengths for metric in plan.metrics]
        marked = [
            ("{}", r"\textbf{{{}}}", r"\underline{{{}}}")[entry.rank].format(_tex(entry.text)) for entry in entries
        ]
        lines.append(" & ".join([_tex(page.labels[row]), *marked]) + r" \\")
    lines += [r"\bottomrule", r"\end{tabular}"]
    lines += [rf"\par\smallskip{{\footnotesize {_tex(note)}}}" for note in page.notes]
    return "\n".join([*lines, r"\end{table*}"]) + "\n"


def comma_separated(plan: Plan) -> str:
    """Every cell of every protocol and seed as it was measured; lists as JSON."""
    file = io.StringIO()
    writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for cell in plan.cells:
        documents = cell.get("documents") or []
        row = {"plan": plan.name} | plan.timings.get(str(cell.get("key")), {}) | cell
        row |= {"documents": len(documents), "predictions": sum(document["count"] for document in documents)}
        for key in ("entropy", "entropy_ratio"):
            row[key] = json.dumps(row[key]) if row.get(key) is not None else ""
        writer.writerow(row)
    return file.getvalue()


def _md(text: str) -> str:
    text = re.sub(r"([\\`*_|\[\]#~])", r"\\\1", " ".join(text.split()))
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


TEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"$<$", ">": r"$>$", "–": "--", "—": "---",
    "…": r"\dots{}", "×": r"$\times$", "≥": r"$\geq$", "≤": r"$\leq$", "−": r"$-$", "∞": r"$\infty$", "→": r"$\to$",
    "α": r"$\alpha$", "β": r"$\beta$", "γ": r"$\gamma$", "ε": r"$\epsilon$", "η": r"$\eta$", "θ": r"$\theta$",
    "λ": r"$\lambda$", "σ": r"$\sigma$", "τ": r"$\tau$",
}  # fmt: skip


def _tex(text: str) -> str:
    return "".join(TEX.get(letter, letter) for letter in " ".join(text.split()))
