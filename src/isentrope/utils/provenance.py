"""Where, when and with which software a result was made."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

from isentrope.version import __version__


def collect_provenance() -> dict[str, Any]:
    """Return the hardware, versions, commit and date that a results file records."""
    return {
        "hardware": torch.cuda.get_device_name() if torch.cuda.is_available() else _read_processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "isentrope": __version__,
        "commit": os.environ.get("ISENTROPE_COMMIT") or _read_commit(),
        "date": time.strftime("%Y-%m-%d"),
    }


def _read_commit() -> str:
    """Return the commit of the source tree, marked "-dirty" if files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        process = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return process.stdout.strip()


def _read_processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
