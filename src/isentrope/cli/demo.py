"""`isentrope demo`: a model far beyond its training length, plain and extended, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from isentrope.cli.common import app, disable_progress_bars, errors_in_one_line
from isentrope.cli.completion import complete_recipe
from isentrope.cli.options import LENGTH_HELP, AsJson, Device, Dtype
from isentrope.cli.output import Output, print_progress
from isentrope.utils.files import RERUN_REMEDY, read_json


@app.command()
@errors_in_one_line()
def demo(
    model: Annotated[
        str | None, typer.Argument(help="A causal model: a folder, or a name on the hub; a small Llama by default.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="A text to read; a module that the small Llama has not seen by default.")
    ] = None,
    recipe: Annotated[
        list[str] | None,
        typer.Option(
            help="A recipe beside the plain model. Repeat for several.",
            show_default="auto; rerope:window=128+share for the small Llama",
            autocompletion=complete_recipe,
        ),
    ] = None,
    length: Annotated[
        str | None,
        typer.Option(help=LENGTH_HELP, show_default="4x; 16x for the small Llama"),
    ] = None,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to write after them.")] = 60,
    out: Annotated[Path, typer.Option(help="Folder for side_by_side.json, .png and .svg.")] = Path("results/opening"),
    dtype: Dtype = "auto",
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Score and continue a long text with a model as it is and extended, side by side.

    isentrope demo

    isentrope demo MODEL --data book.txt

    isentrope demo MODEL --data book.txt --length 2x --recipe rerope:window=4096+share
    """
    from isentrope.experiments.opening import prepare_opening
    from isentrope.report.figures.side_by_side import draw_side_by_side
    from isentrope.report.tables.side_by_side import build_side_by_side

    disable_progress_bars()
    opening = prepare_opening(model, data, recipe, length, new_tokens)
    with Output(as_json) as output:
        results = opening.run(out, device, dtype, print_progress)
        output.add(**read_json(results, RERUN_REMEDY))
        output.print(build_side_by_side(results))
        output.add_files([results, *draw_side_by_side(results)])
