"""PyTorch's fused scaled-dot-product kernels, with their log-sum-exp.

Plain attention is one kernel call. Everything else goes in row chunks against the keys the rows may see, with a mask
for the chunk alone, so memory stays linear.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from isentrope.backends import merge
from isentrope.backends.call import Call
from isentrope.precision import wide

aten = torch.ops.aten

MOST_HEAD_DIM = 256
# entries of a chunk's mask held at once, and rows of a chunk: in more of them a band leaves more to mask
MASK_ENTRIES = 1 << 23
ROWS = 512


def refusal(calls: list[Call]) -> str | None:
    q, v = calls[0].q, calls[0].v
    if max(q.shape[-1], v.shape[-1]) > MOST_HEAD_DIM:
        return (
            f"fused kernels take head sizes up to {MOST_HEAD_DIM}, got {q.shape[-1]} and {v.shape[-1]}; use 'chunked'"
        )
    if q.device.type not in ("cpu", "cuda"):
        return f"its kernels with a log-sum-exp are known on cpu and cuda, got {q.device.type}; use 'chunked'"
    if q.is_cuda and q.dtype == torch.float64:
        return "no fused kernel takes float64 on a GPU; use 'chunked'"
    if q.is_cuda and q.dtype != torch.float32 and any(call.slopes is not None for call in calls):
        return f"a distance bias would be rounded to {q.dtype}; use 'flex' or 'chunked'"
    return None


def attend(calls: list[Call], need_lse: bool) -> tuple[Tensor, Tensor | None]:
    call = calls[0]
    if len(calls) == 1 and not need_lse and call.slopes is None and (call.everything or call.causal):
        out = F.scaled_dot_product_attention(
            call.q, call.k, call.v, is_causal=call.causal, scale=call.scale, enable_gqa=call.groups > 1
        )
        return out, None
    return merge.attend(KERNEL, calls)


class Tile(NamedTuple):
    """A rectangle of queries and keys: unmasked, the causal triangle, or with an additive mask."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    causal: bool
    scale: float


class SDPA:
    """One branch through fused kernels. All heads are materialised and all head sizes made equal with zeros."""

    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        out = call.v.new_zeros(*call.q.shape[:-1], call.v.shape[-1])
        lse = torch.full(call.q.shape[:-1], -torch.inf, dtype=wide(call.q), device=call.q.device)
        for rows, _, tile in _tiles(call):
            o, branch = _forward(tile)
            out[:, :, rows], lse[:, :, rows] = o[..., : out.shape[-1]], branch
        if call.everything or call.causal or (call.q.shape[2] == 1 and call.layout.plain):
            return out, lse
        blind = call.seen == 0
        return out.masked_fill_(blind[..., None], 0), lse.masked_fill_(blind, -torch.inf)

    def backward(self, call: Call, grad: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        heads = call.q.shape[1]
        # every tile adds to dk and dv: sums are kept wide
        dq = torch.zeros_like(call.q, dtype=lse.dtype)
        dk, dv = (x.new_zeros(x.shape[0], heads, *x.shape[2:], dtype=lse.dtype) for x in (call.k, call.v))
        size = max(call.q.shape[-1], call.v.shape[-1])
        # weights e^{s - lse} of a query that sees no key are made 0 by its mask, whatever finite number stands here
        lse = torch.where(lse == -torch.inf, 0.0, lse)
        for rows, columns, tile in _tiles(call):
            g, o = (_pad(x[:, :, rows], size) for x in (grad, out))
            tq, tk, tv = _backward(tile, g, o, lse[:, :, rows])
            dq[:, :, rows] += tq[..., : dq.shape[-1]]
            dk[:, :, columns] += tk[..., : dk.shape[-1]]
            dv[:, :, columns] += tv[..., : dv.shape[-1]]
        return dq.to(call.q.dtype), _gather(dk, call).to(call.k.dtype), _gather(dv, call).to(call.v.dtype)


KERNEL = SDPA()


def _spread(x: Tensor, call: Call) -> Tensor:
    return x if call.groups == 1 else x.repeat_interleave(call.groups, 1)


def _gather(x: Tensor, call: Call) -> Tensor:
    return x if call.groups == 1 else x.unflatten(1, (call.k.shape[1], call.groups)).sum(2)


def _pad(x: Tensor, size: int) -> Tensor:
    """x with zeros up to the size, and entries of a vector next to each other: the kernels do not look."""
    x = F.pad(x, (0, size - x.shape[-1])) if x.shape[-1] < size else x
    return x if x.stride(-1) == 1 else x.contiguous()


def _tiles(call: Call) -> Iterator[tuple[slice, slice, Tile]]:
    size = max(call.q.shape[-1], call.v.shape[-1])
    q, k, v = _pad(call.q, size), _pad(_spread(call.k, call), size), _pad(_spread(call.v, call), size)
    queries, keys = q.shape[2], k.shape[2]
    if call.slopes is None and (call.everything or call.causal):
        yield slice(0, queries), slice(0, keys), Tile(q, k, v, None, call.causal, call.scale)
        return
    if queries == 1 and call.slopes is None and call.layout.plain and len(call.region.spans) == 1:
        low, high = call.layout.key_range(call.region, 0, 1)  # exactly what the one query sees
        if low < high:
            yield slice(None), slice(low, high), Tile(q, k[:, :, low:high], v[:, :, low:high], None, False, call.scale)
        return
    copies = (call.bounds[0].shape[0]) * (1 if call.slopes is None else q.shape[1])
    step = max(1, min(ROWS, MASK_ENTRIES // max(1, copies * keys)))
    if queries <= step and not call.layout.banded:  # no numbers in slices: a compiled length may stay a variable
        yield slice(None), slice(None), Tile(q, k, v, _additive(call, None, None), False, call.scale)
        return
    for first in range(0, queries, step):
        rows = slice(first, min(first + step, queries))
        low, high = call.layout.key_range(call.region, rows.start, rows.stop)
        if low < high:
            columns = slice(low, high)
            tile = Tile(
                q[:, :, rows], k[:, :, columns], v[:, :, columns], _additive(call, rows, columns), False, call.scale
            )
            yield rows, columns, tile


def _additive(call: Call, rows: slice | None, columns: slice | None) -> Tensor:
    """0 where a pair is visible (or its distance bias), -inf where it is not."""
    visible = call.mask(rows, columns)
    bias = call.bias(rows, columns)
    width = visible.shape[-1]
    # GPU kernels read the mask in aligned vectors: give rows a padded stride
    stride = -(-width // 16) * 16
    shape = torch.broadcast_shapes(visible.shape, () if bias is None else bias.shape)
    # a distance bias has more digits than half precision; the CPU kernel takes it as it is
    dtype = call.q.dtype if bias is None else wide(call.q)
    mask = call.q.new_zeros(*shape[:-1], stride, dtype=dtype)[..., :width]
    if bias is not None:
        mask.copy_(bias)
    return mask.masked_fill_(~visible, -torch.inf)


def _forward(tile: Tile) -> tuple[Tensor, Tensor]:
    q, k, v, bias, causal, scale = tile
    if not q.is_cuda:
        return aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, is_causal=causal, attn_mask=_expanded(bias, q, k), scale=scale
        )
    if bias is None and q.dtype != torch.float32 and q.shape[2] == 1 and q.shape[-1] % 8 == 0:
        # keys that grow by one from call to call would have cuDNN make a plan for each
        out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)
        return out, lse
    if bias is None and q.dtype != torch.float32:
        out, lse, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, scale=scale)
        return out, lse.reshape(q.shape[:-1])
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(
        q, k, v, _expanded(bias, q, k), True, 0.0, causal, scale=scale
    )
    return out, lse[..., : q.shape[2]]


def _backward(tile: Tile, grad: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, bias, causal, scale = tile
    if not q.is_cuda:
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse.contiguous(), 0.0, causal, attn_mask=_expanded(bias, q, k), scale=scale
        )
    seed = torch.zeros((), dtype=torch.int64, device=q.device)
    if bias is None and q.dtype != torch.float32:
        return aten._scaled_dot_product_cudnn_attention_backward(
            grad, q, k, v, out, lse[..., None].contiguous(), seed, seed, None, None, None,
            q.shape[2], k.shape[2], 0.0, causal, scale=scale,
        )  # fmt: skip
    # that kernel keeps its log-sum-exp in rows of 32, and reads outputs as (batch, queries, heads, size) whatever their
    # strides say
    lse = F.pad(lse, (0, -lse.shape[-1] % 32), value=torch.inf)
    grad, out = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (grad, out))
    dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
        grad, q, k, v, _expanded(bias, q, k), out, lse, seed, seed, 0.0, [True, True, True, False], causal, scale=scale
    )
    return dq, dk, dv


def _expanded(bias: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    return None if bias is None else bias.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
