"""Files that are complete or absent, files that say who works on what, and what to say where one cannot be used."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex
from typing import Any

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# what an OSError means, and what to do
REMEDIES = {
    errno.EPERM: "writing there is not permitted; choose another place",
    errno.EACCES: "no permission; change that of the file or folder, or choose another",
    errno.EROFS: "the disk can only be read; choose another place",
    errno.EEXIST: "is there already, and no folder; choose another name or move it away",
    errno.ENOTDIR: "a file lies where a folder is needed; choose another name or move it away",
    errno.EISDIR: "is a folder where a file is needed; choose another name",
    errno.ENOTEMPTY: "is a folder that is not empty; choose another name or move it away",
    errno.ENOENT: "no such file or folder; check its name",
    errno.ENAMETOOLONG: "the name is too long; choose a shorter one",
    errno.ELOOP: "is a link to itself; choose another name",
    errno.ENOLCK: "files cannot be locked there; choose a folder on another disk",
    errno.EOPNOTSUPP: "files cannot be locked there; choose a folder on another disk",
    errno.EMFILE: "too many open files; raise the limit (ulimit -n)",
    errno.EIO: "the disk could not be read or written; check it",
} | dict.fromkeys(FULL, "no space is left on the disk; make room, then run the same command again")


RERUN_REMEDY = "run the command that wrote it again"


class BrokenFileError(ValueError):
    """A file whose content is not what was written there."""


def read_json(path: Path, remedy: str) -> Any:
    """The content of a JSON file; a BrokenFileError that names it, and the remedy, where it is none."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        reason = "it is empty" if path.stat().st_size == 0 else str(error).partition("\n")[0]
        raise BrokenFileError(f"{path}: expected JSON, got a broken file ({reason}); {remedy}") from error


def read_fields(path: Path, remedy: str, *needed: str) -> dict[str, Any]:
    """The same of a JSON object that must have these fields."""
    data = read_json(path, remedy)
    missing = [name for name in needed if not isinstance(data, dict) or name not in data]
    if missing or not isinstance(data, dict):
        raise BrokenFileError(f"{path}: expected {', '.join(missing) or 'an object'}, got a broken file; {remedy}")
    return data


def explain_os_error(error: OSError) -> str:
    """What an error of the operating system means in a sentence: where, what, and what to do about it."""
    if error.errno is None:  # one that a library made up, with words of its own
        return str(error)
    where = os.fsdecode(error.filename) if isinstance(error.filename, (str, bytes)) else error.filename
    place = f"{where}: " if where is not None else ""
    if error.errno == errno.EEXIST and where is not None and Path(where).is_dir():
        return f"{place}is there already; choose another name or move it away"
    known = REMEDIES.get(error.errno)
    return place + (known or f"{(error.strerror or 'cannot be used').lower()}; choose another file or folder")


@contextmanager
def write_atomically(path: Path) -> Iterator[Path]:
    """A path to write to, a file or a folder, which takes the name `path` once all is written and else vanishes."""
    # the process id tells whether its writer still runs, but not writers apart: in two containers both may be 1
    partial = path.with_name(f".{path.name}.{token_hex(4)}.{os.getpid()}.partial")
    try:
        yield partial
        os.replace(partial, path)
    except OSError as error:
        # who reads the message knows the file by its own name, and a full disk by none
        if error.filename == str(partial) or (error.filename is None and error.errno in FULL):
            error.filename, error.filename2 = str(path), None
        raise
    finally:
        if partial.is_dir():
            shutil.rmtree(partial)
        partial.unlink(missing_ok=True)


def write_json(path: Path, data: Any) -> None:
    """Write indented JSON atomically."""
    with write_atomically(path) as partial:
        partial.write_text(json.dumps(data, indent=1, ensure_ascii=False), encoding="utf-8")


@contextmanager
def lock_file(path: Path, wait: bool = False) -> Iterator[bool]:
    """Whether this process alone has `path`, an empty file, until the block ends or the process dies.

    Where another one has it: False at once, or True when that one is done with it (`wait`).
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error
        yield True
