"""Hooks of mkdocs: pages that are computed, and links to files of the repository that are not part of the site.

The explorer page is written from the library's formulas and the measurements under docs/results.
Pages keep plain relative links, which work where the repository shows them. Raw measurements and sources are not
copied into the site; figures of benchmarks, which lie outside `docs/`, are.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mkdocs.structure.files import File, Files

from isentrope.analysis.formula_values import compute_formula_values
from isentrope.report.html.explorer import write_explorer

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
FIGURES = ROOT / "benchmarks" / "results"
INCLUDED = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
LINK = re.compile(r"(?<=\]\()([^)\s]+)(?=\))")


def on_files(files: Files, config: Any) -> Files:
    """Add the explorer and the figures of benchmarks to the site."""
    files.append(File.generated(config, "explorer.html", content=render_explorer()))
    for path in FIGURES.glob("*.png"):
        files.append(File.generated(config, f"benchmarks/{path.name}", abs_src_path=str(path)))
    return files


def render_explorer() -> str:
    """Return the explorer page with every curve measured under docs/results."""
    with TemporaryDirectory() as folder:
        page = write_explorer(Path(folder) / "explorer.html", compute_formula_values(), DOCS / "results")
        return page.read_text(encoding="utf-8")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Point links at the site where it has the file, at the repository where it has not."""
    source = Path(page.file.abs_src_path)
    if source.name in INCLUDED:  # the page of the repository's root that this one stands for
        source = ROOT / INCLUDED[source.name]
        markdown = source.read_text(encoding="utf-8")

    def replace(match: re.Match[str]) -> str:
        target, _, anchor = match[1].partition("#")
        if not target or re.match(r"[a-z]+:", target):
            return match[0]
        path = Path(os.path.normpath(source.parent / target))
        if not path.exists():
            return match[0]  # mkdocs itself names the broken link
        if path.parent == FIGURES and path.suffix == ".png":
            return os.path.relpath(f"benchmarks/{path.name}", Path(page.file.src_uri).parent)
        inside = files.get_file_from_path(path.relative_to(DOCS).as_posix()) if path.is_relative_to(DOCS) else None
        if inside is not None and inside.inclusion.is_included():
            return os.path.relpath(path.relative_to(DOCS), Path(page.file.src_uri).parent) + (
                f"#{anchor}" if anchor else ""
            )
        kind = "tree" if path.is_dir() else "blob"
        address = f"{config.repo_url.rstrip('/')}/{kind}/main/{path.relative_to(ROOT).as_posix()}"
        return address + (f"#{anchor}" if anchor else "")

    return LINK.sub(replace, markdown)
