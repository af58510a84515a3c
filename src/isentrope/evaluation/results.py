"""Cells on disk: a file each, complete or absent; one that something else has broken is measured again."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from isentrope.utils.files import BrokenFileError, read_fields

logger = logging.getLogger("isentrope")
MEASURED = ("ppl", "ppl_low", "ppl_high", "acc", "acc_low", "acc_high")


def cell_path(out: Path, key: str) -> Path:
    """The file of a cell in the folder `out`."""
    return out / "cells" / f"{key}.json"


def is_done(out: Path, key: str) -> bool:
    """Whether a cell has its numbers; what failed is tried again."""
    cell = read_cell(out, key)
    return cell is not None and cell["result"]["failed"] is None


def read_cell(out: Path, key: str) -> dict[str, Any] | None:
    """A cell that is there and whole; of a broken one, a warning says that it has to be measured again."""
    path, again = cell_path(out, key), "it has to be measured again"
    if not path.exists():
        return None
    try:
        cell = read_fields(path, again, "result", "timing")
        if not isinstance(cell["result"], dict) or not {"failed", *MEASURED} <= set(cell["result"]):
            raise BrokenFileError(f"{path}: broken, without all of its numbers; {again}")
    except BrokenFileError as error:
        logger.warning("%s", error)
        return None
    return cell
