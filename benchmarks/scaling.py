"""The cost model behind `isentrope plan-scale`, checked: predicted and measured prefill on 1, 2 and 4 processes.

    python benchmarks/scaling.py [--tokens 4096] [--processes 1,2,4] [--repeats 5] [--out results/scaling.json]

A small random Llama reads a text spread over processes of this machine (gloo). The prediction comes from
microbenchmarks alone, made by the same processes before and after: linear layers, attention of one process at several
lengths, choosing far keys, and messages of several sizes. No time of a spread model enters it.

Two clocks: `wall`, of the slowest process, and `cpu`, the processor time of the busiest one, which does not depend on
what else the machine runs; there nothing is hidden behind anything. Where processes are more than cores they share
them: microbenchmarks run in all processes at once, so that wall rates are those of a process's share. `unshared`
predicts wall time from one process alone and the number of cores instead. All times are medians.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measure import save
from run import made_with
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaModel

import isentrope as ise
from isentrope.scaling.hardware import Device, Link
from isentrope.scaling.prefill import Setup, list_exchanges, predict
from isentrope.scaling.shape import shape_from_config
from isentrope.scaling.visibility import Visibility, read_visibility

RECIPES = {
    "dense": "rerope:window=256",
    "windowed": "sink:sinks=4,size=252",
    "retrieved": "rerope:window=256+retrieve:blocks=4,size=64",
}
MESSAGE_BYTES = tuple(1 << k for k in range(12, 25, 2))
PROBES = 3  # repeats of a microbenchmark, before and after
CLOCKS = ("wall", "cpu")
MIN_TOKENS = 1024
Times = dict[str, float]  # seconds by clock


@dataclass(frozen=True)
class Job:
    """What the processes of one group do."""

    processes: int
    tokens: int
    repeats: int
    layers: int
    port: int
    folder: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--processes", default="1,2,4")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--out", type=Path, default=Path("results/scaling.json"))
    options = parser.parse_args()
    if options.tokens < MIN_TOKENS:
        parser.error(f"--tokens: expected {MIN_TOKENS} or more, so that keys are far, got {options.tokens}")
    if not hasattr(ise, "ContextParallel"):
        parser.error("this version of isentrope has no context parallel; install a later one")
    shape = shape_from_config("small", make_config(options.layers))
    rows: list[dict[str, Any]] = []
    calibrations: dict[str, Any] = {}
    alone: Device | None = None
    for processes in map(int, options.processes.split(",")):
        measured = run_group(processes, options)
        calibrations[str(processes)] = measured["calibration"]
        wall, cpu = (read_calibration(measured["calibration"], clock) for clock in CLOCKS)
        alone = alone or wall[0]
        unshared = alone.share_cores(processes, os.cpu_count() or 1), wall[1]
        for row in measured["rows"]:
            setup = Setup(options.tokens, processes, row["exchange"], row["layout"])
            visibility = read_visibility(row["recipe"])
            for name, (device, link) in (("wall", wall), ("cpu", cpu), ("unshared", unshared)):
                cost = predict(replace(shape, dtype_bytes=4), visibility, setup, device, link)
                hidden = cost.seconds if name != "cpu" else cost.linear_seconds + cost.attention_seconds
                seconds = hidden + (cost.exchange_seconds if name == "cpu" else 0.0)
                error = seconds / row["measured"]["cpu" if name == "cpu" else "wall"] - 1
                row[name] = {"predicted": seconds, "error": error, **asdict(cost)}
            rows.append({"processes": processes, **row})
            print(
                f"{processes} processes, {row['keys']:9} {row['exchange']:8} "
                + "; ".join(f"{c} {row['measured'][c]:.3f} s, {row[c]['error']:+.0%} predicted" for c in CLOCKS)
                + f" ({row['unshared']['error']:+.0%} unshared)",
                flush=True,
            )
        facts = {"tokens": options.tokens, "model": asdict(shape), "calibrations": calibrations}
        save(options.out, rows, provenance=made_with(), **facts)
    for clock in (*CLOCKS, "unshared"):
        errors = sorted(abs(row[clock]["error"]) for row in rows)
        print(f"{clock}: median error {statistics.median(errors):.0%}, largest {errors[-1]:.0%}")
    print(f"written to {options.out}")


def make_config(layers: int) -> LlamaConfig:
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 512}
    sizes = {"hidden_size": 256, "intermediate_size": 768, "vocab_size": 1000}
    return LlamaConfig(**heads, **sizes, num_hidden_layers=layers)


def run_group(processes: int, options: argparse.Namespace) -> dict[str, Any]:
    """Measure in a group of processes; returns what its first one wrote."""
    with socket.socket() as one, tempfile.TemporaryDirectory() as folder:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
        one.close()
        job = Job(processes, options.tokens, options.repeats, options.layers, port, folder)
        torch.multiprocessing.spawn(work, (job,), nprocs=processes)
        return json.loads((Path(folder) / "measured.json").read_text())


def work(rank: int, job: Job) -> None:
    """What one process does: microbenchmarks, then every recipe by every exchange."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{job.port}", rank=rank, world_size=job.processes)
    with torch.inference_mode():
        before = calibrate(job)
        rows = [measure(job, kind, recipe) for kind, recipe in RECIPES.items()]
        calibration = average(before, calibrate(job))
    if rank == 0:
        content = {"calibration": calibration, "rows": [row for some in rows for row in some]}
        (Path(job.folder) / "measured.json").write_text(json.dumps(content))
    dist.barrier()
    dist.destroy_process_group()


def time_together(function: Callable[[], object], repeats: int) -> Times:
    """Median seconds of the slowest process by each clock, all beginning together; the first call warms up."""
    taken = []
    for turn in range(repeats + 1):
        dist.barrier()
        start, cpu_start = time.perf_counter(), time.process_time()
        function()
        spent = torch.tensor([time.perf_counter() - start, time.process_time() - cpu_start])
        dist.all_reduce(spent, dist.ReduceOp.MAX)
        if turn:
            taken.append(spent.tolist())
    return {clock: statistics.median(column) for clock, column in zip(CLOCKS, zip(*taken, strict=True), strict=True)}


def average(one: Any, other: Any) -> Any:
    """Average the numbers of two structures that are alike."""
    if isinstance(one, dict):
        return {key: average(value, other[key]) for key, value in one.items()}
    if isinstance(one, list):
        return [average(*pair) for pair in zip(one, other, strict=True)]
    return (one + other) / 2


def calibrate(job: Job) -> dict[str, Any]:
    """Measure rates of one process while all of them compute, and messages between them."""
    config, shape = make_config(job.layers), shape_from_config("small", make_config(job.layers))
    tokens = max(64, job.tokens // job.processes)
    hidden = torch.randn(1, tokens, config.hidden_size)
    layer = LlamaModel(make_config(1)).eval().layers[0]

    def run_linear() -> None:
        """All of a layer but rotation and attention."""
        attention, x = layer.self_attn, layer.input_layernorm(hidden)
        q = attention.q_proj(x)
        attention.k_proj(x), attention.v_proj(x)
        y = hidden + attention.o_proj(q)
        y + layer.mlp(layer.post_attention_layernorm(y))

    def time_attention(recipe: str, n: int) -> Times:
        counts = (shape.heads, shape.kv_heads, shape.kv_heads)
        q, k, v = (torch.randn(1, count, n, shape.head_dim) for count in counts)
        return time_together(lambda: ise.attention(q, k, v, recipe, causal=True), PROBES)

    lengths = sorted({max(64, job.tokens >> k) for k in range(4)})
    attention: dict[str, Any] = {
        kind: [{"tokens": n} | time_attention(RECIPES[kind], n) for n in lengths] for kind in ("dense", "windowed")
    }
    attention["retrieved"] = [{"tokens": lengths[-1]} | time_attention(RECIPES["retrieved"], lengths[-1])]
    linear = {"tokens": tokens} | time_together(run_linear, PROBES)
    return {"linear": linear, "attention": attention, "messages": time_messages(job.processes)}


def time_messages(processes: int) -> list[dict[str, Any]]:
    """Time messages from every process to every other, by the bytes that one receives."""
    if processes == 1:
        return []
    rows = []
    for size in MESSAGE_BYTES:
        counts = [max(1, size // 4 // (processes - 1))] * processes
        counts[dist.get_rank()] = 0
        buffer, out = torch.zeros(sum(counts)), torch.empty(sum(counts))

        def send(out: Tensor = out, buffer: Tensor = buffer, counts: list[int] = counts) -> None:
            dist.all_to_all_single(out, buffer, counts, counts)

        rows.append({"bytes": 4 * sum(counts)} | time_together(send, PROBES))
    return rows


def read_calibration(calibration: dict[str, Any], clock: str) -> tuple[Device, Link]:
    """Turn microbenchmarks into a device and a link: latency from the smallest message, bandwidth from the largest."""
    shape, linear, points = shape_from_config("small", make_config(1)), calibration["linear"], dict[str, Any]()
    unit = 4 * shape.head_dim * shape.heads
    for kind in ("dense", "windowed"):
        seen, rows = read_visibility(RECIPES[kind]), calibration["attention"][kind]
        operations = [unit * seen.count_pairs(0, int(row["tokens"])) for row in rows]
        points[kind] = tuple((count, count / row[clock]) for count, row in zip(operations, rows, strict=True))
    chosen, row = read_visibility(RECIPES["retrieved"]), calibration["attention"]["retrieved"][0]
    n = int(row["tokens"])
    left = row[clock] - unit * chosen.count_pairs(0, n) / points["windowed"][-1][1]
    choosing = unit * chosen.count_far_pairs(0, n) / (2 * (chosen.pool or 1)) / max(left, 1e-6)
    rate = 2 * linear["tokens"] * shape.layer_weights / linear[clock]
    device = Device("this processor", 1e12, rate, 0.0, points["dense"], points["windowed"], choosing, 1.0, "measured")
    messages = calibration["messages"]
    if not messages:
        return device, Link("none", 1 << 20, 1e9, 1e9, 0.0, 1.0, "not used")
    small, large = messages[0], messages[-1]
    bandwidth = (large["bytes"] - small["bytes"]) / max(large[clock] - small[clock], 1e-9)
    return device, Link("gloo", 1 << 20, bandwidth, bandwidth, small[clock], 1.0, "measured")


def measure(job: Job, kind: str, recipe: str) -> list[dict[str, Any]]:
    """Time the model under a recipe by every exchange."""
    torch.manual_seed(0)
    model = LlamaModel(make_config(job.layers)).eval()
    ids = torch.randint(10, 1000, (1, job.tokens))
    visibility: Visibility = read_visibility(recipe)
    layout, rows = "contiguous" if kind == "windowed" else "zigzag", []
    for exchange in list_exchanges(visibility):
        if exchange == "all-gather":  # in one node it is what gather is
            continue
        ways = {"layout": layout} if exchange == "ulysses" else {"layout": layout, "exchange": exchange}
        parallel = (ise.Ulysses if exchange == "ulysses" else ise.ContextParallel)(**ways)
        ise.extend(model, recipe, parallel=parallel)
        arguments = parallel.shard(input_ids=ids)
        seconds = time_together(lambda given=arguments: run_model(model, given), job.repeats)  # type: ignore[misc]
        ise.restore(model)
        rows.append({"keys": kind, "recipe": recipe, "exchange": exchange, "layout": layout, "measured": seconds})
    return rows


def run_model(model: nn.Module, arguments: dict[str, Tensor]) -> Tensor:
    return model(**arguments, use_cache=False).last_hidden_state


if __name__ == "__main__":
    sys.exit(main())
