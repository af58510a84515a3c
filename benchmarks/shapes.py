"""Decoding and prompts in many shapes: median microseconds of each, to compare two commits.

    python benchmarks/shapes.py --out before.json      # at one commit, and at another with --out after.json

bf16 on a GPU, where a decoded token runs inside a CUDA graph of ten calls and a prompt does not, so that short prompts
wait for the host. On a CPU, fp32 and the smallest shapes alone: whether everything runs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from measure import Call, sizes, times

import isentrope as ise
from isentrope.utils.files import write_atomically
from isentrope.utils.provenance import collect_provenance

CALLS = 10  # in a graph
HEADS = ((9, 3, 64), (32, 8, 128), (32, 32, 128), (32, 1, 128))  # of queries, of keys, and their size
CACHES = ((1, 512), (1, 2048), (1, 8192), (1, 32768), (8, 2048), (8, 32768))  # batch and keys
PROMPTS = (4096, 16384)
RETRIEVE = "rerope:window=1024+retrieve:blocks=16,size=64"
DECODED = {
    "rerope": "rerope:window=1024",
    "share": "rerope:window=1024+share:beta=0.5,reference=1024",
    "infoscale": "infoscale:train_length=1024",
    "retrieve": RETRIEVE,
}
READ = {"rerope": "rerope:window=1024", "retrieve": RETRIEVE, "votes": f"{RETRIEVE},score=votes"}
MIN_RETRIEVE = 8192  # keys, below which all are seen


def list_calls(device: str) -> Iterator[tuple[str, bool, Call]]:
    """Yield the name of each call, whether it decodes, and the call."""
    small = device == "cpu"
    for heads, key_heads, size in HEADS[:1] if small else HEADS:
        shape = f"h{heads}/{key_heads} d{size}"
        for batch, n in CACHES[:1] if small else CACHES:
            tensors = make_tensors(device, batch, heads, key_heads, 1, n, size)
            for name, recipe in DECODED.items():
                if name != "retrieve" or n >= MIN_RETRIEVE:
                    yield f"{name} {shape} b{batch} n{n}", True, partial(attend, tensors, recipe)
        for n in (512,) if small else PROMPTS if heads // key_heads in (3, 4) else ():
            tensors = make_tensors(device, 1, heads, key_heads, n, n, size)
            for name, recipe in READ.items():
                yield f"prefill {name} {shape} n{n}", False, partial(attend, tensors, recipe)


def make_tensors(
    device: str, batch: int, heads: int, key_heads: int, queries: int, keys: int, size: int
) -> list[torch.Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    shapes = ((heads, queries), (key_heads, keys), (key_heads, keys))
    return [torch.randn(batch, h, n, size, device=device, dtype=dtype, generator=generator) for h, n in shapes]


def attend(tensors: list[torch.Tensor], recipe: str) -> object:
    return ise.attention(*tensors, recipe, causal=True)


def capture(call: Call) -> Call:
    """Capture a call `CALLS` times."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    return graph.replay


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/shapes.json"))
    options = parser.parse_args()
    size, microseconds = sizes(quick=not torch.cuda.is_available()), dict[str, float]()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for name, decodes, call in list_calls(size.device):
        captured = decodes and size.device == "cuda"
        (taken,) = times((capture(call) if captured else call,), size)
        microseconds[name] = 1000 * taken / (CALLS if captured else 1)
        print(f"{name:40} {microseconds[name]:9.2f} us", flush=True)
        with write_atomically(options.out) as file:
            file.write_text(json.dumps({"run": collect_provenance(), "microseconds": microseconds}, indent=1) + "\n")


if __name__ == "__main__":
    main()
