"""Each method's time and peak memory against plain SDPA on this CPU, 1k to 8k tokens.

    python benchmarks/attention_cpu.py [--lengths 1024,2048,4096,8192] [--out benchmarks/results/attention_cpu.json]

fp32, batch 1, 4 heads, d = 64, causal, no gradients. Times are medians of warm calls; memory is what one call adds to
the peak resident size of a fresh process.
"""

from __future__ import annotations

import argparse
from math import log
from pathlib import Path

import torch
from measure import cpu_peak, cpu_time, save
from torch.nn import functional as F

import isentrope as ise

HEADS, SIZE = 4, 64
PLAIN = "plain SDPA"
RECIPES = {
    "RoPE + InfoScale": "rope+infoscale:train_length=512",
    "CosScale + InfoScale": "rope+infoscale:train_length=512+cosine:alpha=128",
    "ReRoPE 512": "rerope:window=512",
    "Leaky ReRoPE 512": "leakyrerope:window=512",
    "SelfExtend 512/8": "selfextend:window=512,group=8",
    "window 512": "rope+window:size=512",
    "StreamingLLM 4 + 512": "rope+sink:sinks=4,size=512",
    "LM-Infinite 5 + 512": "rerope:window=512+lambda:sinks=5,window=512",
    "ALiBi": "alibi",
}
BACKENDS = ("sdpa", "chunked")
CODE = """
import torch, isentrope as ise
from torch.nn import functional as F
torch.manual_seed(0)
def prepare():
    global q, k, v
    q, k, v = (torch.randn(1, {heads}, {n}, {size}) for _ in range(3))
    small = [x[:, :, :64] for x in (q, k, v)]
    call(*small)
def call(q, k, v):
    with torch.no_grad():
        return {expression}
def work():
    global out
    out = call(q, k, v)
"""
SDPA = "F.scaled_dot_product_attention(q, k, v, is_causal=True)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="1024,2048,4096,8192")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/attention_cpu.json"))
    options = parser.parse_args()
    lengths = [int(n) for n in options.lengths.split(",")]
    rows: list[dict[str, object]] = []
    for n in lengths:
        torch.manual_seed(0)
        q, k, v = (torch.randn(1, HEADS, n, SIZE) for _ in range(3))
        with torch.no_grad():
            base = cpu_time(lambda q=q, k=k, v=v: F.scaled_dot_product_attention(q, k, v, is_causal=True))
        add(rows, PLAIN, "", n, base, base, SDPA)
        for name, recipe in RECIPES.items():
            for backend in BACKENDS:

                def run(q=q, k=k, v=v, recipe=recipe, backend=backend):
                    with torch.no_grad():
                        return ise.attention(q, k, v, recipe, causal=True, backend=backend)

                expression = f"ise.attention(q, k, v, {recipe!r}, causal=True, backend={backend!r})"
                add(rows, name, backend, n, cpu_time(run), base, expression)
        save(options.out, rows)
    for name, backend, exponent in growth(rows, lengths):
        print(f"{name:24} {backend:8} memory ~ n^{exponent:.2f}")
    print(f"written to {options.out}")


def add(rows, name, backend, n, time, base, expression):
    mib = cpu_peak(CODE.format(heads=HEADS, n=n, size=SIZE, expression=expression)) / 2**20
    ratio = time / base
    rows.append({"method": name, "backend": backend, "n": n, "ms": time, "to_sdpa": ratio, "peak_mib": mib})
    print(f"{name:24} {backend:8} n={n:5d} {time:9.1f} ms {ratio:6.2f} × SDPA  peak {mib:7.1f} MiB", flush=True)


def growth(rows, lengths):
    """Exponent of memory between the first and the last length; 1 is linear."""
    for name, backend in dict.fromkeys((row["method"], row["backend"]) for row in rows):
        peaks = [row["peak_mib"] for row in rows if (row["method"], row["backend"]) == (name, backend)]
        if len(peaks) > 1 and min(peaks) > 0:
            yield name, backend, log(peaks[-1] / peaks[0]) / log(lengths[-1] / lengths[0])


if __name__ == "__main__":
    main()
