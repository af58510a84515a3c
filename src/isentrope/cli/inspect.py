"""`isentrope inspect`: attention entropy, angles and heatmaps of one model, under one recipe or several."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from isentrope.cli.common import app, disable_progress_bars, errors_in_one_line, expand_paths
from isentrope.cli.completion import complete_recipe
from isentrope.cli.lengths import resolve_lengths
from isentrope.cli.options import (
    TEXTS_HELP,
    AsJson,
    CommandWithMoreData,
    Device,
    Dtype,
    GgufFile,
    MoreData,
    name_recipe,
    name_results,
    require_data,
)
from isentrope.cli.output import Output
from isentrope.utils.files import RERUN_REMEDY, read_json


@app.command(cls=CommandWithMoreData)
@errors_in_one_line()
def inspect(
    model: Annotated[str, typer.Argument(help="GAU-α or a causal model: a folder, or a name on the hub.")],
    more_data: MoreData = None,
    data: Annotated[
        list[str] | None, typer.Option("--data", help=f"{TEXTS_HELP} The first text that is long enough is read.")
    ] = None,
    recipe: Annotated[
        list[str] | None,
        typer.Option(
            help="A recipe of attention, instead of the model's own ('plain'). Repeat to compare several.",
            autocompletion=complete_recipe,
        ),
    ] = None,
    lengths: Annotated[
        str,
        typer.Option(
            help="Tokens to read; angles and heatmaps use the last. 4x: times the training length of a causal model."
        ),
    ] = "64,128,256,512",
    layer: Annotated[int, typer.Option(help="Layer of the angles and heatmaps; -1 is the last.")] = -1,
    region: Annotated[str | None, typer.Option(help="Queries and keys of the heatmaps, as 0:512,0:512.")] = None,
    inset: Annotated[
        str | None, typer.Option(help="A part to draw enlarged beside them, as 3516:3536,3516:3536.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for inspect.html, inspect.json, heatmaps and figures; several recipes have a folder each.",
            show_default="results/inspect/MODEL-LENGTH",
        ),
    ] = None,
    gguf_file: GgufFile = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Show how focused a model's attention is, at which angles, and where: a table, figures and a page.

    isentrope inspect runs/base/best --data laws.jsonl.xz --recipe rerope:window=64+infoscale --lengths 64,512,4096

    isentrope inspect MODEL --data book.txt --recipe plain --recipe rerope:window=4096+share --lengths 1x,4x
    """
    from isentrope.analysis.inspect import InspectConfig, load_models, load_text, measure_attention
    from isentrope.evaluation.loading import resolve_auto_for
    from isentrope.evaluation.recipe_texts import check_recipes
    from isentrope.recipe.auto import is_auto
    from isentrope.report.figures.inspect import draw_inspection
    from isentrope.report.html.inspection import write_inspection_page
    from isentrope.report.tables.inspection import build_inspection_table

    texts = require_data(data, more_data)
    tokens = resolve_lengths("lengths", lengths, model, gguf_file)
    config = InspectConfig.parse(",".join(map(str, tokens)), region, inset, layer=layer)
    recipes = list(dict.fromkeys(recipe or ["plain"]))
    if any(map(is_auto, recipes)):
        recipes = list(resolve_auto_for(model, recipes, tokens[-1], gguf_file))
    check_recipes(recipes)  # before a model is loaded
    out = out or name_results("inspect", model, tokens[-1], gguf_file)
    folders = [out] if len(recipes) == 1 else [out / name_recipe(text) for text in recipes]
    disable_progress_bars()
    given = load_text(expand_paths(texts), model, tokens[-1], gguf_file)  # checked before a model is loaded
    with Output(as_json) as output:
        models = load_models(model, recipes, device, dtype, gguf_file)
        files: list[Path] = []
        for folder, loaded in zip(folders, models, strict=True):
            results = measure_attention(loaded, model, given, config, folder)
            output.append("inspections", read_json(results, RERUN_REMEDY))
            files += [results, *draw_inspection(folder)]
        output.print(build_inspection_table(folders))
        output.add_files([*files, write_inspection_page(folders, out)])
