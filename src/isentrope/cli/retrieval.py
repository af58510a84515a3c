"""Laws, perplexity, and a look inside a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from isentrope.cli.common import TEXTS, app, errors_in_one_line, files, quietly, show, tell_failures


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
    """What each temperature law does to attention entropy as the number of keys grows.

    isentrope laws --train-length 512 --longest 65536 --out results/laws
    """
    with errors_in_one_line():
        from rich.console import Console

        from isentrope.analysis.entropy_laws import Config, run
        from isentrope.report.figures import laws as figures
        from isentrope.report.tables import terminal as tables

        config = Config(train_length, head_dim, alpha, longest, queries, seed)
        results = run(config, out)
        Console().print(tables.laws(results))
        for path in (results, *figures.laws(results)):
            typer.echo(path)


@app.command()
def perplexity(
    model: Annotated[str, typer.Argument(help="A causal model: a folder, or a name on the hub.")],
    texts: Annotated[list[str], typer.Argument(help=TEXTS)],
    recipe: Annotated[
        list[str], typer.Option(help="Recipes to compare; 'plain' is the model as it is. Give it several times.")
    ],
    edges: Annotated[
        str, typer.Option(help="Buckets of positions; the last is how many tokens of each document are read.")
    ] = "0,4096,8192,12288,16384,24576,32768",
    documents: Annotated[int, typer.Option(help="At most this many documents, the first that are long enough.")] = 8,
    out: Annotated[Path, typer.Option(help="Folder for perplexity.json, .png and .svg.")] = Path("results/perplexity"),
    gguf_file: Annotated[str | None, typer.Option(help="A GGUF file in the model's folder.")] = None,
    dtype: Annotated[
        str, typer.Option(help="bfloat16, float16 or float32; auto: bfloat16 on a GPU, float32 on a CPU.")
    ] = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda, …; auto: a GPU where there is one.")] = "auto",
) -> None:
    """Perplexity by position in long texts, under one recipe after another. What is already measured is kept.

    isentrope perplexity MODEL book.txt --recipe plain --recipe rerope:window=4096+infoscale
    """
    with errors_in_one_line():
        from isentrope.evaluation import perplexity as study
        from isentrope.report.figures import laws as figures
        from isentrope.report.tables import terminal as tables

        config = study.Config.read(recipe, edges)
        quietly()
        found = study.read(files(texts), model, gguf_file, config.length, documents)  # before a model is loaded
        loaded = study.load(model, device, dtype, gguf_file)
        results = study.run(loaded, Path(model).name, found, config, out)
        show(tables.perplexity(results))
        for path in (results, *figures.perplexity(results)):
            typer.echo(path)
        if lost := study.failures(results, recipe):
            tell_failures(lost, results)
            raise typer.Exit(1)


@app.command()
def retrieval(
    model: Annotated[str, typer.Argument(help="A causal model: a folder, or a name on the hub.")],
    recipe: Annotated[
        list[str], typer.Option(help="Recipes to compare; 'plain' is the model as it is. Give it several times.")
    ],
    tasks: Annotated[
        str, typer.Option(help="Of passkey, needle, multikey, multivalue, variables, words; commas between.")
    ] = "passkey,needle",
    lengths: Annotated[
        str, typer.Option(help="Tokens of an example, with its question and answer.")
    ] = "1024,2048,4096",
    depths: Annotated[
        str, typer.Option(help="Percent of the text before what is asked for (passkey, needle, multikey).")
    ] = "0,25,50,75,100",
    examples: Annotated[int, typer.Option(help="Examples for each task, length and depth.")] = 4,
    text: Annotated[
        list[str] | None, typer.Option(help="Files to hide it in; without, a few plain sentences again and again.")
    ] = None,
    chat: Annotated[
        bool | None, typer.Option(help="Ask in the tokenizer's chat template; by default where it has one.")
    ] = None,
    score: Annotated[
        str, typer.Option(help="both: also what the model says; forced: the answer's likelihood.")
    ] = "both",
    seed: Annotated[int, typer.Option(help="Seed of the examples.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for retrieval.json and heatmaps.")] = Path("results/retrieval"),
    gguf_file: Annotated[str | None, typer.Option(help="A GGUF file in the model's folder.")] = None,
    dtype: Annotated[
        str, typer.Option(help="bfloat16, float16 or float32; auto: bfloat16 on a GPU, float32 on a CPU.")
    ] = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda, …; auto: a GPU where there is one.")] = "auto",
) -> None:
    """What a model finds again in long texts, under one recipe after another. What is already measured is kept.

    isentrope retrieval MODEL --recipe plain --recipe rerope:window=4096+infoscale --lengths 4096,8192,16384

    isentrope retrieval MODEL --recipe plain --tasks multikey,variables,words --text book.txt --score forced
    """
    with errors_in_one_line():
        from isentrope.evaluation import retrieval as study
        from isentrope.evaluation.perplexity import load, load_tokenizer
        from isentrope.report.figures import retrieval as report

        config = study.Config.read(recipe, tasks, lengths, depths, examples=examples, seed=seed, score=score)
        quietly()
        haystack = study.read(files(text or []))
        loaded = load(model, device, dtype, gguf_file)
        prompts = study.Prompts.of(load_tokenizer(model, gguf_file), chat)
        results = study.run(loaded, Path(model).name, prompts, haystack, config, out)
        show(report.table(results))
        for path in (results, *report.heatmaps(results)):
            typer.echo(path)
        if lost := study.failures(results, config):
            tell_failures(lost, results)
            raise typer.Exit(1)


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
    dtype: Annotated[
        str, typer.Option(help="bfloat16, float16 or float32; auto: bfloat16 on a GPU, float32 on a CPU.")
    ] = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda, …; auto: a GPU where there is one.")] = "auto",
) -> None:
    """How focused a model's attention is, at which angles, and where: numbers and figures.

    isentrope inspect runs/base/best laws.jsonl.xz --recipe rerope:window=64+infoscale --lengths 64,512,4096
    """
    with errors_in_one_line():
        from isentrope.analysis import inspect as looking
        from isentrope.report.figures.inspect import draw

        config = looking.Config.read(lengths, region, inset, layer=layer)
        results = looking.run(model, text, recipe, config, out, device, dtype)
        typer.echo("\n".join(map(str, (results, *draw(out)))))
