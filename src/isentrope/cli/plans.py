"""Run a plan and print its results, for the commands `study`, `evaluate` and `report`."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import typer

from isentrope.cli.common import disable_progress_bars
from isentrope.cli.output import Output, print_error, print_progress
from isentrope.utils.files import RERUN_REMEDY, read_json


def run_causal_plan(plan: Any, out: Path, output: Output) -> bool:
    """Run a plan for a causal model and print its recipes, best first.

    Args:
        plan: the plan to run.
        out: folder that plans share; the results go to the folder of the plan's name in it.
        output: for the leaderboard and the files.

    Returns:
        Whether every cell was measured.
    """
    from isentrope.experiments.runner import run_plan
    from isentrope.report.html.page import write_page
    from isentrope.report.html.recipes import write_recipes

    disable_progress_bars()
    folder, failed = out / plan.name, run_plan(plan, out, notify=print_progress)["failed"]
    written = write_recipes(folder)
    print_recipes(folder, output)
    output.add_files([*written, write_page(folder)])
    if failed:
        print_error(f"{failed} cells failed: {folder}")
    return not failed


def print_recipes(folder: Path, output: Output) -> None:
    """Print the tables of a plan for a causal model, and which recipe is best."""
    from isentrope.evaluation.ranking import rank_recipes
    from isentrope.report.html.recipes import summarize_recipes
    from isentrope.report.tables.leaderboard import build_leaderboard_table
    from isentrope.report.tables.retrieval import build_retrieval_table

    lines = summarize_recipes(folder)
    summary = [line.plain for line in lines]
    output.append("leaderboards", {"plan": folder.name, **rank_recipes(folder), "summary": summary})
    if (results := folder / "retrieval.json").exists():
        output.print(build_retrieval_table(results))
    output.print(build_leaderboard_table(folder))
    for line in lines:
        output.print(line)


def print_comparison(folder: Path, output: Output) -> None:
    """Print the leaderboard of a comparison."""
    from isentrope.report.tables.comparison import build_comparison_table

    if output.as_json:
        board = read_json(folder / "leaderboard.json", RERUN_REMEDY)
        output.append("comparisons", {"plan": folder.name, "leaderboard": board})
    output.print(build_comparison_table(folder))


def print_plan(folder: Path, output: Output, cap: bool = False) -> None:
    """Print the tables and verdicts of plans for masked models: a plan's folder, or one whose subfolders are."""
    from isentrope.report.load import load_plans
    from isentrope.report.tables.plan_tables import render_terminal

    for plan in load_plans(folder) if output.as_json else ():
        output.append("tables", {"plan": plan.name, "title": plan.title, "rows": list_values(plan)})
    output.print(render_terminal(folder, cap))


def list_values(plan: Any) -> list[dict[str, Any]]:
    """List every number of a plan's tables with its interval."""
    return [
        {"protocol": grid.protocol, "method": row.method, "variant": row.variant, "length": length, "metric": metric}
        | {"mean": value.mean, "low": value.low, "high": value.high, "seeds": value.seeds}
        for grid in plan.grids
        for row in plan.rows
        for length in plan.lengths
        for metric in plan.metrics
        if (value := grid.value(row, length, metric)) is not None
    ]


def run_masked_plans(
    plans: Sequence[Any],
    out: Path,
    corpus: Path | None,
    output: Output,
    compile: bool | None = None,
    is_helper: bool = False,
    yield_memory: Callable[[], bool] = lambda: False,
) -> bool:
    """Run plans for masked models; write the report of each and print its tables once it is complete.

    Args:
        plans: the plans to run.
        out: folder that plans share; the results go to the folder of the plan's name in it.
        corpus: folder of a prepared corpus.
        output: for the tables and the pages.
        compile: whether trainings are compiled; None decides by their length.
        is_helper: whether another process, which started this one, writes the reports.
        yield_memory: called when a training runs out of memory; waits until the processes that share the work have
            ended, and returns whether there were any: then the training is tried again.

    Returns:
        Whether every cell was measured.
    """
    import torch

    from isentrope.experiments import masked_runner
    from isentrope.experiments.checkpoints import TrainingMemoryError
    from isentrope.training.trainer import Interrupted, is_main_process

    disable_progress_bars()
    complete, pending = True, list(plans)
    while pending:
        failure = ""
        try:
            for plan, counts in masked_runner.run_masked_plans(
                tuple(pending), out, corpus, print_progress, compile, is_helper
            ):
                pending.remove(plan)
                if is_main_process() and not is_helper:
                    _report_masked_plan(out / plan.name, counts, output)
                complete = complete and (is_helper or not counts["failed"])
        except Interrupted as stopped:
            print_error(str(stopped))
            raise typer.Exit(128 + stopped.number) from None
        except TrainingMemoryError as error:
            failure = str(error)  # the error itself keeps the memory
        if failure:
            gc.collect()
            torch.cuda.empty_cache()
            print_error(failure)
            if not yield_memory():
                raise typer.Exit(2)
    return complete


def report_masked_plans(plans: Sequence[Any], out: Path, corpus: Path | None, output: Output) -> bool:
    """Report what is measured of plans for masked models; arguments and result as in `run_masked_plans`."""
    from isentrope.experiments.masked_runner import collect_masked_plan

    complete = True
    for plan in plans:
        counts = collect_masked_plan(plan, out, corpus)
        _report_masked_plan(out / plan.name, counts, output)
        if missing := counts["cells"] - counts["done"] - counts["failed"]:
            count = f"{missing} of {counts['cells']} cells"
            print_error(f"{count} are not measured; run without --report-only to measure them")
        complete = complete and not counts["failed"]
    return complete


def _report_masked_plan(folder: Path, counts: dict[str, Any], output: Output) -> None:
    """Write the report of a plan for masked models, and print its tables."""
    from isentrope.report.figures.plan_curves import draw_curves
    from isentrope.report.html.page import write_page
    from isentrope.report.study import draw_study
    from isentrope.report.tables.plan_tables import write_tables

    draw_curves(folder)
    draw_study(folder)
    write_tables(folder)
    print_plan(folder, output)
    output.add_files([write_page(folder)])
    if counts["failed"]:
        print_error(f"{counts['failed']} of {counts['cells']} cells failed: {folder / 'results.jsonl'}")
