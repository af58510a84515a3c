"""Timing, memory, and what one row of results says."""

from __future__ import annotations

import ctypes
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import log
from pathlib import Path
from typing import Any

import torch
from limits import find_limit

from isentrope.utils.files import write_atomically

Call = Callable[[], object]
Row = dict[str, Any]
BLANK: Row = dict.fromkeys(
    ("group", "method", "n", "ms", "baseline", "baseline_ms", "ratio", "tflops", "peak_bytes", "baseline_peak",
     "limit_ms", "of_peak", "target", "met", "cold_ms", "note")
)  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    """The shapes of a run. Targets are set for the full shapes on a GPU and are left out everywhere else."""

    device: str
    dtype: torch.dtype
    heads: int
    size: int
    short: int
    middle: int
    long: int
    windows: tuple[int, int]
    train_length: int
    scaling: tuple[int, ...]
    once_ms: float  # a call that is predicted to take longer is timed once, and if much longer, cold
    most_ms: float  # a method grows no further once its next length is predicted to take longer
    seconds: float  # of repeats for one ratio
    least: int  # repeats
    batches: tuple[int, int]  # of decoding
    decoder_layers: int
    evaluate: tuple[int, int]
    train: tuple[tuple[int, int, int], ...]  # batch, length, steps
    compilations: tuple[int, int, int]  # how many lengths, from, to
    switched: bool = True  # whether calls are measured without the kernels behind switches too
    targets: bool = False  # of a GPU
    cpu_targets: bool = False


def sizes(quick: bool = False) -> Sizes:
    """The shapes for the machine at hand."""
    if torch.cuda.is_available():
        common: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16, "heads": 32, "size": 128}
        if quick:
            return Sizes(
                **common, short=2048, middle=4096, long=8192, windows=(256, 1024), train_length=512,
                scaling=powers(1024, 16384), once_ms=5, most_ms=300, seconds=0.2, least=3, batches=(1, 2),
                decoder_layers=4, evaluate=(4, 1024), train=((16, 64, 20),), compilations=(8, 1000, 2000),
            )  # fmt: skip
        return Sizes(
            **common, short=16384, middle=32768, long=131072, windows=(1024, 4096), train_length=2048,
            scaling=powers(1024, 1 << 20), once_ms=500, most_ms=6e4, seconds=1.5, least=5, batches=(1, 8),
            decoder_layers=30, evaluate=(32, 4096), train=((128, 64, 300), (128, 512, 40)),
            compilations=(50, 1000, 8000), targets=True,
        )  # fmt: skip
    common = {"device": "cpu", "dtype": torch.float32, "heads": 4, "size": 64}
    if quick:
        return Sizes(
            **common, short=128, middle=256, long=512, windows=(32, 64), train_length=64, scaling=powers(128, 512),
            once_ms=5, most_ms=100, seconds=0.02, least=1, batches=(1, 2), decoder_layers=1, evaluate=(2, 64),
            train=((2, 32, 2),), compilations=(3, 100, 200),
        )  # fmt: skip
    return Sizes(
        **common, short=1024, middle=2048, long=4096, windows=(256, 512), train_length=512, scaling=powers(512, 4096),
        once_ms=1000, most_ms=2000, seconds=0.5, least=3, batches=(1, 2), decoder_layers=4, evaluate=(2, 512),
        train=((8, 64, 5),), compilations=(10, 500, 2000), cpu_targets=True,
    )  # fmt: skip


def powers(first: int, last: int) -> tuple[int, ...]:
    """first, 2 first, 4 first … last."""
    return tuple(first << i for i in range((last // first).bit_length()))


def shorten(size: Sizes) -> Sizes:
    """Return sizes with fewer repeats, for groups of many rows."""
    return replace(size, seconds=min(size.seconds, 0.5), least=min(size.least, 3))


@dataclass(frozen=True)
class Job:
    """One row to come: `work` measures and returns what the row says. free: reckoned from rows already there."""

    group: str
    method: str
    n: int
    work: Callable[[], Row]
    free: bool = False


def times(functions: Sequence[Call], size: Sizes) -> list[float]:
    """Milliseconds of each function, warm, all taking turns; as many turns as fit into the time there is."""
    turns = gpu_times if size.device == "cuda" else cpu_times
    once = sum(turns(functions, 1, 1))
    repeats = max(size.least, min(30, int(1000 * size.seconds / once)))
    return turns(functions, repeats, 1)


def gpu_times(functions: Sequence[Call], repeats: int = 20, warm: int = 3) -> list[float]:
    """Median milliseconds of each function between events, warm, all taking turns.

    Nothing waits in between: work is queued while earlier work runs, as in a model, and what a call takes on the host
    counts where it is more than that.
    """
    for function in functions:
        for _ in range(warm):
            function()
    marks = []
    for _ in range(repeats):
        for function in functions:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            function()
            end.record()
            marks.append((start, end))
    torch.cuda.synchronize()
    taken = [start.elapsed_time(end) for start, end in marks]
    return [statistics.median(taken[i :: len(functions)]) for i in range(len(functions))]


def cpu_times(functions: Sequence[Call], repeats: int = 5, warm: int = 1) -> list[float]:
    """Milliseconds of each function, warm, all taking turns: means over the middle half of turns, by their length.

    Processors change their pace: times of one turn belong together, medians of each function may not.
    """
    for function in functions:
        for _ in range(warm):
            function()
    turns: list[list[float]] = []
    for _ in range(repeats):
        turn = []
        for function in functions:
            start = time.perf_counter()
            function()
            turn.append((time.perf_counter() - start) * 1000)
        turns.append(turn)
    middle = sorted(turns, key=sum)[repeats // 4 : repeats - repeats // 4]
    return [statistics.fmean(each) for each in zip(*middle, strict=True)]


def once(function: Call, warm: bool) -> tuple[float, int | None, object]:
    """Milliseconds and peak bytes of a single call, and what it returned."""
    taken, results = 0.0, list[object]()
    if warm:
        function()

    def timed() -> object:
        nonlocal taken
        begun = time.perf_counter()
        results.append(function())
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        taken = (time.perf_counter() - begun) * 1000
        return results[0]

    bytes_ = peak(timed)
    return taken, bytes_, results[0]


def peak(function: Call) -> int | None:
    """Bytes at the worst moment of one call above what was there before it, less what it returns.

    On a CPU the growth of resident memory, which is rough below a few MiB; None where the system does not tell.
    """
    return gpu_peak(function) if torch.cuda.is_available() else cpu_peak(function)


def gpu_peak(function: Call) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before - held(result)


def cpu_peak(function: Call) -> int | None:
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # or memory let go earlier would be found again unseen
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew from what is resident now
        before = _resident("VmRSS")
    except (OSError, AttributeError):
        return None
    result = function()
    return max(0, _resident("VmHWM") - before - held(result))


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def held(result: object) -> int:
    """Bytes of the tensors in a result."""
    if isinstance(result, torch.Tensor):
        return result.nbytes
    parts = result if isinstance(result, (tuple, list)) else getattr(result, "__dict__", {}).values()
    return sum(held(part) for part in parts)


def captured(run: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """A call as a graph, after a few on a side stream, and where the graph leaves its result."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    return graph, out


def compared(
    size: Sizes, ours: Call, base: Call, baseline: str, target: float | None = None, flops: float | None = None
) -> Row:
    """Times and peaks of a call and of what it is measured against, taking turns."""
    ms, base_ms = times((ours, base), size)
    return {
        "ms": ms, "baseline": baseline, "baseline_ms": base_ms, "ratio": ms / base_ms, "target": target,
        **rates(ms, flops), "peak_bytes": peak(ours), "baseline_peak": peak(base),
    }  # fmt: skip


def rates(ms: float, flops: float | None, moved_bytes: float | None = None) -> Row:
    """TFLOP/s, the least milliseconds the card allows, and the share of its peak that was reached."""
    limit = find_limit(flops, moved_bytes)
    return {
        "tflops": None if flops is None else flops / ms / 1e9,
        "limit_ms": limit,
        "of_peak": None if limit is None else limit / ms,
    }


def upper_half(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """The longer half of the lengths, three at least."""
    return sorted(points)[min(len(points) // 2, max(0, len(points) - 3)) :]


def exponent(points: Sequence[tuple[int, float]]) -> float | None:
    """Slope of log time against log n, least squares, over the upper half of the lengths; None below three points."""
    upper = upper_half(points)
    if len(upper) < 3:
        return None
    x, y = ([log(point[axis]) for point in upper] for axis in (0, 1))
    mean_x, mean_y = statistics.fmean(x), statistics.fmean(y)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum((a - mean_x) ** 2 for a in x)


def save(path: Path, rows: list[Row], **more: Any) -> None:
    """Write results complete or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with write_atomically(path) as file:
        file.write_text(json.dumps({**more, "rows": rows}, indent=1) + "\n")
