"""Temperatures fitted to text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from isentrope.cli.common import TEXTS, app, errors_in_one_line, files, quietly


@app.command()
def calibrate(
    model: Annotated[str, typer.Argument(help="A causal model: a folder, or a name on the hub.")],
    texts: Annotated[list[str], typer.Argument(help=TEXTS)],
    length: Annotated[int, typer.Option(help="Tokens read of each document; the law is fitted up to there.")],
    recipe: Annotated[
        str, typer.Option(help="What gets the temperature; may say {window} and {factor}. 'plain': the model as it is.")
    ] = "plain",
    windows: Annotated[str | None, typer.Option(help="Values for {window}, such as 2048,4096; the best stays.")] = None,
    factors: Annotated[str | None, typer.Option(help="Values for {factor}, such as 4,8; the best stays.")] = None,
    levels: Annotated[
        str, typer.Option(help="What is fitted: one law for all layers, one a layer, one a head.")
    ] = "scalar,layer,head",
    budget: Annotated[
        str | None, typer.Option(help="Stop fitting in time to end after 90s, 10m, 2h; the best so far counts.")
    ] = None,
    documents: Annotated[int, typer.Option(help="At most this many documents, the first that are long enough.")] = 16,
    train_length: Annotated[int | None, typer.Option(help="In place of what the model's config says.")] = None,
    seed: Annotated[int, typer.Option(help="Decides which documents are held out.")] = 0,
    out: Annotated[
        Path, typer.Option(help="Folder for calibrate.json, .png and .svg and for the recipe's text.")
    ] = Path("results/calibrate"),
    save: Annotated[Path | None, typer.Option(help="A new folder: the model with the recipe in its config.")] = None,
    gguf_file: Annotated[str | None, typer.Option(help="A GGUF file in the model's folder.")] = None,
    dtype: Annotated[
        str, typer.Option(help="bfloat16, float16 or float32; auto: bfloat16 on a GPU, float32 on a CPU.")
    ] = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda, …; auto: a GPU where there is one.")] = "auto",
) -> None:
    """Fit a temperature to your own text, the model frozen; half of the documents are held out and decide.

    Never worse than InfoScale on held-out text, and nothing changes inside the training length. Interrupted, the same
    command goes on.

    isentrope calibrate MODEL books/*.txt --recipe rerope:window=4096 --length 32768 --budget 10m --save longer
    """
    with errors_in_one_line():
        from rich.console import Console

        from isentrope.calibration import calibrate as study
        from isentrope.calibration.select import halves
        from isentrope.evaluation.loading import check_free, save_extended
        from isentrope.evaluation.perplexity import load, read
        from isentrope.report.figures.calibration import draw, measured, table

        config = study.Config.read(
            length, recipe, windows, factors, levels, budget, train_length=train_length, seed=seed
        )
        check_free(save)
        quietly()
        found = read(files(texts), model, gguf_file, length, documents)
        halves(found, length, seed)  # before a model is loaded
        loaded = load(model, device, dtype, gguf_file)
        result = study.calibrate(
            loaded, found, config, out, Path(model).name, lambda words: typer.echo(words, err=True)
        )
        results = out / "calibrate.json"
        Console().print(table(results))
        for path in (results, out / "recipe.txt", *draw(results)):
            typer.echo(path)
        if save is not None:
            typer.echo(save_extended(model, result.recipe, save, gguf_file, measured(results)))
