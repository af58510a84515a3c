"""What a call costs the host: torch operations and CPU time, at sizes where all of it is Python and launches.

    python benchmarks/host.py [--out FILE] [--calls N] [--compile]

Operations are those that reach a kernel or make a view, counted below autograd: on a GPU most are a launch each. They
do not depend on the machine; microseconds of CPU time do, and are the least of several repeats on one thread.
--compile: in place of calls, what one more layer adds to `torch.compile` of a whole model: operations of the traced
graph, and seconds of CPU time up to the graph ("eager") and up to AOTAutograd's ("aot_eager") and code ("inductor").
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import isentrope as ise
from isentrope.utils.files import write_atomically
from isentrope.utils.provenance import collect_provenance

KEYS, HEADS, SIZE, LAYERS, REPEATS = 64, 2, 8, 4, 5
RECIPES = (
    "infoscale:train_length=16", "rope+infoscale:train_length=16", "rerope:window=16",
    "rerope:window=16+infoscale:train_length=16", "selfextend:window=16,group=4", "rope+window:size=16",
    "rope+sink:sinks=2,size=16",
)  # fmt: skip
COMPILED_LAYERS, COMPILERS = (2, 6), ("eager", "aot_eager", "inductor")
MODEL_RECIPES = ("infoscale", "rerope:window=32+infoscale", "selfextend:window=32,group=4", "window:size=24")


class OperationCounter(TorchDispatchMode):
    """Counts the operations of whatever runs inside."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


def count_operations(run: Callable[[], object]) -> int:
    """Operations of a call whose caches are warm."""
    run()
    with OperationCounter() as counter:
        run()
    return counter.count


def measure(run: Callable[[], object], calls: int) -> dict[str, float]:
    """Operations and microseconds of CPU time of one call."""
    operations, taken = count_operations(run), []
    for _ in range(REPEATS):
        begun = time.process_time()
        for _ in range(calls):
            run()
        taken.append((time.process_time() - begun) / calls * 1e6)
    return {"operations": operations, "us": min(taken)}


def attention_rows(calls: int) -> list[dict[str, Any]]:
    """`attention` alone: a prompt, and one query against a cache."""
    rows: list[dict[str, Any]] = []
    for kind, queries in (("prompt", KEYS), ("decode", 1)):
        q, k, v = (torch.randn(1, HEADS, n, SIZE) for n in (queries, KEYS, KEYS))
        runs: dict[str, Callable[[], object]] = {"torch's SDPA": partial(F.scaled_dot_product_attention, q, k, v)}
        for text in RECIPES:
            runs[text] = partial(ise.attention, q, k, v, ise.Recipe.parse(text), causal=True)
        rows += [{"what": kind, "recipe": text, **measure(run, calls)} for text, run in runs.items()]
    return rows


def make_model(layers: int | None = None) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=layers or LAYERS, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def model_rows(calls: int) -> list[dict[str, Any]]:
    """Whole models of few layers: a prompt, and one token."""
    rows = []
    for text in (None, *MODEL_RECIPES):
        model = make_model() if text is None else ise.extend(make_model(), text)
        for kind, run in (("model, prompt", read_prompt(model)), ("model, token", read_token(model))):
            row = measure(run, max(1, calls // 10))
            rows.append({"what": kind, "recipe": text or "unextended", "layers": LAYERS, **row})
    return rows


def read_prompt(model: LlamaForCausalLM) -> Callable[[], object]:
    ids = torch.arange(100)[None] % 64
    return lambda: model(ids, use_cache=False)


def read_token(model: LlamaForCausalLM) -> Callable[[], object]:
    ids, cache = torch.arange(100)[None] % 64, DynamicCache(config=model.config)
    model(ids, past_key_values=cache)
    return lambda: model(ids[:, :1], past_key_values=cache)


def compile_rows() -> list[dict[str, Any]]:
    """What one more layer adds when a whole model is compiled; the first model of each kind warms the compiler up."""
    rows = []
    few, many = COMPILED_LAYERS
    for compiler in COMPILERS:
        for text in (None, *MODEL_RECIPES):
            compile_model(text, 1, compiler)
            first, last = (compile_model(text, layers, compiler) for layers in (few, many))
            operations, seconds = ((after - before) / (many - few) for before, after in zip(first, last, strict=True))
            added = {"layers": [few, many], "operations": operations, "us": seconds * 1e6}
            rows.append({"what": f"layer, {compiler}", "recipe": text or "unextended", **added})
    return rows


def compile_model(text: str | None, layers: int, compiler: str) -> tuple[int, float]:
    """Operations of the graph of a pass, and seconds of CPU time until it has run once."""
    torch._dynamo.reset()
    model, operations = make_model(layers), 0
    inner = torch._dynamo.lookup_backend(compiler)

    def count(graph: Any, inputs: Any) -> Any:
        nonlocal operations
        operations = sum(node.op.startswith("call") for node in graph.graph.nodes)
        return inner(graph, inputs)

    run = torch.compile(model if text is None else ise.extend(model, text), fullgraph=True, backend=count)
    begun = time.process_time()
    run(torch.arange(100)[None] % 64, use_cache=False)
    return operations, time.process_time() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/host.json"))
    parser.add_argument("--calls", type=int, default=100, help="calls of attention in one repeat")
    parser.add_argument("--compile", action="store_true", help="what a layer adds to torch.compile of a model")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with torch.no_grad():
        rows = compile_rows() if options.compile else attention_rows(options.calls) + model_rows(options.calls)
    for row in rows:
        print(f"{row['what']:14} {row['recipe']:45} {row['operations']:5.0f} operations {row['us']:9.0f} us")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with write_atomically(options.out) as file:
        file.write_text(json.dumps({"provenance": collect_provenance(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
