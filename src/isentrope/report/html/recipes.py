"""Recipes of one causal model as a section of the page: the verdict, the table, figures, and how it was made."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

from isentrope.evaluation.ranking import rank_recipes
from isentrope.report.figures import laws as figures
from isentrope.report.figures import retrieval
from isentrope.report.html.fragments import KINDS, figure, fold, plain
from isentrope.report.tables import leaderboard
from isentrope.utils.files import RERUN_REMEDY, read_fields

CAPTIONS = {
    "leaderboard": "Perplexity in the last bucket, and what each recipe changes inside the training length.",
    "perplexity": "Perplexity by position in the text.",
}


def folders(folder: Path) -> list[Path]:
    """Those with results of a plan for a causal model: the folder itself, or some in it, by name."""
    here = [folder] if (folder / "decoder.json").is_file() else []
    return here or sorted(path.parent for path in folder.glob("*/decoder.json"))


def title(folder: Path) -> str:
    return str(_told(folder)["title"])


def write(folder: Path) -> list[Path]:
    """Leaderboard and figures beside the results."""
    _told(folder)
    drawn = [*leaderboard.write(folder), *figures.perplexity(folder / "perplexity.json")]
    if (found := folder / "retrieval.json").exists():
        drawn += retrieval.heatmaps(found)
    return drawn


def verdict(folder: Path) -> list[Any]:
    """The best of the recipes that the plan has, as `leaderboard.verdict` tells it."""
    told = _told(folder)
    return leaderboard.verdict(folder, told["recipes"], told["forgetful"])


def section(folder: Path, name: str) -> str:
    told, board = _told(folder), rank_recipes(folder)
    data = read_fields(folder / "perplexity.json", RERUN_REMEDY)
    sentences = "".join(f"<li>{escape(line.plain)}</li>" for line in verdict(folder))
    shown = []
    for drawn in sorted(folder.glob("*.svg")):
        paths = {suffix: path for suffix in KINDS if (path := drawn.with_suffix(suffix)).is_file()}
        shown.append(figure(paths, CAPTIONS.get(drawn.stem, drawn.stem.replace("-", ": "))))
    heads, rows = leaderboard.cells(board)
    settings = {key: data.get(key) for key in ("model", "train_length", "config", "texts")}
    return (
        f'<section class="plan" id="{name}" aria-labelledby="{name}-title">'
        f'<p class="eyebrow">{escape(board["model"]["name"])}</p><h2 id="{name}-title">{escape(told["title"])}</h2>'
        f'<ul class="summary">{sentences}</ul><h3>Table</h3>{plain([heads, *rows], "Recipes")}'
        f'<p class="caption">{escape(leaderboard.CAPTION)}</p>'
        f'<h3>Figures</h3><div class="figures" style="grid-template-columns: 1fr">{"".join(shown)}</div>'
        f"<h3>Configuration and provenance</h3>{fold('Run', data.get('run'))}{fold('Plan', settings)}</section>\n"
    )


def _told(folder: Path) -> dict[str, Any]:
    """What `decoder.json` says of the plan."""
    path = folder / "decoder.json"
    return read_fields(path, "run the plan again", "title", "recipes", "forgetful")
