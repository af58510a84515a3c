"""The figures of a study in its folder: claims, curves of every pre-training, gains, best temperatures."""

from __future__ import annotations

from pathlib import Path

from isentrope.report.best_temperatures import collect_best_temperatures, compute_laws
from isentrope.report.claims import evaluate_claims
from isentrope.report.figures.study import (
    collect_gains,
    draw_best_temperatures,
    draw_forest,
    draw_gains,
    draw_pretraining_curves,
)
from isentrope.report.load import load_plans
from isentrope.utils.files import RERUN_REMEDY, read_fields, write_json

CURVE_VARIANTS = ("none", "InfoScale", "LogN", "share")
HEAD_SIZE = 128  # GAU-α's attention_key_size, unless a training sets another


def draw_study(folder: Path) -> list[Path]:
    """Draw what a plan's results allow as FOLDER/figures/*.png and .svg, with captions for the page.

    Args:
        folder: of one plan's results.

    Returns:
        The files written.
    """
    (plan,) = load_plans(folder)
    grid, out, captions = plan.grids[0], folder / "figures", dict[str, str]()
    out.mkdir(exist_ok=True)
    written = draw_forest(evaluate_claims(grid), out / "claims")
    if written:
        captions["claims.svg"] = "Every registered claim: the difference, its 95 % interval and the verdict."
    variants = [v for v in CURVE_VARIANTS if any(row.variant == v for row in plan.rows)]
    if len(grid.seeds) > 1 and variants:
        written += draw_pretraining_curves(grid, variants, out / "pretrainings")
        captions["pretrainings.svg"] = "Accuracy against length: thin a line a pre-training, thick their mean."
    length = max(plan.lengths)
    if points := collect_gains(grid):
        written += draw_gains(points, out / "gain", length)
        captions["gain.svg"] = (
            "What InfoScale gains against how far entropy rises without it; a point a method and run."
        )
    if measured := collect_best_temperatures(grid):
        train_length = int(plan.metadata.get("train_length", 64))
        laws = compute_laws(plan.lengths, train_length, HEAD_SIZE)
        written += draw_best_temperatures(measured, laws, out / "temperatures", train_length)
        captions["temperatures.svg"] = "The temperature of the lowest loss at each length, and what each law says."
    path = out / "figures.json"
    known = read_fields(path, RERUN_REMEDY) if path.exists() else {}
    write_json(path, known | captions)
    return written
