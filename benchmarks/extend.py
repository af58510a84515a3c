"""What extending a model costs: prefill and decoding under each recipe, as ratios to the plain model.

    python benchmarks/extend.py [MODEL] [--gguf-file NAME] [--length 32768] [--out benchmarks/results/extend.json]

Without MODEL a Llama of SmolLM2-135M's shape with random weights. Random tokens. Prefill is one forward pass over
`length` tokens without logits; decoding is greedy steps from a cache of that length, eagerly, no graphs. Medians of
warm runs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from measure import save
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import isentrope as ise
from isentrope.study.causal.perplexity import load

RECIPES = (
    "infoscale",
    "yarn:factor=4+yarntemperature:factor=4",
    "rerope:window=4096",
    "rerope:window=4096+infoscale",
    "leakyrerope:window=4096+infoscale",
    "selfextend:window=4096,group=8+infoscale",
    "sink:sinks=4,size=4092",
    "rerope:window=4096+lambda:sinks=5,window=4096",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--gguf-file")
    parser.add_argument("--length", type=int, default=32768)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/extend.json"))
    options = parser.parse_args()
    model = (load(options.model, "auto", "auto", options.gguf_file) if options.model else random_model()).eval()
    rows: list[dict[str, object]] = []
    measure(model, options)  # the first run pays for memory that all others find there
    base = measure(model, options)
    rows.append({"recipe": "plain", "length": options.length, **base})
    print(f"plain {base}", flush=True)
    for recipe in RECIPES:
        with ise.extended(model, recipe):
            found = measure(model, options)
        ratios = {f"{name}_ratio": found[name] / base[name] for name in ("prefill_ms", "decode_ms")}
        rows.append({"recipe": recipe, "length": options.length, **found, **ratios})
        print(f"{recipe} {rows[-1]}", flush=True)
        save(options.out, rows)


def random_model() -> PreTrainedModel:
    torch.manual_seed(0)
    shape = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "vocab_size": 49152}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192}
    rope = {"rope_type": "default", "rope_theta": 100000.0}
    model: PreTrainedModel = LlamaForCausalLM(
        LlamaConfig(**shape, **heads, rope_parameters=rope, tie_word_embeddings=True)
    )
    return model.to("cuda", torch.bfloat16) if torch.cuda.is_available() else model


def measure(model: PreTrainedModel, options: argparse.Namespace) -> dict[str, float]:
    torch.manual_seed(0)
    ids = torch.randint(10, model.config.vocab_size, (1, options.length), device=model.device)
    with torch.inference_mode():
        prefill = _median(lambda: model.base_model(input_ids=ids, use_cache=False), model, options.repeats)
        cache = DynamicCache(config=model.config)
        model.base_model(input_ids=ids, past_key_values=cache, use_cache=True)
        token = ids[:, :1]

        def step() -> None:
            model(input_ids=token, past_key_values=cache, use_cache=True)

        decode = _median(step, model, options.steps)
    return {"prefill_ms": prefill, "decode_ms": decode}


def _median(run: Callable[[], object], model: PreTrainedModel, repeats: int) -> float:
    times = []
    for _ in range(repeats + 2):
        _wait(model)
        start = time.perf_counter()
        run()
        _wait(model)
        times.append((time.perf_counter() - start) * 1000)
    return statistics.median(times[2:])


def _wait(model: PreTrainedModel) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
