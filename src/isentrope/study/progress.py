"""Progress bars: on standard error, and only in a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sized
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

T = TypeVar("T")


def progress(items: Iterable[T], what: str | Callable[[T], str], total: int | None = None) -> Iterator[T]:
    """The items, one after another, while a bar shows how many have gone by. what: beside it, or for each item."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.fields[what]}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    if total is None and isinstance(items, Sized):
        total = len(items)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total, what=what if isinstance(what, str) else "")
        for item in items:
            if not isinstance(what, str):
                bar.update(task, what=what(item))
            yield item
            bar.advance(task)
