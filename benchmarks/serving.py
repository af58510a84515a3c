"""Throughput of an extended model under transformers' continuous batching, against the plain model served the same way.

    python benchmarks/serving.py [--model FOLDER [--gguf-file FILE]] [--seconds 60] --out results/serving.json
    python benchmarks/serving.py --count --out results/serving-operations.json

Both models take turns step by step in one process, with the same requests. A step is everything that the engine does:
scheduling, the forward pass and sampling. Ratios are plain / extended, of each pair of steps (1: as fast as the plain
model), and medians are of these. On a CPU times are of the processor, which other programs disturb less.

The plain model runs SDPA over the paged cache, as transformers runs it by itself where no FlashAttention is installed.
On a GPU both models are also served with CUDA graphs, and the plain one with FlashAttention where that is installed.
--graphs leaves out all rows without.

--count: in place of times, what a step costs the host for each layer, which no machine changes: torch operations, views
included, and launches of Triton's kernels. On a CPU, and as the host of a GPU makes them (`stub_gpu`).
"""

from __future__ import annotations

import argparse
import inspect
import logging
import statistics
import sys
import time
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from host import OperationCounter
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM

import isentrope as ise
from isentrope.evaluation.loading import load_on_device
from isentrope.utils.files import write_json
from isentrope.utils.provenance import collect_provenance

# SmolLM2-135M
SIZES = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True,
}  # fmt: skip
PAGE = 64
BATCH_TOKENS = {"cpu": 1024, "cuda": 4096}
FLASH_PACKAGES = {"flash_attention_3": "flash_attn_interface", "flash_attention_2": "flash_attn"}
WARM_STEPS = 3  # of each kind, left out
OPTIONS = inspect.signature(ContinuousBatchingConfig).parameters


class Baseline(NamedTuple):
    """How models are served: the attention of the plain one, and whether both have CUDA graphs."""

    attention: str = "sdpa"
    graphs: bool = False

    def __str__(self) -> str:
        return f"{self.attention}{', CUDA graphs' if self.graphs else ''}"


def list_baselines(device: str) -> list[Baseline]:
    """List what transformers can serve the plain model with on this machine."""
    if device == "cpu":
        return [Baseline()]
    flash = [Baseline(name, True) for name, package in FLASH_PACKAGES.items() if find_spec(package)]
    return [Baseline(), *flash[:1], Baseline(graphs=True)]


def make_prompts(train_length: int, window: int, vocabulary: int) -> dict[str, list[list[int]]]:
    """Return prompts of random tokens: those at which a recipe with this window is idle, longer ones, and both."""
    generator = torch.Generator().manual_seed(0)
    short = [window // 4 + 3 * i for i in range(16)]
    long = [train_length + train_length // 8 * i for i in range(16)]
    lengths = {
        "short": short,
        "long": long,
        "mixed": [*short[:8], *long[::2]],
        "one long": [long[-1]],
    }
    return {
        name: [torch.randint(3, vocabulary, (n,), generator=generator).tolist() for n in each]
        for name, each in lengths.items()
    }


def start(model: Any, prompts: list[list[int]], new: int, graphs: bool = False) -> Any:
    """Return a manager with these requests waiting, whose steps are run by hand."""
    generation = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    pages = sum(-(-(len(prompt) + new) // PAGE) for prompt in prompts) + 2 * len(prompts)
    options = {"page_size" if "page_size" in OPTIONS else "block_size": PAGE, "num_blocks": max(64, pages)}
    options |= {
        "max_batch_tokens": BATCH_TOKENS[model.device.type],
        "allow_block_sharing": False,
        "use_async_batching": False,
    }
    if "auto_switch_to_flash" in OPTIONS:
        options["auto_switch_to_flash"] = False
    manager = model.init_continuous_batching(generation, ContinuousBatchingConfig(**options, use_cuda_graph=graphs))
    manager.batch_processor, manager.current_batch = manager._create_batch_processor(), 0
    manager.add_requests(prompts)
    return manager


def run_step(manager: Any, device: torch.device) -> tuple[float, int] | None:
    """Run a step, and return its seconds and its number of tokens; None where no request is left."""
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    begin = clock()
    if not manager.batch_processor.prepare_next_batch():
        return None
    tokens = sum(request.query_length for request in manager.batch_processor.inputs_and_outputs.requests_in_batch)
    manager._generation_step()
    manager.batch_processor.update_batch()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return clock() - begin, tokens


@torch.no_grad()
def compare(
    plain: Any, extended: Any, prompts: list[list[int]], new: int, baseline: Baseline, seconds: float = float("inf")
) -> dict[str, Any]:
    """Return medians and totals of steps that read prompts, and of those that decode a token of every request.

    After this many seconds it stops with what it has.
    """
    # transformers before 5.20 would take FlashAttention otherwise, and names what reads pages
    attention = baseline.attention if "auto_switch_to_flash" in OPTIONS else f"paged|{baseline.attention}"
    plain.set_attn_implementation(attention)
    managers = [start(model, prompts, new, baseline.graphs) for model in (plain, extended)]
    pairs: dict[str, list[tuple[float, float]]] = {"prefill": [], "decode": []}
    order, end = [0, 1], time.monotonic() + seconds
    while time.monotonic() < end:
        steps: list[Any] = [None, None]
        for n in order:
            steps[n] = run_step(managers[n], plain.device)
        order.reverse()
        if steps[0] is None or steps[1] is None:
            break
        kind = "decode" if steps[1][1] <= len(prompts) else "prefill"
        pairs[kind].append((steps[0][0], steps[1][0]))
    return {kind: summarise(each[WARM_STEPS:] or each) for kind, each in pairs.items() if each}


def summarise(pairs: list[tuple[float, float]]) -> dict[str, float]:
    plain, extended = zip(*pairs, strict=True)
    return {
        "steps": len(pairs),
        "plain_ms": 1e3 * statistics.median(plain),
        "extended_ms": 1e3 * statistics.median(extended),
        "ratio": statistics.median(a / b for a, b in pairs),
        "ratio_of_totals": sum(plain) / sum(extended),
    }


def build(options: argparse.Namespace) -> Any:
    """Load the model, or make one of SmolLM2-135M's sizes with random weights."""
    dtype = "float32" if options.device == "cpu" else "bfloat16"
    if options.model:
        model: Any = load_on_device(options.model, options.device, dtype, options.gguf_file)
        model.config.max_position_embeddings = options.train_length or model.config.max_position_embeddings
    else:
        torch.manual_seed(0)
        length = options.train_length or (256 if options.device == "cpu" else 2048)
        model = LlamaForCausalLM(LlamaConfig(**SIZES, max_position_embeddings=length, eos_token_id=None))
        model = model.to(options.device, getattr(torch, dtype))
    return model.eval()


def make_small(layers: int, dtype: torch.dtype) -> Any:
    """Return a small model whose heads the kernels of a GPU take."""
    sizes = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 64, "max_position_embeddings": 256}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": layers, "eos_token_id": None}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads)).eval().to(dtype)


@torch.no_grad()
def count_steps(model: Any, prompts: list[list[int]], new: int, launches: Any) -> list[tuple[int, int]]:
    """Return the numbers of tokens and of operations, launches included, of the steps of a load."""
    manager, counts = start(model, prompts, new), []
    while True:
        before = launches.count
        with OperationCounter() as counter:
            step = run_step(manager, model.device)
        if step is None:
            return counts
        counts.append((step[1], counter.count + launches.count - before))


def count_layer(recipe: str | None, prompts: list[list[int]], new: int, on_gpu: bool) -> dict[str, float]:
    """Return the most operations that one more layer adds to a step that reads prompts, and to one that decodes."""
    from stub_gpu import Launches, stub_gpu  # Triton may not be installed

    counts = []
    for layers in (1, 3):
        model = make_small(layers, torch.bfloat16 if on_gpu else torch.float32)
        if recipe is not None:
            ise.extend(model, recipe)
        with stub_gpu() if on_gpu else nullcontext(Launches()) as launches:
            count_steps(model, prompts, new, launches)  # what outlives a step is made
            counts.append(count_steps(model, prompts, new, launches))
    found: dict[str, float] = {}
    for (tokens, few), (_, many) in zip(*counts, strict=True):
        kind = "decode" if tokens <= len(prompts) else "prefill"
        found[kind] = max(found.get(kind, 0), (many - few) / 2)
    return found


def count_rows(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the operations of a layer in each load, of the plain and of the extended model."""
    rows = []
    workloads = make_prompts(256, 128, 64)
    for on_gpu in (False, True):
        for name, prompts in workloads.items():
            if options.only and name not in options.only:
                continue
            row: dict[str, Any] = {"workload": name, "host": "of a GPU" if on_gpu else "of a CPU"}
            for model, recipe in (("plain", None), ("extended", options.recipe.format(window=128))):
                row[model] = count_layer(recipe, prompts, options.new, on_gpu)
            rows.append(row)
            kinds = (f"{kind} {row['plain'][kind]:g} · {row['extended'][kind]:g}" for kind in row["plain"])
            print(f"{row['host']:8} {name:9} plain · extended: {', '.join(kinds)}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder; without, random weights of SmolLM2-135M's sizes")
    parser.add_argument("--gguf-file", help="in that folder")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--train-length", type=int, help="of the model, by which requests are long or short")
    parser.add_argument("--recipe", default="rerope:window={window}+share")
    parser.add_argument("--new", type=int, default=12, help="tokens of each request")
    parser.add_argument("--only", nargs="*", help="names of workloads")
    parser.add_argument("--graphs", action="store_true", help="with CUDA graphs alone")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="of all rows together, after loading")
    parser.add_argument("--count", action="store_true", help="operations of a layer, in place of times")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    if options.graphs and options.device != "cuda":
        parser.error(f"--graphs: expected a GPU, got --device {options.device}; leave it out")
    if options.new < 1:
        parser.error(f"--new: expected 1 token or more, got {options.new}")
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    command = " ".join(["python", "benchmarks/serving.py", *sys.argv[1:]])
    provenance = collect_provenance() | {"transformers": transformers.__version__}
    if options.count:
        write_json(options.out, {"command": command, "provenance": provenance, "results": count_rows(options)})
        return
    plain, extended = build(options), build(options)
    train_length = plain.config.max_position_embeddings
    recipe = options.recipe.format(window=train_length // 2)
    ise.extend(extended, recipe)
    end = time.monotonic() + options.seconds
    workloads = make_prompts(train_length, train_length // 2, plain.config.vocab_size)
    found = {
        "command": command,
        "provenance": provenance,
        "model": (options.gguf_file or Path(options.model).name) if options.model else "SmolLM2-135M's sizes, random",
        "clock": "wall" if options.device == "cuda" else "processor",
        "dtype": str(plain.dtype),
        "train_length": train_length,
        "recipe": recipe,
    }
    rows: list[dict[str, Any]] = []
    jobs = [
        (baseline, name)
        for baseline in list_baselines(options.device)
        for name in workloads
        if (not options.only or name in options.only) and baseline.graphs >= options.graphs
    ]
    if options.device == "cuda":  # kernels are compiled
        compare(plain, extended, [workloads["short"][0], *workloads["long"][:2]], 4, Baseline())
    for index, (baseline, name) in enumerate(jobs):
        row: dict[str, Any] = {"workload": name, "plain": str(baseline)}
        seconds = (end - time.monotonic()) / 2  # at most, so that others get some
        if seconds < 1:
            print(f"out of time: {len(jobs) - index} rows left out", flush=True)
            break
        try:
            row |= compare(plain, extended, workloads[name], options.new, baseline, seconds)
        except (RuntimeError, ImportError, ValueError) as error:  # of the plain model: others are measured still
            if baseline == Baseline():
                raise
            row["error"] = str(error).splitlines()[0]
        rows.append(row)
        for kind in ("prefill", "decode"):
            if kind in row:
                ratios = f"{row[kind]['ratio']:.2f}  (totals {row[kind]['ratio_of_totals']:.2f})"
                times = f"{row[kind]['plain_ms']:.2f} ms against {row[kind]['extended_ms']:.2f} ms"
                print(f"{row['plain']:18} {name:9} {kind:8} {ratios}  {times}", flush=True)
        if "error" in row:
            print(f"{row['plain']:18} {name:9} {row['error']}", flush=True)
        write_json(options.out, found | {"results": rows})


if __name__ == "__main__":
    try:
        main()
    except (OSError, ValueError) as error:  # a wrong option or file, whose message says what to do
        print(error, file=sys.stderr)
        sys.exit(2)
