"""One long text, end to end: time, memory and perplexity by position of four ways to read it, then some tokens.

    python benchmarks/million.py --model FOLDER [--gguf-file FILE] [--tokens 1048576] [--chunk 65536] [--data FILES]
        [--window 4096] [--generate 32] [--out results/million.json] [--seconds N]

The ways: `plain` (causal attention in chunks on PyTorch's fastest kernel, the baseline), a dense recipe with near and
far keys, a window with sinks and a `StreamingCache`, and far keys by choice (`retrieve`). The text is read in chunks
into a cache that is allocated once; logits exist for a few rows at a time. Without --data the text is SymPy's sources,
without --model the model is a random Llama of SmolLM2-135M's shape, and the text random tokens.

The file is written anew after every way. Run again with the same options, ways that are finished are not measured
again; one that --seconds cut short, or that failed, is. Peaks are above the weights.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import torch
from measure import peak, sizes
from models import random_model
from prefill import (
    AllocatedCache,
    OutOfTimeError,
    Reading,
    count_cache_bytes,
    generate_greedily,
    plain_attention,
    read_in_chunks,
)
from run import made_with
from torch import Tensor
from transformers import Cache, PreTrainedModel

import isentrope as ise
from isentrope.data.corpus import read_documents, read_sympy_documents
from isentrope.data.source import find_text_files
from isentrope.evaluation.loading import load_on_device, load_tokenizer
from isentrope.hf.layer_plan import read_train_length
from isentrope.utils.files import RERUN_REMEDY, read_json, write_json

MAX_TIME_RATIO = 1.1  # of the dense recipe, to the plain prefill
MAX_MEMORY_RATIO = 1.1  # of the dense recipe's peak above the weights, to its cache
PLAIN = "plain"
WARM_CHUNKS = 1  # a first chunk is read beforehand, for compilation and plans of kernels


@dataclass(frozen=True)
class Way:
    """A way to read: its name, recipe (None: the model as it is) and whether the cache has a constant size."""

    name: str
    recipe: str | None
    streaming: bool = False


def list_ways(window: int) -> list[Way]:
    """List the ways, the baseline first."""
    return [
        Way(PLAIN, None),
        Way("dense", f"rerope:window={window}"),
        Way("windowed", f"sink:sinks=4,size={window - 4}", streaming=True),
        Way("retrieve", f"rerope:window={window}+retrieve"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a causal model: a folder, or a name on the hub")
    parser.add_argument("--gguf-file")
    parser.add_argument("--data", action="append", help="a file, folder or glob of texts, joined; may be repeated")
    parser.add_argument("--tokens", type=int, default=1 << 20)
    parser.add_argument("--chunk", type=int, default=1 << 16, help="tokens of a forward pass; 0: all in one")
    parser.add_argument("--window", type=int, help="near keys; by default half of the training length")
    parser.add_argument("--generate", type=int, default=32, help="tokens generated after the text")
    parser.add_argument("--only", help="some of the ways, separated by commas")
    parser.add_argument("--out", type=Path, default=Path("results/million.json"))
    parser.add_argument("--seconds", type=float, default=math.inf, help="after these, no chunk begins")
    options = parser.parse_args()
    if options.tokens < 2 or options.chunk < 0:
        parser.error(f"--tokens, --chunk: expected 2 and 0 or more, got {options.tokens} and {options.chunk}")
    deadline = time.monotonic() + options.seconds
    model = load(options.model, options.gguf_file)
    tokens = load_tokens(options, model)
    window = options.window or (read_train_length(model.config.get_text_config()) or 8192) // 2
    ways = list_ways(window)
    if options.only:
        known, wanted = [way.name for way in ways], options.only.split(",")
        if not set(wanted) <= set(known):
            parser.error(f"--only: expected some of {', '.join(known)}, got {options.only!r}")
        ways = [way for way in ways if way.name in wanted]
    run = Run(model, tokens, options.chunk or len(tokens), options.generate, deadline)
    try:
        results = measure(run, ways, options.out, options.model or "a random Llama of SmolLM2-135M's shape")
    except ValueError as error:
        parser.error(str(error))
    for line in summarize(results):
        print(line, flush=True)
    print(f"written to {options.out}", flush=True)


def load(name: str | None, gguf_file: str | None) -> PreTrainedModel:
    model = load_on_device(name, "auto", "auto", gguf_file) if name else random_model(sizes())
    return model.eval()


def load_tokens(options: argparse.Namespace, model: PreTrainedModel) -> Tensor:
    """Return the first tokens of all texts, joined by an empty line."""
    if options.model is None:
        generator = torch.Generator().manual_seed(0)
        return torch.randint(10, model.config.vocab_size, (options.tokens,), generator=generator)
    tokenizer = load_tokenizer(options.model, options.gguf_file)
    files = chain.from_iterable(map(find_text_files, options.data or ()))
    documents = read_documents(files) if options.data else read_sympy_documents()
    tokens: list[int] = []
    for document in documents:
        own = (
            document.tokens
            if document.tokens is not None
            else tokenizer(f"{document.text}\n\n", verbose=False).input_ids
        )
        tokens += own
        if len(tokens) >= options.tokens:
            return torch.tensor(tokens[: options.tokens])
    raise SystemExit(f"--tokens: expected at most {len(tokens)}, all that the texts have; got {options.tokens}")


@dataclass(frozen=True)
class Run:
    """What all ways have in common."""

    model: PreTrainedModel
    tokens: Tensor
    chunk: int
    generate: int
    deadline: float


def measure(run: Run, ways: list[Way], out: Path, name: str) -> dict[str, Any]:
    """Measure the ways that the file does not have yet, and write it after each.

    Raises:
        ValueError: the file is of another model, text, chunk or length.
    """
    digest = hashlib.sha256(run.tokens.numpy().tobytes()).hexdigest()
    dtype = str(run.model.dtype).removeprefix("torch.")
    head = {"model": name, "dtype": dtype, "tokens": len(run.tokens), "chunk": run.chunk, "text": digest}
    results: dict[str, Any] = {"head": head, "provenance": made_with(), "ways": {}}
    if out.exists():
        earlier = read_json(out, RERUN_REMEDY)
        if earlier.get("head") != head:
            raise ValueError(f"--out: {out} holds results of other options: {earlier.get('head')}; choose another file")
        results["ways"] = earlier["ways"]
    out.parent.mkdir(parents=True, exist_ok=True)
    for way in ways:
        before = results["ways"].get(way.name)
        if before is not None and before["recipe"] == way.recipe and before["failed"] is None:
            print(f"{way.name}: finished before", flush=True)
            continue
        row: dict[str, Any] = {"recipe": way.recipe, "failed": None}
        try:
            row |= measure_way(run, way)
        except OutOfTimeError as error:
            row["failed"] = str(error)
        except RuntimeError as error:  # out of memory, for one: the next way may fit
            row["failed"] = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
        results["ways"][way.name] = row | {"commit": results["provenance"]["commit"]}
        add_ratios(results["ways"], run.model.device.type)
        write_json(out, results)
        if row["failed"]:
            print(f"{way.name}: {row['failed']}", flush=True)
        gc.collect()
        if run.model.device.type == "cuda":
            torch.cuda.empty_cache()
    return results


def measure_way(run: Run, way: Way) -> dict[str, Any]:
    """Read the text one way, continue it, and return what was measured."""
    tokens, chunk = run.tokens, run.chunk
    if time.monotonic() > run.deadline:
        raise OutOfTimeError("no time was left to begin")
    with ExitStack() as stack:
        stack.enter_context(plain_attention(run.model) if way.recipe is None else ise.extended(run.model, way.recipe))

        def new_cache(length: int) -> Cache:
            return ise.StreamingCache(run.model) if way.streaming else AllocatedCache(run.model, length)

        warm = tokens[: chunk * WARM_CHUNKS + min(chunk, 64)]  # the second chunk has keys before it
        read_in_chunks(run.model, warm, new_cache(len(warm)), chunk)
        kept: dict[str, Any] = {}

        def read() -> object:
            kept["cache"] = new_cache(len(tokens) + run.generate)
            kept["reading"] = read_in_chunks(run.model, tokens, kept["cache"], chunk, make_report(way.name, run))
            return None

        peak_bytes = peak(read)
        reading: Reading = kept["reading"]
        cache_bytes = count_cache_bytes(kept["cache"])
        continuation, step = generate_greedily(run.model, reading, kept["cache"], run.generate)
    losses = torch.cat(reading.losses)
    return {
        "seconds": reading.seconds, "processor_seconds": reading.processor_seconds,
        "loss_seconds": reading.loss_seconds, "peak_bytes": peak_bytes, "cache_bytes": cache_bytes,
        "loss": losses.mean().item(), "positions": by_position(losses, len(tokens)),
        "seconds_per_token": step, "continuation": continuation,
    }  # fmt: skip


def make_report(name: str, run: Run) -> Callable[[int, Reading], None]:
    """Return a function that prints a line after a chunk, and ends the way once the time is over."""

    def report(read: int, reading: Reading) -> None:
        loss = reading.losses[-1].mean().item()
        spent = f"{reading.seconds:.1f} s, losses {reading.loss_seconds:.1f} s"
        print(f"{name}: {read:,} of {len(run.tokens):,} tokens, {spent}, perplexity {perplexity(loss):.4g}", flush=True)
        if time.monotonic() > run.deadline and read < len(run.tokens):
            raise OutOfTimeError(f"the time was over after {read:,} tokens")

    return report


def perplexity(loss: float) -> float:
    return math.exp(min(loss, 700.0))


def by_position(losses: Tensor, length: int) -> list[dict[str, Any]]:
    """Average losses between positions that double: 0, 1024, 2048 … n. The token at i is predicted from i before it."""
    edges = [0, *(1 << k for k in range(10, 64) if 1 << k < length), length]
    rows = []
    for low, high in pairwise(edges):
        part = losses[max(low, 1) - 1 : high - 1]
        loss = part.mean().item()
        rows.append({"from": low, "to": high, "loss": loss, "perplexity": perplexity(loss)})
    return rows


def add_ratios(ways: dict[str, Any], device: str) -> None:
    """Add each way's ratios to the baseline and to its own cache; targets are for the dense recipe on a GPU."""
    clocks = {"time": "seconds", "processor_time": "processor_seconds"}
    base = ways.get(PLAIN, {})
    for name, row in ways.items():
        if row["failed"] is not None:
            continue
        ratios = {key: row[clock] / base[clock] if base.get(clock) else None for key, clock in clocks.items()}
        has_memory = row["peak_bytes"] is not None and row["cache_bytes"]
        ratios["memory"] = row["peak_bytes"] / row["cache_bytes"] if has_memory else None
        row["ratios"] = ratios
        targets = {"time": MAX_TIME_RATIO, "memory": MAX_MEMORY_RATIO} if (name, device) == ("dense", "cuda") else {}
        row["targets"] = {
            key: {"at_most": most, "met": None if ratios[key] is None else ratios[key] <= most}  # type: ignore[operator]
            for key, most in targets.items()
        }


def summarize(results: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of a table."""
    yield f"{'':10} {'seconds':>9} {'× plain':>8} {'peak GiB':>9} {'× cache':>8} {'ppl, last':>10} {'ms/token':>9}"
    for name, row in results["ways"].items():
        if row["failed"] is not None:
            yield f"{name:10} {row['failed']}"
            continue
        ratio, memory = (row["ratios"][key] for key in ("time", "memory"))
        peak_bytes = "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**30:.3f}"
        cells = [f"{name:10} {row['seconds']:9.2f} {'' if ratio is None else f'{ratio:.3f}':>8} {peak_bytes:>9}"]
        cells.append(f"{'' if memory is None else f'{memory:.3f}':>8} {row['positions'][-1]['perplexity']:10.4g}")
        yield " ".join([*cells, f"{1000 * row['seconds_per_token']:9.2f}"])
        for key, target in row["targets"].items():
            verdict = {None: "not measured", True: "met", False: "MISSED"}[target["met"]]
            yield f"{'':10} target: {key} at most {target['at_most']}: {verdict}"


if __name__ == "__main__":
    try:
        main()
    except (OSError, ValueError) as error:  # a wrong option or file, whose message says what to do
        print(error, file=sys.stderr)
        sys.exit(2)
