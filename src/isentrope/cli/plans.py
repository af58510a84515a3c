"""Run a plan and print its results, for the commands `study`, `evaluate` and `report`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from isentrope.cli.common import disable_progress_bars
from isentrope.cli.output import print_error, print_paths, print_progress, print_table


def run_causal_plan(plan: Any, out: Path) -> bool:
    """Run a plan for a causal model and print its recipes, best first.

    Returns:
        Whether every cell was measured.
    """
    from isentrope.experiments.runner import run_plan
    from isentrope.report.html.page import write_page
    from isentrope.report.html.recipes import write_recipes

    disable_progress_bars()
    folder, failed = out / plan.name, run_plan(plan, out, notify=print_progress)["failed"]
    written = write_recipes(folder)
    print_recipes(folder)
    print_paths([*written, write_page(folder)])
    if failed:
        print_error(f"{failed} cells failed: {folder}")
    return not failed


def print_recipes(folder: Path) -> None:
    """Print the tables of a plan for a causal model, and which recipe is best."""
    from rich.console import Console

    from isentrope.report.html.recipes import summarize_recipes
    from isentrope.report.tables.leaderboard import build_leaderboard_table
    from isentrope.report.tables.retrieval import build_retrieval_table

    if (results := folder / "retrieval.json").exists():
        print_table(build_retrieval_table(results))
    print_table(build_leaderboard_table(folder))
    for line in summarize_recipes(folder):
        Console(soft_wrap=True).print(line)


def print_comparison(folder: Path) -> None:
    """Print the leaderboard of a comparison."""
    from isentrope.report.tables.comparison import build_comparison_table

    print_table(build_comparison_table(folder))


def run_masked_plan(
    plan: Any, out: Path, corpus: Path | None, compile: bool | None = None, is_helper: bool = False
) -> bool:
    """Run a plan for masked models, then write its report and print its tables.

    Args:
        plan: the plan to run.
        out: folder that plans share; the results go to the folder of the plan's name in it.
        corpus: folder of a prepared corpus.
        compile: whether trainings are compiled; None decides by their length.
        is_helper: whether another process, which started this one, writes the report.

    Returns:
        Whether every cell was measured.
    """
    from rich.console import Console

    from isentrope.experiments.runner import run_plan
    from isentrope.report.figures.plan_curves import draw_curves
    from isentrope.report.html.page import write_page
    from isentrope.report.study import draw_study
    from isentrope.report.tables.plan_tables import render_terminal, write_tables
    from isentrope.training.trainer import Interrupted, is_main_process

    disable_progress_bars()
    try:
        outcome = run_plan(plan, out, corpus, print_progress, compile, is_helper)
    except Interrupted as stopped:
        print_error(str(stopped))
        raise typer.Exit(128 + stopped.number) from None
    if is_main_process() and not is_helper:
        folder = out / plan.name
        draw_curves(folder)
        draw_study(folder)
        write_tables(folder)
        Console().print(render_terminal(folder))
        typer.echo(write_page(folder))
        if outcome["failed"]:
            print_error(f"{outcome['failed']} of {outcome['cells']} cells failed: {folder / 'results.jsonl'}")
    return is_helper or not outcome["failed"]
