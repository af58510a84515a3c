"""`isentrope report`: one page and tables from a folder of results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from isentrope.cli.common import app, errors_in_one_line
from isentrope.cli.output import print_paths
from isentrope.cli.plans import print_comparison, print_recipes


@app.command()
@errors_in_one_line()
def report(
    folder: Annotated[
        Path, typer.Argument(help="A folder that 'isentrope study run' or 'compare' wrote, or one plan's in it.")
    ],
    cap: Annotated[bool, typer.Option("--cap", help="Print >500 and <0.1 as the paper does.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print paths and verdicts as JSON.")] = False,
) -> None:
    """Write a study's page, its tables in Markdown, LaTeX and CSV, and a verdict for each of the paper's claims.

    Of comparisons: leaderboards as JSON and Markdown, and the frontier of retrieval against perplexity.

    isentrope report results
    """
    from rich.console import Console

    from isentrope.report.html.page import find_results, write_report
    from isentrope.report.tables.plan_tables import render_terminal

    plans, recipe_folders, comparisons = find_results(folder)
    written = write_report(folder, cap)
    if as_json:
        typer.echo(json.dumps(written, ensure_ascii=False))
        return
    if plans:
        Console().print(render_terminal(folder, cap))
    for path in recipe_folders:
        print_recipes(path)
    for path in comparisons:
        print_comparison(path)
    print_paths([*(file for plan in written["plans"] for file in plan["files"]), written["report"]])
