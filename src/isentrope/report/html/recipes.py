"""The section of a page that compares recipes of one causal model."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

from isentrope.evaluation.ranking import rank_recipes
from isentrope.evaluation.results import read_results
from isentrope.report.figures.perplexity import draw_perplexity
from isentrope.report.figures.retrieval import draw_heatmaps
from isentrope.report.html.fragments import MIME_TYPES, render_details, render_figure, render_table
from isentrope.report.load import find_result_folders
from isentrope.report.tables.leaderboard import CAPTION, format_rows, summarize_ranking, write_leaderboard
from isentrope.report.tables.retrieval import describe_retrieval, format_retrieval, read_retrieval
from isentrope.utils.files import RERUN_REMEDY, read_fields

CAPTIONS = {
    "leaderboard": "Perplexity in the last bucket, and what each recipe changes inside the training length.",
    "perplexity": "Perplexity by position in the text.",
}


def find_recipe_folders(folder: Path) -> list[Path]:
    """Find folders with results of a plan for a causal model: the folder itself, or those below it."""
    return find_result_folders(folder, "decoder.json")


def read_title(folder: Path) -> str:
    return str(_read_plan(folder)["title"])


def write_recipes(folder: Path) -> list[Path]:
    """Write the leaderboard and figures beside the results."""
    _read_plan(folder)
    paths = [*write_leaderboard(folder), *draw_perplexity(folder / "perplexity.json")]
    if (results := folder / "retrieval.json").exists():
        paths += draw_heatmaps(results)
    return paths


def summarize_recipes(folder: Path) -> list[Any]:
    """Summarize which of the plan's recipes is best."""
    plan = _read_plan(folder)
    return summarize_ranking(folder, plan["recipes"], plan["forgetful"])


def render_section(folder: Path, name: str) -> str:
    plan, board = _read_plan(folder), rank_recipes(folder)
    data = read_results(folder / "perplexity.json", RERUN_REMEDY)
    sentences = "".join(f"<li>{escape(line.plain)}</li>" for line in summarize_recipes(folder))
    figures = []
    for svg in sorted(folder.glob("*.svg")):
        paths = {suffix: path for suffix in MIME_TYPES if (path := svg.with_suffix(suffix)).is_file()}
        figures.append(render_figure(paths, CAPTIONS.get(svg.stem, svg.stem.replace("-", ": "))))
    heads, rows = format_rows(board)
    settings = {key: data.get(key) for key in ("model", "train_length", "config", "texts")}
    return (
        f'<section class="plan" id="{name}" aria-labelledby="{name}-title">'
        f'<p class="eyebrow">{escape(board["model"]["name"])}</p><h2 id="{name}-title">{escape(plan["title"])}</h2>'
        f'<ul class="summary">{sentences}</ul><h3>Table</h3>{render_table([heads, *rows], "Recipes")}'
        f'<p class="caption">{escape(CAPTION)}</p>{_render_retrieval(folder)}'
        f'<h3>Figures</h3><div class="figures" style="grid-template-columns: 1fr">{"".join(figures)}</div>'
        f"<h3>Configuration and provenance</h3>{render_details('Run', data.get('run'))}"
        f"{render_details('Plan', settings)}</section>\n"
    )


def _render_retrieval(folder: Path) -> str:
    """Render the table of retrieval with its intervals and the ceiling, where retrieval was measured."""
    if not (results := folder / "retrieval.json").exists():
        return ""
    data, metric = read_retrieval(results)
    heads, rows = format_retrieval(data, metric)
    notes = escape(" ".join(describe_retrieval(data, metric)))
    return f'<h3>Retrieval</h3>{render_table([heads, *rows], "Retrieval")}<p class="caption">{notes}</p>'


def _read_plan(folder: Path) -> dict[str, Any]:
    return read_fields(folder / "decoder.json", "run the plan again", "title", "recipes", "forgetful")
