"""`isentrope explore`: a page with sliders for lengths, windows and laws."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from isentrope.cli.common import app, errors_in_one_line
from isentrope.cli.options import AsJson
from isentrope.cli.output import Output


@app.command()
@errors_in_one_line()
def explore(
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("explorer.html"),
    results: Annotated[
        Path | None, typer.Option(help="A folder whose perplexity.json files are drawn as measured curves.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a page that shows distances, temperatures and shares for any length, window, law and β; it works offline.

    isentrope explore --out explorer.html --results results
    """
    from isentrope.analysis.formula_values import compute_formula_values
    from isentrope.report.html.explorer import write_explorer

    with Output(as_json) as output:
        output.add_files([write_explorer(out, compute_formula_values(), results)])
