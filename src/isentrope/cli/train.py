"""Training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from isentrope.cli.common import app, errors_in_one_line, quietly


@app.command()
def train(
    corpus: Annotated[Path, typer.Argument(help="A folder that 'isentrope data prepare' wrote.")],
    out: Annotated[Path, typer.Option(help="Folder for the run; one that holds this run already is gone on with.")],
    preset: Annotated[str, typer.Option(help="pretrain, train, finetune, paper, paper-finetune or causal.")] = "train",
    model: Annotated[str | None, typer.Option(help="Start from this model: a folder, or a name on the hub.")] = None,
    variant: Annotated[
        str | None, typer.Option(help="What the paper trains: plain, pi, yarn16, yarn32, pose, alibi or clex.")
    ] = None,
    cosscale: Annotated[float | None, typer.Option(help="Scaled cosine scores with this factor.")] = None,
    recipe: Annotated[str | None, typer.Option(help="What attention follows, in place of a variant.")] = None,
    pose: Annotated[int | None, typer.Option(help="Draw positions up to this length (PoSE).")] = None,
    length: Annotated[int | None, typer.Option(help="Tokens a crop.")] = None,
    batch: Annotated[int | None, typer.Option(help="Crops a step, over all processes.")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimiser steps.")] = None,
    epochs: Annotated[float | None, typer.Option(help="In place of steps: times that each document is taken.")] = None,
    rate: Annotated[float | None, typer.Option(help="Highest learning rate.")] = None,
    crop: Annotated[str | None, typer.Option(help="random, or first: the beginning of each document.")] = None,
    dropout: Annotated[float | None, typer.Option(help="In place of the model's own.")] = None,
    layers: Annotated[int | None, typer.Option(help="Layers; of a given model, its first.")] = None,
    sizes: Annotated[
        str | None,
        typer.Option(
            help="Of a new model: hidden_size=768,intermediate_size=1536,attention_key_size=128; "
            "of a causal one num_attention_heads in place of the last."
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Decides everything random.")] = None,
    precision: Annotated[str | None, typer.Option(help="bf16, fp32, or auto: bf16 on a GPU.")] = None,
    accumulate: Annotated[int | None, typer.Option(help="Parts that a batch is worked through in.")] = None,
    compile: Annotated[
        bool | None, typer.Option(help="Compile the step; on a GPU where the run is long, by default.")
    ] = None,
    save_every: Annotated[
        int | None, typer.Option(help="Steps between saved states; once a minute by default.")
    ] = None,
    evaluate_every: Annotated[
        int | None, typer.Option(help="Steps between validation losses; a twentieth of the run by default.")
    ] = None,
    track: Annotated[list[str], typer.Option(help="tensorboard, wandb; several times for both.")] = ["tensorboard"],  # noqa: B006
) -> None:
    """Train GAU-α on masked tokens, or a small Llama on the next one, or go on with a run that was interrupted.

    isentrope train data/laws --out runs/base --preset pretrain

    isentrope train data/laws --out runs/pi --model runs/base/best --variant pi --cosscale 128

    isentrope train data/sympy --out runs/llama --preset causal

    accelerate launch --num_processes 4 -m isentrope.cli train data/laws --out runs/base --preset pretrain
    """
    with errors_in_one_line():
        from isentrope.report.figures.losses import losses
        from isentrope.training import trainer as study
        from isentrope.training.config import configured, read_sizes

        config = configured(
            preset, variant, cosscale, model=model, recipe=recipe, pose=pose, length=length, batch=batch, steps=steps,
            epochs=epochs, rate=rate, crop=crop, dropout=dropout, layers=layers, sizes=read_sizes(sizes), seed=seed,
            precision=precision, accumulate=accumulate, compile=compile, save_every=save_every,
            evaluate_every=evaluate_every,
        )  # fmt: skip
        quietly()
        try:
            told = study.train(corpus, config, out, tuple(track))
        except study.Interrupted as stopped:
            typer.echo(f"isentrope: {stopped}", err=True)
            raise typer.Exit(128 + stopped.number) from None
        except study.Diverged as diverged:
            typer.echo(f"isentrope: {diverged}", err=True)
            raise typer.Exit(1) from None
        if study.is_main():
            best = told["best"]
            typer.echo(f"lowest validation loss {best['validation']:.4f} at step {best['step']} of {told['steps']}")
            for path in (out / "best", out / "final", out / "log.jsonl", *losses([out], out / "loss")):
                typer.echo(path)


@app.command()
def losses(
    runs: Annotated[list[Path], typer.Argument(help="Folders that 'isentrope train' wrote.")],
    out: Annotated[Path, typer.Option(help="The figure, without suffix.")] = Path("results/losses"),
) -> None:
    """Training losses of several runs in one figure.

    isentrope losses runs/base runs/cosine --out results/losses
    """
    with errors_in_one_line():
        from isentrope.report.figures.losses import losses as draw

        out.parent.mkdir(parents=True, exist_ok=True)
        for path in draw(runs, out):
            typer.echo(path)
