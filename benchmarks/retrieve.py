"""Far keys by choice: prefill against dense causal attention, decoding against the same method with all keys."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from inputs import rope, rope_for
from measure import Call, Job, Row, Sizes, compared, times
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import isentrope as ise
from isentrope.block_selection import select_blocks

HEADS, KV_HEADS, HEAD_SIZE = 9, 3, 64  # of SmolLM2-135M
LENGTHS = (32768, 131072)  # of a run with targets
DECODING_LENGTHS = (8192, 32768, 131072)
MIN_DECODING, MAX_DECODING_RATIO = 32768, 1.0  # from that length on, of the same method with all keys
MAX_VOTES_RATIO = 1.5  # of dense attention
MAX_RATIO, LONG = 0.5, 131072  # of dense attention, from that length on
OPTIONS = ("queries=32,pool=8", "queries=32,pool=4", "queries=32,pool=1", "queries=128,pool=4", "score=votes")


def retrieve(size: Sizes) -> Iterator[Job]:
    """Prefill and decoding at the longer lengths."""
    lengths = LENGTHS if size.targets else (size.middle, size.long)
    window, blocks, block_size = (4096, 16, 128) if size.targets else (size.windows[0], 1, max(1, size.windows[0] // 8))
    for n in lengths:
        for options in OPTIONS:
            text = f"rerope:window={window}+retrieve:blocks={blocks},size={block_size},sinks={block_size},{options}"
            yield Job("retrieve", f"ReRoPE, {options}", n, partial(_prefill, size, n, text))
    text = f"rerope:window={window}+retrieve:blocks={blocks},size={block_size},sinks={block_size}"
    for n in DECODING_LENGTHS if size.targets else lengths:
        for batch in size.batches:
            name = f"ReRoPE, one query, batch {batch}"
            yield Job("retrieve", name, n, partial(_decode, size, batch, n, text))


def _make_inputs(size: Sizes, queries: int, keys: int, batch: int = 1) -> list[Tensor]:
    generator = torch.Generator(size.device).manual_seed(0)
    shapes = ((HEADS, queries), (KV_HEADS, keys), (KV_HEADS, keys))
    options: dict[str, Any] = {"device": size.device, "dtype": size.dtype, "generator": generator}
    return [torch.randn(batch, heads, length, HEAD_SIZE, **options) for heads, length in shapes]


def _run(q: Tensor, k: Tensor, v: Tensor, text: str) -> Call:
    def call() -> object:
        with torch.no_grad():
            return ise.attention(q, k, v, text, causal=True)

    return call


def _prefill(size: Sizes, n: int, text: str) -> Row:
    q, k, v = _make_inputs(size, n, n)
    base, name = _make_dense(size, q, k, v)
    target = MAX_VOTES_RATIO if "votes" in text else MAX_RATIO
    row = compared(size, _run(q, k, v, text), base, name, target if n >= LONG else None)
    (choosing,) = times((lambda: select_blocks(q, k, text),), size)
    return row | {"note": f"of which choosing {choosing:.3g} ms"}


def _decode(size: Sizes, batch: int, n: int, text: str) -> Row:
    q, k, v = _make_inputs(size, 1, n, batch)
    plain, target = text.partition("+")[0], MAX_DECODING_RATIO if n >= MIN_DECODING else None
    return compared(size, _run(q, k, v, text), _run(q, k, v, plain), "the same with all keys", target)


def _make_dense(size: Sizes, q: Tensor, k: Tensor, v: Tensor) -> tuple[Call, str]:
    """Return RoPE and causal attention on the fastest of PyTorch's kernels, keys repeated for all heads beforehand."""
    theta = 1e4 ** (-torch.arange(0, HEAD_SIZE, 2, device=q.device) / HEAD_SIZE)
    angle = torch.arange(q.shape[2], device=q.device)[:, None] * theta
    cos, sin, turn = angle.cos(), angle.sin(), rope_for(q.shape[2], False, size.device)
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))

    def attend(backend: SDPBackend | None) -> object:
        with torch.no_grad():
            rotated = [(turn if size.device == "cuda" else rope)(x, cos, sin) for x in (q, k)]
            if backend is None:
                return F.scaled_dot_product_attention(*rotated, v, is_causal=True)
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(*rotated, v, is_causal=True)

    if size.device != "cuda":
        return partial(attend, None), "RoPE + SDPA"
    taken: dict[SDPBackend, float] = {}
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        try:
            taken[backend] = times((partial(attend, backend),), size)[0]
        except RuntimeError:  # not on this card, or not at this shape
            continue
    fastest = min(taken, key=taken.__getitem__)
    return partial(attend, fastest), f"RoPE + SDPA ({fastest.name.split('_')[0].lower()})"
