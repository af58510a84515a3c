"""Training and evaluating GAU-α: the package's step beside a plain eager fp32 loop, in one process.

    python benchmarks/training.py [--shapes 128x64,128x512] [--steps 300] [--out benchmarks/results/training.json]

Six layers at the paper's sizes, a vocabulary of 12,000, masked-token batches drawn and copied while training, as in
`isentrope train`. Steps a second are of a whole stretch of steps after the first few, begun and ended with an empty
queue; on a CPU pass small shapes (`--shapes 8x64 --steps 5`). Evaluation is one forward pass with one prediction a row.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from measure import save
from torch import nn

from isentrope.data.batches import Batches
from isentrope.data.prepared import Documents
from isentrope.models import GAUAlphaConfig, GAUAlphaForMaskedLM
from isentrope.study.step import Stepper, ahead

VOCABULARY, WARM = 12000, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="128x64,128x512")
    parser.add_argument("--steps", type=int, default=300, help="of the shortest length; fewer at longer ones")
    parser.add_argument("--evaluate", default="32x4096,1x65536", help="shapes of the forward pass; '' for none")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/training.json"))
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    shapes = [tuple(map(int, shape.split("x"))) for shape in options.shapes.split(",")]
    for size, length in shapes:
        steps = max(3, options.steps * shapes[0][1] // length)
        for name, dropout, fast in (
            ("eager fp32", 0.1, False),
            ("isentrope", 0.1, True),
            ("isentrope, no dropout", 0.0, True),
        ):
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats() if torch.cuda.is_available() else None
            begun = time.perf_counter()
            rate = trained(size, length, dropout, fast, steps if fast else max(3, steps // 8))
            row = {"what": name, "batch": size, "length": length, "steps_per_second": rate}
            row |= {"tokens_per_second": rate * size * length, "seconds": time.perf_counter() - begun, "peak": peak()}
            rows.append(row)
            print(f"{name:24s} {size} × {length}: {rate:8.1f} steps/s {rate * size * length / 1e6:7.2f} M tokens/s "
                  f"({row['seconds']:.0f} s with compilation, peak {row['peak']:.1f} GiB)", flush=True)  # fmt: skip
    for shape in options.evaluate.split(",") if options.evaluate else []:
        size, length = map(int, shape.split("x"))
        rows += evaluated(size, length)
    save(options.out, rows)


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def peak() -> float:
    return torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def model(dropout: float) -> Any:
    torch.manual_seed(0)
    config = GAUAlphaConfig(
        vocab_size=VOCABULARY, num_hidden_layers=6, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout
    )
    return GAUAlphaForMaskedLM(config).to(device())


def trained(size: int, length: int, dropout: float, fast: bool, steps: int) -> float:
    """Optimiser steps a second."""
    torch._dynamo.reset()
    ids = np.random.default_rng(0).integers(5, VOCABULARY, 1 << 22, np.int32)
    count = len(ids) // 8192
    documents = Documents([str(i) for i in range(count)], np.full(count, 8192), np.arange(count) * 8192, ids)
    batches = Batches(documents, length, size, 0, 4, np.arange(5, VOCABULARY))
    gau, cuda = model(dropout).train(), torch.cuda.is_available()
    if fast:
        stepper = Stepper(gau, Accelerator(), decay=0.01, clip=1.0, bf16=cuda, accumulate=1, compile=cuda)
        step = lambda batch: stepper(batch, 1e-4)  # noqa: E731
    else:
        step = plain(gau)
    losses = []
    for done, batch in enumerate(ahead(batches.__getitem__, 0, WARM + steps, pin=cuda)):
        if done == WARM:
            wait()
            begun = time.perf_counter()
        losses.append(step(batch))
    wait()
    seconds = time.perf_counter() - begun
    if not torch.stack(losses).isfinite().all():
        raise AssertionError("a loss is not a number")
    return steps / seconds


def plain(gau: Any) -> Any:
    """The loop one writes first: everything eager, in fp32, with the logits of all tokens."""
    optimizer = torch.optim.AdamW(gau.parameters(), lr=1e-4)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        batch = {name: x.to(device()) for name, x in batch.items()}
        labels = torch.full_like(batch["input_ids"], -100).scatter(1, batch["at"], batch["labels"])
        loss = gau(batch["input_ids"], labels=labels, backend="reference").loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(gau.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    return step


def evaluated(size: int, length: int) -> list[dict[str, Any]]:
    """Milliseconds of one forward pass: ours in bf16 for one position a row, and eager fp32 with all logits."""
    gau = model(0.0).eval()
    ids = torch.randint(5, VOCABULARY, (size, length), device=device())
    at = torch.full((size, 1), length // 2, device=device())
    cuda, rows = torch.cuda.is_available(), []

    def ours() -> torch.Tensor:
        return narrow(ids, at=at).logits

    def eager() -> torch.Tensor:
        return gau(ids, backend="reference").logits

    narrow = model(0.0).eval().to(torch.bfloat16) if cuda else gau
    for name, call in (("isentrope", ours), ("eager fp32, all logits", eager)):
        try:
            torch.cuda.reset_peak_memory_stats() if cuda else None
            with torch.inference_mode():
                call()
                times = []
                for _ in range(3 if name == "isentrope" else 1):
                    wait()
                    begun = time.perf_counter()
                    call()
                    wait()
                    times.append(1e3 * (time.perf_counter() - begun))
            row = {"what": name, "batch": size, "length": length, "ms": sorted(times)[len(times) // 2], "peak": peak()}
            print(f"{name:24s} forward {size} × {length}: {row['ms']:8.1f} ms, peak {row['peak']:.1f} GiB", flush=True)
        except torch.OutOfMemoryError:
            row = {"what": name, "batch": size, "length": length, "ms": None, "why": "out of memory"}
            print(f"{name:24s} forward {size} × {length}: out of memory", flush=True)
        rows.append(row)
        torch.cuda.empty_cache()
    return rows


if __name__ == "__main__":
    main()
