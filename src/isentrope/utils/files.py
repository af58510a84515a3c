"""Read JSON, write atomically, lock files, and explain errors of the operating system."""

from __future__ import annotations

import errno
import gzip
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex
from typing import Any

from isentrope.utils.extras import name_missing_extras

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# the problem and the remedy of an OSError, by its number
REMEDIES = {
    errno.EPERM: "writing is not permitted; choose another folder",
    errno.EACCES: "no permission; change that of the file or folder, or choose another",
    errno.EROFS: "the disk is read-only; choose another folder",
    errno.EEXIST: "already exists and is not a folder; choose another name or move it away",
    errno.ENOTDIR: "a file is where a folder is needed; choose another name or move it away",
    errno.EISDIR: "is a folder where a file is needed; choose another name",
    errno.ENOTEMPTY: "is a folder that is not empty; choose another name or move it away",
    errno.ENOENT: "no such file or folder; check its name",
    errno.ENAMETOOLONG: "the name is too long; choose a shorter one",
    errno.ELOOP: "is a link to itself; choose another name",
    errno.ENOLCK: "files cannot be locked there; choose a folder on another disk",
    errno.EOPNOTSUPP: "files cannot be locked there; choose a folder on another disk",
    errno.EMFILE: "too many open files; raise the limit (ulimit -n)",
    errno.EIO: "the disk could not be read or written; check it",
} | dict.fromkeys(DISK_FULL, "no space is left on the disk; make room, then run the same command again")

PARTS_MODULE = "isentrope_parts_"  # begins the name of the module that a file of --parts becomes


RERUN_REMEDY = "run the command that wrote it again"


class BrokenFileError(ValueError):
    """A file's content is broken or incomplete."""


def read_plain_or_gzip(path: Path) -> bytes | None:
    """Return the content of a file, or of NAME.gz beside it; None where neither is there."""
    if path.is_file():
        return path.read_bytes()
    packed = path.with_name(f"{path.name}.gz")
    return gzip.decompress(packed.read_bytes()) if packed.is_file() else None


def read_json(path: Path, remedy: str) -> Any:
    """Return the content of a JSON file.

    Raises:
        BrokenFileError: it is not JSON; the message names the file and ends with `remedy`.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        reason = "it is empty" if path.stat().st_size == 0 else str(error).partition("\n")[0]
        raise BrokenFileError(f"{path}: expected JSON, got a broken file ({reason}); {remedy}") from error


def read_fields(path: Path, remedy: str, *required: str) -> dict[str, Any]:
    """Return the JSON object in a file, as `read_json`; it must have the required fields."""
    data = read_json(path, remedy)
    missing = [name for name in required if not isinstance(data, dict) or name not in data]
    if missing or not isinstance(data, dict):
        raise BrokenFileError(f"{path}: expected {', '.join(missing) or 'an object'}, got a broken file; {remedy}")
    return data


def explain_os_error(error: OSError) -> str:
    """Return file, problem and remedy of an OSError in one sentence."""
    if error.errno is None:  # raised by a library, with a message of its own
        return str(error)
    path = os.fsdecode(error.filename) if isinstance(error.filename, (str, bytes)) else error.filename
    prefix = f"{path}: " if path is not None else ""
    if error.errno == errno.EEXIST and path is not None and Path(path).is_dir():
        return f"{prefix}already exists; choose another name or move it away"
    remedy = REMEDIES.get(error.errno)
    return prefix + (remedy or f"{(error.strerror or 'cannot be used').lower()}; choose another file or folder")


@contextmanager
def write_atomically(path: Path) -> Iterator[Path]:
    """Yield a temporary path for a file or folder, which is renamed to `path` if the block succeeds, else deleted."""
    # the process id shows whether the writer still runs, the random part distinguishes writers in two containers
    partial = path.with_name(f".{path.name}.{token_hex(4)}.{os.getpid()}.partial")
    try:
        yield partial
        os.replace(partial, path)
    except OSError as error:
        # the message should name the final file; an error about a full disk names none
        if error.filename == str(partial) or (error.filename is None and error.errno in DISK_FULL):
            error.filename, error.filename2 = str(path), None
        raise
    except Exception as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        if type(error).__name__ != "SafetensorError" or number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error
    finally:
        if partial.is_dir():
            shutil.rmtree(partial)
        partial.unlink(missing_ok=True)


def write_json(path: Path, data: Any) -> None:
    """Write indented JSON atomically."""
    with write_atomically(path) as partial:
        partial.write_text(json.dumps(data, indent=1, ensure_ascii=False), encoding="utf-8")


@contextmanager
def lock_file(path: Path, wait: bool = False, optional: bool = False) -> Iterator[bool]:
    """Lock `path`, an empty file, until the block ends or the process dies; yield whether that succeeded.

    Args:
        path: the lock file, created if missing.
        wait: wait while another process holds the lock, instead of yielding False at once.
        optional: yield True where files cannot be locked, instead of raising OSError.
    """
    with name_missing_extras():
        from filelock import FileLock, Timeout
    path.parent.mkdir(parents=True, exist_ok=True)
    lock, locked = FileLock(path), True
    try:
        lock.acquire(timeout=-1 if wait else 0)
    except Timeout:  # an OSError too: another process holds the lock
        locked = False
    except (NotImplementedError, OSError) as error:
        if not optional:
            number = error.errno if isinstance(error, OSError) else errno.ENOLCK
            raise OSError(number, os.strerror(number or 0), str(path)) from error
    try:
        yield locked
    finally:
        lock.release()
