"""What a tile of 128 queries costs in the kernel for Hopper: for each block of keys, and whatever the blocks.

    python benchmarks/tiles.py [--kinds cudnn,plain,rows,both] [--sizes 128,64] [--out FILE]

Calls over all pairs, with 4,096 queries and enough heads that every program has eight tiles, at five numbers of keys;
microseconds of a tile are a line in these, by 1,024 and 4,096 keys. Inside a CUDA graph, all lengths of a kind taking
turns. Kinds: cuDNN; one span without angles; with angles, a temperature, an offset as well; with intervals; three
spans, near keys and far ones on either side, as ReRoPE in both directions has, without angles and with them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from measure import captured, gpu_times
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from isentrope.backends.band.key_span import TILE_QUERIES, KeySpan
from isentrope.backends.band.spans import HEAD_DIMS, has_kernel
from isentrope.core.compile import count_multiprocessors
from isentrope.utils.files import write_json
from isentrope.utils.provenance import collect_provenance

KINDS = "cudnn", "plain", "rows", "tau", "offset", "intervals", "both plain", "both"
QUERIES, TILES = 4096, 8  # and tiles of a program
LENGTHS = 512, 1024, 2048, 4096, 8192
BETWEEN = 1024, 4096  # keys by which the line is drawn
BLOCK_KEYS = 128
CALLS, REPEATS = 4, 7  # in a graph, and replays of it
ALL = 1 << 20  # keys on either side, more than there are


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--sizes", default="128,64", help="of heads")
    parser.add_argument("--out", type=Path, help="also write the rows to this file")
    options = parser.parse_args()
    kinds = options.kinds.split(",")
    if unknown := set(kinds) - set(KINDS):
        parser.error(f"--kinds: expected some of {', '.join(KINDS)}, got {', '.join(sorted(unknown))}")
    sizes = options.sizes.split(",")
    if unknown := set(sizes) - set(map(str, HEAD_DIMS)):
        parser.error(f"--sizes: expected some of {', '.join(map(str, HEAD_DIMS))}, got {', '.join(sorted(unknown))}")
    if not (torch.cuda.is_available() and has_kernel(torch.device("cuda"))):
        parser.error("expected a Hopper GPU, and a release of Triton on which the kernel ran")
    rows = [measure(kind, int(size)) for size in sizes for kind in kinds]
    if options.out:
        write_json(options.out, {"provenance": collect_provenance(), "rows": rows})


def measure(kind: str, size: int) -> dict[str, object]:
    """Return microseconds of a tile by the number of keys, of a block, and of a tile without any."""
    heads = TILES * count_multiprocessors(torch.device("cuda")) // (QUERIES // TILE_QUERIES)
    runs = [make_call(kind, size, heads, keys) for keys in LENGTHS]  # which hold the tensors that graphs read
    replays = [captured(lambda run=run: [run() for _ in range(CALLS)][-1])[0].replay for run in runs]
    tiles = dict(zip(LENGTHS, (1000 * ms / CALLS / TILES for ms in gpu_times(replays, REPEATS)), strict=True))
    first, last = BETWEEN
    block = (tiles[last] - tiles[first]) / ((last - first) / BLOCK_KEYS)
    fixed = tiles[first] - block * first / BLOCK_KEYS
    listed = ", ".join(f"{keys}: {us:.2f}" for keys, us in tiles.items())
    print(f"d {size}, {kind}: {block:.3f} us a block, {fixed:.2f} beside them; a tile of {listed}", flush=True)
    return {"kind": kind, "size": size, "tile_us": tiles, "block_us": block, "fixed_us": fixed}


def make_call(kind: str, size: int, heads: int, keys: int) -> Callable[[], Tensor]:
    """Return a call of a kind."""
    from isentrope.backends.band.span_launch import SpanLaunch

    def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(1, *shape, device="cuda").to(dtype)

    q, near, far, v = (draw(heads, n, size, dtype=torch.bfloat16) for n in (QUERIES, keys, keys, keys))
    if kind == "cudnn":

        def attend() -> Tensor:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return F.scaled_dot_product_attention(q, near, v)

        return attend
    angles = draw(1, QUERIES, size // 2), draw(1, QUERIES, size // 2)
    constant = angles[0][:, :, :1], angles[1][:, :, :1]
    if kind.startswith("both"):
        window, rotated = keys // 4, kind == "both"
        spans = [
            KeySpan(q, near, window - 1, window - 1, angles=angles if rotated else None),
            KeySpan(q, far, ALL, -window, angles=constant if rotated else None),
            KeySpan(q, far, -window, ALL, angles=constant if rotated else None),
        ]
    else:
        bounds = [torch.full((1, QUERIES), n, dtype=torch.int32, device="cuda") for n in (0, keys)]
        span = KeySpan(q, near, ALL, ALL, angles=None if kind == "plain" else angles)
        span = span._replace(interval=(bounds[0], bounds[1]) if kind == "intervals" else None)
        span = span._replace(tau=draw(1, QUERIES).exp() if kind in ("tau", "offset") else None)
        spans = [span._replace(offset=draw(heads, QUERIES) if kind == "offset" else None)]
    launch = SpanLaunch(spans, v, size**-0.5, normalise=False, padded=False, need_entropy=False)
    return lambda: launch.run([x.q for x in spans], [x.k for x in spans], v).out


if __name__ == "__main__":
    main()
