"""Compile kernels for several cards, without one, and list their registers, spilled bytes and shared memory.

    python benchmarks/registers.py --out results/registers.json

A kernel that spills keeps values in the card's memory; one that needs more shared memory than the card has cannot be
launched, which ends the run with exit status 1.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import triton
from stub_gpu import Launches, StubKernel, stub_gpu
from torch import Tensor
from triton import JITFunction
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

import isentrope as ise
from isentrope.backends.band import spans
from isentrope.core.layout import Layout, Rows
from isentrope.core.switches import BAND_POINTERS, DEFAULTS, set_switches
from isentrope.utils.files import write_json
from isentrope.utils.provenance import collect_provenance

# compute capability, the most shared memory of a program by the CUDA programming guide, and multiprocessors
CARDS = {
    name: SimpleNamespace(capability=version, shared_memory_per_block_optin=size << 10, multi_processor_count=count)
    for name, version, size, count in (
        ("sm_80 (A100)", (8, 0), 163, 108),
        ("sm_89 (L4, RTX 40)", (8, 9), 99, 58),
        ("sm_90 (H100, H200)", (9, 0), 227, 132),
        ("sm_100 (B200)", (10, 0), 227, 148),
        ("sm_120 (RTX 50)", (12, 0), 99, 170),
    )
}
CURRENT_TRITON = tuple(map(int, triton.__version__.split(".")[:2]))
RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")
LENGTH, HEADS, KV_HEADS = 1024, 4, 2
LONG, MANY = 4096, (32, 8)  # length and heads of calls that the kernel for Hopper takes
SIZES = (64, 128)  # of heads
RECIPES = {
    "RoPE + InfoScale": "rope+infoscale:train_length=256",
    "cosine + InfoScale": "rope+cosine:alpha=16+infoscale:train_length=256",
    "ReRoPE": "rerope:window=256",
    "ReRoPE + InfoScale + share, sinks": "rerope:window=256+infoscale:train_length=256+share:sinks=4,reference=256",
    "SelfExtend": "selfextend:window=256,group=8",
    "Dual Chunk": "dualchunk:chunk=512,local=64",
    "window": "rope+window:size=256",
    "LM-Infinite": "rope+lambda:sinks=4,window=256",
    "ALiBi": "alibi",
    "retrieve": "rerope:window=256+retrieve:size=64,blocks=4,queries=32",
    "retrieve, votes": "rerope:window=256+retrieve:size=64,blocks=4,queries=32,score=votes",
}
LAWS = "rerope:window=256+infoscale:train_length=256+share:reference=256"


class CardDriver:
    """Stands in for the driver of one card: kernels are compiled for it, and not launched."""

    def __init__(self, number: int, card: Any) -> None:
        self.number, self.card = number, card

    def get_current_device(self) -> int:
        return self.number

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        major, minor = self.card.capability
        return GPUTarget("cuda", 10 * major + minor, 32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="also write the rows to this file")
    parser.add_argument("--match", default="", help="regular expression of cards and calls, as in 'sm_100.*, d 128'")
    options = parser.parse_args()
    try:
        chosen = re.compile(options.match)
    except re.error as error:
        parser.error(f"--match: expected a regular expression, got {options.match!r} ({error})")
    rows: list[dict[str, Any]] = []
    for number, (name, card) in enumerate(CARDS.items()):
        for call, run in list_calls():
            if not chosen.search(f"{name}, {call}"):
                continue
            rows += [{"card": name, "call": call, **row} for row in compile_call(number, card, run)]
            print(f"{name}, {call}: {len(rows)} kernels so far", file=sys.stderr, flush=True)
    if not rows:
        parser.error(f"--match: expected to match a card and a call, got {options.match!r}, which matches none")
    if options.out:
        write_json(options.out, {"provenance": collect_provenance(), "triton": triton.__version__, "rows": rows})
    print(render_rows(rows))
    sys.exit(any(row["shared_bytes"] > row["limit_bytes"] for row in rows))


def list_calls() -> Iterator[tuple[str, Callable[[], Any]]]:
    """List calls that reach every kernel: prompts, padded rows, entropy and one query under each recipe."""
    for size in SIZES:
        heads = HEADS, KV_HEADS, KV_HEADS
        q, k, v = (torch.randn(2, LENGTH, n, size, dtype=torch.bfloat16).transpose(1, 2) for n in heads)
        for name, recipe in RECIPES.items():
            prompt = partial(ise.attention, k=k, v=v, recipe=recipe, causal=True)
            yield f"{name}, d {size}", partial(prompt, q)
            yield f"{name}, one query, d {size}", partial(prompt, q[:, :, -1:])
            if name in ("ReRoPE", "window"):
                yield f"{name}, padded, d {size}", partial(prompt, q, lengths=torch.tensor([LENGTH, LENGTH - 7]))
                yield f"{name}, entropy, d {size}", partial(prompt, q, return_entropy=True)
        heads = MANY[0], MANY[1], MANY[1]
        q, k, v = (torch.empty(2, LONG, n, size, dtype=torch.bfloat16).transpose(1, 2) for n in heads)
        for name, recipe in (("ReRoPE", RECIPES["ReRoPE"]), ("laws", LAWS), ("SelfExtend", RECIPES["SelfExtend"])):
            yield f"{name}, long, d {size}", partial(ise.attention, q, k, v, recipe, causal=True)
        two = partial(ise.attention, q, k, v, RECIPES["ReRoPE"])
        yield f"ReRoPE, long, padded, d {size}", partial(two, causal=True, lengths=torch.tensor([LONG, 7]))
        yield f"ReRoPE, long, entropy, d {size}", partial(two, causal=True, return_entropy=True)
        yield f"ReRoPE, long, both directions, d {size}", partial(two, causal=False)
        yield f"ReRoPE, long, padded, backward, d {size}", partial(run_backward, q, k, v, torch.tensor([LONG, 7]))


def run_backward(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> None:
    """Compute gradients of padded rows, whose padding nobody reads."""
    layout = Layout(*q.shape[:1], q.shape[2], k.shape[2], q.device, Rows(lengths=lengths))
    layout.padded_queries_matter = False
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    with torch.enable_grad():
        out = ise.attention(*inputs, RECIPES["ReRoPE"], causal=True, layout=layout)
    torch.autograd.grad(out, inputs, torch.zeros_like(out))


def compile_call(number: int, card: Any, run: Callable[[], Any]) -> Iterator[dict[str, Any]]:
    """Compile the kernels of a call for a card, and yield what each needs of it."""
    compiled, compile_kernel = [], JITFunction.run

    def compile_only(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> StubKernel:
        compiled.append(compile_kernel(kernel, *arguments, grid=grid, warmup=True, **options))
        return StubKernel(Launches())

    before = set_switches(DEFAULTS | {BAND_POINTERS})
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(stub_gpu(card))
            stack.enter_context(patch.object(driver, "_active", CardDriver(number, card)))
            stack.enter_context(patch.object(JITFunction, "run", compile_only))
            stack.enter_context(patch.object(spans, "TRITON_RELEASES", (CURRENT_TRITON,)))  # whether it ran or not
            stack.enter_context(patch.object(torch, "empty", torch.zeros))  # indices that no kernel writes
            run()
    except NotImplementedError as error:  # an operation of PyTorch that needs the card, such as its own attention
        print(f"not compiled beyond it: {str(error).partition(chr(10))[0][:100]}", file=sys.stderr, flush=True)
    finally:
        set_switches(before)
    for kernel in dict.fromkeys(compiled):
        registers, stack, local = read_resources(kernel.asm["cubin"])
        yield {
            "kernel": kernel.name, "warps": kernel.metadata.num_warps, "registers": registers,
            "spilled_bytes": stack + local, "shared_bytes": kernel.metadata.shared,
            "limit_bytes": card.shared_memory_per_block_optin,
        }  # fmt: skip


def read_resources(binary: bytes) -> tuple[int, int, int]:
    """Read registers, stack and local memory in bytes of a compiled kernel's thread."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    registers, stack, local = RESOURCES.search(text).groups()
    return int(registers), int(stack), int(local)


def render_rows(rows: list[dict[str, Any]]) -> str:
    """Print a line for each card: kernels compiled, most registers, kernels that spill, most shared memory."""
    lines = [
        "| card | kernels | most registers | spill, bytes | shared memory, of the card's |",
        "|---|---|---|---|---|",
    ]
    for card in dict.fromkeys(row["card"] for row in rows):
        mine = [row for row in rows if row["card"] == card]
        spilling = [f"{row['kernel']} ({row['call']}: {row['spilled_bytes']})" for row in mine if row["spilled_bytes"]]
        share = max(row["shared_bytes"] / row["limit_bytes"] for row in mine)
        registers = max(row["registers"] for row in mine)
        lines.append(
            f"| {card} | {len(mine)} | {registers} | {', '.join(dict.fromkeys(spilling)) or 'none'} | {share:.0%} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
