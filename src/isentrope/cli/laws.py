"""`isentrope laws`: the entropy of attention under each temperature law."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from isentrope.cli.common import app, errors_in_one_line
from isentrope.cli.output import print_paths


@app.command()
@errors_in_one_line()
def laws(
    out: Annotated[Path, typer.Option(help="Folder for laws.json, laws.png and laws.svg.")] = Path("results/laws"),
    train_length: Annotated[int, typer.Option(help="The length at which τ = 1.")] = 64,
    longest: Annotated[int, typer.Option(help="The longest length; lengths double from the training length.")] = 32768,
    head_dim: Annotated[int, typer.Option(help="Dimension d of queries and keys.")] = 128,
    alpha: Annotated[float, typer.Option(help="Scores are alpha cos θ.")] = 16.0,
    queries: Annotated[int, typer.Option(help="Queries measured at each length.")] = 256,
    seed: Annotated[int, typer.Option(help="Seed of the random vectors.")] = 0,
) -> None:
    """Measure what each temperature law does to attention entropy as the number of keys grows.

    isentrope laws --train-length 512 --longest 65536 --out results/laws
    """
    from rich.console import Console

    from isentrope.analysis.entropy_laws import EntropyLawsConfig, measure_laws
    from isentrope.report.figures.laws import draw_laws
    from isentrope.report.tables.laws import build_laws_table

    results = measure_laws(EntropyLawsConfig(train_length, head_dim, alpha, longest, queries, seed), out)
    Console().print(build_laws_table(results))
    print_paths([results, *draw_laws(results)])
