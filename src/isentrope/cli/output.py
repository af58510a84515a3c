"""Printing of results, progress and errors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import typer


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
