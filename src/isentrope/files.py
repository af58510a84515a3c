"""Files that are complete or absent, and files that say who works on what."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex


@contextmanager
def complete(path: Path) -> Iterator[Path]:
    """A path to write to, a file or a folder, which takes the name `path` once all is written and else vanishes."""
    # the process id tells whether its writer still runs, but not writers apart: in two containers both may be 1
    partial = path.with_name(f".{path.name}.{token_hex(4)}.{os.getpid()}.partial")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        if partial.is_dir():
            shutil.rmtree(partial)
        partial.unlink(missing_ok=True)


@contextmanager
def claimed(path: Path, wait: bool = False) -> Iterator[bool]:
    """Whether this process alone has `path`, an empty file, until the block ends or the process dies.

    Where another one has it: False at once, or True when that one is done with it (`wait`).
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
        else:
            yield True
