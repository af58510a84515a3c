"""`isentrope far-laws`: what each law does to the share of far keys."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from isentrope.cli.common import app, errors_in_one_line
from isentrope.cli.options import AsJson, deprecated_option, prefer_new
from isentrope.cli.output import Output
from isentrope.utils.files import RERUN_REMEDY, read_json

LONGEST = 131072  # tokens


@app.command()
@errors_in_one_line()
def far_laws(
    out: Annotated[Path, typer.Option(help="Folder for far_laws.json, far_laws.png and far_laws.svg.")] = Path(
        "results/far-laws"
    ),
    train_length: Annotated[int, typer.Option(help="The length up to which laws change nothing.")] = 8192,
    window: Annotated[int, typer.Option(help="Number of near keys.")] = 4096,
    length: Annotated[
        int | None,
        typer.Option(help="The longest length; lengths double from the training length.", show_default=str(LONGEST)),
    ] = None,
    longest: Annotated[int | None, deprecated_option("--longest")] = None,
    head_dim: Annotated[int, typer.Option(help="Head size, for InfoScale.")] = 64,
    sigma: Annotated[float, typer.Option(help="Standard deviation of scores.")] = 2.0,
    near_mean: Annotated[float, typer.Option(help="Mean score of near keys; that of far keys is 0.")] = 1.5,
    queries: Annotated[int, typer.Option(help="Queries sampled at each length.")] = 64,
    as_json: AsJson = False,
) -> None:
    """Compute what each law does to the share of far keys and to the entropy within them as keys are added.

    isentrope far-laws --train-length 2048 --window 1024 --length 32768 --out results/far-laws
    """
    from isentrope.analysis.far_laws import FarLawsConfig, compute_far_laws
    from isentrope.report.figures.far_laws import draw_far_laws
    from isentrope.report.tables.far_laws import build_far_laws_table

    length = prefer_new(length, longest, "--longest", "--length")
    length = LONGEST if length is None else length  # 0 is refused
    config = FarLawsConfig(train_length, window, head_dim, sigma, near_mean, length, queries)
    with Output(as_json) as output:
        results = compute_far_laws(config, out)
        output.add(**read_json(results, RERUN_REMEDY))
        output.print(build_far_laws_table(results))
        output.add_files([results, *draw_far_laws(results)])
