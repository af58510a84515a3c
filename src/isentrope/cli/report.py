"""`isentrope report`: one page and tables from a folder of results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from isentrope.cli.common import app, errors_in_one_line
from isentrope.cli.options import AsJson
from isentrope.cli.output import Output
from isentrope.cli.plans import print_comparison, print_plan, print_recipes


@app.command()
@errors_in_one_line()
def report(
    folder: Annotated[
        Path,
        typer.Argument(help="A folder that was --out of 'study run', 'evaluate' or 'compare', or one plan's in it."),
    ],
    cap: Annotated[bool, typer.Option("--cap", help="Print >500 and <0.1 as the paper does.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a study's page, its tables in Markdown, LaTeX and CSV, and a verdict for each of the paper's claims.

    Of comparisons: leaderboards as JSON and Markdown, and the frontier of retrieval against perplexity.

    isentrope report results
    """
    from isentrope.report.html.page import find_results, write_report

    plans, recipe_folders, comparisons = find_results(folder)
    written = write_report(folder, cap)
    with Output(as_json) as output:
        output.add(**written)
        if plans:
            print_plan(folder, output, cap)
        for path in recipe_folders:
            print_recipes(path, output)
        for path in comparisons:
            print_comparison(path, output)
        output.add_files([*(file for plan in written["plans"] for file in plan["files"]), written["report"]])
