"""PyTorch's fused scaled-dot-product kernels, with their log-sum-exp.

A region of whole rows is a few bands, and a band is one kernel: all pairs, or a lower triangle (far keys are one,
moved down by the window), or on a GPU a band as FlashAttention has it. Everything else goes in row chunks against the
keys the rows may see, with a mask for the chunk alone, so memory stays linear.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from isentrope.backends import merge
from isentrope.backends.merge import Kernel, Part, lengthened
from isentrope.core.call import FoldedBranch
from isentrope.core.compile import cuda_capability_major
from isentrope.core.dtypes import accumulation_dtype
from isentrope.core.region import Band

aten = torch.ops.aten

MAX_HEAD_DIM = 256
CUDNN = torch.backends.cudnn.version() or 0
ALL = Band(0, 0, 0, 0, inf, inf)  # what is seen is in the mask
# entries of a chunk's mask held at once, and rows of a chunk: in more of them a band leaves more to mask
MASK_ENTRIES = 1 << 23
ROWS = 512


def refusal(branches: list[FoldedBranch]) -> str | None:
    q, v = branches[0].q, branches[0].v
    if max(q.shape[-1], v.shape[-1]) > MAX_HEAD_DIM:
        return f"fused kernels take head sizes up to {MAX_HEAD_DIM}, got {q.shape[-1]} and {v.shape[-1]}; use 'chunked'"
    if q.device.type not in ("cpu", "cuda"):
        return f"its kernels with a log-sum-exp are known on cpu and cuda, got {q.device.type}; use 'chunked'"
    if q.is_cuda and q.dtype == torch.float64:
        return "no fused kernel takes float64 on a GPU; use 'chunked'"
    if q.is_cuda and q.dtype != torch.float32 and any(branch.slopes is not None for branch in branches):
        return f"a distance bias would be rounded to {q.dtype}; use 'flex' or 'chunked'"
    return None


def attend(branches: list[FoldedBranch], need_lse: bool) -> tuple[Tensor, Tensor | None]:
    branch = branches[0]
    if len(branches) == 1 and not need_lse and _whole(branch):
        out = F.scaled_dot_product_attention(
            branch.q, branch.k, branch.v, is_causal=branch.causal, scale=branch.scale, enable_gqa=branch.groups > 1
        )
        return out, None
    return merge.attend(KERNEL, branches)


def _whole(branch: FoldedBranch) -> bool:
    """Whether PyTorch's own function takes it, and has a kernel for it that makes no table of all pairs."""
    q, k, v = branch.q, branch.k, branch.v
    if (
        branch.slopes is not None
        or not (branch.everything or branch.causal)
        or any(x.stride(-1) != 1 for x in (q, k, v))
    ):
        return False
    alike = q.shape[-1] == v.shape[-1]
    return (branch.groups == 1 or (alike and q.dtype != torch.float32)) if q.is_cuda else alike


def fused(branch: FoldedBranch) -> bool:
    """Whether a GPU needs no mask: whole rows in half precision, bands that kernels have, no bias."""
    return _half(branch) and all(_shape(part) is not None for part in branch.split())


def triangular(branch: FoldedBranch) -> bool:
    """Whether a GPU's fastest kernels have it: the same, all pairs or lower triangles."""
    bands = [_shape(part) for part in branch.split()] if _half(branch) else [None]
    return all(band is not None and (band.full or band.causal) for band in bands)


def _half(branch: FoldedBranch) -> bool:
    """What FlashAttention takes at all."""
    size, kind = max(branch.q.shape[-1], branch.v.shape[-1]), branch.q.dtype
    able = branch.q.is_cuda and kind in (torch.float16, torch.bfloat16) and cuda_capability_major(branch.q.device) >= 8
    return able and size % 8 == 0 and size <= MAX_HEAD_DIM


class Tile(NamedTuple):
    """A rectangle of queries and keys: with an additive mask, or one of the shapes that kernels know."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    band: Band
    scale: float


class SDPA(Kernel):
    """One branch through fused kernels. All heads are materialised and all head sizes made equal with zeros."""

    def forward(self, branch: FoldedBranch) -> Part:
        if (band := _shape(branch)) is not None:
            out, lse = _forward(_tile(branch, band))
            return Part(out[..., : branch.v.shape[-1]], lse, band.first)
        out = branch.v.new_zeros(*branch.q.shape[:-1], branch.v.shape[-1])
        lse = torch.full(branch.q.shape[:-1], -inf, dtype=accumulation_dtype(branch.q), device=branch.q.device)
        for rows, _, tile in _masked(branch):
            o, tile_lse = _forward(tile)
            out[:, :, rows], lse[:, :, rows] = o[..., : out.shape[-1]], tile_lse
        blind = branch.seen == 0
        return Part(out.masked_fill_(blind[..., None], 0), lse.masked_fill_(blind, -inf))

    def backward(self, branch: FoldedBranch, grad: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        heads, size = branch.q.shape[1], max(branch.q.shape[-1], branch.v.shape[-1])
        # weights e^{s - lse} of a query that sees no key are made 0 by its mask, whatever finite number stands here
        lse = torch.where(lse == -inf, 0.0, lse)
        if (band := _shape(branch)) is not None:
            rows = slice(band.first, band.last)
            g, o = (_pad(x[:, :, rows], size) for x in (grad, out))
            tq, tk, tv = _backward(_tile(branch, band), g, o, lse[:, :, rows])
            dq = lengthened(tq[..., : branch.q.shape[-1]], band.first, branch.q.shape[2])
            dk, dv = (lengthened(x, band.begin, branch.k.shape[2]) for x in (tk, tv))
            return dq, _gather(dk[..., : branch.k.shape[-1]], branch), _gather(dv[..., : branch.v.shape[-1]], branch)
        # every tile adds to dk and dv: sums are kept wide
        dq = torch.zeros_like(branch.q, dtype=lse.dtype)
        dk, dv = (x.new_zeros(x.shape[0], heads, *x.shape[2:], dtype=lse.dtype) for x in (branch.k, branch.v))
        for rows, columns, tile in _masked(branch):
            g, o = (_pad(x[:, :, rows], size) for x in (grad, out))
            tq, tk, tv = _backward(tile, g, o, lse[:, :, rows])
            dq[:, :, rows] += tq[..., : dq.shape[-1]]
            dk[:, :, columns] += tk[..., : dk.shape[-1]]
            dv[:, :, columns] += tv[..., : dv.shape[-1]]
        return dq.to(branch.q.dtype), _gather(dk, branch).to(branch.k.dtype), _gather(dv, branch).to(branch.v.dtype)


KERNEL = SDPA()


def _spread(x: Tensor, branch: FoldedBranch) -> Tensor:
    return x if branch.groups == 1 else x.repeat_interleave(branch.groups, 1)


def _gather(x: Tensor, branch: FoldedBranch) -> Tensor:
    return x if branch.groups == 1 else x.unflatten(1, (branch.k.shape[1], branch.groups)).sum(2)


def _pad(x: Tensor, size: int) -> Tensor:
    """x with zeros up to the size, and entries of a vector next to each other: the kernels do not look."""
    x = F.pad(x, (0, size - x.shape[-1])) if x.shape[-1] < size else x
    return x if x.stride(-1) == 1 else x.contiguous()


def _operands(branch: FoldedBranch) -> tuple[Tensor, Tensor, Tensor]:
    size = max(branch.q.shape[-1], branch.v.shape[-1])
    return _pad(branch.q, size), _pad(_spread(branch.k, branch), size), _pad(_spread(branch.v, branch), size)


def _shape(branch: FoldedBranch) -> Band | None:
    """The band that a call is, where a kernel has it."""
    if branch.slopes is not None or not branch.layout.plain or len(branch.region.spans) != 1:
        return None
    queries, keys = branch.layout.queries, branch.layout.keys
    if torch.compiler.is_compiling():  # in a graph a length may be a variable, of which only whole regions are known
        whole = Band(0, queries, 0, keys, inf, 0 if branch.causal else inf)
        return whole if branch.everything or branch.causal else None
    band = branch.region.spans[0].to_band(queries, keys)
    if band is None or band.full or band.causal:
        return band
    # FlashAttention takes a right side as long as the keys for none, also where the queries are more
    return band if _half(branch) and (band.right == inf or band.right < band.end - band.begin) else None


def _tile(branch: FoldedBranch, band: Band) -> Tile:
    q, k, v = _operands(branch)
    k, v = (x[:, :, band.begin : band.end] for x in (k, v))
    return Tile(q[:, :, band.first : band.last], k, v, None, band, branch.scale)


def _masked(branch: FoldedBranch) -> Iterator[tuple[slice, slice, Tile]]:
    """The rows of a call in chunks, each with the keys it may see and their mask."""
    q, k, v = _operands(branch)
    queries, keys = q.shape[2], k.shape[2]
    copies = (branch.bounds[0].shape[0]) * (1 if branch.slopes is None else q.shape[1])
    step = max(1, min(ROWS, MASK_ENTRIES // max(1, copies * keys)))
    if queries <= step and not branch.layout.banded:  # no numbers in slices: a compiled length may stay a variable
        yield slice(None), slice(None), Tile(q, k, v, _additive(branch, None, None), ALL, branch.scale)
        return
    for first in range(0, queries, step):
        rows = slice(first, min(first + step, queries))
        low, high = branch.layout.key_range(branch.region, rows.start, rows.stop)
        if low < high:
            columns = slice(low, high)
            mask = _additive(branch, rows, columns)
            yield rows, columns, Tile(q[:, :, rows], k[:, :, columns], v[:, :, columns], mask, ALL, branch.scale)


def _additive(branch: FoldedBranch, rows: slice | None, columns: slice | None) -> Tensor:
    """0 where a pair is visible (or its distance bias), -inf where it is not."""
    visible = branch.mask(rows, columns)
    bias = branch.bias(rows, columns)
    width = visible.shape[-1]
    # GPU kernels read the mask in aligned vectors: give rows a padded stride
    stride = -(-width // 16) * 16
    # the first call of torch.broadcast_shapes imports half of torch, for seconds
    shape = visible.shape if bias is None else torch.broadcast_tensors(visible, bias)[0].shape
    # a distance bias has more digits than half precision; the CPU kernel takes it as it is
    dtype = branch.q.dtype if bias is None else accumulation_dtype(branch.q)
    mask = branch.q.new_zeros(*shape[:-1], stride, dtype=dtype)[..., :width]
    if bias is not None:
        mask.copy_(bias)
    return mask.masked_fill_(~visible, -torch.inf)


def _forward(tile: Tile) -> tuple[Tensor, Tensor]:
    q, k, v, bias, band, scale = tile
    if not q.is_cuda:
        return aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, is_causal=band.causal, attn_mask=_expanded(bias, q, k), scale=scale
        )
    if _cudnn(tile):
        out, lse, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, band.causal, scale=scale)
        return out, lse.reshape(q.shape[:-1])
    if _flash(tile):
        out, lse, *_ = aten._flash_attention_forward(
            *(x.transpose(1, 2) for x in (q, k, v)), None, None, q.shape[2], k.shape[2], 0.0, False, False,
            scale=scale, **_sides(band),
        )  # fmt: skip
        return out.transpose(1, 2), lse
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(
        q, k, v, _expanded(bias, q, k), True, 0.0, band.causal, scale=scale
    )
    return out, lse[..., : q.shape[2]]


def _backward(tile: Tile, grad: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, bias, band, scale = tile
    if not q.is_cuda:
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse.contiguous(), 0.0, band.causal, attn_mask=_expanded(bias, q, k), scale=scale
        )
    seed = torch.zeros((), dtype=torch.int64, device=q.device)
    if _cudnn(tile):
        return aten._scaled_dot_product_cudnn_attention_backward(
            grad, q, k, v, out, lse[..., None].contiguous(), seed, seed, None, None, None,
            q.shape[2], k.shape[2], 0.0, band.causal, scale=scale,
        )  # fmt: skip
    if _flash(tile):
        grads = aten._flash_attention_backward(
            *(x.transpose(1, 2) for x in (grad, q, k, v, out)), lse.contiguous(), None, None,
            q.shape[2], k.shape[2], 0.0, False, seed, seed, scale=scale, **_sides(band),
        )  # fmt: skip
        return tuple(x.transpose(1, 2) for x in grads)
    # that kernel keeps its log-sum-exp in rows of 32, and reads outputs as (batch, queries, heads, size) whatever their
    # strides say
    lse = F.pad(lse, (0, -lse.shape[-1] % 32), value=inf)
    grad, out = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (grad, out))
    dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
        grad, q, k, v, _expanded(bias, q, k), out, lse, seed, seed, 0.0, [True, True, True, False], band.causal,
        scale=scale,
    )  # fmt: skip
    return dq, dk, dv


def _cudnn(tile: Tile) -> bool:
    """On Hopper and later the fastest for what it knows. Keys that grow by one from call to call would have it make a
    plan for each."""
    known = tile.bias is None and (tile.band.full or tile.band.causal) and min(tile.q.shape[2], tile.k.shape[2]) > 1
    return (
        known and tile.q.dtype != torch.float32 and _cudnn_takes(tile.q.shape[-1], cuda_capability_major(tile.q.device))
    )


def _cudnn_takes(size: int, cuda_capability_major: int) -> bool:
    """Vectors of this size, as PyTorch looks at it before it branches cuDNN itself."""
    most = 256 if cuda_capability_major == 9 and CUDNN >= 91000 else 128
    return cuda_capability_major >= 9 and torch.version.hip is None and size % 8 == 0 and size <= most


def _flash(tile: Tile) -> bool:
    able = tile.bias is None and tile.q.dtype != torch.float32 and tile.q.shape[-1] % 8 == 0
    return able and cuda_capability_major(tile.q.device) >= 8


def _sides(band: Band) -> dict[str, int]:
    """FlashAttention's window: -1 for no bound."""
    left, right = (-1 if side == inf else int(side) for side in (band.left, band.right))
    return {"window_size_left": left, "window_size_right": right}


def _expanded(bias: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    return None if bias is None else bias.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
