"""Tiles of a band on a CPU: kernels for all pairs and for triangles, and one small mask for all groups of a band."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from isentrope.backends.merge import PartialOutput, merge_into
from isentrope.core.band_tiles import BandTile, find_band_tiles
from isentrope.core.call import FoldedBranch
from isentrope.core.dtypes import accumulation_dtype

aten = torch.ops.aten
MIN_ROW_QUERIES = 64  # of a triangle in each row of a batch, for a call of its own


class Operands(NamedTuple):
    """Queries, keys and values with equal head sizes; query heads may share key heads in a forward pass."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float


class TilePart(NamedTuple):
    """Outputs of a tile, or of one row of it, as a kernel arranged them.

    arrange: returns a view of a tensor (batch, heads, queries of the tile, …) in the shape of these outputs.
    """

    arrange: Callable[[Tensor], Tensor]
    out: Tensor
    lse: Tensor


def tiles_on_cpu(branch: FoldedBranch, sharing: int = 1) -> list[BandTile] | None:
    """Return the tiles that a branch is on a CPU; None for any other branch or device.

    Args:
        sharing: how many heads are rows of one product.
    """
    if branch.q.device.type != "cpu" or branch.biased or branch.chosen is not None:
        return None
    return find_band_tiles(branch.region, branch.layout, sharing)


def forward_tiles(branch: FoldedBranch, operands: Operands, tiles: list[BandTile]) -> PartialOutput:
    """Compute the tiles of a branch, merged by log-sum-exp where several have the same queries."""
    q, size = operands.q, branch.v.shape[-1]
    alone = tiles[0] if len(tiles) == 1 and tiles[0].batch == slice(None) else None
    if alone is not None and alone.repeats == branch.groups == 1:
        _, out, lse = next(_forward(alone, operands, _make_mask(alone, branch)))
        return PartialOutput(out[..., :size], lse, alone.first)
    begin, count = (0, q.shape[2]) if alone is None else (alone.first, alone.last - alone.first)
    shape = *q.shape[:2], count
    make = branch.v.new_empty if _cover_all(tiles, q.shape[0], count) else branch.v.new_zeros
    out, lse = make(*shape, size), torch.full(shape, -inf, dtype=accumulation_dtype(q), device=q.device)
    for tile in tiles:
        o, total = (x[tile.batch, :, tile.first - begin : tile.last - begin] for x in (out, lse))
        for part in _forward(tile, operands, _make_mask(tile, branch)):
            if tile.adds:
                merge_into(part.arrange(o), part.arrange(total), part.out[..., :size], part.lse)
            else:
                part.arrange(o).copy_(part.out[..., :size])
                part.arrange(total).copy_(part.lse)
    return PartialOutput(out, lse, begin)


def _cover_all(tiles: list[BandTile], rows: int, count: int) -> bool:
    """Return whether every query is in a tile that writes its output, rather than adding to what is there."""
    covered = sum(len(range(*tile.batch.indices(rows))) * (tile.last - tile.first) for tile in tiles if not tile.adds)
    return covered == rows * count


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


def _forward(tile: BandTile, operands: Operands, mask: Tensor | None) -> Iterator[TilePart]:
    """Yield the outputs of a tile: of all its rows, or one row after the other.

    Heads that share keys are rows of one product, or in triangles see views of their keys, which are repeated for
    short rows alone.
    """
    key_heads, scale = operands.k.shape[1], operands.scale
    heads = key_heads, operands.q.shape[1] // key_heads  # and how many share each
    causal = tile.kind in ("lower", "upper")
    mask = mask if mask is None or heads[1] == 1 else mask.repeat(heads[1], 1)
    if tile.repeats > 1:
        for place, row in enumerate(range(*tile.batch.indices(operands.q.shape[0]))):
            outputs = _attend_groups(tile, operands, row, heads, mask)
            yield TilePart(partial(_take_groups, place, heads, tile), *outputs)
        return
    flip = tile.kind == "upper"
    q = _take(operands.q, tile.batch, slice(tile.first, tile.last), flip)
    k, v = (_take(x, tile.batch, slice(tile.begin, tile.begin + tile.columns), flip) for x in operands[1:3])
    if heads[1] == 1 or (causal and len(q) > 1 and tile.rows < MIN_ROW_QUERIES):
        k, v = (x if heads[1] == 1 else x.repeat_interleave(heads[1], 1) for x in (k, v))
        out, lse = _attend(q, k, v, mask, scale, causal)
        yield TilePart(_keep, *((out.flip(2), lse.flip(2)) if flip else (out, lse)))
    elif not causal:
        out, lse = _attend(q.unflatten(1, heads).flatten(2, 3), k, v, mask, scale)
        yield TilePart(partial(_split_heads, heads), *(x.unflatten(2, (heads[1], tile.rows)) for x in (out, lse)))
    else:
        for row, (queries, *shared) in enumerate(zip(q, k, v, strict=True)):
            keys, values = (x[:, None].expand(-1, heads[1], -1, -1) for x in shared)
            out, lse = _attend(queries.unflatten(0, heads), keys, values, None, scale, causal=True)
            yield TilePart(partial(_take_row, row, heads), *((out.flip(2), lse.flip(2)) if flip else (out, lse)))


def _attend_groups(
    tile: BandTile, operands: Operands, row: int, heads: tuple[int, int], mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute the groups of a band in one row of the batch, as a batch of views that share keys."""
    q = _view_groups(operands.q[row], tile.first, tile.rows, tile)
    k, v = (_view_groups(x[row], tile.begin, tile.columns, tile) for x in operands[1:3])
    if heads[1] == 1:
        return _attend(q, k, v, mask, operands.scale)
    out, lse = _attend(q.unflatten(1, heads).flatten(2, 3), k, v, mask, operands.scale)
    return out.unflatten(2, (heads[1], tile.rows)), lse.unflatten(2, (heads[1], tile.rows))


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, causal: bool = False
) -> tuple[Tensor, Tensor]:
    outputs: tuple[Tensor, Tensor] = aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, is_causal=causal, attn_mask=_expand(mask, q), scale=scale
    )
    return outputs


def _keep(x: Tensor) -> Tensor:
    return x


def _split_heads(heads: tuple[int, int], x: Tensor) -> Tensor:
    return x.unflatten(1, heads)


def _take_row(row: int, heads: tuple[int, int], x: Tensor) -> Tensor:
    return x[row].unflatten(0, heads)


def _take_groups(row: int, heads: tuple[int, int], tile: BandTile, x: Tensor) -> Tensor:
    """Return a row of x (batch, heads, queries, …) as (groups, key heads, heads that share one, queries, …).

    Without the third where each has its own.
    """
    groups = x[row].unflatten(1, (tile.repeats, tile.rows))
    return groups.transpose(0, 1) if heads[1] == 1 else groups.unflatten(0, heads).movedim(2, 0)


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
