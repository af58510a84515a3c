"""One rectangle of queries and keys on the fastest fused kernel of PyTorch that takes it, with its log-sum-exp."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from isentrope.core.compile import cuda_capability_major
from isentrope.core.region import Band

aten = torch.ops.aten

CUDNN = torch.backends.cudnn.version() or 0
GROUPED_SIZE_MULTIPLE = 32  # of vectors whose heads kernels share
ALL_PAIRS = Band(0, 0, 0, 0, inf, inf)  # of a tile with a mask


class Tile(NamedTuple):
    """A rectangle of queries and keys: with an additive mask, or a band that kernels support.

    k and v may have fewer heads than q where `takes_fewer_key_heads`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    band: Band
    scale: float


def forward_tile(tile: Tile) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp of a tile."""
    q, k, v, bias, band, scale = tile
    if bias is not None:
        return forward_masked(q, k, v, expand_mask(bias, q, k), scale)
    if band.anticausal and (not q.is_cuda or _takes_cudnn(tile)):
        out, lse = forward_tile(_turn_around(tile))
        return out.flip(2), lse.flip(2)
    if not q.is_cuda:
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, is_causal=band.causal, scale=scale)
    if _takes_cudnn(tile):
        out, lse, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, band.causal, scale=scale)
        return out, lse.squeeze(-1)
    if _tile_takes_flash(tile):
        out, lse, *_ = aten._flash_attention_forward(
            *(x.transpose(1, 2) for x in (q, k, v)), None, None, q.shape[2], k.shape[2], 0.0, False, False,
            scale=scale, **_window_sizes(band),
        )  # fmt: skip
        return out.transpose(1, 2), lse
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, band.causal, scale=scale)
    return out, lse[..., : q.shape[2]]


def forward_masked(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp of all pairs under a mask of every row and head."""
    if not q.is_cuda:
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=bias, scale=scale)
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, 0.0, False, scale=scale)
    return out, lse[..., : q.shape[2]]


def backward_tile(tile: Tile, grad: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv of a tile, from the merged gradient, output and log-sum-exp."""
    q, k, v, _, band, scale = tile
    if not q.is_cuda:
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse.contiguous(), 0.0, band.causal, attn_mask=_expand_bias(tile), scale=scale
        )
    seed = torch.zeros((), dtype=torch.int64, device=q.device)
    if _takes_cudnn(tile) and not band.anticausal:
        # PyTorch keeps cuDNN's graphs by the strides of q, k and v alone: outputs in another order would be misread
        grad, out = (_match_strides(x, q) for x in (grad, out))
        return aten._scaled_dot_product_cudnn_attention_backward(
            grad, q, k, v, out, lse[..., None].contiguous(), seed, seed, None, None, None,
            q.shape[2], k.shape[2], 0.0, band.causal, scale=scale,
        )  # fmt: skip
    if _tile_takes_flash(tile):
        grads = aten._flash_attention_backward(
            *(x.transpose(1, 2) for x in (grad, q, k, v, out)), lse.contiguous(), None, None,
            q.shape[2], k.shape[2], 0.0, False, seed, seed, scale=scale, **_window_sizes(band),
        )  # fmt: skip
        return tuple(x.transpose(1, 2) for x in grads)
    # that kernel keeps its log-sum-exp in rows of 32, and reads outputs as (batch, queries, heads, size) whatever their
    # strides say
    lse = F.pad(lse, (0, -lse.shape[-1] % 32), value=inf)
    grad, out = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (grad, out))
    dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
        grad, q, k, v, _expand_bias(tile), out, lse, seed, seed, 0.0, [True, True, True, False], band.causal,
        scale=scale,
    )  # fmt: skip
    return dq, dk, dv


def _match_strides(x: Tensor, q: Tensor) -> Tensor:
    """Return x (batch, heads, queries, size) with the strides that an output for queries q has."""
    like = torch.empty_like(q)
    if x.stride() == like.stride():
        return x
    if len(x) == 1 and x.stride()[1:] == like.stride()[1:]:  # that of a single row may be any
        return x.as_strided(x.shape, like.stride())
    return like.copy_(x)


def _turn_around(tile: Tile) -> Tile:
    """Return an upper triangle with queries and keys in reverse, a lower one: the fastest kernels have only that."""
    return Tile(tile.q.flip(2), tile.k.flip(2), tile.v.flip(2), None, replace(tile.band, left=inf, right=0), tile.scale)


def takes_fewer_key_heads(tile: Tile) -> bool:
    """Return whether the kernel of a tile lets query heads share key heads: cuDNN and FlashAttention do.

    PyTorch's own function hands them such keys as they are, forward and backward. Used only where a GPU has
    tested it: several queries, head sizes in whole blocks.
    """
    tested = min(tile.q.shape[2], tile.k.shape[2]) > 1 and tile.q.shape[-1] % GROUPED_SIZE_MULTIPLE == 0
    fused = tile.q.is_cuda and torch.version.hip is None and (_takes_cudnn(tile) or _tile_takes_flash(tile))
    return tested and fused


def _takes_cudnn(tile: Tile) -> bool:
    """Return whether cuDNN takes a tile, the fastest since Hopper; not for one query, as it plans each length anew."""
    q, k, band = tile.q, tile.k, tile.band
    known = tile.bias is None and (band.full or band.causal or band.anticausal) and min(q.shape[2], k.shape[2]) > 1
    return known and q.dtype != torch.float32 and _cudnn_takes(q.shape[-1], cuda_capability_major(q.device))


def _cudnn_takes(size: int, capability: int) -> bool:
    """Return whether PyTorch itself would call cuDNN with vectors of this size."""
    max_size = 256 if capability == 9 and CUDNN >= 91000 else 128
    return capability >= 9 and torch.version.hip is None and size % 8 == 0 and size <= max_size


def _tile_takes_flash(tile: Tile) -> bool:
    half = tile.bias is None and tile.q.dtype != torch.float32 and tile.q.shape[-1] % 8 == 0
    return half and cuda_capability_major(tile.q.device) >= 8


def _window_sizes(band: Band) -> dict[str, int]:
    """Return FlashAttention's window, -1 for no bound."""
    left, right = (-1 if side == inf else int(side) for side in (band.left, band.right))
    return {"window_size_left": left, "window_size_right": right}


def expand_mask(bias: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Return a mask of every row and head, which kernels take."""
    shape = q.shape[0], q.shape[1], q.shape[2], k.shape[2]
    return bias if bias.shape == shape else bias.expand(shape)


def _expand_bias(tile: Tile) -> Tensor | None:
    return None if tile.bias is None else expand_mask(tile.bias, tile.q, tile.k)
