"""`isentrope calibrate`: laws fitted to text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from isentrope.cli.common import app, disable_progress_bars, errors_in_one_line, expand_paths
from isentrope.cli.completion import complete_recipe
from isentrope.cli.lengths import resolve_length
from isentrope.cli.options import (
    LENGTH_HELP,
    AsJson,
    CausalModel,
    CommandWithMoreData,
    Data,
    Device,
    Dtype,
    GgufFile,
    MaxDocuments,
    MoreData,
    name_recipe,
    name_results,
    require_data,
)
from isentrope.cli.output import Output, print_progress, summarize_results
from isentrope.utils.files import RERUN_REMEDY, read_json


@app.command(cls=CommandWithMoreData)
@errors_in_one_line()
def calibrate(
    model: CausalModel,
    more_data: MoreData = None,
    data: Data = None,
    length: Annotated[str, typer.Option(help=f"{LENGTH_HELP} The law is fitted up to there.")] = "4x",
    recipe: Annotated[
        str,
        typer.Option(
            help="The recipe to fit, which may contain {window} and {factor} and, with near and far keys, "
            "a temperature and a share law to start from. 'auto': the one chosen for the length; 'plain': the "
            "unchanged model.",
            autocompletion=complete_recipe,
        ),
    ] = "auto",
    windows: Annotated[
        str | None, typer.Option(help="Values to try for {window}, such as 2048,4096; the best is used.")
    ] = None,
    factors: Annotated[
        str | None, typer.Option(help="Values to try for {factor}, such as 4,8; the best is used.")
    ] = None,
    levels: Annotated[
        str,
        typer.Option(
            help="Laws to fit: one for all layers (scalar), one per layer, one per head; near: the best of these with "
            "near keys fitted too."
        ),
    ] = "scalar,layer,head,near",
    budget: Annotated[
        str | None,
        typer.Option(
            help="Stop fitting after 90s, 10m or 2h with the best law so far. Loading the model, the step under way "
            "and judging the law come on top."
        ),
    ] = None,
    with_retrieval: Annotated[
        bool, typer.Option("--with-retrieval", help="Also fit to, and judge by, passkeys hidden in the texts.")
    ] = False,
    documents: MaxDocuments = 16,
    train_length: Annotated[int | None, typer.Option(help="Training length, instead of the one in the config.")] = None,
    seed: Annotated[int, typer.Option(help="Seed that selects the held-out documents.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for calibrate.json, .png and .svg and recipe.txt.",
            show_default="results/calibrate/MODEL-LENGTH-RECIPE",
        ),
    ] = None,
    save: Annotated[Path | None, typer.Option(help="A new folder for the model with the recipe in its config.")] = None,
    gguf_file: GgufFile = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Fit a law to your own text with the model frozen; half of the documents are held out to select it.

    Recipes with near and far keys get a share law and a temperature of far keys, others a temperature. With six
    held-out documents or more the result is never worse on them than InfoScale or the closed law; with fewer it is one
    of these unless a fitted law is better on each. Nothing changes inside the training length. Run the same command
    again to resume after an interruption.

    isentrope calibrate MODEL --data books --recipe rerope:window=4096 --length 4x --budget 10m --save longer
    """
    from isentrope.calibration.calibrate import fit_laws
    from isentrope.calibration.config import CalibrationConfig, choose_fitted_recipe
    from isentrope.calibration.passkeys import load_prompt_format
    from isentrope.calibration.select import split_texts
    from isentrope.evaluation.loading import (
        check_not_extended,
        check_save_folder,
        load_on_device,
        read_causal_config,
        save_extended,
    )
    from isentrope.evaluation.texts import load_texts
    from isentrope.recipe.auto import is_auto
    from isentrope.report.figures.calibration import draw_calibration
    from isentrope.report.tables.calibration import build_calibration_table, build_card_rows

    texts = require_data(data, more_data)
    if gguf_file is None:
        check_not_extended(model, ["a law"])  # one is fitted to the plain model
    tokens = resolve_length(length, model, gguf_file, train_length)
    model_config = read_causal_config(model, gguf_file) if is_auto(recipe) else None
    out = out or name_results("calibrate", model, f"{tokens}-{name_recipe(recipe)}", gguf_file)
    config = CalibrationConfig.parse(
        tokens,
        choose_fitted_recipe(recipe, model_config, tokens, train_length),
        windows=windows,
        factors=factors,
        levels=levels,
        budget=budget,
        train_length=train_length,
        seed=seed,
        with_retrieval=with_retrieval,
    )
    check_save_folder(save)
    disable_progress_bars()
    documents_read = load_texts(expand_paths(texts), model, gguf_file, tokens, documents)
    split_texts(documents_read, tokens, seed)  # checked before a model is loaded
    prompts = load_prompt_format(model, gguf_file, required=with_retrieval, notify=print_progress)
    loaded = load_on_device(model, device, dtype, gguf_file)
    with Output(as_json) as output:
        result = fit_laws(loaded, documents_read, config, out, Path(model).name, print_progress, prompts)
        results = out / "calibrate.json"
        output.add(**summarize_results(read_json(results, RERUN_REMEDY)) | {"recipe": str(result.recipe)})
        output.print(build_calibration_table(results))
        output.add_files([results, out / "recipe.txt", *draw_calibration(results)])
        if save is not None:
            rows = build_card_rows(results)
            output.add_files([save_extended(model, result.recipe, save, gguf_file, rows, result.warning)])
