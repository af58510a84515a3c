"""The command itself, and how it answers mistakes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from isentrope.utils.extras import MissingExtraError, name_missing_extras
from isentrope.utils.files import explain_os_error

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
data = typer.Typer(no_args_is_help=True, help="Corpora to train and evaluate on.")
app.add_typer(data, name="data")
study = typer.Typer(no_args_is_help=True, help="The paper's experiments, and others like them.")
app.add_typer(study, name="study")

TEXTS = "Files, folders, globs: text, .parquet, or .jsonl(.xz) with a 'text' a line."


@contextmanager
def errors_in_one_line() -> Iterator[None]:
    try:
        with name_missing_extras():
            yield
    except BrokenPipeError:
        raise  # the reader has gone: nobody to tell
    except KeyboardInterrupt:
        typer.echo("isentrope: interrupted; the same command goes on with what is missing", err=True)
        raise typer.Exit(130) from None
    except (ValueError, OSError, MissingExtraError) as error:
        words = explain_os_error(error) if isinstance(error, OSError) else str(error)
        typer.echo(f"isentrope: {words.strip().partition(chr(10))[0]}", err=True)
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


def quietly() -> None:
    """Without the bars that transformers shows for every file it loads."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def show(table: Any) -> None:
    """A table with all of its columns: rich would leave out those that a narrow terminal has no room for."""
    from rich.console import Console

    console = Console()
    least = console.measure(table, options=console.options.update(max_width=1 << 12)).minimum
    Console(width=max(console.width, least)).print(table)


def files(words: Sequence[str]) -> list[Path]:
    """Those of all the files, folders and globs."""
    from isentrope.experiments.causal_plan import texts_of

    return [path for word in words for path in texts_of(word)]


def tell_failures(words: Sequence[str], results: Path) -> None:
    """Why cells failed, each reason once, and how many that is."""
    for line in dict.fromkeys(words):
        typer.echo(f"isentrope: {line}", err=True)
    typer.echo(f"isentrope: {len(words)} cells failed: {results}", err=True)


@contextmanager
def started_again(times: int, folder: Path) -> Iterator[None]:
    """This command, running as often beside this process; what the others say goes to FOLDER/2.log and so on."""
    others: list[subprocess.Popen[bytes]] = []
    try:
        for number in range(2, times + 2):
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / f"{number}.log").open("wb") as log:
                command = [sys.executable, "-m", "isentrope.cli", *sys.argv[1:], "--jobs", "1", "--helps"]
                others.append(subprocess.Popen(command, stdout=log, stderr=log))
        yield
        for other in others:
            other.wait()
    finally:
        for other in others:
            other.terminate()
