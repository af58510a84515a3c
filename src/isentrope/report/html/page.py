"""Results as one self-contained HTML page: summaries, claims, tables, figures and provenance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from isentrope.report.claims import evaluate_claims
from isentrope.report.html.comparison import build_comparison_section, find_comparison_folders, write_comparison
from isentrope.report.html.fragments import Section, list_names, render_page_template
from isentrope.report.html.grid import build_grid_section
from isentrope.report.html.recipes import build_section, find_recipe_folders, write_recipes
from isentrope.report.html.summary import count_verdicts
from isentrope.report.load import PlanResults, load_plans
from isentrope.report.tables.plan_tables import write_tables
from isentrope.utils.files import write_atomically


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
    grids = [grid for plan in plans for grid in plan.grids]
    sections = [build_grid_section(grid, index, cap) for index, grid in enumerate(grids)]
    sections += [build_section(path, f"recipes-{i}") for i, path in enumerate(recipe_folders)]
    sections += [build_comparison_section(path, f"comparison-{i}") for i, path in enumerate(comparisons)]
    heading, subject = _name_page(sections)
    opening = ""
    if len(plans) > 1:
        counts = count_verdicts([verdict for plan in plans for verdict in evaluate_claims(plan.grids[0])])
        opening = f"{len(plans)} plans. {counts}"
    return render_page_template(
        "page.html",
        title=" · ".join(filter(None, (heading, subject, "isentrope"))),
        heading=heading,
        subject=subject,
        opening=opening,
        sections=sections,
    )


def _name_page(sections: list[Section]) -> tuple[str, str]:
    """Return the heading of a page, and which models and texts it is about."""
    studies = list(dict.fromkeys(section.title for section in sections))
    heading = studies[0] if len(studies) == 1 else f"{len(studies)} studies of length extrapolation"
    models, texts = (list_names(getattr(section, kind) for section in sections) for kind in ("model", "texts"))
    return heading, f"{models} on {texts}" if models and texts else models or texts
