"""Memory of one attention layer, forward and backward, in each of 1, 2 and 4 processes that share a sequence.

    python benchmarks/context_parallel_memory.py --out benchmarks/results/DATE-cpu-context-parallel.json

Peak resident memory of a process beyond what it had after a call on a few tokens; the tokens are the same in number
for every number of processes, so that memory linear in a process's share halves from one row to the next.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes

import isentrope as ise
from isentrope.parallel.key_parts import Options
from isentrope.recipe import as_recipe
from isentrope.utils.files import write_json
from isentrope.utils.provenance import collect_provenance

HEADS, HEAD_DIM = 4, 128
RECIPES = {
    "two branches": "rerope:window=256+infoscale:train_length=1024,keys=near+share",
    "window": "rope+window:size=256",
}
EXCHANGES = {"two branches": ("ring", "gather"), "window": ("gather",)}


def attend(recipe: str, exchange: str, length: int) -> None:
    """Attend once with this process's part of so many random tokens."""
    parallel = ise.ContextParallel(exchange=exchange)
    mask = parallel.shard(torch.zeros(1, length, dtype=torch.int64))["attention_mask"]
    shape = (1, HEADS, mask.shape[2], HEAD_DIM)
    q, k, v = (torch.randn(shape).requires_grad_() for _ in range(3))
    options = Options(as_recipe(recipe), True, None, None, "auto", jumping=False)
    out, _ = parallel.attend((q, k, v), parallel.read(mask, q, k), options)
    out.sum().backward()


def read_peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(rank: int, folder: str, size: int, name: str, exchange: str, length: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    attend(RECIPES[name], exchange, 32)
    before, started = read_peak_bytes(), time.perf_counter()
    attend(RECIPES[name], exchange, length)
    row = {"peak_bytes": read_peak_bytes() - before, "seconds": time.perf_counter() - started}
    Path(folder, f"{rank}.json").write_text(json.dumps(row))
    dist.destroy_process_group()


def run(name: str, exchange: str, size: int, length: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        processes.spawn(measure, (folder, size, name, exchange, length), nprocs=size)  # type: ignore[no-untyped-call]
        rows = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(size)]
    peak = max(row["peak_bytes"] for row in rows)
    return {"recipe": name, "exchange": exchange, "processes": size, "length": length, "peak_mb": round(peak / 1e6, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--length", type=int, default=4096)
    arguments = parser.parse_args()
    rows = []
    for name, exchanges in EXCHANGES.items():
        for exchange in exchanges:
            for size in (1, 2, 4):
                rows.append(run(name, exchange, size, arguments.length))
                print(rows[-1], flush=True)
    sizes = {"heads": HEADS, "head_dim": HEAD_DIM, "dtype": "float32", "recipes": RECIPES}
    result = {"provenance": collect_provenance(), "sizes": sizes, "rows": rows}
    write_json(arguments.out, result)


if __name__ == "__main__":
    main()
