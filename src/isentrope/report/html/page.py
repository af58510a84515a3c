"""A study as one HTML page that needs nothing but itself: words, claims, tables, figures, and how it was made."""

from __future__ import annotations

import re
from html import escape
from math import log
from pathlib import Path
from typing import Any

from isentrope.report.claims import FAILS, HOLDS, OPEN, Verdict, judge, said
from isentrope.report.html import chart, recipes
from isentrope.report.html import summary as words
from isentrope.report.html.fragments import KINDS, figure, fold, plain
from isentrope.report.load import LOWER_IS_BETTER, METRICS, PROTOCOLS, Grid, Plan, Row, read
from isentrope.report.tables.grid import ABSENT, FAILED, Entry, Sheet, sheet, write
from isentrope.report.tables.numbers import PPL_CAP, number
from isentrope.report.tables.published import CAPTION, UNSHOWN, beside
from isentrope.utils.files import read_json, write_atomically

SIGNS = {HOLDS: ("✓", "holds"), FAILS: ("✗", "fails"), OPEN: ("○", "open")}
MANY = 8  # claims that are shown one after another
# nothing is fetched, and a browser would refuse to
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def report(folder: Path, cap: bool = False) -> dict[str, Any]:
    """Write the page and every plan's tables; returns their paths and the verdicts, as JSON has them."""
    plans, compared = found(folder)
    told: list[dict[str, Any]] = [
        {
            "name": plan.name,
            "files": [str(path) for path in write(plan.folder, cap)],
            "claims": [verdict for grid in plan.grids for verdict in judge(grid)],
        }
        for plan in plans
    ]
    told += [
        {"name": each.name, "files": [str(path) for path in recipes.write(each)], "claims": []} for each in compared
    ]
    return {"report": str(page(folder, cap)), "plans": told}


def found(folder: Path) -> tuple[list[Plan], list[Path]]:
    """The plan in a folder or those in its subfolders, and the folders of those that compare recipes."""
    compared = recipes.folders(folder)
    return read(folder, needed=not compared), compared


def page(folder: Path, cap: bool = False) -> Path:
    """Write `report.html` of the plan in a folder, or of those in its subfolders."""
    text = html(*found(folder), cap)
    path = folder / "report.html"
    with write_atomically(path) as file:
        file.write_text(text, encoding="utf-8", newline="\n")
    return path


def html(plans: list[Plan], compared: list[Path], cap: bool = False) -> str:
    """The page of these plans."""
    here = Path(__file__)
    style, script = (here.with_name(f"page.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    question = "Which method holds at which length"
    titles = [plan.title for plan in plans] + [recipes.title(each) for each in compared]
    title = f"{titles[0]} · isentrope" if len(titles) == 1 else question
    grids = [grid for plan in plans for grid in plan.grids]
    sections = [_section(grid, f"{_slug(grid.plan.name)}-{i}", cap) for i, grid in enumerate(grids)]
    sections += [recipes.section(each, f"recipes-{i}") for i, each in enumerate(compared)]
    contents = ""
    if len(sections) > 1:
        entries = [_entry(grid, i) for i, grid in enumerate(grids)]
        entries += [f'<li><a href="#recipes-{i}">{escape(recipes.title(x))}</a></li>' for i, x in enumerate(compared)]
        contents = f'<nav aria-label="Contents"><ul>{"".join(entries)}</ul></nav>'
    opening = ""
    if len(plans) > 1:
        tally = words.tally([verdict for plan in plans for verdict in judge(plan.grids[0])])
        opening = f"<p>{len(plans)} plans. {escape(tally)}</p>"
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta name="color-scheme" content="light dark">\n<title>{escape(title)}</title>\n'
        f"<style>\n{style}</style>\n</head>\n<body>\n<header><p class=eyebrow>isentrope study</p>"
        f"<h1>{question}</h1>{opening}{contents}</header>\n<main>\n{''.join(sections)}</main>\n"
        f"<script>\n{script}</script>\n</body>\n</html>\n"
    )


def _entry(grid: Grid, place: int) -> str:
    verdicts = judge(grid)
    count = f" <small>{sum(v['verdict'] == HOLDS for v in verdicts)}/{len(verdicts)} hold</small>" if verdicts else ""
    other = f", {_protocol(grid)}" if len(grid.plan.grids) > 1 else ""
    return f'<li><a href="#{_slug(grid.plan.name)}-{place}">{escape(grid.plan.title + other)}</a>{count}</li>'


def _section(grid: Grid, name: str, cap: bool) -> str:
    plan, verdicts, view = grid.plan, judge(grid), sheet(grid, cap)
    own = grid is plan.grids[0]  # figures, losses and configuration are the plan's, and shown once
    label = f"{plan.told['label']} of the paper · " if plan.told.get("label") else ""
    parts = [
        f'<section class="plan" id="{name}" aria-labelledby="{name}-title">',
        f'<p class="eyebrow">{escape(label + _protocol(grid))}</p><h2 id="{name}-title">{escape(plan.title)}</h2>',
    ]
    if plan.rows:
        sentences = "".join(f"<li>{escape(text)}</li>" for text in words.summary(grid, verdicts))
        parts.append(f'<ul class="summary">{sentences}</ul>')
    parts.append(_claims(verdicts))
    if plan.rows and plan.lengths:
        parts.append(_table(view, name))
    parts.append("".join(f'<p class="note">{escape(note)}</p>' for note in view.notes))
    parts.append(_beside(view, own, cap))
    if own:
        parts += [_figures(plan), _training(plan), _provenance(plan)]
    return "".join(parts) + "</section>\n"


def _claims(verdicts: list[Verdict]) -> str:
    """In the plan's order; where there are many, by verdict, and what holds is folded away."""
    if not verdicts:
        return ""
    if len(verdicts) <= MANY:
        return f"<h3>Claims</h3>{_cards(verdicts)}"
    folds = []
    for kind in (FAILS, HOLDS, OPEN):
        found = [verdict for verdict in verdicts if verdict["verdict"] == kind]
        if found:
            opened = " open" if kind == FAILS else ""
            title = f"{len(found)} of {len(verdicts)}: {kind}"
            folds.append(f"<details{opened}><summary>{escape(title)}</summary>{_cards(found)}</details>")
    return f"<h3>Claims</h3>{''.join(folds)}"


def _cards(verdicts: list[Verdict]) -> str:
    items = []
    for verdict in verdicts:
        sign, kind = SIGNS[verdict["verdict"]]
        source = f" <cite>{escape(verdict['source'])}</cite>" if verdict["source"] else ""
        paper = f"<p class=numbers>{escape(verdict['paper']['words'])}</p>" if verdict["paper"] else ""
        items.append(
            f'<li class="{kind}"><span class="badge"><span aria-hidden="true">{sign}</span> '
            f"{escape(said(verdict))}</span>"
            f"<p>{escape(verdict['text'])}{source}</p><p class=numbers>{escape(verdict['words'])}</p>{paper}</li>"
        )
    return f'<ul class="claims">{"".join(items)}</ul>'


def _table(view: Sheet, name: str) -> str:
    """Lengths under each metric, so that either can be hidden; the script sorts by what `data-v` holds."""
    plan = view.grid.plan
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
        cells = "".join(
            _cell(view.entries[row, length, metric], view.grid, row, length, metric)
            for metric in plan.metrics
            for length in plan.lengths
        )
        start = ' class="start"' if view.starts_group(row) else ""
        label = escape(view.labels[row])
        body.append(f'<tr{start}><th scope="row" data-v="{label}">{label}</th>{cells}</tr>')
    method = '<button type="button" data-first="ascending" aria-label="Sort by method">Method</button>'
    return (
        f'<h3>Table</h3><div class="sheet" data-show="both"><div class="controls">{controls}'
        f'<span class="hint">Press a column’s head to sort; a third time restores the order.</span></div>'
        f'<div class="scroll" tabindex="0" role="region" aria-label="Table, scrolls sideways"><table>'
        f'<thead><tr><td class="corner"></td>{groups}</tr>'
        f'<tr><th scope="col" aria-sort="none">{method}</th>{heads}</tr></thead>'
        f'<tbody>{"".join(body)}</tbody></table></div><p class="caption">{escape(view.caption)}</p></div>'
    )


def _cell(entry: Entry, grid: Grid, row: Row, length: int, metric: str) -> str:
    kind = f"m-{metric} rank{entry.rank}" if entry.rank else f"m-{metric}"
    value = entry.value
    if value is None:
        reasons = "; ".join(grid.failed(row, length).values()) or "not measured yet"
        shown = FAILED if entry.text == FAILED else ABSENT
        return f'<td class="{kind}" title="{escape(reasons)}">{shown}</td>'
    # how good a value is, from 0 to 1: the cell's shade
    good = value.mean if metric == "acc" else 1 - log(max(value.mean, 1.0)) / log(PPL_CAP)
    shade = f"--good:{min(max(good, 0.0), 1.0):.2f}"
    interval = f"{number(value.low, metric)}–{number(value.high, metric)}"
    seeds = f"<br>seeds {number(value.least, metric)}–{number(value.most, metric)}" if value.seeds > 1 else ""
    text = escape(entry.text)
    marked = {0: text, 1: f"<b>{text}</b>", 2: f"<u>{text}</u>"}[entry.rank]
    return (
        f'<td class="{kind}" data-v="{value.mean!r}" style="{shade}" title="{interval}">{marked}'
        f'<small class="interval">{interval}{seeds}</small></td>'
    )


def _beside(view: Sheet, own: bool, cap: bool) -> str:
    """The paper's numbers beside ours: how many changes agree, the figure, and the tables folded away."""
    found, plan = beside(view.grid), view.grid.plan
    if found is None:
        return ""
    told = f"{found.sentence()} {UNSHOWN}" if found.sentence() else ""
    parts = [f"<h3>Beside the paper</h3><p>{escape(told or f'The numbers of its {found.table.label}.')}</p>"]
    drawn = {suffix: path for suffix in KINDS if (path := plan.folder / f"beside{suffix}").is_file()}
    if own and drawn:
        parts.append(figure(drawn, CAPTION))
    for metric in reversed(plan.metrics):
        tables = [found.numbers(metric, view.labels, cap), found.counts(metric)]
        shown = "".join(plain(rows, f"{METRICS[metric]} beside the paper") for rows in tables if rows)
        parts.append(f"<details><summary>{METRICS[metric]}: the paper’s and ours</summary>{shown}</details>")
    return "".join(parts)


def _figures(plan: Plan) -> str:
    """The plan's figures, each once."""
    folder = plan.folder / "figures"
    found: dict[str, dict[str, Path]] = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if path.suffix in KINDS and not path.name.startswith("."):
            found.setdefault(path.stem, {})[path.suffix] = path
    captions = _captions(folder)
    shown = []
    for stem, paths in found.items():
        names = [f"{stem}.svg", f"{stem}.png", stem]
        caption = next((captions[name] for name in names if name in captions), re.sub(r"[-_]+", " ", stem))
        shown.append(figure(paths, caption))
    return f'<h3>Figures</h3><div class="figures">{"".join(shown)}</div>' if shown else ""


def _captions(folder: Path) -> dict[str, str]:
    path = folder / "figures.json"
    if not path.is_file():
        return {}
    found = read_json(path, "delete it, and run the plan again")
    if not isinstance(found, dict):
        raise ValueError(f"{path}: expected captions by file name, got {type(found).__name__}")
    return {str(name): str(caption) for name, caption in found.items()}


def _training(plan: Plan) -> str:
    checkpoints: dict[str, dict[str, Any]] = plan.told.get("checkpoints") or {}
    if not checkpoints:
        return ""
    drawn = chart.losses({name: told.get("log") or [] for name, told in checkpoints.items()})
    rows = [["Checkpoint", "best step", "validation loss", "time"]]
    for name, told in checkpoints.items():
        best = told.get("best") or {}
        validation, seconds = best.get("validation"), told.get("seconds")
        why = told.get("failed")
        cells = [
            f"failed, {why}" if why else str(best.get("step") or ""),
            f"{validation:.4f}" if isinstance(validation, int | float) else "",
            f"{seconds:.0f} s" if isinstance(seconds, int | float) else "",
        ]
        rows.append([name, *cells])
    label = "<figcaption>Training loss (nats a masked token) against step.</figcaption>"
    curves = f"<figure class=losses>{drawn}{label}</figure>" if drawn else ""
    return f"<h3>Training</h3>{curves}{plain(rows, 'Checkpoints')}"


def _provenance(plan: Plan) -> str:
    """How it was made, folded away: run, corpus, each row's recipe, each checkpoint's configuration."""
    told = plan.told
    rows = {Row(str(row["method"]), str(row["variant"])).label: row.get("recipe", "") for row in told["rows"]}
    settings = {key: told.get(key) for key in ("name", "protocol", "positions", "train_length", "lengths", "layout")}
    folds = [fold("Run", told.get("run")), fold("Corpus", told.get("data")), fold("Plan", settings | {"rows": rows})]
    for name, checkpoint in (told.get("checkpoints") or {}).items():
        folds.append(fold(f"Checkpoint {name}", checkpoint.get("config")))
    return f"<h3>Configuration and provenance</h3>{''.join(folds)}"


def _protocol(grid: Grid) -> str:
    return PROTOCOLS.get(grid.protocol, grid.protocol)


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "plan"
