"""Attention by itself: each method against compiled RoPE + SDPA, or against what its group names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from inputs import PLAIN, Inputs
from measure import Call, Job, Row, Sizes, compared, exponent, once, peak, rates, times, upper_half
from methods import ALIBI, Method, branched, chunked, folded, mapped, million, windowed, with_far_law, with_sinks_spared

import isentrope as ise
from isentrope.core.caching import clear_caches

MILLION = 1 << 20
COLD = 40  # times the length of a call that is timed once: beyond it there is no call before
BACKWARD_FLOPS = 3.5  # of forward and backward together, in forwards


def cold(call: Call, size: Sizes) -> float:
    """Milliseconds of a call when geometry and block masks are built anew, kernels being compiled already."""

    def anew() -> None:
        clear_caches(keep_compiled=True)
        call()

    return times((anew,), replace(size, seconds=0.0, least=3))[0]


def attention(size: Sizes, inputs: Inputs) -> Iterator[Job]:
    """Each method against RoPE + SDPA."""
    methods = folded(size)
    every = (size.short, size.middle, size.long)
    planned = [(methods[name], every, 1.02) for name in ("InfoScale", "PI", "YaRN")]
    planned.append((methods["CosScale"], (size.short, size.middle), 1.05))
    planned += [(m, (size.middle, size.long), 1.12) for window in size.windows for m in branched(window)]
    planned += [(m, (size.middle, size.long), 1.12) for m in chunked(size.windows[-1])]
    planned += [(m, (size.middle, size.long), 1.12) for m in mapped(size.windows[0])]
    for n in every:
        for method, lengths, target in planned:
            if n in lengths:
                yield Job("attention", method.name, n, partial(_attention, size, inputs, method, n, target))


def _attention(size: Sizes, inputs: Inputs, method: Method, n: int, target: float | None) -> Row:
    at = inputs.at(n)
    call, (base, name) = at.call(method), at.baseline()
    row = compared(size, call, base, name, target, method.flops(n, size))
    return row | {"cold_ms": cold(call, size)}


def window(size: Sizes, inputs: Inputs) -> Iterator[Job]:
    """Windows against FlexAttention's own, and whether their time is linear."""
    for method in windowed(size.windows[0]):
        done: dict[int, float] = {}
        for n in (size.middle, size.long):
            yield Job("window", method.name, n, partial(_window, size, inputs, method, n, done))
        if len(done) == 2:
            yield Job("window", f"{method.name}, growth", size.long, partial(_growth, size, done), free=True)


def _window(size: Sizes, inputs: Inputs, method: Method, n: int, done: dict[int, float]) -> Row:
    at = inputs.at(n)
    call = at.call(method)
    if size.device != "cuda":  # FlexAttention is for GPUs
        base, name = at.baseline()
        row = compared(size, call, base, name, None, method.flops(n, size))
    else:
        base, bare = (at.flex_window(size.windows[0], rotate) for rotate in (True, False))
        row = compared(size, call, base, "RoPE + FlexAttention's window", 1.0, method.flops(n, size))
        ours, theirs = times((call, bare), size)
        row["note"] = f"{ours / theirs:.2f} × FlexAttention without RoPE"
        row["bare_ratio"] = ours / theirs
    done[n] = row["ms"]
    return row | {"cold_ms": cold(call, size)}


def _growth(size: Sizes, done: dict[int, float]) -> Row:
    short, long = done[size.middle], done[size.long]
    return {"ms": long, "baseline": f"itself at {size.middle}", "baseline_ms": short, "ratio": long / short,
            "target": 4.3 if size.long == 4 * size.middle else None}  # fmt: skip


def share(size: Sizes, inputs: Inputs) -> Iterator[Job]:
    """A share law and a temperature of far keys, or spared sinks, against the same method without them."""
    for method in branched(size.windows[-1]):
        spared = with_sinks_spared(method, size.train_length)
        for n in (size.middle, size.long):
            yield Job("share", spared.name, n, partial(_share, size, inputs, spared, method, n, False))
        changed = with_far_law(method, size.train_length)
        for n in (size.middle, size.long):
            yield Job("share", changed.name, n, partial(_share, size, inputs, changed, method, n, False))
        name = f"{changed.name}, backward"
        yield Job("share", name, size.short, partial(_share, size, inputs, changed, method, size.short, True))


def _share(size: Sizes, inputs: Inputs, changed: Method, method: Method, n: int, grad: bool) -> Row:
    at = inputs.at(n, grad)
    flops = (BACKWARD_FLOPS if grad else 1) * method.flops(n, size)
    return compared(size, at.call(changed), at.call(method), "the same without", 1.005, flops)


def backward(size: Sizes, inputs: Inputs) -> Iterator[Job]:
    """Forward and backward, against RoPE + SDPA's."""
    for method, target in ((folded(size)["InfoScale"], 1.03), (chunked(size.windows[0])[0], 1.3)):
        yield Job("backward", method.name, size.short, partial(_backward, size, inputs, method, target))


def _backward(size: Sizes, inputs: Inputs, method: Method, target: float) -> Row:
    at = inputs.at(size.short, grad=True)
    base, name = at.baseline()
    return compared(size, at.call(method), base, name, target, BACKWARD_FLOPS * method.flops(size.short, size))


def memory(size: Sizes, inputs: Inputs) -> Iterator[Job]:
    """Peaks above inputs and outputs at the long length: here the ratio is one of bytes."""
    methods = folded(size)
    near = size.windows[0]
    chosen = (methods["InfoScale"], methods["CosScale"], branched(near)[0], windowed(near)[0], chunked(near)[0])
    for method in chosen:
        yield Job("memory", method.name, size.long, partial(_memory, size, inputs, method))


def _memory(size: Sizes, inputs: Inputs, method: Method) -> Row:
    at = inputs.at(size.long)
    base, name = at.baseline()
    calls, peaks = (at.call(method), base), []
    for call in calls:
        call()  # compiled, geometry known
        peaks.append(peak(call))
    ours, theirs = peaks
    ratio = None if ours is None or not theirs else ours / theirs
    return {"baseline": name, "ratio": ratio, "target": 1.2, "peak_bytes": ours, "baseline_peak": theirs,
            "note": "bytes, not time"}  # fmt: skip


def scaling(size: Sizes, inputs: Inputs) -> Iterator[Job]:
    """Every method from the shortest length to as far as its time allows."""
    near = size.windows[0]
    methods = [million(size), None, *folded(size).values(), *branched(near), *windowed(near), ALIBI]
    for method in methods:
        name = PLAIN if method is None else method.name
        points: list[tuple[int, float]] = []
        for n in size.scaling:
            if points and predicted(points) > size.most_ms:
                break
            before = len(points)
            yield Job("scaling", name, n, partial(_scaling, size, inputs, method, n, points))
            if len(points) == before:  # failed, or no time is left
                break
        if exponent(points) is not None:
            yield Job("scaling", f"{name}: exponent", points[-1][0], partial(_exponent, points), free=True)
        if method is methods[0] and size.scaling[-1] == MILLION:
            work, reached = partial(_million, size, inputs, points), points[-1:] and points[-1][0] == MILLION
            yield Job("scaling", "one million tokens", MILLION, work, free=bool(reached))


def predicted(points: list[tuple[int, float]]) -> float:
    """Milliseconds of the next length, twice the last."""
    last = points[-1][1]
    return last * (max(2.0, last / points[-2][1]) if len(points) > 1 else 4.0)


def _scaling(size: Sizes, inputs: Inputs, method: Method | None, n: int, points: list[tuple[int, float]]) -> Row:
    at = inputs.at(n)
    call, chosen = (at.call(method), None) if method else at.baseline()
    method = method or Method(PLAIN, "rope")
    notes = [] if chosen in (None, PLAIN) else [chosen]
    if points and (coming := predicted(points)) > size.once_ms:
        warm = coming < COLD * size.once_ms
        ms, extra, out = once(call, warm)
        notes.append("one call" if warm else "one call, the first")
    else:
        (ms,) = times((call,), size)
        extra, out = peak(call), call()
    if n > size.long:  # where sizes pass what 32 bits can count
        notes.append(f"{at.away(out, method):.1%} away from the reference")
    points.append((n, ms))
    note = "; ".join(notes) or None
    flops = None if method is ALIBI else method.flops(n, size)  # it leaves out keys, as many as q and k allow
    return {"ms": ms, **rates(ms, flops), "peak_bytes": extra, "note": note}


def _exponent(points: list[tuple[int, float]]) -> Row:
    found, first = exponent(points), upper_half(points)[0][0]
    return {"exponent": found, "note": f"time ~ n^{found:.2f} from n = {first:,}"}


def _million(size: Sizes, inputs: Inputs, points: list[tuple[int, float]]) -> Row:
    reached = bool(points) and points[-1][0] == MILLION
    if not reached:
        return {"met": False, "note": f"reached {points[-1][0] if points else 0}"}
    gib = 2**30
    held = 4 * MILLION * size.heads * size.size * size.dtype.itemsize
    extra = peak(inputs.at(MILLION).call(million(size)))
    note = f"{million(size).name}: q, k, v and output {held / gib:.1f} GiB, {(extra or 0) / gib:.1f} GiB beside them"
    return {"ms": points[-1][1], "peak_bytes": extra, "met": True, "note": note}


def compilation(size: Sizes, inputs: Inputs) -> Iterator[Job]:
    """How often kernels are compiled for many lengths, and how long the first call takes with nothing in any cache."""
    inputs.free()
    count, first, last = size.compilations
    lengths = [first + (last - first) * i // (count - 1) + i % 2 for i in range(count)]  # odd ones too
    found: list[int] = []
    for method in (folded(size)["InfoScale"], branched(size.windows[0])[0], windowed(size.windows[0])[0]):
        yield Job("compilation", method.name, lengths[-1], partial(_compilation, size, method, lengths, found))
    if len(found) == 3:
        yield Job("compilation", "all three", lengths[-1], partial(_together, found), free=True)


def _compilation(size: Sizes, method: Method, lengths: list[int], found: list[int]) -> Row:
    """In a process and with caches of its own."""
    arguments = json.dumps([method.recipe, lengths, size.heads, size.size])
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": str(Path(folder, "triton"))}
        command = [sys.executable, str(Path(__file__).resolve()), arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=env)
        kernels = len(list(Path(folder).rglob("*.cubin")))  # Triton's, our own and those that torch writes
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no message"])[-1])
    seen = json.loads(done.stdout.splitlines()[-1])
    found.append(max(seen["graphs"], kernels))
    compiled = f"{seen['graphs']} graphs and {kernels} kernels for {len(lengths)} lengths"
    note = f"{compiled}; first call {seen['first_ms'] / 1000:.1f} s"
    return {"ms": seen["rest_ms"], "cold_ms": seen["first_ms"], "compilations": found[-1], "note": note}


def _together(found: list[int]) -> Row:
    return {"baseline": "one compilation", "ratio": float(sum(found)), "target": 12.0, "compilations": sum(found),
            "note": "a count, not a time"}  # fmt: skip


def compile_many(recipe: str, lengths: list[int], heads: int, head_size: int) -> dict[str, float]:
    """Graphs that torch compiled for these lengths, milliseconds of the first call and on average of the others."""
    from torch._dynamo.utils import counters

    cuda = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if cuda else ("cpu", torch.float32)
    taken = []
    for n in lengths:
        q, k, v = (torch.randn(1, heads, n, head_size, device=device, dtype=dtype) for _ in range(3))
        torch.cuda.synchronize() if cuda else None
        begun = time.perf_counter()
        with torch.no_grad():
            ise.attention(q, k, v, recipe, causal=True)
        torch.cuda.synchronize() if cuda else None
        taken.append((time.perf_counter() - begun) * 1000)
    rest = sum(taken[1:]) / max(1, len(taken) - 1)
    return {"graphs": counters["stats"]["unique_graphs"], "first_ms": taken[0], "rest_ms": rest}


if __name__ == "__main__":
    print(json.dumps(compile_many(*json.loads(sys.argv[1]))))
