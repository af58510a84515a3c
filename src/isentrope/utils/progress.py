"""Progress on standard error: a bar in a terminal, elsewhere a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from types import TracebackType
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

T = TypeVar("T")
LINE_INTERVAL = 60.0  # seconds between lines


class ProgressBar:
    """How much of a task is done.

    Args:
        total: units of work; None if unknown.
        completed: units done before.
        label: text before the bar.
        line_interval: seconds between lines where there is no terminal.
        enabled: whether to show anything.
    """

    def __init__(
        self,
        total: int | None,
        completed: int = 0,
        label: str = "",
        line_interval: float = LINE_INTERVAL,
        enabled: bool = True,
    ) -> None:
        console = Console(stderr=True)
        columns = (
            TextColumn("{task.fields[label]}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
            TextColumn("{task.fields[speed]}"),
        )  # fmt: skip
        self.total, self.completed, self.line_interval = total, completed, line_interval
        self.bar = Progress(*columns, console=console, transient=True, disable=not (enabled and console.is_terminal))
        self.task = self.bar.add_task("", total=total, completed=completed, label=label, speed="")
        self.prints_lines = enabled and not console.is_terminal
        self.start = self.last_line = time.monotonic()

    def __enter__(self) -> ProgressBar:
        self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.bar.stop()

    def update(self, completed: int, label: str | None = None) -> None:
        """Show how many units are done and, if given, a new label."""
        self.bar.update(self.task, completed=completed)
        if label is not None:
            self.bar.update(self.task, label=label)

    def print_line(self, line: str, always: bool = False) -> None:
        """Print a line where there is no terminal, if it is time for one or `always`."""
        now = time.monotonic()
        if self.prints_lines and (always or now - self.last_line > self.line_interval):
            self.last_line = now
            print(line, file=sys.stderr, flush=True)

    def report(self, step: int, metrics: Mapping[str, float], always: bool = False) -> None:
        """Show metrics and steps per second beside the bar, and on a line where there is no terminal."""
        label = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        speed = f"{(step - self.completed) / (time.monotonic() - self.start):.1f} steps/s"
        self.bar.update(self.task, label=label, speed=speed)
        self.print_line(f"step {step}/{self.total}  {label}  {speed}", always)


def track_progress(
    items: Iterable[T],
    label: str | Callable[[T], str],
    total: int | None = None,
    weights: Sequence[int] | None = None,
) -> Iterator[T]:
    """Yield the items while a bar shows how many are done.

    Args:
        items: what to iterate over.
        label: text before the bar, or a function of the item.
        total: number of items, if `items` has no length.
        weights: units of work of each item; 1 by default.
    """
    if total is None and isinstance(items, Sized):
        total = len(items)
    done = 0
    with ProgressBar(total if weights is None else sum(weights), label=label if isinstance(label, str) else "") as bar:
        for index, item in enumerate(items):
            text = label if isinstance(label, str) else label(item)
            bar.update(done, text)
            bar.print_line(f"{text}: {index}" + ("" if total is None else f" of {total}"))
            yield item
            done += 1 if weights is None else weights[index]
            bar.update(done)
