"""Each method against compiled RoPE + SDPA and against FlexAttention on one GPU: time, ratio, peak memory.

    python benchmarks/attention_gpu.py [--lengths 32768,131072] [--out benchmarks/results/attention_gpu.json]

bf16, batch 1, 32 heads, d = 128, causal, no gradients unless said. Times are medians of warm calls between events. "cold"
is one call whose geometry (visible intervals, block masks, frequencies) is built anew; warm calls share it, as the layers
of a model do.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from measure import gpu_peak, gpu_time, save
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import isentrope as ise
from isentrope.layout import _whole_rows

HEADS, SIZE = 32, 128
RECIPES = {
    "InfoScale + RoPE": "rope+infoscale:train_length=2048",
    "InfoScale + YaRN": "yarn:factor=16+infoscale:train_length=2048",
    "CosScale + InfoScale": "rope+infoscale:train_length=2048+cosine:alpha=128",
    "ReRoPE 1024": "rerope:window=1024",
    "ReRoPE 1024 + InfoScale": "rerope:window=1024+infoscale:train_length=2048",
    "Leaky ReRoPE 1024": "leakyrerope:window=1024",
    "SelfExtend 1024/8": "selfextend:window=1024,group=8",
    "window 1024": "rope+window:size=1024",
    "StreamingLLM 4 + 1024": "rope+sink:sinks=4,size=1024",
    "LM-Infinite 5 + 1024": "rerope:window=1024+lambda:sinks=5,window=1024",
    "ALiBi": "alibi",
}


@torch.compile(dynamic=False)
def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="32768,131072")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/attention_gpu.json"))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device; benchmarks/attention_cpu.py runs without one")
    rows: list[dict[str, object]] = []
    for n in (int(length) for length in options.lengths.split(",")):
        measure(n, rows)
        save(options.out, rows)
    print(f"written to {options.out}", flush=True)


def measure(n: int, rows: list[dict[str, object]]) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, HEADS, n, SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    theta = 1e4 ** (-torch.arange(0, SIZE, 2, device="cuda") / SIZE)
    angle = torch.arange(n, device="cuda")[:, None] * theta
    cos, sin = angle.cos(), angle.sin()
    repeats = 20 if n <= 32768 else 5
    flops = 2 * n * n * SIZE * HEADS

    def baseline() -> torch.Tensor:
        return F.scaled_dot_product_attention(rope(q, cos, sin), rope(k, cos, sin), v, is_causal=True)

    compiled_flex = torch.compile(flex_attention, dynamic=False)
    causal = torch.compile(create_block_mask)(lambda b, h, i, j: i >= j, 1, 1, n, n, device="cuda")

    def record(name: str, run: object, base: float | None, flex: float | None, cold: float | None = None) -> float:
        with torch.no_grad():
            time = gpu_time(run, repeats)  # type: ignore[arg-type]
            peak = gpu_peak(run)  # type: ignore[arg-type]
        row = {
            "method": name, "n": n, "ms": time, "cold_ms": cold, "tflops": flops / time / 1e9, "peak_gib": peak / 2**30,
            "to_sdpa": time / base if base else 1.0, "to_flex": time / flex if flex else None,
        }  # fmt: skip
        rows.append(row)
        ratios = f"{row['to_sdpa']:6.3f} × SDPA" + (f" {row['to_flex']:6.3f} × flex" if flex else "")
        started = f"  cold {cold:7.2f}" if cold else ""
        print(f"{name:32} n={n:7d} {time:8.2f} ms  {ratios}  peak {row['peak_gib']:5.2f} GiB{started}", flush=True)
        return time

    base = record("compiled RoPE + SDPA", baseline, None, None)
    flex = record("FlexAttention causal", lambda: compiled_flex(q, k, v, block_mask=causal), base, None)
    warm = {}
    for name, recipe in RECIPES.items():
        warm[name] = record(
            name, lambda r=recipe: ise.attention(q, k, v, r, causal=True), base, flex, cold(q, k, v, recipe)
        )
    for name in ("InfoScale + RoPE", "ReRoPE 1024"):
        recipe = RECIPES[name]
        time = record(
            f"{name}, entropy too",
            lambda r=recipe: ise.attention(q, k, v, r, causal=True, return_entropy=True),
            base,
            flex,
        )
        rows[-1]["to_without_entropy"] = time / warm[name]
        print(f"    = {time / warm[name]:.3f} × the same without entropy", flush=True)


def cold(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, recipe: str) -> float:
    """Milliseconds of a call after which nothing was remembered, kernels being compiled already."""

    def run() -> None:
        _whole_rows.cache_clear()
        with torch.no_grad():
            ise.attention(q, k, v, recipe, causal=True)

    return gpu_time(run, 3, warm=2)


if __name__ == "__main__":
    main()
