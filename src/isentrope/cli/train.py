"""`isentrope train` and `isentrope losses`: training runs and their loss curves."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from isentrope.cli.common import app, disable_progress_bars, errors_in_one_line
from isentrope.cli.options import AsJson, CommandWithMoreData, Corpus, prefer_new
from isentrope.cli.output import Output, print_error


@app.command(cls=CommandWithMoreData)
@errors_in_one_line()
def train(
    out: Annotated[Path, typer.Option(help="Folder for the run; an interrupted run in it is resumed.")],
    corpus: Annotated[Path | None, typer.Argument(hidden=True)] = None,
    data: Corpus = None,
    preset: Annotated[str, typer.Option(help="pretrain, train, finetune, paper, paper-finetune or causal.")] = "train",
    model: Annotated[str | None, typer.Option(help="Start from this model: a folder, or a name on the hub.")] = None,
    variant: Annotated[
        str | None, typer.Option(help="A variant of the paper: plain, pi, yarn16, yarn32, pose, alibi or clex.")
    ] = None,
    cosscale: Annotated[float | None, typer.Option(help="Scaled cosine scores with this factor.")] = None,
    recipe: Annotated[str | None, typer.Option(help="The recipe of attention, instead of a variant.")] = None,
    pose: Annotated[int | None, typer.Option(help="Draw positions up to this length (PoSE).")] = None,
    length: Annotated[int | None, typer.Option(help="Tokens per crop.")] = None,
    batch: Annotated[int | None, typer.Option(help="Crops per step, over all processes.")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimiser steps.")] = None,
    epochs: Annotated[float | None, typer.Option(help="Passes over the documents, instead of steps.")] = None,
    rate: Annotated[float | None, typer.Option(help="Highest learning rate.")] = None,
    crop: Annotated[str | None, typer.Option(help="random, or first: the beginning of each document.")] = None,
    dropout: Annotated[float | None, typer.Option(help="Dropout, instead of the model's own.")] = None,
    layers: Annotated[int | None, typer.Option(help="Number of layers; of a given model, its first.")] = None,
    sizes: Annotated[
        str | None,
        typer.Option(
            help="Sizes of a new model: hidden_size=768,intermediate_size=1536,attention_key_size=128; "
            "for a causal one num_attention_heads instead of the last."
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of everything random.")] = None,
    precision: Annotated[str | None, typer.Option(help="bf16, fp32, or auto: bf16 on a GPU.")] = None,
    accumulate: Annotated[int | None, typer.Option(help="Micro-batches per batch (gradient accumulation).")] = None,
    compile: Annotated[bool | None, typer.Option(help="Compile the step; by default for long runs on a GPU.")] = None,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Give the same bits again on a GPU too, which takes longer.")
    ] = False,
    save_every: Annotated[
        int | None, typer.Option(help="Steps between saved states; once a minute by default.")
    ] = None,
    evaluate_every: Annotated[
        int | None,
        typer.Option(
            help="Steps between validation losses; by default a twentieth of the run, of short ones 50 or a quarter."
        ),
    ] = None,
    hash_every: Annotated[
        int | None, typer.Option(help="Steps between hashes of the weights in the log; 'losses' compares them.")
    ] = None,
    track: Annotated[list[str], typer.Option(help="tensorboard or wandb; repeat for both.")] = ["tensorboard"],  # noqa: B006
    as_json: AsJson = False,
) -> None:
    """Train GAU-α on masked tokens or a small Llama on next tokens, or resume an interrupted run.

    isentrope train --data data/laws --out runs/base --preset pretrain

    isentrope train --data data/laws --out runs/pi --model runs/base/best --variant pi --cosscale 128

    isentrope train --data data/sympy --out runs/llama --preset causal

    accelerate launch --num_processes 4 -m isentrope.cli train --data data/laws --out runs/base --preset pretrain
    """
    from isentrope.report.figures.losses import draw_losses
    from isentrope.training import trainer
    from isentrope.training.config import build_config, parse_sizes

    config = build_config(
        preset, variant, cosscale, model=model, recipe=recipe, pose=pose, length=length, batch=batch, steps=steps,
        epochs=epochs, rate=rate, crop=crop, dropout=dropout, layers=layers, sizes=parse_sizes(sizes), seed=seed,
        precision=precision, accumulate=accumulate, compile=compile, save_every=save_every,
        evaluate_every=evaluate_every, deterministic=deterministic, hash_every=hash_every,
    )  # fmt: skip
    folder = prefer_new(data, corpus, "the corpus as an argument", "--data FOLDER")
    if folder is None:
        raise ValueError("data: expected a corpus, got none; isentrope data prepare makes one, then --data FOLDER")
    disable_progress_bars()
    try:
        with Output(as_json) as output:
            outcome = trainer.train(folder, config, out, tuple(track))
            if trainer.is_main_process():
                best, steps = outcome["best"], outcome["steps"]
                output.add(best=best, steps=steps)
                output.print(f"lowest validation loss {best['validation']:.4f} at step {best['step']} of {steps}")
                output.add_files([out / "best", out / "final", out / "log.jsonl", *draw_losses([out], out / "loss")])
    except trainer.Interrupted as stopped:
        print_error(str(stopped))
        raise typer.Exit(128 + stopped.number) from None
    except trainer.Diverged as diverged:
        print_error(str(diverged))
        raise typer.Exit(1) from None


@app.command()
@errors_in_one_line()
def losses(
    runs: Annotated[list[Path], typer.Argument(help="Folders that 'isentrope train' wrote.")],
    out: Annotated[Path, typer.Option(help="Path of the figure, without suffix.")] = Path("results/losses"),
    as_json: AsJson = False,
) -> None:
    """Draw the training losses of several runs in one figure, and say from which step on their weights differ.

    Weights are compared where the runs were trained with --hash-every.

    isentrope losses runs/base runs/cosine --out results/losses
    """
    from isentrope.report.figures.losses import draw_losses
    from isentrope.report.repeats import compare_weights

    with Output(as_json) as output:
        lines = list(compare_weights(runs))
        output.add(weights=lines)
        for line in lines:
            output.print(line)
        out.parent.mkdir(parents=True, exist_ok=True)
        output.add_files(draw_losses(runs, out))
