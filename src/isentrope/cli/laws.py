"""`isentrope laws`: the entropy of attention under each temperature law."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from isentrope.cli.common import app, errors_in_one_line
from isentrope.cli.options import AsJson, deprecated_option, prefer_new
from isentrope.cli.output import Output
from isentrope.utils.files import RERUN_REMEDY, read_json

if TYPE_CHECKING:
    from isentrope.analysis.entropy_laws import EntropyLawsConfig

LONGEST = 32768  # tokens


@app.command()
@errors_in_one_line()
def laws(
    out: Annotated[Path, typer.Option(help="Folder for laws.json, laws.png and laws.svg.")] = Path("results/laws"),
    train_length: Annotated[int, typer.Option(help="The length at which τ = 1.")] = 64,
    length: Annotated[
        int | None,
        typer.Option(help="The longest length; lengths double from the training length.", show_default=str(LONGEST)),
    ] = None,
    longest: Annotated[int | None, deprecated_option("--longest")] = None,
    head_dim: Annotated[int, typer.Option(help="Dimension d of queries and keys.")] = 128,
    alpha: Annotated[float, typer.Option(help="Scores are alpha cos θ.")] = 16.0,
    queries: Annotated[int, typer.Option(help="Queries measured at each length.")] = 256,
    seed: Annotated[int, typer.Option(help="Seed of the random vectors.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Measure what each temperature law does to attention entropy as the number of keys grows.

    isentrope laws --train-length 512 --length 65536 --out results/laws
    """
    from isentrope.analysis.entropy_laws import EntropyLawsConfig

    length = prefer_new(length, longest, "--longest", "--length")
    length = LONGEST if length is None else length  # 0 is refused
    with Output(as_json) as output:
        run_laws(EntropyLawsConfig(train_length, head_dim, alpha, length, queries, seed), out, output)


def run_laws(config: EntropyLawsConfig, out: Path, output: Output) -> None:
    """Measure the laws, print their table and draw it."""
    from isentrope.analysis.entropy_laws import measure_laws
    from isentrope.report.figures.laws import draw_laws
    from isentrope.report.tables.laws import build_laws_table

    results = measure_laws(config, out)
    output.add(**read_json(results, RERUN_REMEDY))
    output.print(build_laws_table(results))
    output.add_files([results, *draw_laws(results)])
