"""The command itself, and how it answers mistakes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
data = typer.Typer(no_args_is_help=True, help="Corpora to train and evaluate on.")
app.add_typer(data, name="data")
study = typer.Typer(no_args_is_help=True, help="The paper's experiments, and others like them.")
app.add_typer(study, name="study")


@contextmanager
def errors_in_one_line() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise  # the reader has gone: nobody to tell
    except KeyboardInterrupt:
        typer.echo("isentrope: interrupted; the same command goes on with what is missing", err=True)
        raise typer.Exit(130) from None
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


def quietly() -> None:
    """Without the bars that transformers shows for every file it loads."""
    from transformers.utils import logging

    logging.disable_progress_bar()
