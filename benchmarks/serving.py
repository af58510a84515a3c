"""Throughput of an extended model under transformers' continuous batching, against the plain model served the same way.

    python benchmarks/serving.py [--model FOLDER] [--device cuda] --out results/serving.json

Both models take turns step by step in one process, with the same requests. A step is everything that the engine does:
scheduling, the forward pass and sampling. Ratios are plain / extended, of each pair of steps (1: as fast as the plain
model), and medians are of these. On a CPU times are of the processor, which other programs disturb less.
"""

from __future__ import annotations

import argparse
import inspect
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

import isentrope as ise
from isentrope.utils.files import write_json

# SmolLM2-135M
SIZES = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True,
}  # fmt: skip
PAGE = 64
BATCH_TOKENS = 1024
OPTIONS = inspect.signature(ContinuousBatchingConfig).parameters


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


def start(model: Any, prompts: list[list[int]], new: int) -> Any:
    """Return a manager with these requests waiting, whose steps are run by hand."""
    generation = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    pages = sum(-(-(len(prompt) + new) // PAGE) for prompt in prompts) + 2 * len(prompts)
    options = {"page_size" if "page_size" in OPTIONS else "block_size": PAGE, "num_blocks": max(64, pages)}
    options |= {"max_batch_tokens": BATCH_TOKENS, "allow_block_sharing": False, "use_cuda_graph": False}
    if "auto_switch_to_flash" in OPTIONS:
        options["auto_switch_to_flash"] = False
    manager = model.init_continuous_batching(generation, ContinuousBatchingConfig(**options))
    manager.batch_processor, manager.current_batch = manager._create_batch_processor(), 0
    manager.add_requests(prompts)
    return manager


def run_step(manager: Any, device: torch.device) -> tuple[float, int] | None:
    """Run a step, and return its seconds and its number of tokens; None where no request is left."""
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    begin = clock()
    if not manager.batch_processor.prepare_next_batch():
        return None
    manager._generation_step()
    manager.batch_processor.update_batch()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return clock() - begin, manager.batch_processor.inputs_and_outputs.num_q_tokens


@torch.no_grad()
def compare(plain: Any, extended: Any, prompts: list[list[int]], new: int) -> dict[str, dict[str, float]]:
    """Return medians and totals of steps that read prompts, and of those that decode a token of every request."""
    managers = [start(model, prompts, new) for model in (plain, extended)]
    pairs: dict[str, list[tuple[float, float]]] = {"prefill": [], "decode": []}
    order = [0, 1]
    while True:
        steps: list[Any] = [None, None]
        for n in order:
            steps[n] = run_step(managers[n], plain.device)
        order.reverse()
        if steps[0] is None or steps[1] is None:
            break
        kind = "decode" if steps[0][1] <= len(prompts) else "prefill"
        pairs[kind].append((steps[0][0], steps[1][0]))
    pairs["decode"] = pairs["decode"][2:] or pairs["decode"]  # the first steps warm up
    return {kind: summarise(each) for kind, each in pairs.items() if each}


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
    dtype = torch.float32 if options.device == "cpu" else torch.bfloat16
    if options.model:
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype)
    else:
        torch.manual_seed(0)
        config = LlamaConfig(**SIZES, max_position_embeddings=options.train_length, eos_token_id=None)
        model = LlamaForCausalLM(config).to(dtype)
    return model.eval().to(options.device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder; without, random weights of SmolLM2-135M's sizes")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--train-length", type=int, default=256, help="of random weights")
    parser.add_argument("--recipe", default="rerope:window={window}+share")
    parser.add_argument("--new", type=int, default=12, help="tokens of each request")
    parser.add_argument("--only", nargs="*", help="names of workloads")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    plain, extended = build(options), build(options)
    train_length = plain.config.max_position_embeddings
    recipe = options.recipe.format(window=train_length // 2)
    ise.extend(extended, recipe)
    results = {}
    for name, prompts in make_prompts(train_length, train_length // 2, plain.config.vocab_size).items():
        if options.only and name not in options.only:
            continue
        results[name] = compare(plain, extended, prompts, options.new)
        for kind, numbers in results[name].items():
            print(f"{name:9} {kind:8} {numbers['ratio']:.2f}  (totals {numbers['ratio_of_totals']:.2f})", flush=True)
        versions = {"python": platform.python_version(), "torch": torch.__version__}
        versions |= {"transformers": transformers.__version__, "isentrope": ise.__version__}
        found = {
            "command": " ".join(["python", "benchmarks/serving.py", *sys.argv[1:]]),
            "model": Path(options.model).name if options.model else "SmolLM2-135M's sizes, random weights",
            "device": torch.cuda.get_device_name() if options.device == "cuda" else platform.processor() or "cpu",
            "threads": torch.get_num_threads(),
            "clock": "wall" if options.device == "cuda" else "processor",
            "dtype": str(plain.dtype),
            "train_length": train_length,
            "recipe": recipe,
            "versions": versions,
            "results": results,
        }
        write_json(options.out, found)


if __name__ == "__main__":
    main()
