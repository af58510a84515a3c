"""`isentrope inspect`: attention entropy, angles and heatmaps of one model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from isentrope.cli.common import app, errors_in_one_line
from isentrope.cli.options import Device, Dtype
from isentrope.cli.output import print_paths


@app.command()
@errors_in_one_line()
def inspect(
    model: Annotated[str, typer.Argument(help="GAU-α or a causal model: a folder, or a name on the hub.")],
    text: Annotated[Path, typer.Argument(help="A text file, or .jsonl(.xz): its first text that is long enough.")],
    recipe: Annotated[str | None, typer.Option(help="The recipe of attention, instead of the model's own.")] = None,
    lengths: Annotated[str, typer.Option(help="Tokens to read; angles and heatmaps use the last.")] = "64,128,256,512",
    layer: Annotated[int, typer.Option(help="Layer of the angles and heatmaps; -1 is the last.")] = -1,
    region: Annotated[str | None, typer.Option(help="Queries and keys of the heatmaps, as 0:512,0:512.")] = None,
    inset: Annotated[
        str | None, typer.Option(help="A part to draw enlarged beside them, as 3516:3536,3516:3536.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for inspect.json, heatmaps and figures.")] = Path("results/inspect"),
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> None:
    """Show how focused a model's attention is, at which angles, and where: numbers and figures.

    isentrope inspect runs/base/best laws.jsonl.xz --recipe rerope:window=64+infoscale --lengths 64,512,4096
    """
    from isentrope.analysis.inspect import InspectConfig, load_model, load_text, measure_attention
    from isentrope.evaluation.loading import resolve_auto_for
    from isentrope.recipe.auto import is_auto
    from isentrope.report.figures.inspect import draw_inspection

    config = InspectConfig.parse(lengths, region, inset, layer=layer)
    if recipe is not None and is_auto(recipe):
        recipe = resolve_auto_for(model, [recipe], max(config.lengths))[0]
    given = load_text(text, model, config.lengths[-1])  # checked before a model is loaded
    results = measure_attention(load_model(model, recipe, device, dtype), model, given, config, out)
    print_paths([results, *draw_inspection(out)])
