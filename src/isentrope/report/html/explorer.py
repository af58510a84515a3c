"""The explorer: one page with sliders for length, window, law and β, and the measured curves; it needs no network."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.resources import files
from math import isfinite
from pathlib import Path
from typing import Any

from isentrope.evaluation.results import read_results
from isentrope.utils.files import RERUN_REMEDY, write_atomically

DATA_SLOT, SCRIPT_SLOT = "{{ data }}", "{{ script }}"
DIGITS = 5  # of perplexities in the page


def write_explorer(out: Path, checks: Mapping[str, Any], results: Path | None = None) -> Path:
    """Write the explorer page.

    Args:
        out: the page.
        checks: values of the library's formulas, which the page compares its own with.
        results: a folder whose `perplexity.json` files, at any depth, are the measured curves; none by default.

    Returns:
        The page.

    Raises:
        ValueError: the folder is not there, or has no such file.
    """
    folder = files("isentrope.report.html")
    data = {"checks": checks, "measured": collect_curves(results) if results is not None else []}
    # a closing tag inside a string would end the script
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("</", "<\\/")
    page = (folder / "explorer.html").read_text(encoding="utf-8").replace(DATA_SLOT, text)
    page = page.replace(SCRIPT_SLOT, (folder / "explorer.js").read_text(encoding="utf-8"))
    out.parent.mkdir(parents=True, exist_ok=True)
    with write_atomically(out) as partial:
        partial.write_text(page, encoding="utf-8")
    return out


def collect_curves(folder: Path) -> list[dict[str, Any]]:
    """Collect the perplexities by position of every `perplexity.json` below a folder, named by where they are."""
    if not folder.is_dir():
        raise ValueError(f"results: expected a folder with perplexity.json files, got {folder}; name another")
    paths = sorted(folder.rglob("perplexity.json"))
    if not paths:
        raise ValueError(
            f"results: expected perplexity.json in {folder} or below it, got none; name the folder that was --out of "
            "perplexity, evaluate or compare"
        )
    curves = []
    for path in paths:
        data = read_results(path, RERUN_REMEDY)
        curves.append(
            {
                "name": path.parent.relative_to(folder).as_posix() if path.parent != folder else data["model"]["name"],
                "train_length": data.get("train_length"),
                "edges": data["config"]["edges"],
                "rows": [
                    {
                        "recipe": row["recipe"],
                        # JSON has no NaN and no infinity: a browser would refuse the whole page
                        "perplexity": [float(f"{x:.{DIGITS}g}") if isfinite(x) else None for x in row["perplexity"]],
                    }
                    for row in data["rows"]
                ],
            }
        )
    return curves
