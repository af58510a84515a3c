"""The `isentrope` application, options that commands share, and how results and errors are printed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from isentrope.utils.extras import MissingExtraError, name_missing_extras
from isentrope.utils.files import explain_os_error

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)

CausalModel = Annotated[str, typer.Argument(help="A causal model: a folder, or a name on the hub.")]
Texts = Annotated[
    list[str],
    typer.Argument(help="Files, folders or globs: text, .parquet, or .jsonl(.xz) with a 'text' on each line."),
]
CORPUS_OPTION = typer.Option("--data", help="A folder that 'isentrope data prepare' wrote.")
Recipes = Annotated[
    list[str], typer.Option(help="A recipe to compare; 'plain' is the unchanged model. Repeat for several.")
]
MaxDocuments = Annotated[int, typer.Option(help="Use at most this many documents, the first that are long enough.")]
GgufFile = Annotated[str | None, typer.Option(help="A GGUF file in the model's folder.")]
Dtype = Annotated[str, typer.Option(help="bfloat16, float16 or float32; auto: bfloat16 on a GPU, float32 on a CPU.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, …; auto: a GPU if there is one.")]


def _print_version(requested: bool) -> None:
    if requested:
        from isentrope import __version__

        typer.echo(f"isentrope {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Attention that keeps its focus at lengths a model was never trained on."""


@contextmanager
def errors_in_one_line() -> Iterator[None]:
    """Print an expected error as one line on stderr and exit with status 2; also usable as a decorator."""
    try:
        with name_missing_extras():
            yield
    except BrokenPipeError:
        raise  # nobody reads the output any more
    except KeyboardInterrupt:
        print_error("interrupted; run the same command again to resume")
        raise typer.Exit(130) from None
    except (ValueError, OSError, MissingExtraError) as error:
        message = explain_os_error(error) if isinstance(error, OSError) else str(error)
        print_error(message.strip().partition("\n")[0])
        raise typer.Exit(2) from None


def print_error(message: str) -> None:
    typer.echo(f"isentrope: {message}", err=True)


def print_progress(message: str) -> None:
    typer.echo(message, err=True)


def print_paths(paths: Iterable[Path | str]) -> None:
    for path in paths:
        typer.echo(path)


def print_table(table: Any) -> None:
    """Print every column of a table: in a narrow terminal rich would drop some."""
    from rich.console import Console

    console = Console()
    minimum = console.measure(table, options=console.options.update(max_width=1 << 12)).minimum
    Console(width=max(console.width, minimum)).print(table)


def exit_if_failed(messages: Sequence[str], results: Path) -> None:
    """Print each reason of failed cells once, with the number of cells, and exit with status 1."""
    if not messages:
        return
    for message in dict.fromkeys(messages):
        print_error(message)
    print_error(f"{len(messages)} cells failed: {results}")
    raise typer.Exit(1)


def disable_progress_bars() -> None:
    """Turn off the progress bars that transformers shows while loading a model."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def expand_paths(patterns: Sequence[str]) -> list[Path]:
    """Return the text files of all the given files, folders and globs."""
    from isentrope.data.source import find_text_files

    return [path for pattern in patterns for path in find_text_files(pattern)]
