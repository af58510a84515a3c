"""Timing and memory."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from isentrope.files import complete
from isentrope.study.provenance import provenance


def gpu_times(functions: Sequence[Callable[[], object]], repeats: int = 20, warm: int = 3) -> list[float]:
    """Median milliseconds of each function between events, warm, all taking turns."""
    for function in functions:
        for _ in range(warm):
            function()
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(repeats):
        for function, taken in zip(functions, times, strict=True):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            function()
            end.record()
            end.synchronize()
            taken.append(start.elapsed_time(end))
    return [statistics.median(taken) for taken in times]


def gpu_peak(function: Callable[[], object]) -> int:
    """Bytes allocated at the worst moment of one call, above what was allocated before it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = function()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    del result
    return peak


def cpu_time(function: Callable[[], object], seconds: float = 1.0, least: int = 3) -> float:
    """Median milliseconds of warm calls."""
    function()
    times: list[float] = []
    while len(times) < least or sum(times) < seconds * 1000:
        start = time.perf_counter()
        function()
        times.append((time.perf_counter() - start) * 1000)
    return statistics.median(times)


def cpu_peak(code: str) -> int:
    """Bytes by which running `code` in a fresh process raises its resident memory at the worst moment (Linux).

    The code defines `prepare()`, run first, and `work()`, which is measured.
    """
    script = code + WATCH
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return int(done.stdout.split()[-1]) * 1024


WATCH = """
def status(field):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(field))

prepare()
with open("/proc/self/clear_refs", "w") as reset:
    reset.write("5")  # the peak starts anew from what is resident now
before = status("VmRSS")
work()
print(status("VmHWM") - before)
"""


def save(path: Path, rows: list[dict[str, object]]) -> None:
    """Write results complete or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with complete(path) as file:
        file.write_text(json.dumps({"provenance": provenance(), "rows": rows}, indent=1) + "\n")
