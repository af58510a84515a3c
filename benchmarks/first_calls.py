"""First calls with kernels on disk, what a new shape compiles, and torch.compile's time for one more layer.

Each is measured in processes of their own, since a first call comes once in a process. The group `first`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measure import Job, Row, Sizes
from methods import branched, folded, windowed

import isentrope as ise
from isentrope.core.layout import Layout, Rows

MAX_FIRST_MS, MAX_LAYER_MS = 3000.0, 300.0
MAX_SECONDS = 150.0  # of a process
LAYERS = (1, 2, 4)  # of the models that are compiled: the first starts the compiler, the others differ by two layers
Request = dict[str, Any]


def list_jobs(size: Sizes) -> Iterator[Job]:
    """First calls and new shapes, then torch.compile."""
    requests, found = list_requests(size), dict[str, Row]()
    n = size.short // 4
    first = next(iter(requests))
    yield Job("first call", first, n, partial(_measure_first_calls, requests, found, first))
    for name in list(found)[1:]:
        yield Job("first call", name, n, partial(found.__getitem__, name), free=True)
    recipe = f"rerope:window={size.windows[0]}+infoscale:train_length={size.train_length}"
    yield Job("torch.compile", "ReRoPE + InfoScale, one more layer", n, partial(_measure_compilation, recipe, n))


def list_requests(size: Sizes) -> dict[str, Request]:
    """Return the first calls of a process, by name."""
    near = size.windows[0]
    common = {"n": size.short // 4, "heads": size.heads, "head_size": size.size, "batch": 1, "padded": False}
    requests = {
        method.name: {**common, "recipe": method.recipe, "causal": True}
        for method in (branched(near)[0], folded(size)["InfoScale"], windowed(near)[0])
    }
    two = {**common, "recipe": branched(near)[0].recipe}
    requests["ReRoPE, padded"] = {**two, "causal": True, "padded": True, "batch": 2}
    requests["ReRoPE, both directions"] = {**two, "causal": False}
    return requests


def _measure_first_calls(requests: dict[str, Request], found: dict[str, Row], first: str) -> Row:
    """Fill a folder of kernels in one process, then measure in a second one."""
    with tempfile.TemporaryDirectory() as folder:
        for more in (False, True):
            seen = _run("measure_calls", folder, list(requests.values()), more, folder)
    for name, facts in zip(requests, seen, strict=True):
        ms, compiled = facts["first_ms"], facts["compiled"]
        note = f"{compiled['first']} kernels compiled"
        found[name] = {"ms": ms, "baseline": "3 s", "baseline_ms": MAX_FIRST_MS, "ratio": ms / MAX_FIRST_MS,
                       "target": 1.0, "note": note}  # fmt: skip
    for name, facts in zip(requests, seen, strict=True):
        new = {key: count for key, count in facts["compiled"].items() if key != "first"}
        note = ", ".join(f"{key}: {facts['ms'][key]:.0f} ms, {count} compiled" for key, count in new.items())
        found[f"{name}, new shapes"] = {"ms": max(facts["ms"].values()), "baseline": "nothing compiled",
                                        "ratio": float(sum(new.values())), "target": 0.0, "note": note}  # fmt: skip
    return found[first]


def measure_calls(requests: list[Request], more: bool, folder: str) -> list[dict[str, Any]]:
    """Time the first call of each request and, with `more`, one of another length, batch and number of heads.

    Returns:
        For each, milliseconds and how many kernels and graphs were compiled, by what is new.
    """
    results = []
    for request in requests:
        n, batch, heads = request["n"], request["batch"], request["heads"]
        changes = {"length": {"n": n * 3 // 4 + 1}, "batch": {"batch": batch + 2}, "heads": {"heads": heads // 2}}
        taken, compiled = {}, {}
        for name, change in ({"first": {}} | (changes if more else {})).items():
            before = _count_compiled(folder)
            taken[name] = _time_call(**request | change)
            compiled[name] = _count_compiled(folder) - before
        first_ms = taken.pop("first")
        results.append({"first_ms": first_ms, "ms": taken, "compiled": compiled})
    return results


def _count_compiled(folder: str) -> int:
    """Count Triton's kernels on disk, and graphs that torch compiled in this process."""
    from torch._dynamo.utils import counters

    return len(list(Path(folder).rglob("*.cubin"))) + int(counters["stats"]["unique_graphs"])


def _time_call(recipe: str, n: int, heads: int, head_size: int, batch: int, causal: bool, padded: bool) -> float:
    cuda = torch.cuda.is_available()
    device, dtype = torch.device("cuda" if cuda else "cpu"), torch.bfloat16 if cuda else torch.float32
    q, k, v = (torch.randn(batch, heads, n, head_size, device=device, dtype=dtype) for _ in range(3))
    lengths = torch.linspace(n // 2, n, batch, device=device).long()
    layout = Layout(batch, n, n, device, Rows(lengths=lengths)) if padded else None
    attention = ise.attention  # the package is imported at the first use of a name
    torch.cuda.synchronize() if cuda else None
    start = time.perf_counter()
    with torch.no_grad():
        attention(q, k, v, recipe, causal=causal, layout=layout)
    torch.cuda.synchronize() if cuda else None
    return (time.perf_counter() - start) * 1000


def _measure_compilation(recipe: str, n: int) -> Row:
    """What torch.compile takes for one more layer of an extended model, with nothing in its caches before."""
    times = []
    for each in (None, recipe):
        with tempfile.TemporaryDirectory() as folder:
            times.append(_run("measure_layers", folder, each, LAYERS, n))
    plain, ours = times
    note = f"{plain:.0f} ms for a layer of the plain model"
    if not torch.cuda.is_available():
        note += "; traced alone, no code generated"
    return {"ms": ours, "baseline": "0.3 s", "baseline_ms": MAX_LAYER_MS, "ratio": ours / MAX_LAYER_MS,
            "target": 1.0, "plain_ms": plain, "note": note}  # fmt: skip


def measure_layers(recipe: str | None, layers: tuple[int, int, int], n: int) -> float:
    """Return milliseconds of torch.compile for one more layer of a model; without a recipe it is the plain model."""
    from dataclasses import replace

    from measure import sizes
    from models import random_model

    size, backend = sizes(), "inductor" if torch.cuda.is_available() else "eager"
    taken = []
    for count in layers:
        torch._dynamo.reset()
        model = random_model(replace(size, decoder_layers=count)).eval()
        if recipe is not None:
            ise.extend(model, recipe)
        compiled = torch.compile(model, backend=backend)
        ids = torch.randint(10, model.config.vocab_size, (1, n), device=model.device)
        start = time.perf_counter()
        with torch.no_grad():
            compiled(input_ids=ids, use_cache=False, logits_to_keep=1)
        torch.cuda.synchronize() if torch.cuda.is_available() else None
        taken.append((time.perf_counter() - start) * 1000)
        print(f"{count} layers: {taken[-1]:.0f} ms", file=sys.stderr, flush=True)
    return (taken[2] - taken[1]) / (layers[2] - layers[1])


def _run(function: str, folder: str, *arguments: Any) -> Any:
    """Call a function of this module in a process whose compiled kernels are kept in a folder."""
    env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": str(Path(folder, "triton"))}
    command = [sys.executable, str(Path(__file__).resolve()), function, json.dumps(arguments)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=MAX_SECONDS)
    except subprocess.TimeoutExpired as error:
        lines = (error.stderr or b"").decode().strip().splitlines()  # bytes, text or not
        raise RuntimeError("; ".join([f"stopped after {MAX_SECONDS:g} s", *lines[-3:]])) from None
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no message"])[-1])
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    functions = {"measure_calls": measure_calls, "measure_layers": measure_layers}
    print(json.dumps(functions[sys.argv[1]](*json.loads(sys.argv[2]))))
