"""The `isentrope` command: one subcommand, one function."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
data = typer.Typer(no_args_is_help=True, help="Corpora to train and evaluate on.")
app.add_typer(data, name="data")
study = typer.Typer(no_args_is_help=True, help="The paper's experiments, and others like them.")
app.add_typer(study, name="study")


@contextmanager
def _errors_in_one_line() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise  # the reader has gone: nobody to tell
    except (ValueError, OSError) as error:
        typer.echo(f"isentrope: {str(error).strip().partition(chr(10))[0]}", err=True)
        raise typer.Exit(2) from None


def _version(asked: bool) -> None:
    if asked:
        from isentrope import __version__

        typer.echo(f"isentrope {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Attention that holds its focus at lengths a model was never trained on."""


@app.command()
def laws(
    out: Annotated[Path, typer.Option(help="Folder for laws.json, laws.png and laws.svg.")] = Path("results/laws"),
    train_length: Annotated[int, typer.Option(help="The length where τ = 1.")] = 64,
    longest: Annotated[
        int, typer.Option(help="The last of the lengths, which double from the training length.")
    ] = 32768,
    head_dim: Annotated[int, typer.Option(help="Size d of queries and keys.")] = 128,
    alpha: Annotated[float, typer.Option(help="Scores are alpha cos θ.")] = 16.0,
    queries: Annotated[int, typer.Option(help="Queries measured at each length.")] = 256,
    seed: Annotated[int, typer.Option(help="Seed of the random vectors.")] = 0,
) -> None:
    """What each temperature law does to attention entropy as the number of keys grows."""
    with _errors_in_one_line():
        from rich.console import Console

        from isentrope.report import figures, tables
        from isentrope.study.laws import Config, run

        config = Config(train_length, head_dim, alpha, longest, queries, seed)
        results = run(config, out)
        Console().print(tables.laws(results))
        for path in (results, *figures.laws(results)):
            typer.echo(path)


@app.command()
def perplexity(
    model: Annotated[str, typer.Argument(help="A causal model: a folder, or a name on the hub.")],
    texts: Annotated[list[Path], typer.Argument(help="Text files, or .jsonl(.xz) with a 'text' a line.")],
    recipe: Annotated[
        list[str], typer.Option(help="Recipes to compare; 'plain' is the model as it is. Give it several times.")
    ],
    edges: Annotated[
        str, typer.Option(help="Buckets of positions; the last is how many tokens of each document are read.")
    ] = "0,4096,8192,12288,16384,24576,32768",
    documents: Annotated[int, typer.Option(help="At most this many documents, the first that are long enough.")] = 8,
    out: Annotated[Path, typer.Option(help="Folder for perplexity.json, .png and .svg.")] = Path("results/perplexity"),
    gguf_file: Annotated[str | None, typer.Option(help="A GGUF file in the model's folder.")] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32; auto: bfloat16 on a GPU.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda, …; auto: a GPU where there is one.")] = "auto",
) -> None:
    """Perplexity by position in long texts, under one recipe after another. What is already measured is kept."""
    with _errors_in_one_line():
        from rich.console import Console

        from isentrope.report import figures, tables
        from isentrope.study import perplexity as study

        config = study.Config.read(recipe, edges)
        loaded = study.load(model, device, dtype, gguf_file)
        found = study.read(texts, model, gguf_file, config.length, documents)
        results = study.run(loaded, Path(model).name, found, config, out)
        Console().print(tables.perplexity(results))
        for path in (results, *figures.perplexity(results)):
            typer.echo(path)


@app.command()
def inspect(
    model: Annotated[str, typer.Argument(help="GAU-α or a causal model: a folder, or a name on the hub.")],
    text: Annotated[Path, typer.Argument(help="A text file, or .jsonl(.xz): its first text that is long enough.")],
    recipe: Annotated[str | None, typer.Option(help="What attention follows, in place of the model's own.")] = None,
    lengths: Annotated[str, typer.Option(help="Tokens to read; angles and heatmaps at the last.")] = "64,128,256,512",
    layer: Annotated[int, typer.Option(help="Whose angles and heatmaps; -1 is the last layer.")] = -1,
    region: Annotated[str | None, typer.Option(help="Queries and keys of the heatmaps, as 0:512,0:512.")] = None,
    inset: Annotated[str | None, typer.Option(help="A part to draw beside it, as 3516:3536,3516:3536.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for inspect.json, heatmaps and figures.")] = Path("results/inspect"),
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32; auto: bfloat16 on a GPU.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda, …; auto: a GPU where there is one.")] = "auto",
) -> None:
    """How focused a model's attention is, at which angles, and where: numbers and figures.

    isentrope inspect runs/base/best laws.jsonl.xz --recipe rerope:window=64+infoscale --lengths 64,512,4096
    """
    with _errors_in_one_line():
        from isentrope.report.inspect import draw
        from isentrope.study import inspect as looking

        config = looking.Config.read(lengths, region, inset, layer=layer)
        results = looking.run(model, text, recipe, config, out, device, dtype)
        typer.echo("\n".join(map(str, (results, *draw(out)))))


@data.command()
def prepare(
    source: Annotated[
        str, typer.Argument(help="'sympy'; a file, a folder or a 'glob'; or owner/name, a data set on the hub.")
    ],
    out: Annotated[Path, typer.Option(help="Folder for tokens, tokenizer, manifest.json, partition.png and .svg.")],
    tokenizer: Annotated[
        str, typer.Option(help="'characters' of the corpus, a BERT vocabulary (.txt), a folder, or a name on the hub.")
    ] = "characters",
    vocab_size: Annotated[
        int | None, typer.Option(help="Tokens of the tokenizer 'characters'; 12000 unless said.")
    ] = None,
    longer_than: Annotated[int, typer.Option(help="Keep documents of more tokens than this.")] = 4096,
    seed: Annotated[int, typer.Option(help="Seed of the partition.")] = 0,
    test: Annotated[int, typer.Option(help="Documents to test on.")] = 10,
    train_share: Annotated[float, typer.Option(help="Share of the documents to train on.")] = 0.8,
    features: Annotated[
        str | None, typer.Option(help="A model whose mean hidden states are clustered; else pairs of tokens are.")
    ] = None,
    column: Annotated[str, typer.Option(help="What holds the text, in JSON lines, Parquet and on the hub.")] = "text",
    subset: Annotated[str | None, typer.Option(help="Subset (configuration) of a data set on the hub.")] = None,
    split: Annotated[str | None, typer.Option(help="Split of a data set on the hub; 'train' unless said.")] = None,
    data_files: Annotated[str | None, typer.Option(help="Files of a data set on the hub, as a 'glob'.")] = None,
    skip_broken: Annotated[bool, typer.Option("--skip-broken", help="Warn of what cannot be read; go on.")] = False,
    limit: Annotated[int | None, typer.Option(help="Read only the first so many documents.")] = None,
) -> None:
    """Tokens of a corpus, parted into training, validation and test documents.

    Example: isentrope data prepare laws.jsonl.xz --tokenizer vocab.txt --out corpora/laws

    The same corpus, options and seed give the same partition. What an earlier run has done is kept.
    """
    with _errors_in_one_line():
        from isentrope.data.source import Source
        from isentrope.study import prepare as study

        found = Source(source, column, subset, split, data_files, skip_broken, limit)
        options = study.Options(tokenizer, vocab_size, longer_than, seed, test, train_share, features)
        _show_partition(study.prepare(found, out, options, say=lambda text: typer.echo(text, err=True)))


def _show_partition(manifest: Path) -> None:
    from rich.console import Console

    from isentrope.report import corpus, tables

    Console().print(tables.partition(manifest))
    for path in (manifest, *corpus.partition(manifest)):
        typer.echo(path)


@app.command()
def train(
    corpus: Annotated[Path, typer.Argument(help="A folder that 'isentrope data prepare' wrote.")],
    out: Annotated[Path, typer.Option(help="Folder for the run; one that holds this run already is gone on with.")],
    preset: Annotated[str, typer.Option(help="pretrain, train, finetune, paper or paper-finetune.")] = "train",
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
        str | None, typer.Option(help="Of a new model: hidden_size=768,intermediate_size=1536,attention_key_size=128")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Decides everything random.")] = None,
    precision: Annotated[str | None, typer.Option(help="bf16, fp32, or auto: bf16 on a GPU.")] = None,
    accumulate: Annotated[int | None, typer.Option(help="Parts that a batch is worked through in.")] = None,
    compile: Annotated[bool | None, typer.Option(help="Compile the step; on a GPU unless told otherwise.")] = None,
    save_every: Annotated[int | None, typer.Option(help="Steps between saved states; a twentieth by default.")] = None,
    evaluate_every: Annotated[int | None, typer.Option(help="Steps between validation losses; likewise.")] = None,
    track: Annotated[list[str], typer.Option(help="tensorboard, wandb; several times for both.")] = ["tensorboard"],  # noqa: B006
) -> None:
    """Train GAU-α on masked tokens, or go on with a run that was interrupted.

    isentrope train data/laws --out runs/base --preset pretrain

    isentrope train data/laws --out runs/pi --model runs/base/best --variant pi --cosscale 128

    accelerate launch --num_processes 4 -m isentrope.cli train data/laws --out runs/base --preset pretrain
    """
    with _errors_in_one_line():
        from isentrope.report.losses import losses
        from isentrope.study import train as study
        from isentrope.study.regimen import configured, read_sizes

        config = configured(
            preset, variant, cosscale, model=model, recipe=recipe, pose=pose, length=length, batch=batch, steps=steps,
            epochs=epochs, rate=rate, crop=crop, dropout=dropout, layers=layers, sizes=read_sizes(sizes), seed=seed,
            precision=precision, accumulate=accumulate, compile=compile, save_every=save_every,
            evaluate_every=evaluate_every,
        )  # fmt: skip
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
    """Training losses of several runs in one figure."""
    with _errors_in_one_line():
        from isentrope.report.losses import losses as draw

        out.parent.mkdir(parents=True, exist_ok=True)
        for path in draw(runs, out):
            typer.echo(path)


@study.command("list")
def study_list() -> None:
    """The plans that ship: what they measure, and how many cells that is."""
    from rich.console import Console

    from isentrope.report import tables
    from isentrope.study import plan as plans

    Console().print(tables.plans([plans.described(name) for name in (*plans.OTHERS, *plans.names())]))


@study.command("run")
def study_run(
    plan: Annotated[str, typer.Argument(help="A plan's name (isentrope study list), or a YAML file.")],
    out: Annotated[Path, typer.Option(help="Folder for checkpoints, cells and results; plans share it.")] = Path(
        "results"
    ),
    corpus: Annotated[Path | None, typer.Option("--data", help="A folder that 'isentrope data prepare' wrote.")] = None,
    lengths: Annotated[str | None, typer.Option(help="In place of the plan's, such as 128,1024.")] = None,
    positions: Annotated[
        int | None, typer.Option(help="Masked positions a document, in place of the plan's; 0 for all.")
    ] = None,
    seeds: Annotated[str | None, typer.Option(help="Training seeds in place of the plan's, such as 0,1,2.")] = None,
) -> None:
    """Train and evaluate what is missing of a plan, then print its table. Interrupted, the same command goes on.

    isentrope study run main --data data/laws --out results

    accelerate launch -m isentrope.cli study run main --data data/laws --out results
    """
    with _errors_in_one_line():
        from isentrope.study import plan as plans

        if plan == "laws":
            laws(out / "laws")
        elif plan == "dataset":
            if corpus is None:
                raise ValueError("data: the plan dataset needs a corpus: isentrope data prepare …, then --data FOLDER")
            from isentrope.data.prepared import Prepared

            _show_partition(Prepared.open(corpus).folder / "manifest.json")
        else:
            _carry_out(plans.changed(plans.load(plan), lengths, positions, seeds), out, corpus)


@study.command("status")
def study_status(
    plan: Annotated[str, typer.Argument(help="A plan's name, or a YAML file.")],
    out: Annotated[Path, typer.Option(help="The folder of the runs.")] = Path("results"),
    as_json: Annotated[bool, typer.Option("--json", help="For a script.")] = False,
) -> None:
    """How many cells of a plan are done, failed and missing."""
    with _errors_in_one_line():
        import json

        from isentrope.study import plan as plans
        from isentrope.study.run import status

        found = status(plans.load(plan), out)
        missing = found["cells"] - found["done"] - found["failed"]
        words = f"{plan}: {found['done']} of {found['cells']} cells done, {found['failed']} failed, {missing} missing"
        typer.echo(json.dumps(found) if as_json else words)


@app.command()
def evaluate(
    model: Annotated[str, typer.Argument(help="A GAU-α model: a folder, such as RUN/best.")],
    corpus: Annotated[Path, typer.Option("--data", help="A folder that 'isentrope data prepare' wrote.")],
    recipe: Annotated[list[str], typer.Option(help="Recipes to compare; give it several times.")],
    lengths: Annotated[str, typer.Option(help="Lengths in tokens.")] = "128,256,512,1024,2048,4096",
    positions: Annotated[int, typer.Option(help="Masked positions a document; 0 for all.")] = 256,
    protocol: Annotated[str, typer.Option(help="single: one token masked at a time; random: 15 % at once.")] = "single",
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("results/evaluate"),
) -> None:
    """Perplexity and accuracy of masked tokens at lengths past the training length.

    isentrope evaluate runs/base/best --data data/laws --recipe rope --recipe rope+infoscale:count=sequence
    """
    with _errors_in_one_line():
        from isentrope.study import plan as plans

        _carry_out(plans.single(model, recipe, lengths, positions, protocol), out, corpus)


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="A folder that 'isentrope study run' wrote, or one plan's in it.")],
    cap: Annotated[bool, typer.Option("--cap", help="Print >500 and <0.1 as the paper does.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For a script: paths and verdicts.")] = False,
) -> None:
    """One page of a study, tables in Markdown, LaTeX and CSV, and whether the paper's claims hold.

    isentrope report results
    """
    with _errors_in_one_line():
        import json

        from rich.console import Console

        from isentrope.report import grid, page

        written = page.report(folder, cap)
        if as_json:
            typer.echo(json.dumps(written, ensure_ascii=False))
            return
        Console().print(grid.terminal(folder, cap))
        for path in (*(file for plan in written["plans"] for file in plan["files"]), written["report"]):
            typer.echo(path)


def _carry_out(plan: Any, out: Path, corpus: Path | None) -> None:
    """Run a plan, then write and show what came out; exit code 1 where a cell failed."""
    from rich.console import Console

    from isentrope.report.curves import curves
    from isentrope.report.grid import terminal, write
    from isentrope.report.page import page
    from isentrope.study.run import run
    from isentrope.study.train import Interrupted, is_main

    try:
        told = run(plan, out, corpus, lambda words: typer.echo(words, err=True))
    except Interrupted as stopped:
        typer.echo(f"isentrope: {stopped}", err=True)
        raise typer.Exit(128 + stopped.number) from None
    if is_main():
        folder = out / plan.name
        curves(folder)
        write(folder)
        Console().print(terminal(folder))
        typer.echo(page(folder))
        if told["failed"]:
            typer.echo(
                f"isentrope: {told['failed']} of {told['cells']} cells failed: {folder / 'results.jsonl'}", err=True
            )
            raise typer.Exit(1)


if __name__ == "__main__":
    app()
