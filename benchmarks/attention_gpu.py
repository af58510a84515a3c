"""Each method against compiled RoPE + SDPA and against FlexAttention on one GPU: time, ratio, peak memory.

    python benchmarks/attention_gpu.py [--lengths 32768,131072] [--out benchmarks/results/attention_gpu.json]

bf16, batch 1, 32 heads, d = 128, causal, no gradients. Times are medians of warm calls between events; every method
takes turns with the baseline, so that a clock that drifts moves both sides of a ratio. "cold" is a call whose geometry
(visible intervals, block masks, frequencies) is built anew; warm calls share it, as the layers of a model do.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from measure import gpu_peak, gpu_times, save
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import isentrope as ise
from isentrope.layout import _recent

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

    def record(name: str, run: Callable[[], object], rival: Callable[[], object] | None = None) -> dict[str, object]:
        with torch.no_grad():
            time, base = gpu_times((run, baseline), repeats)
            row: dict[str, object] = {"method": name, "n": n, "ms": time, "sdpa_ms": base, "to_sdpa": time / base}
            row |= {"tflops": flops / time / 1e9, "peak_gib": gpu_peak(run) / 2**30}
            if rival is not None:
                time, other = gpu_times((run, rival), repeats)
                row["to_rival"] = time / other
        rows.append(row)
        print(", ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{v}" for k, v in row.items()), flush=True)
        return row

    def stock_flex() -> object:
        return compiled_flex(q, k, v, block_mask=causal)

    record("compiled RoPE + SDPA", baseline)
    record("FlexAttention causal", stock_flex)
    for name, recipe in RECIPES.items():

        def plain(recipe: str = recipe) -> torch.Tensor:
            return ise.attention(q, k, v, recipe, causal=True)

        row = record(name, plain, stock_flex)  # to_rival: against FlexAttention's own causal attention
        row["cold_ms"] = cold(plain)
        if name in ("InfoScale + RoPE", "ReRoPE 1024"):

            def diagnosed(recipe: str = recipe) -> object:
                return ise.attention(q, k, v, recipe, causal=True, return_entropy=True)

            record(f"{name}, entropy too", diagnosed, plain)  # to_rival: against the same without entropy


def cold(call: Callable[[], object]) -> float:
    """Milliseconds of a call when nothing is remembered, kernels being compiled already."""

    def run() -> None:
        _recent.clear()
        with torch.no_grad():
            call()

    return gpu_times((run,), 3)[0]


if __name__ == "__main__":
    main()
