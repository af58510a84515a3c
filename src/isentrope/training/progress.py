"""How a long training run is going, for whoever watches: a bar in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

QUIET = 15.0  # seconds between lines


class Watch:
    """Steps done, loss and speed, on standard error."""

    def __init__(self, steps: int, first: int, shown: bool) -> None:
        console = Console(stderr=True)
        columns = (
            TextColumn("{task.fields[what]}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
            TextColumn("{task.fields[speed]}"),
        )  # fmt: skip
        self.bar = Progress(*columns, console=console, transient=True, disable=not (shown and console.is_terminal))
        self.task = self.bar.add_task("", total=steps, completed=first, what="training", speed="")
        self.lines = shown and not console.is_terminal
        self.steps, self.first = steps, first
        self.begun = self.told = time.perf_counter()
        self.words = ""

    def __enter__(self) -> Watch:
        self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.bar.stop()

    def advance(self, done: int) -> None:
        self.bar.update(self.task, completed=done)

    def tell(self, row: dict[str, Any]) -> None:
        """A row of the log."""
        self.words = f"loss {row['loss']:.4f}"
        if "validation" in row:
            self.words += f"  validation {row['validation']:.4f}"
        now = time.perf_counter()
        speed = f"{(row['step'] - self.first) / (now - self.begun):.1f} steps/s"
        self.bar.update(self.task, what=self.words, speed=speed)
        if self.lines and (now - self.told > QUIET or "validation" in row):
            self.told = now
            print(f"step {row['step']}/{self.steps}  {self.words}  {speed}", file=sys.stderr, flush=True)
