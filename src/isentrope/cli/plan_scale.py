"""`isentrope plan-scale`: predicted time and memory of a prefill on many GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from isentrope.cli.common import app, errors_in_one_line
from isentrope.cli.options import AsJson, GgufFile
from isentrope.cli.output import Output

RECIPES = ["rerope:window=4096", "sink:sinks=4,size=4092", "rerope:window=4096+retrieve"]


@app.command("plan-scale")
@errors_in_one_line()
def plan_scale(
    model: Annotated[
        list[str],
        typer.Option(help="1b, 3b, 8b or 70b (Llama 3's shapes), a folder, or a name on the hub. Repeatable."),
    ] = ["8b"],  # noqa: B006
    recipe: Annotated[list[str], typer.Option(help="Which keys queries see. Repeat for several.")] = RECIPES,
    tokens: Annotated[str, typer.Option(help="Lengths of the text; K and M are 2¹⁰ and 2²⁰.")] = "1M,10M",
    gpus: Annotated[str, typer.Option(help="Numbers of GPUs.")] = "8,64,512",
    link: Annotated[
        str,
        typer.Option(help="nvlink (one domain), ndr (nodes of 8 on InfiniBand NDR), or GB/s per GPU and direction."),
    ] = "ndr",
    efficiency: Annotated[
        float | None, typer.Option(help="Share of the link's bandwidth that messages reach.", show_default="0.8")
    ] = None,
    gguf_file: GgufFile = None,
    out: Annotated[Path, typer.Option(help="Folder for plan-scale.json, .png and .svg.")] = Path("results/plan-scale"),
    as_json: AsJson = False,
) -> None:
    """Predict time and memory of a prefill whose text is spread over GPUs, by every way of exchange.

    isentrope plan-scale --model 70b --tokens 1M,10M --gpus 8,64,512 --recipe rerope:window=4096 --link ndr
    """
    from dataclasses import replace

    from isentrope.report.figures.scaling import draw_scaling
    from isentrope.report.tables.scaling import build_scale_tables
    from isentrope.scaling.hardware import H200, parse_link
    from isentrope.scaling.plan import ScalePlan, parse_tokens, write_plan
    from isentrope.scaling.shape import read_shape
    from isentrope.utils.files import RERUN_REMEDY, read_json
    from isentrope.utils.parsing import parse_numbers

    chosen = parse_link(link)
    if efficiency is not None:
        if not 0 < efficiency <= 1:
            raise ValueError(f"efficiency: expected a share of the bandwidth above 0 and up to 1, got {efficiency}")
        chosen = replace(chosen, efficiency=efficiency)
    shapes = tuple(read_shape(name, gguf_file) for name in model)
    counts = parse_numbers("gpus", gpus, example="8,64,512")
    plan = ScalePlan(shapes, tuple(recipe), parse_tokens(tokens), counts, H200, chosen)
    if min(counts) < 1:
        raise ValueError(f"gpus: expected 1 or more, got {gpus!r}")
    with Output(as_json) as output:
        results = write_plan(plan, out)
        output.add(**read_json(results, RERUN_REMEDY))
        for table in build_scale_tables(results):
            output.print(table)
        output.add_files([results, *draw_scaling(results)])
