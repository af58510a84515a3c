"""Printing of results, progress and errors: tables for people, or one JSON object for programs."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from types import TracebackType
from typing import Any

import typer

TABLE_EDGES = 2  # columns that rich's least width of a table without edges lacks


def print_error(message: str) -> None:
    typer.echo(f"isentrope: {message}", err=True)


def print_progress(message: str) -> None:
    typer.echo(message, err=True)


class Output:
    """The result of a command on stdout.

    With `as_json` stdout gets one JSON object of the added fields and the paths of files, and nothing else: whatever
    the block prints meanwhile goes to stderr. Without it, tables, lines and paths are printed as they come.

    Args:
        as_json: whether `--json` was given.
    """

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self.fields: dict[str, Any] = {}
        self.files: list[str] = []
        self._stack = ExitStack()

    def __enter__(self) -> Output:
        if self.as_json:
            self._stack.enter_context(redirect_stdout(sys.stderr))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stack.close()
        content = self.fields | ({"files": self.files} if self.files else {})
        # a command that ends with a status of its own may have a result; one that raises an error has none, nor has a
        # process that helps another
        if self.as_json and content and (error is None or isinstance(error, typer.Exit)):
            is_unicode = "utf" in (getattr(sys.stdout, "encoding", None) or "").lower()  # pipes on Windows are not
            typer.echo(json.dumps(_replace_nonfinite(content), ensure_ascii=not is_unicode))

    def add(self, **fields: Any) -> None:
        """Add fields to the JSON object."""
        self.fields |= fields

    def append(self, field: str, value: Any) -> None:
        """Append a value to a list in the JSON object."""
        self.fields.setdefault(field, []).append(value)

    def print(self, content: Any) -> None:
        """Print a line, a table or another renderable of rich, for people only."""
        if self.as_json:
            return
        if isinstance(content, str):
            typer.echo(content)
        else:
            print_table(content)

    def add_files(self, paths: Iterable[Path | str]) -> None:
        """Name files that were written."""
        for path in paths:
            self.files.append(str(path))
            self.print(str(path))


def print_table(table: Any) -> None:
    """Print every column of a table: in a narrow terminal rich would drop some. Lines of text are not wrapped."""
    from rich.console import Console
    from rich.text import Text

    if isinstance(table, Text):
        Console(soft_wrap=True).print(table)
        return
    console = Console()
    minimum = console.measure(table, options=console.options.update(max_width=1 << 12)).minimum
    Console(width=max(console.width, minimum + TABLE_EDGES)).print(table)


def exit_if_failed(messages: Sequence[str], results: Path) -> None:
    """Print each reason of failed cells once, with the number of cells, and exit with status 1."""
    if not messages:
        return
    for message in dict.fromkeys(messages):
        print_error(message)
    print_error(f"{len(messages)} cells failed: {results}")
    raise typer.Exit(1)


def summarize_results(results: dict[str, Any]) -> dict[str, Any]:
    """Leave out of a results file what only it needs: single measurements, and the schema they are stored in."""
    return {key: value for key, value in results.items() if key not in ("cells", "schema")}


def _replace_nonfinite(value: Any) -> Any:
    """Replace NaN and infinity, which JSON does not have, by None."""
    if isinstance(value, dict):
        return {key: _replace_nonfinite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_nonfinite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
