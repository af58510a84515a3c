"""Tiles of a band on a CPU: kernels for all pairs and for triangles, and one small mask for all groups of a band."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from isentrope.backends.merge import PartialOutput, merge_into
from isentrope.core.band_tiles import BandTile, find_band_tiles
from isentrope.core.call import FoldedBranch
from isentrope.core.dtypes import accumulation_dtype

aten = torch.ops.aten


class Operands(NamedTuple):
    """Queries, keys and values with equal head sizes; query heads may share key heads where all tiles are full."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float


def tiles_on_cpu(branch: FoldedBranch) -> list[BandTile] | None:
    """Return the tiles that a branch is on a CPU; None for any other branch or device."""
    if branch.q.device.type != "cpu" or branch.biased or branch.chosen is not None:
        return None
    return find_band_tiles(branch.region, branch.layout)


def forward_tiles(branch: FoldedBranch, operands: Operands, tiles: list[BandTile]) -> PartialOutput:
    """Compute the tiles of a branch, merged by log-sum-exp where several have the same queries."""
    size = branch.v.shape[-1]
    if len(tiles) == 1 and tiles[0].batch == slice(None) and tiles[0].repeats == 1:
        out, lse = _forward(tiles[0], operands, _make_mask(tiles[0], branch))
        return PartialOutput(out[..., :size], lse, tiles[0].first)
    q = operands.q
    make = branch.v.new_empty if _cover_all(tiles, q) else branch.v.new_zeros
    out = make(*q.shape[:-1], size)
    lse = torch.full(q.shape[:-1], -inf, dtype=accumulation_dtype(q), device=q.device)
    for tile in tiles:
        mask = _make_mask(tile, branch)
        if tile.repeats > 1:
            batch = range(*tile.batch.indices(q.shape[0]))
            parts = [(slice(row, row + 1), *_forward_groups(tile, operands, row, mask)) for row in batch]
        else:
            parts = [(tile.batch, *_forward(tile, operands, mask))]
        for some, tile_out, tile_lse in parts:
            o, total = (x[some, :, tile.first : tile.last] for x in (out, lse))
            if tile.adds:
                merge_into(o, total, tile_out[..., :size], tile_lse)
            else:
                o.copy_(tile_out[..., :size])
                total.copy_(tile_lse)
    return PartialOutput(out, lse)


def _cover_all(tiles: list[BandTile], q: Tensor) -> bool:
    """Return whether every query is in a tile that writes its output, rather than adding to what is there."""
    covered = sum(
        len(range(*tile.batch.indices(q.shape[0]))) * (tile.last - tile.first) for tile in tiles if not tile.adds
    )
    return covered == q.shape[0] * q.shape[2]


def backward_tiles(
    branch: FoldedBranch, operands: Operands, tiles: list[BandTile], outputs: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv of all heads, from the merged gradient, output and (finite) log-sum-exp."""
    dq, dk, dv = (torch.zeros_like(x, dtype=outputs[2].dtype) for x in operands[:3])
    for tile in tiles:
        mask, some = _make_mask(tile, branch), tile.batch
        for part in _split(tile):
            rows, columns = slice(part.first, part.last), slice(part.begin, part.begin + part.columns)
            flip = part.kind == "upper"
            q, grad, out, lse = (_take(x, some, rows, flip) for x in (operands.q, *outputs))
            k, v = (_take(x, some, columns, flip) for x in operands[1:3])
            gradients = aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad, q, k, v, out, lse.contiguous(), 0.0, part.kind in ("lower", "upper"),
                attn_mask=_expand(mask, q), scale=operands.scale,
            )  # fmt: skip
            for total, gradient, place in zip((dq, dk, dv), gradients, (rows, columns, columns), strict=True):
                total[some, :, place] += gradient.flip(2) if flip else gradient
    return dq, dk, dv


def _split(tile: BandTile) -> Iterator[BandTile]:
    """Yield the groups of a tile one by one: gradients of keys that they share are added up."""
    for step in range(0, tile.repeats * tile.rows, tile.rows):
        yield tile._replace(first=tile.first + step, begin=tile.begin + step, repeats=1)


def _take(x: Tensor, some: slice, part: slice, flip: bool) -> Tensor:
    return x[some, :, part].flip(2) if flip else x[some, :, part]


def _expand(mask: Tensor | None, q: Tensor) -> Tensor | None:
    return None if mask is None else mask.expand(*q.shape[:3], -1)


def _forward(tile: BandTile, operands: Operands, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute one tile: backwards, an upper triangle is a lower one."""
    flip = tile.kind == "upper"
    q = _take(operands.q, tile.batch, slice(tile.first, tile.last), flip)
    k, v = (_take(x, tile.batch, slice(tile.begin, tile.begin + tile.columns), flip) for x in operands[1:3])
    shape = q.shape[:3]
    if shape[1] != k.shape[1]:  # queries of heads that share keys are rows of one head
        q = q.reshape(shape[0], k.shape[1], -1, q.shape[3])
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, is_causal=tile.kind in ("lower", "upper"), attn_mask=_expand(mask, q), scale=operands.scale
    )
    if q.shape[:3] != shape:
        out, lse = out.reshape(*shape, -1), lse.reshape(shape)
    return (out.flip(2), lse.flip(2)) if flip else (out, lse)


def _forward_groups(tile: BandTile, operands: Operands, row: int, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute the groups of a band in one row of the batch, as a batch of views that share keys."""
    q = _view_groups(operands.q[row], tile.first, tile.rows, tile)
    k, v = (_view_groups(x[row], tile.begin, tile.columns, tile) for x in operands[1:3])
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, attn_mask=_expand(mask, q), scale=operands.scale
    )
    return out.transpose(0, 1).flatten(1, 2)[None], lse.transpose(0, 1).flatten(1, 2)[None]


def _view_groups(x: Tensor, first: int, size: int, tile: BandTile) -> Tensor:
    """Return a tensor (heads, length, d) by group, (groups, heads, size, d), without a copy."""
    last = first + (tile.repeats - 1) * tile.rows + size
    return x[:, first:last].unfold(1, size, tile.rows).permute(1, 0, 3, 2)


def _make_mask(tile: BandTile, branch: FoldedBranch) -> Tensor | None:
    """Return 0 where query r of a group sees a key, and -inf elsewhere, (rows, columns); None without a band."""
    if tile.kind != "band":
        return None
    dtype, device = branch.q.dtype, branch.q.device

    def make() -> Tensor:
        ahead = torch.arange(tile.columns, device=device) - torch.arange(tile.rows, device=device)[:, None] + tile.lead
        hidden = (ahead < 0) | (ahead >= tile.width)
        return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -inf)

    return branch.layout.cached(("band mask", tile.rows, tile.columns, tile.width, tile.lead, dtype), make)
