"""A page about a model's attention, under one recipe or several: table, figures and provenance."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from isentrope.evaluation.results import read_results
from isentrope.report.html.fragments import MIME_TYPES, render_details, render_figure, render_table
from isentrope.report.tables.inspection import format_inspections
from isentrope.utils.files import RERUN_REMEDY, write_atomically

FIGURES = {
    "entropy": "Entropy by length, a line for each layer; uniform attention has ln n.",
    "focus": "Entropy of each layer and head as a share of uniform attention's.",
    "attention": "ln of the attention weights of one layer.",
    "angles": "Cosines between queries and keys of that layer.",
    "rope": "Scores of that layer before and after the position method.",
}
# the page fetches nothing, and browsers enforce it
CONTENT_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def write_inspection_page(folders: Sequence[Path], out: Path) -> Path:
    """Write `inspect.html`, self-contained.

    Args:
        folders: folders that `isentrope inspect` wrote for one model and text, each with its figures.
        out: the folder for the page.

    Returns:
        The path of the page.
    """
    rows, (title, *notes) = format_inspections(folders)
    style = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    sections = "".join(_render_folder(folder) for folder in folders)
    table = render_table(rows, "Attention entropy")
    page = (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{CONTENT_POLICY}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta name="color-scheme" content="light dark">\n<title>{escape(title)}</title>\n'
        f"<style>\n{style}</style>\n</head>\n<body>\n<header><p class=eyebrow>isentrope inspect</p>"
        f"<h1>{escape(title)}</h1></header>\n<main>\n<section>{table}"
        f'<p class="caption">{escape(" ".join(notes))}</p></section>\n{sections}</main>\n</body>\n</html>\n'
    )
    path = out / "inspect.html"
    with write_atomically(path) as file:
        file.write_text(page, encoding="utf-8", newline="\n")
    return path


def _render_folder(folder: Path) -> str:
    data = read_results(folder / "inspect.json", RERUN_REMEDY, "recipe", "config")
    figures = []
    for name, caption in FIGURES.items():
        paths = {suffix: path for suffix in MIME_TYPES if (path := folder / f"{name}{suffix}").is_file()}
        if paths:
            figures.append(render_figure(paths, caption))
    heading = escape(data["recipe"]["text"])
    details = render_details("Run", data.get("run")) + render_details("Settings", data["config"])
    return f'<section class="plan"><h2>{heading}</h2><div class="figures">{"".join(figures)}</div>{details}</section>\n'
