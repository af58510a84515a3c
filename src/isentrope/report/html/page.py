"""A study as one self-contained HTML page: summary, claims, tables, figures and provenance."""

from __future__ import annotations

import re
from html import escape
from math import log
from pathlib import Path
from typing import Any

from isentrope.report.claims import evaluate_claims, format_verdict
from isentrope.report.html.chart import render_losses
from isentrope.report.html.comparison import (
    find_comparison_folders,
    read_comparison_title,
    render_comparison,
    write_comparison,
)
from isentrope.report.html.fragments import MIME_TYPES, render_details, render_figure, render_table
from isentrope.report.html.recipes import find_recipe_folders, read_title, render_section, write_recipes
from isentrope.report.html.summary import count_verdicts, summarize_grid
from isentrope.report.load import LOWER_IS_BETTER, METRICS, PROTOCOLS, Grid, PlanResults, Row, load_plans
from isentrope.report.tables.numbers import PPL_CAP, format_number
from isentrope.report.tables.plan_tables import GridTable, format_grid, write_tables
from isentrope.report.tables.published import FIGURE_CAPTION, ROUNDING_NOTE, compare_with_paper
from isentrope.report.verdicts import FAILS, HOLDS, NOT_MEASURED, OPEN, Verdict
from isentrope.utils.files import read_json, write_atomically

VERDICT_SIGNS = {HOLDS: ("✓", "holds"), FAILS: ("✗", "fails"), OPEN: ("?", "open"), NOT_MEASURED: ("○", "open")}
MAX_LISTED_CLAIMS = 8  # more are grouped by verdict
# the page fetches nothing, and browsers enforce it
CONTENT_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def write_report(folder: Path, cap: bool = False) -> dict[str, Any]:
    """Write the page and every plan's tables.

    Args:
        folder: a plan's folder, or one whose subfolders are.
        cap: whether to print >500 and <0.1 as the paper does.

    Returns:
        The paths of all files and the verdicts, ready for JSON.
    """
    plans, recipe_folders, comparisons = find_results(folder)
    written: list[dict[str, Any]] = [
        {
            "name": plan.name,
            "files": [str(path) for path in write_tables(plan.folder, cap)],
            "claims": [verdict for grid in plan.grids for verdict in evaluate_claims(grid)],
        }
        for plan in plans
    ]
    written += [
        {"name": path.name, "files": [str(file) for file in write_recipes(path)], "claims": []}
        for path in recipe_folders
    ]
    written += [
        {"name": path.name, "files": [str(file) for file in write_comparison(path)], "claims": []}
        for path in comparisons
    ]
    return {"report": str(write_page(folder, cap)), "plans": written}


def find_results(folder: Path) -> tuple[list[PlanResults], list[Path], list[Path]]:
    """Find plans for masked models, folders of those for causal ones and of comparisons, in a folder or below it."""
    recipe_folders, comparisons = find_recipe_folders(folder), find_comparison_folders(folder)
    return load_plans(folder, required=not recipe_folders and not comparisons), recipe_folders, comparisons


def write_page(folder: Path, cap: bool = False) -> Path:
    """Write `report.html` for the plan in a folder, or for those in its subfolders."""
    text = render_page(*find_results(folder), cap)
    path = folder / "report.html"
    with write_atomically(path) as file:
        file.write_text(text, encoding="utf-8", newline="\n")
    return path


def render_page(
    plans: list[PlanResults], recipe_folders: list[Path], comparisons: list[Path], cap: bool = False
) -> str:
    """Render the page of these plans and comparisons."""
    style, script = (Path(__file__).with_name(f"page.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    heading = "Which method holds at which length"
    causal = [(f"recipes-{i}", read_title(path)) for i, path in enumerate(recipe_folders)]
    causal += [(f"comparison-{i}", read_comparison_title(path)) for i, path in enumerate(comparisons)]
    titles = [plan.title for plan in plans] + [title for _, title in causal]
    title = f"{titles[0]} · isentrope" if len(titles) == 1 else heading
    grids = [grid for plan in plans for grid in plan.grids]
    sections = [_render_grid(grid, f"{_slug(grid.plan.name)}-{i}", cap) for i, grid in enumerate(grids)]
    sections += [render_section(path, f"recipes-{i}") for i, path in enumerate(recipe_folders)]
    sections += [render_comparison(path, f"comparison-{i}") for i, path in enumerate(comparisons)]
    contents = ""
    if len(sections) > 1:
        entries = [_render_contents_entry(grid, i) for i, grid in enumerate(grids)]
        entries += [f'<li><a href="#{name}">{escape(text)}</a></li>' for name, text in causal]
        contents = f'<nav aria-label="Contents"><ul>{"".join(entries)}</ul></nav>'
    opening = ""
    if len(plans) > 1:
        counts = count_verdicts([verdict for plan in plans for verdict in evaluate_claims(plan.grids[0])])
        opening = f"<p>{len(plans)} plans. {escape(counts)}</p>"
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{CONTENT_POLICY}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta name="color-scheme" content="light dark">\n<title>{escape(title)}</title>\n'
        f"<style>\n{style}</style>\n</head>\n<body>\n<header><p class=eyebrow>isentrope study</p>"
        f"<h1>{heading}</h1>{opening}{contents}</header>\n<main>\n{''.join(sections)}</main>\n"
        f"<script>\n{script}</script>\n</body>\n</html>\n"
    )


def _render_contents_entry(grid: Grid, index: int) -> str:
    verdicts = evaluate_claims(grid)
    count = f" <small>{sum(v['verdict'] == HOLDS for v in verdicts)}/{len(verdicts)} hold</small>" if verdicts else ""
    other = f", {_protocol_name(grid)}" if len(grid.plan.grids) > 1 else ""
    return f'<li><a href="#{_slug(grid.plan.name)}-{index}">{escape(grid.plan.title + other)}</a>{count}</li>'


def _render_grid(grid: Grid, name: str, cap: bool) -> str:
    plan, verdicts, table = grid.plan, evaluate_claims(grid), format_grid(grid, cap)
    is_first = grid is plan.grids[0]  # a plan's figures, losses and configuration are shown once
    label = f"{plan.metadata['label']} of the paper · " if plan.metadata.get("label") else ""
    parts = [
        f'<section class="plan" id="{name}" aria-labelledby="{name}-title">',
        f'<p class="eyebrow">{escape(label + _protocol_name(grid))}</p><h2 id="{name}-title">{escape(plan.title)}</h2>',
    ]
    if plan.rows:
        sentences = "".join(f"<li>{escape(text)}</li>" for text in summarize_grid(grid, verdicts))
        parts.append(f'<ul class="summary">{sentences}</ul>')
    parts.append(_render_claims(verdicts))
    if plan.rows and plan.lengths:
        parts.append(_render_table(table, name))
    parts.append("".join(f'<p class="note">{escape(note)}</p>' for note in table.notes))
    parts.append(_render_comparison(table, is_first, cap))
    if is_first:
        parts += [_render_figures(plan), _render_training(plan), _render_provenance(plan)]
    return "".join(parts) + "</section>\n"


def _render_claims(verdicts: list[Verdict]) -> str:
    """Render claims in the plan's order; many are grouped by verdict, with only the failed ones open."""
    if not verdicts:
        return ""
    if len(verdicts) <= MAX_LISTED_CLAIMS:
        return f"<h3>Claims</h3>{_render_cards(verdicts)}"
    folds = []
    for kind in (FAILS, HOLDS, OPEN, NOT_MEASURED):
        group = [verdict for verdict in verdicts if verdict["verdict"] == kind]
        if group:
            opened = " open" if kind == FAILS else ""
            title = f"{len(group)} of {len(verdicts)}: {kind}"
            folds.append(f"<details{opened}><summary>{escape(title)}</summary>{_render_cards(group)}</details>")
    return f"<h3>Claims</h3>{''.join(folds)}"


def _render_cards(verdicts: list[Verdict]) -> str:
    items = []
    for verdict in verdicts:
        sign, kind = VERDICT_SIGNS[verdict["verdict"]]
        source = f" <cite>{escape(verdict['source'])}</cite>" if verdict["source"] else ""
        paper = f"<p class=numbers>{escape(verdict['paper']['words'])}</p>" if verdict["paper"] else ""
        items.append(
            f'<li class="{kind}"><span class="badge"><span aria-hidden="true">{sign}</span> '
            f"{escape(format_verdict(verdict))}</span>"
            f"<p>{escape(verdict['text'])}{source}</p><p class=numbers>{escape(verdict['words'])}</p>{paper}</li>"
        )
    return f'<ul class="claims">{"".join(items)}</ul>'


def _render_table(table: GridTable, name: str) -> str:
    """Render lengths under each metric, so that either can be hidden; the script sorts by `data-v`."""
    plan = table.grid.plan
    choices = [*plan.metrics, "both"] if len(plan.metrics) > 1 else []
    labels = METRICS | {"both": "Both"}
    radios = "".join(
        f'<label><input type="radio" name="{name}-show" value="{c}"{" checked" * (c == "both")}>{labels[c]}</label>'
        for c in choices
    )
    controls = f"<fieldset><legend>Show</legend>{radios}</fieldset>" if choices else ""
    controls += '<label class="check"><input type="checkbox" data-intervals> intervals</label>'
    groups = "".join(
        f'<th scope="colgroup" colspan="{len(plan.lengths)}" class="m-{metric}">{METRICS[metric]} '
        f"<small>{'lower' if metric in LOWER_IS_BETTER else 'higher'} is better</small></th>"
        for metric in plan.metrics
    )
    heads = "".join(
        f'<th scope="col" class="m-{metric}" aria-sort="none"><button type="button" '
        f'data-first="{"ascending" if metric in LOWER_IS_BETTER else "descending"}" '
        f'aria-label="Sort by {METRICS[metric]} at {length}">{length}</button></th>'
        for metric in plan.metrics
        for length in plan.lengths
    )
    body = []
    for row in plan.rows:
        cells = "".join(_render_cell(table, row, length, metric) for metric in plan.metrics for length in plan.lengths)
        start = ' class="start"' if table.starts_group(row) else ""
        label = escape(table.labels[row])
        body.append(f'<tr{start}><th scope="row" data-v="{label}">{label}</th>{cells}</tr>')
    method = '<button type="button" data-first="ascending" aria-label="Sort by method">Method</button>'
    return (
        f'<h3>Table</h3><div class="sheet" data-show="both"><div class="controls">{controls}'
        f'<span class="hint">Press a column’s head to sort; a third time restores the order.</span></div>'
        f'<div class="scroll" tabindex="0" role="region" aria-label="Table, scrolls sideways"><table>'
        f'<thead><tr><td class="corner"></td>{groups}</tr>'
        f'<tr><th scope="col" aria-sort="none">{method}</th>{heads}</tr></thead>'
        f'<tbody>{"".join(body)}</tbody></table></div><p class="caption">{escape(table.caption)}</p></div>'
    )


def _render_cell(table: GridTable, row: Row, length: int, metric: str) -> str:
    cell = table.cells[row, length, metric]
    kind = f"m-{metric} rank{cell.rank}" if cell.rank else f"m-{metric}"
    value = cell.value
    if value is None:
        reasons = "; ".join(table.grid.failures(row, length).values()) or "not measured yet"
        return f'<td class="{kind}" title="{escape(reasons)}">{cell.text}</td>'
    # the cell's shade: 0 for the worst value, 1 for the best
    good = value.mean if metric == "acc" else 1 - log(max(value.mean, 1.0)) / log(PPL_CAP)
    shade = f"--good:{min(max(good, 0.0), 1.0):.2f}"
    interval = f"{format_number(value.low, metric)}–{format_number(value.high, metric)}"
    seeds = (
        f"<br>seeds {format_number(value.least, metric)}–{format_number(value.most, metric)}" if value.seeds > 1 else ""
    )
    text = escape(cell.text)
    marked = {0: text, 1: f"<b>{text}</b>", 2: f"<u>{text}</u>"}[cell.rank]
    return (
        f'<td class="{kind}" data-v="{value.mean!r}" style="{shade}" title="{interval}">{marked}'
        f'<small class="interval">{interval}{seeds}</small></td>'
    )


def _render_comparison(table: GridTable, is_first: bool, cap: bool) -> str:
    """Render how many changes agree with the paper, the figure, and folded tables of both numbers."""
    comparison, plan = compare_with_paper(table.grid), table.grid.plan
    if comparison is None:
        return ""
    sentence = comparison.summarize()
    text = f"{sentence} {ROUNDING_NOTE}" if sentence else f"The numbers of its {comparison.table.label}."
    parts = [f"<h3>Comparison with the paper</h3><p>{escape(text)}</p>"]
    figures = {suffix: path for suffix in MIME_TYPES if (path := plan.folder / f"beside{suffix}").is_file()}
    if is_first and figures:
        parts.append(render_figure(figures, FIGURE_CAPTION))
    for metric in reversed(plan.metrics):
        tables = [comparison.number_rows(metric, table.labels, cap), comparison.agreement_rows(metric)]
        rendered = "".join(render_table(rows, f"{METRICS[metric]}, paper and ours") for rows in tables if rows)
        parts.append(f"<details><summary>{METRICS[metric]}: the paper’s and ours</summary>{rendered}</details>")
    return "".join(parts)


def _render_figures(plan: PlanResults) -> str:
    """Render each of the plan's figures once."""
    folder = plan.folder / "figures"
    files: dict[str, dict[str, Path]] = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if path.suffix in MIME_TYPES and not path.name.startswith("."):
            files.setdefault(path.stem, {})[path.suffix] = path
    captions = _read_captions(folder)
    figures = []
    for stem, paths in files.items():
        names = [f"{stem}.svg", f"{stem}.png", stem]
        caption = next((captions[name] for name in names if name in captions), re.sub(r"[-_]+", " ", stem))
        figures.append(render_figure(paths, caption))
    return f'<h3>Figures</h3><div class="figures">{"".join(figures)}</div>' if figures else ""


def _read_captions(folder: Path) -> dict[str, str]:
    path = folder / "figures.json"
    if not path.is_file():
        return {}
    captions = read_json(path, "delete it, and run the plan again")
    if not isinstance(captions, dict):
        raise ValueError(f"{path}: expected captions by file name, got {type(captions).__name__}")
    return {str(name): str(caption) for name, caption in captions.items()}


def _render_training(plan: PlanResults) -> str:
    checkpoints: dict[str, dict[str, Any]] = plan.metadata.get("checkpoints") or {}
    if not checkpoints:
        return ""
    chart = render_losses({name: checkpoint.get("log") or [] for name, checkpoint in checkpoints.items()})
    rows = [["Checkpoint", "best step", "validation loss", "time"]]
    for name, checkpoint in checkpoints.items():
        best = checkpoint.get("best") or {}
        validation, seconds = best.get("validation"), checkpoint.get("seconds")
        reason = checkpoint.get("failed")
        cells = [
            f"failed, {reason}" if reason else str(best.get("step") or ""),
            f"{validation:.4f}" if isinstance(validation, int | float) else "",
            f"{seconds:.0f} s" if isinstance(seconds, int | float) else "",
        ]
        rows.append([name, *cells])
    label = "<figcaption>Training loss (nats per masked token) against step.</figcaption>"
    curves = f"<figure class=losses>{chart}{label}</figure>" if chart else ""
    return f"<h3>Training</h3>{curves}{render_table(rows, 'Checkpoints')}"


def _render_provenance(plan: PlanResults) -> str:
    """Render folded details: run, corpus, each row's recipe, each checkpoint's configuration."""
    metadata = plan.metadata
    rows = {Row(str(row["method"]), str(row["variant"])).label: row.get("recipe", "") for row in metadata["rows"]}
    settings = {
        key: metadata.get(key) for key in ("name", "protocol", "positions", "train_length", "lengths", "layout")
    }
    folds = [
        render_details("Run", metadata.get("run")),
        render_details("Corpus", metadata.get("data")),
        render_details("Plan", settings | {"rows": rows}),
    ]
    for name, checkpoint in (metadata.get("checkpoints") or {}).items():
        folds.append(render_details(f"Checkpoint {name}", checkpoint.get("config")))
    return f"<h3>Configuration and provenance</h3>{''.join(folds)}"


def _protocol_name(grid: Grid) -> str:
    return PROTOCOLS.get(grid.protocol, grid.protocol)


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "plan"
