"""Progress on standard error: a bar in a terminal, elsewhere a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

T = TypeVar("T")
EVERY = 60  # seconds between lines


def progress(items: Iterable[T], what: str | Callable[[T], str], total: int | None = None) -> Iterator[T]:
    """The items, one after another, while a bar shows how many have gone by. what: beside it, or for each item."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.fields[what]}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    if total is None and isinstance(items, Sized):
        total = len(items)
    told = time.monotonic()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total, what=what if isinstance(what, str) else "")
        for done, item in enumerate(items):
            if not isinstance(what, str):
                bar.update(task, what=what(item))
            if not console.is_terminal and time.monotonic() - told > EVERY:
                told = time.monotonic()
                words = what if isinstance(what, str) else what(item)
                print(f"{words}: {done}" + ("" if total is None else f" of {total}"), file=sys.stderr, flush=True)
            yield item
            bar.advance(task)
