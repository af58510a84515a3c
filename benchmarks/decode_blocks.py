"""Block shapes of the kernel for one query a row: how much of the memory's bandwidth each reaches.

    python benchmarks/decode_blocks.py [--n 32768] [--batch 8] [--heads 9/3/64,32/8/128] [--shapes 128x3x4x2,64x3x4x2]

A shape is vectors of a block, pipeline stages, warps and programs per multiprocessor, as in
`backends.decode.blocks.SERVER_BLOCKS`, whose own is the first of each head size and what the others are compared with,
in time and in what they return. Calls run inside a CUDA graph; the last lines name the best of each row. On a CPU, with
TRITON_INTERPRET=1 and a small --n, only whether shapes are right.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial

import torch
from calls import Case, Shape, make_call, make_tensors, rope_sdpa
from measure import Sizes, sizes
from methods import branched, folded
from targets import measure_decoding

from isentrope.backends.decode.blocks import Blocks, find_device_blocks
from isentrope.core import switches
from isentrope.core.compile import can_run_triton

# two or three blocks in shared memory, one to four programs that share it
SHAPES = {
    32: "256x3x4x2,256x2x4x3,512x3x4x1",
    64: "128x3x4x2,128x3x4x3,64x3x2x4,64x4x2x4,256x3x8x1",
    128: "64x2x4x3,64x3x4x2,128x3x4x1,128x2x4x2",
    256: "64x3x4x1,32x3x4x1,32x2x4x2",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=32768)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--heads", default="9/3/64,32/8/128", help="query heads, key heads and head size")
    parser.add_argument("--shapes", help="of all head sizes, in place of a few for each")
    options = parser.parse_args()
    size = replace(sizes(), seconds=0.1)
    probe = torch.empty(0, device=size.device)
    if not can_run_triton(probe):
        parser.error("expected Triton and a GPU, or TRITON_INTERPRET=1 and a small --n")
    best: list[str] = []
    for counts in options.heads.split(","):
        heads, key_heads, d = map(int, counts.split("/"))
        shape = Shape(options.batch, heads, key_heads, 1, options.n, d)
        blocks = find_device_blocks(probe)[1]
        own = blocks[d]
        listed = (options.shapes or SHAPES[d]).split(",")
        candidates = dict.fromkeys([own, *(Blocks(*map(int, text.split("x"))) for text in listed)])
        for method in (folded(size)["InfoScale"], branched(size.windows[-1])[0]):
            times: dict[Blocks, float] = {}
            for candidate in candidates:
                name = f"{method.name}, {options.batch} × {counts}: {'x'.join(map(str, candidate))}"
                try:
                    times[candidate] = _measure(size, shape, method.recipe, blocks, candidate, own, name)
                except Exception as error:  # too much shared memory, or a shape that the compiler does not take
                    print(f"{name}: {str(error).strip().partition(chr(10))[0]}", flush=True)
            if times:
                fastest = min(times, key=times.__getitem__)
                best.append(f"best of {method.name}, {options.batch} × {counts}: {'x'.join(map(str, fastest))}")
    print(*best, sep="\n")


def _measure(
    size: Sizes,
    shape: Shape,
    recipe: str,
    blocks: dict[int, Blocks],
    candidate: Blocks,
    own: Blocks,
    name: str,
) -> float:
    """Return milliseconds of a call with these blocks, once it returns what it does with the kernel's own."""
    case = Case("", "", recipe, shape, 0, None, partial(rope_sdpa, size))
    call = make_call(case, make_tensors(size, case), switches.DEFAULTS, backend="decode")
    usual = call()
    blocks[shape.head_size] = candidate
    try:
        torch.testing.assert_close(call(), usual, rtol=2e-2, atol=2e-3)
        row = measure_decoding(size, shape, recipe)
    finally:
        blocks[shape.head_size] = own
    share = "" if row.get("ratio") is None else f", {1 / row['ratio']:.0%} of the bandwidth"
    print(f"{name}: {row['ms']:.4f} ms, {row['gb_per_second']:,.0f} GB/s{share}", flush=True)
    return float(row["ms"])


if __name__ == "__main__":
    main()
