"""The `isentrope` command: one subcommand, one function."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


@contextmanager
def _errors_in_one_line() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise  # the reader has gone: nobody to tell
    except (ValueError, OSError) as error:
        typer.echo(f"isentrope: {error}", err=True)
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


if __name__ == "__main__":
    app()
