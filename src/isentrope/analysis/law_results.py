"""Write the results of comparing laws, with the versions that they were computed with."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numpy as np
import torch

from isentrope.utils.files import write_atomically
from isentrope.version import __version__


def make_folder(folder: Path) -> None:
    """Make a folder, and raise OSError before any work is done where no file can be written to it."""
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryFile(dir=folder):
        pass


def write_law_results(path: Path, head: dict[str, Any], rows: list[dict[str, Any]]) -> Path:
    """Write head, versions and rows as JSON, completely or not at all; return the path."""
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "isentrope": __version__,
    }
    results = head | {"versions": versions, "rows": rows}
    with write_atomically(path) as file:
        file.write_text(json.dumps(results, indent=1, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
    return path
