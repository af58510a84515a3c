"""`isentrope recipes`: what recipes can be made of."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from isentrope.cli.common import app, errors_in_one_line
from isentrope.cli.completion import complete_part
from isentrope.cli.options import AsJson
from isentrope.cli.output import Output


@app.command()
@errors_in_one_line()
def recipes(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PART]…", help="Parts to show in detail; all in short by default.", autocompletion=complete_part
        ),
    ] = None,
    kind: Annotated[
        str | None, typer.Option(help="Only parts of this kind: position, temperature, score, mask, share, retrieve.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the parts of recipes: formula, options with their defaults, and paper.

    A recipe joins parts by +, at most one position method, score, mask, share and retrieve, and a temperature:
    rerope:window=4096+infoscale

    isentrope recipes

    isentrope recipes rerope share
    """
    from isentrope.recipe.catalog import find_part, list_parts
    from isentrope.recipe.kinds import KINDS
    from isentrope.report.tables.recipes import render_catalog, render_part
    from isentrope.utils.messages import suggest

    if kind is not None and kind not in KINDS:
        raise ValueError(f"kind: unknown {kind!r}{suggest(kind, KINDS)}")
    parts = [find_part(name) for name in names] if names else list_parts()
    parts = [part for part in parts if kind in (None, part.kind)]
    with Output(as_json) as output:
        output.add(parts=[asdict(part) for part in parts])
        for block in (render_part(part) for part in parts) if names else render_catalog(parts):
            output.print(block)
