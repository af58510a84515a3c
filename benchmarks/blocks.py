"""Block shapes of the kernel around the diagonal: how long each takes, and which do not fit.

    python benchmarks/blocks.py [--n 32768] [--windows 1024,4096] [--sizes 64,128] [--shapes 128x64x3x8,128x128x2x8]

A shape is queries and keys of a block, pipeline stages and warps, as in `tile_shapes.SERVER_SHAPES`, whose own is the
first of each size and what the others are compared with, in time and in what they return. bf16 on a GPU; on a CPU, with
TRITON_INTERPRET=1 and a small --n, only whether shapes are right.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch
from measure import Row, save, sizes, times

from isentrope.core import tile_shapes
from isentrope.core.compile import can_run_triton
from isentrope.functional import attention
from isentrope.utils.provenance import collect_provenance

SHAPES = ",".join("x".join(map(str, shape)) for shape in product((64, 128), (64, 128), (2, 3, 4), (4, 8)))
METHODS = ("rope+window:size={}", "rope+sink:sinks=4,size={}", "rerope:window={}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=32768)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--windows", default="1024,4096")
    parser.add_argument("--sizes", default="64,128", help="of heads")
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--out", type=Path, default=Path("results/blocks.json"))
    options = parser.parse_args()
    size = replace(sizes(), seconds=0.1)
    if not can_run_triton(torch.empty(0, device=size.device)):
        parser.error("expected Triton and a GPU, or TRITON_INTERPRET=1 and a small --n")
    try:
        shapes = [tuple(map(int, shape.split("x"))) for shape in options.shapes.split(",")]
    except ValueError:
        parser.error(f"--shapes: expected some like 128x64x3x8, got {options.shapes!r}")
    rows: list[Row] = []
    for d, window, method in product(options.sizes.split(","), options.windows.split(","), METHODS):
        q, k, v = (
            torch.randn(1, options.heads, options.n, int(d), dtype=size.dtype, device=size.device) for _ in "qkv"
        )

        def run(recipe: str = method.format(window), q=q, k=k, v=v) -> torch.Tensor:  # type: ignore[no-untyped-def]
            with torch.no_grad():
                return attention(q, k, v, recipe, causal=True, backend="band")

        own = tile_shapes.SERVER_SHAPES[int(d)]
        usual = run()
        for shape in (own, *(shape for shape in shapes if shape != own)):
            tile_shapes.SERVER_SHAPES[int(d)] = shape
            row: Row = {"method": method.format(window), "size": int(d), "shape": shape}
            try:
                torch.testing.assert_close(run(), usual, rtol=2e-2, atol=2e-2)
                row["ms"] = times([run], size)[0]
            except Exception as error:  # too much shared memory, or a shape that the compiler does not take
                row["failed"] = str(error).strip().partition("\n")[0]
            finally:
                tile_shapes.SERVER_SHAPES[int(d)] = own
            rows.append(row)
            print(d, row["method"], shape, f"{row['ms']:.3f} ms" if "ms" in row else row["failed"], flush=True)
            save(options.out, rows, run=collect_provenance(), n=options.n, heads=options.heads)


if __name__ == "__main__":
    main()
