"""The section of a page about one plan: methods by length, claims, figures, training."""

from __future__ import annotations

import re
from math import log
from pathlib import Path
from typing import Any

from isentrope.report.claims import evaluate_claims, format_verdict
from isentrope.report.html.chart import render_losses
from isentrope.report.html.fragments import MIME_TYPES, Section, embed_figure, find_figure, render
from isentrope.report.html.summary import summarize_grid
from isentrope.report.load import LOWER_IS_BETTER, METRICS, PROTOCOLS, Grid, PlanResults, Row
from isentrope.report.tables.numbers import PPL_CAP, format_number
from isentrope.report.tables.plan_tables import GridTable, format_grid
from isentrope.report.tables.published import FIGURE_CAPTION, ROUNDING_NOTE, compare_with_paper
from isentrope.report.verdicts import FAILS, HOLDS, NOT_MEASURED, OPEN, Verdict
from isentrope.utils.files import read_json

VERDICT_SIGNS = {HOLDS: ("✓", "holds"), FAILS: ("✗", "fails"), OPEN: ("?", "open"), NOT_MEASURED: ("○", "open")}
MAX_LISTED_CLAIMS = 8  # more are grouped by verdict
MODEL = "GAU-α"  # which every plan of this kind trains or reads


def build_grid_section(grid: Grid, index: int, cap: bool) -> Section:
    """Build the section of one plan under one protocol.

    Args:
        grid: the results.
        index: of the section in the page.
        cap: whether to print >500 and <0.1 as the paper does.
    """
    plan, verdicts, table = grid.plan, evaluate_claims(grid), format_grid(grid, cap)
    name = f"{_slug(plan.name)}-{index}"
    is_first = grid is plan.grids[0]  # a plan's figures, losses and configuration are shown once
    checkpoints = plan.metadata.get("checkpoints") or {} if is_first else {}
    body = render(
        "grid.html",
        summary=summarize_grid(grid, verdicts) if plan.rows else [],
        claims=_group_claims(verdicts),
        sheet=_build_sheet(table, name) if plan.rows and plan.lengths else None,
        notes=table.notes,
        comparison=_build_comparison(table, is_first, cap),
        figures=_list_figures(plan) if is_first else [],
        checkpoints=_list_checkpoints(checkpoints) if checkpoints else [],
        chart=render_losses({key: checkpoint.get("log") or [] for key, checkpoint in checkpoints.items()}),
        provenance=_list_provenance(plan) if is_first else [],
    )
    trained, texts = plan.metadata.get("train_length"), str((plan.metadata.get("data") or {}).get("name") or "")
    model = f"{MODEL} trained at {trained} tokens" if trained else MODEL
    protocol = PROTOCOLS.get(grid.protocol, grid.protocol)
    label = f"{plan.metadata['label']} of the paper" if plan.metadata.get("label") else ""
    title = f"{plan.title}, {protocol}" if len(plan.grids) > 1 else plan.title
    note = " · ".join(filter(None, (label, protocol)))
    kind = f"{' and '.join(METRICS[metric] for metric in plan.metrics)} by length"
    hold = sum(verdict["verdict"] == HOLDS for verdict in verdicts)
    count = f"{hold}/{len(verdicts)} hold" if verdicts else ""
    return Section(name, title, kind, model, texts, body, note, count)


def _group_claims(verdicts: list[Verdict]) -> list[dict[str, Any]]:
    """Return claims in the plan's order; many are grouped by verdict, with only the failed ones open."""
    if len(verdicts) <= MAX_LISTED_CLAIMS:
        return [{"title": "", "verdicts": _build_cards(verdicts)}] if verdicts else []
    groups = []
    for kind in (FAILS, HOLDS, OPEN, NOT_MEASURED):
        members = [verdict for verdict in verdicts if verdict["verdict"] == kind]
        title = f"{len(members)} of {len(verdicts)}: {kind}"
        groups += [{"title": title, "is_open": kind == FAILS, "verdicts": _build_cards(members)}] if members else []
    return groups


def _build_cards(verdicts: list[Verdict]) -> list[dict[str, str]]:
    cards = []
    for verdict in verdicts:
        sign, kind = VERDICT_SIGNS[verdict["verdict"]]
        paper = verdict["paper"]["words"] if verdict["paper"] else ""
        card = {"sign": sign, "kind": kind, "badge": format_verdict(verdict), "text": verdict["text"], "paper": paper}
        cards.append(card | {"source": verdict["source"] or "", "words": verdict["words"]})
    return cards


def _build_sheet(table: GridTable, name: str) -> dict[str, Any]:
    """Build the table with lengths under each metric, so that either can be hidden."""
    plan = table.grid.plan
    labels = METRICS | {"both": "Both"}
    choices = [(choice, labels[choice]) for choice in [*plan.metrics, "both"]] if len(plan.metrics) > 1 else []
    columns = [(metric, length) for metric in plan.metrics for length in plan.lengths]
    groups = [
        {
            "label": METRICS[metric],
            "columns": len(plan.lengths),
            "kind": f"m-{metric}",
            "note": f"{'lower' if metric in LOWER_IS_BETTER else 'higher'} is better",
        }
        for metric in plan.metrics
    ]
    heads = [
        {
            "label": length,
            "kind": f"m-{metric}",
            "order": "ascending" if metric in LOWER_IS_BETTER else "descending",
            "name": f"{METRICS[metric]} at {length}",
        }
        for metric, length in columns
    ]
    rows = [
        {
            "key": table.labels[row],
            "label": table.labels[row],
            "is_best": False,
            "starts_group": table.starts_group(row),
            "cells": [_build_cell(table, row, length, metric) for metric, length in columns],
        }
        for row in plan.rows
    ]
    return {
        "title": "Table", "classes": "sheet", "name": name, "choices": choices, "groups": groups, "heads": heads,
        "first": "Method", "sort_first_by": "method", "rows": rows, "footer": [], "caption": table.caption,
    }  # fmt: skip


def _build_cell(table: GridTable, row: Row, length: int, metric: str) -> dict[str, Any]:
    cell = table.cells[row, length, metric]
    kind = f"m-{metric} rank{cell.rank}" if cell.rank else f"m-{metric}"
    value = cell.value
    if value is None:
        reasons = "; ".join(table.grid.failures(row, length).values()) or "not measured yet"
        return {
            "kind": kind, "value": None, "shade": None, "hint": reasons, "rank": 0, "text": cell.text, "notes": [],
        }  # fmt: skip
    # the cell's shade: 0 for the worst value, 1 for the best
    good = value.mean if metric == "acc" else 1 - log(max(value.mean, 1.0)) / log(PPL_CAP)
    interval = f"{format_number(value.low, metric)}–{format_number(value.high, metric)}"
    seeds = f"seeds {format_number(value.least, metric)}–{format_number(value.most, metric)}"
    return {
        "kind": kind, "value": repr(value.mean), "shade": f"{min(max(good, 0.0), 1.0):.2f}", "hint": interval,
        "rank": cell.rank, "text": cell.text, "notes": [interval, seeds] if value.seeds > 1 else [interval],
    }  # fmt: skip


def _build_comparison(table: GridTable, is_first: bool, cap: bool) -> dict[str, Any] | None:
    """Return how many changes agree with the paper, the figure, and folded tables of both numbers."""
    comparison, plan = compare_with_paper(table.grid), table.grid.plan
    if comparison is None:
        return None
    sentence = comparison.summarize()
    figure = find_figure(plan.folder / "beside") if is_first else {}
    folds = []
    for metric in reversed(plan.metrics):
        tables = [comparison.number_rows(metric, table.labels, cap), comparison.agreement_rows(metric)]
        folds.append({
            "title": f"{METRICS[metric]}: the paper’s and ours",
            "name": f"{METRICS[metric]}, paper and ours",
            "tables": [rows for rows in tables if rows],
        })  # fmt: skip
    return {
        "text": f"{sentence} {ROUNDING_NOTE}" if sentence else f"The numbers of its {comparison.table.label}.",
        "figure": embed_figure(figure, FIGURE_CAPTION) if figure else None,
        "folds": folds,
    }


def _list_figures(plan: PlanResults) -> list[dict[str, str]]:
    """List each of the plan's figures once."""
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
        figures.append(embed_figure(paths, caption))
    return figures


def _read_captions(folder: Path) -> dict[str, str]:
    path = folder / "figures.json"
    if not path.is_file():
        return {}
    captions = read_json(path, "delete it, and run the plan again")
    if not isinstance(captions, dict):
        raise ValueError(f"{path}: expected captions by file name, got {type(captions).__name__}")
    return {str(name): str(caption) for name, caption in captions.items()}


def _list_checkpoints(checkpoints: dict[str, dict[str, Any]]) -> list[list[str]]:
    """List how each checkpoint's training ended, under headings."""
    rows = [["Checkpoint", "best step", "validation loss", "time"]]
    for name, checkpoint in checkpoints.items():
        best = checkpoint.get("best") or {}
        validation, seconds = best.get("validation"), checkpoint.get("seconds")
        reason = checkpoint.get("failed")
        rows.append([
            name,
            f"failed, {reason}" if reason else str(best.get("step") or ""),
            f"{validation:.4f}" if isinstance(validation, int | float) else "",
            f"{seconds:.0f} s" if isinstance(seconds, int | float) else "",
        ])  # fmt: skip
    return rows


def _list_provenance(plan: PlanResults) -> list[tuple[str, Any]]:
    """List run, corpus, each row's recipe, and each checkpoint's configuration."""
    metadata = plan.metadata
    rows = {Row(str(row["method"]), str(row["variant"])).label: row.get("recipe", "") for row in metadata["rows"]}
    settings = {
        key: metadata.get(key) for key in ("name", "protocol", "positions", "train_length", "lengths", "layout")
    }
    checkpoints = (metadata.get("checkpoints") or {}).items()
    return [
        ("Run", metadata.get("run")),
        ("Corpus", metadata.get("data")),
        ("Plan", settings | {"rows": rows}),
        *((f"Checkpoint {name}", checkpoint.get("config")) for name, checkpoint in checkpoints),
    ]


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "plan"
