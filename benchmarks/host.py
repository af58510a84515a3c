"""What a call costs the host: torch operations and CPU time, at sizes where all of it is Python and launches.

    python benchmarks/host.py [--out FILE] [--calls N] [--compile [eager,…] | --stub-gpu]

Operations are those that reach a kernel or make a view, counted below autograd: on a GPU most are a launch each. They
do not depend on the machine; microseconds of CPU time do, and are the least of several repeats on one thread.
--compile: in place of calls, what one more layer adds to `torch.compile` of a whole model: operations of the traced
graph, Python functions that tracing enters, and CPU time up to the graph ("eager"), up to AOTAutograd's ("aot_eager")
and up to code ("inductor"), the least of three repeats; all three take half an hour or more, rows are written one by
one.
--stub-gpu: calls as a GPU's host makes them, up to kernels that do nothing (`stub_gpu`): Python functions that are
called, and CPU time; then decoded tokens of whole models, by layer and for the rest of a step.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
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
COMPILED_LAYERS, COMPILE_REPEATS, COMPILERS = (2, 6), 3, ("eager", "aot_eager", "inductor")
MODEL_RECIPES = ("infoscale", "rerope:window=32+infoscale", "selfextend:window=32,group=4", "window:size=24")
COMPILED_RECIPES = (
    *MODEL_RECIPES, "selfextend:window=32,group=4+infoscale", "rerope:window=32+share:beta=0.75",
    "sink:sinks=4,size=24", "yarn:factor=4",
)  # fmt: skip

GPU_RECIPES = {
    "ReRoPE": "rerope:window=64",
    "SelfExtend": "selfextend:window=64,group=8",
    "CosScale + InfoScale": "rope+infoscale:train_length=64+cosine:alpha=128",
    "LM-Infinite": "rerope:window=64+lambda:sinks=5,window=64",
}  # as benchmarks/targets.py has them, in short
GPU_MODEL_RECIPES = {
    "unextended": None,
    "ReRoPE": "rerope:window=32",
    "ReRoPE + InfoScale": "rerope:window=32+infoscale",
    "ReRoPE + share + far LogN": "rerope:window=32+logn:keys=far+share:beta=0.75",
    "ReRoPE + retrieve": "rerope:window=32+retrieve:blocks=1,size=16,sinks=16",
}
GPU_LAYERS = 2, 8
ONE_PASS_RECIPES, ONE_PASS_HEAD_SIZE = ("ReRoPE", "SelfExtend"), 64  # of the kernel for Hopper
GPU_KEYS, GPU_HEAD_SIZE, GPU_CALLS = 256, 32, 15  # so few calls that some repeats run undisturbed


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


def count_functions(run: Callable[[], object]) -> int:
    """Python functions that a call with warm caches enters."""
    for _ in range(3):  # the first builds what the second chooses a backend for
        run()
    return count_entered(run)


def count_entered(run: Callable[[], object]) -> int:
    """Python functions that a call enters."""
    count = 0

    def trace(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    gc.disable()  # what is let go of elsewhere may enter functions too
    sys.setprofile(trace)
    try:
        run()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


def time_calls(run: Callable[[], object], calls: int, repeats: int = REPEATS) -> float:
    """Return microseconds of CPU time of one call, the least of several repeats."""
    taken = []
    for _ in range(repeats):
        begun = time.process_time()
        for _ in range(calls):
            run()
        taken.append((time.process_time() - begun) / calls * 1e6)
    return min(taken)


def measure(run: Callable[[], object], calls: int) -> dict[str, float]:
    """Operations and microseconds of CPU time of one call."""
    return {"operations": count_operations(run), "us": time_calls(run, calls)}


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


def make_gpu_call(recipe: str, queries: int, size: int = GPU_HEAD_SIZE) -> Callable[[], object]:
    """Return a call of a recipe in half precision, for `stub_gpu`."""
    q, k, v = (torch.randn(1, HEADS, n, size, dtype=torch.bfloat16) for n in (queries, GPU_KEYS, GPU_KEYS))
    return partial(ise.attention, q, k, v, recipe, causal=True)


def gpu_rows(calls: int) -> list[dict[str, Any]]:
    """`attention` up to its kernels, as the host of a GPU runs it: a prompt, and one query against a cache."""
    from stub_gpu import stub_gpu  # Triton may not be installed

    rows = []
    kinds = (
        ("prompt, GPU", GPU_KEYS, GPU_HEAD_SIZE, GPU_RECIPES),
        ("prompt, GPU, one pass", GPU_KEYS, ONE_PASS_HEAD_SIZE, ONE_PASS_RECIPES),
        ("decode, GPU", 1, GPU_HEAD_SIZE, GPU_RECIPES),
    )
    for kind, queries, size, names in kinds:
        with stub_gpu(one_pass=size == ONE_PASS_HEAD_SIZE):
            for name in names:
                run = make_gpu_call(GPU_RECIPES[name], queries, size)
                functions = count_functions(run)
                us = time_calls(run, GPU_CALLS, max(1, calls))
                rows.append({"what": kind, "recipe": name, "functions": functions, "us": us})
    return rows


def gpu_layer_rows(calls: int) -> list[dict[str, Any]]:
    """A decoded token of a whole model up to its kernels: what one more layer adds, and what is left of the step."""
    from stub_gpu import stub_gpu  # Triton may not be installed

    few, many = GPU_LAYERS
    rows = []
    for name, text in GPU_MODEL_RECIPES.items():
        models = [make_model(layers, heads=(9, 3), head_dim=64).bfloat16() for layers in GPU_LAYERS]
        if text is not None:
            models = [ise.extend(model, text) for model in models]
        with stub_gpu():
            first, last = (measure_token(model, calls) for model in models)
        layer = {key: (last[key] - first[key]) / (many - few) for key in first}
        rows.append({"what": "token, a layer", "recipe": name, **layer})
        rest = {key: first[key] - few * layer[key] for key in first}
        rows.append({"what": "token, the rest", "recipe": name, **rest})
    return rows


def measure_token(model: LlamaForCausalLM, calls: int) -> dict[str, float]:
    """Functions, operations and microseconds of CPU time of a decoded token, each with one key more than the last."""
    run = read_token(model)
    counts = {"functions": count_functions(run), "operations": count_operations(run)}
    return {**counts, "us": time_calls(run, GPU_CALLS, max(1, calls))}


def make_model(
    layers: int | None = None, heads: tuple[int, int] = (4, 2), head_dim: int | None = None
) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=64, hidden_size=8 * heads[0], intermediate_size=32, num_hidden_layers=layers or LAYERS,
        num_attention_heads=heads[0], num_key_value_heads=heads[1], max_position_embeddings=64, head_dim=head_dim,
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


def compile_rows(compilers: Sequence[str]) -> Iterator[dict[str, Any]]:
    """What one more layer adds when a whole model is compiled; the first model of each kind warms the compiler up.

    Also the Python functions that tracing a layer enters: those of Dynamo itself, which no other load changes.
    """
    few, many = COMPILED_LAYERS
    for compiler in compilers:
        for text in (None, *COMPILED_RECIPES):
            compile_model(text, 1, compiler)
            first, last = (
                min(compile_model(text, layers, compiler) for _ in range(COMPILE_REPEATS)) for layers in (few, many)
            )
            operations, seconds = ((after - before) / (many - few) for before, after in zip(first, last, strict=True))
            added: dict[str, Any] = {"layers": [few, many], "operations": operations, "us": seconds * 1e6}
            if compiler == COMPILERS[0]:
                entered = [count_entered(partial(compile_model, text, layers, compiler)) for layers in (few, many)]
                added["functions"] = (entered[1] - entered[0]) / (many - few)
            yield {"what": f"layer, {compiler}", "recipe": text or "unextended", **added}


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
    gc.collect()  # what earlier graphs have left behind
    begun = time.process_time()
    run(torch.arange(100)[None] % 64, use_cache=False)
    return operations, time.process_time() - begun


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/host.json"))
    parser.add_argument("--calls", type=int, default=100, help="calls of attention in one repeat")
    compilers = ",".join(COMPILERS)
    parser.add_argument("--compile", nargs="?", const=compilers, help=f"cost of a compiled layer: {compilers}")
    parser.add_argument("--stub-gpu", action="store_true", help="calls as a GPU's host makes them, up to the kernels")
    options = parser.parse_args()
    chosen = options.compile.split(",") if options.compile else []
    if unknown := set(chosen) - set(COMPILERS):
        parser.error(f"--compile: expected some of {compilers}, got {', '.join(sorted(unknown))}")
    torch.set_num_threads(1)
    measured: Iterable[dict[str, Any]]
    if chosen:
        measured = compile_rows(chosen)
    elif options.stub_gpu:
        measured = [*gpu_rows(options.calls), *gpu_layer_rows(options.calls)]
    else:
        measured = [*attention_rows(options.calls), *model_rows(options.calls)]
    rows, provenance = [], collect_provenance()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for row in measured:
        rows.append(row)
        unit = "functions" if options.stub_gpu else "operations"
        other = "operations" if options.stub_gpu else "functions"
        more = f" {row[other]:7.0f} {other}" if other in row else ""
        print(f"{row['what']:21} {row['recipe']:45} {row[unit]:5.0f} {unit}{more} {row['us']:9.0f} us", flush=True)
        with write_atomically(options.out) as file:
            file.write_text(json.dumps({"provenance": provenance, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
