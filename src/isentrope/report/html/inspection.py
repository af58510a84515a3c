"""A page about a model's attention, under one recipe or several: table, figures and provenance."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from isentrope.evaluation.results import read_results
from isentrope.report.html.fragments import embed_figure, find_figure, render_page_template
from isentrope.report.tables.inspection import format_inspections
from isentrope.utils.files import RERUN_REMEDY, write_atomically

FIGURES = {
    "entropy": "Entropy by length, a line for each layer; uniform attention has ln n.",
    "focus": "Entropy of each layer and head as a share of uniform attention's.",
    "attention": "ln of the attention weights of one layer.",
    "angles": "Cosines between queries and keys of that layer.",
    "rope": "Scores of that layer before and after the position method.",
}


def write_inspection_page(folders: Sequence[Path], out: Path) -> Path:
    """Write `inspect.html`, self-contained.

    Args:
        folders: folders that `isentrope inspect` wrote for one model and text, each with its figures.
        out: the folder for the page.

    Returns:
        The path of the page.
    """
    rows, (title, *notes) = format_inspections(folders)
    sections = [_build_section(folder) for folder in folders]
    page = render_page_template("inspection.html", title=title, rows=rows, caption=" ".join(notes), sections=sections)
    path = out / "inspect.html"
    with write_atomically(path) as file:
        file.write_text(page, encoding="utf-8", newline="\n")
    return path


def _build_section(folder: Path) -> dict[str, Any]:
    data = read_results(folder / "inspect.json", RERUN_REMEDY, "recipe", "config")
    figures = {name: find_figure(folder / name) for name in FIGURES}
    return {
        "heading": data["recipe"]["text"],
        "figures": [embed_figure(paths, FIGURES[name]) for name, paths in figures.items() if paths],
        "run": data.get("run"),
        "settings": data["config"],
    }
