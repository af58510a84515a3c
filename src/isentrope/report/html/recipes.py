"""The section of a page that compares recipes of one causal model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from isentrope.evaluation.ranking import rank_recipes
from isentrope.evaluation.results import read_results
from isentrope.report.figures.perplexity import draw_perplexity
from isentrope.report.figures.retrieval import draw_heatmaps
from isentrope.report.html.fragments import Section, embed_figure, find_figure, list_names, render
from isentrope.report.load import find_result_folders
from isentrope.report.tables.leaderboard import describe_columns, format_rows, summarize_ranking, write_leaderboard
from isentrope.report.tables.retrieval import describe_retrieval, format_retrieval, read_retrieval
from isentrope.utils.files import RERUN_REMEDY, read_fields

CAPTIONS = {
    "leaderboard": "Perplexity in the last bucket, and what each recipe changes inside the training length.",
    "perplexity": "Perplexity by position in the text.",
}


def find_recipe_folders(folder: Path) -> list[Path]:
    """Find folders with results of a plan for a causal model: the folder itself, or those below it."""
    return find_result_folders(folder, "decoder.json")


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


def build_section(folder: Path, name: str) -> Section:
    """Build the section of one plan; its figures are read from the folder."""
    plan, board = _read_plan(folder), rank_recipes(folder)
    data = read_results(folder / "perplexity.json", RERUN_REMEDY)
    figures = [
        embed_figure(find_figure(svg.with_suffix("")), CAPTIONS.get(svg.stem, svg.stem.replace("-", ": ")))
        for svg in sorted(folder.glob("*.svg"))
    ]
    heads, rows = format_rows(board)
    settings = {key: data.get(key) for key in ("model", "train_length", "config", "texts")}
    body = render(
        "recipes.html",
        summary=[line.plain for line in summarize_recipes(folder)],
        rows=[heads, *rows],
        caption=describe_columns(board),
        retrieval=_format_retrieval(folder),
        figures=figures,
        provenance=[("Run", data.get("run")), ("Plan", settings)],
    )
    model, texts = str(board["model"]["name"]), list_names(str(text["name"]) for text in data.get("texts") or [])
    return Section(name, str(plan["title"]), "Perplexity of each recipe", model, texts, body)


def _format_retrieval(folder: Path) -> dict[str, Any] | None:
    """Return the table of retrieval with its intervals and the ceiling, where retrieval was measured."""
    if not (results := folder / "retrieval.json").exists():
        return None
    data, metric = read_retrieval(results)
    heads, rows = format_retrieval(data, metric)
    # the recipe first: that column stays where a table scrolls sideways
    swapped = [[recipe, task, *cells] for task, recipe, *cells in (heads, *rows)]
    return {"rows": swapped, "notes": " ".join(describe_retrieval(data, metric))}


def _read_plan(folder: Path) -> dict[str, Any]:
    return read_fields(folder / "decoder.json", "run the plan again", "title", "recipes", "forgetful")
