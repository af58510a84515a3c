"""PyTorch's fused scaled-dot-product kernels, with their log-sum-exp.

In unpadded rows a region is a few bands, and a band is one kernel: all pairs, a lower triangle (far keys are one, moved
down by the window), or on a GPU a window of FlashAttention. Regions of whole chunks are batches of rectangles, one
kernel each (`chunk_tiles`). On a CPU rows and documents are cut into tiles (`cpu_tiles`), and one query sees near and
far keys in one kernel (`one_query`). Everything else goes in row chunks against the keys that the rows may see, with a
mask for the chunk alone, so memory stays linear.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

import torch
from torch import Tensor
from torch.nn import functional as F

from isentrope.backends.additive_masks import (
    WholeMask,
    count_chunk_rows,
    find_whole_mask,
    get_additive_mask,
    get_whole_mask,
    is_one_tile,
)
from isentrope.backends.cpu_tiles import Operands, backward_tiles, forward_tiles, tiles_on_cpu
from isentrope.backends.graph_plan import MaskedPlan, plan_branches
from isentrope.backends.merge import BranchGradients, MergedBackend, PartialOutput, TileOutput
from isentrope.backends.one_query import forward_one_query, plan_one_query
from isentrope.backends.tile_kernels import ALL_PAIRS, Tile, backward_tile, forward_tile, takes_fewer_key_heads
from isentrope.core.call import AttentionCall, FoldedBranch, RotatedBranch, is_causal, is_unmasked, split_region
from isentrope.core.chunk_tiles import ChunkTiles, find_tiles, share_queries
from isentrope.core.compile import can_run_triton, cuda_capability_major
from isentrope.core.dtypes import accumulation_dtype
from isentrope.core.layout import Layout
from isentrope.core.position_columns import has_bias, takes_columns, widen_branches
from isentrope.core.region import Band, Region

MAX_HEAD_DIM = 256
MAX_MASKED_QUERIES = 16  # whose mask costs nothing


def has_fused_kernels(call: AttentionCall) -> bool:
    """Return whether a GPU needs no mask: unpadded rows in half precision, bands that kernels support, no bias."""
    return _takes_flash(call.q, call.v) and all(None not in _list_bands(call, branch) for branch in call.branches)


def has_triangular_branch(call: AttentionCall) -> bool:
    """Return whether a branch of a call with fused kernels is all pairs or lower triangles, a GPU's fastest kernels."""
    bands = [_list_bands(call, branch) for branch in call.branches]
    return any(all(band is not None and (band.full or band.causal) for band in some) for some in bands)


class SDPABackend(MergedBackend):
    """Branches through fused kernels. Head sizes are made equal with zeros, and key heads repeated where needed."""

    name = "sdpa"

    def refusal(self, call: AttentionCall) -> str | None:
        q, v = call.q, call.v
        if max(q.shape[-1], v.shape[-1]) > MAX_HEAD_DIM:
            sizes = f"{q.shape[-1]} and {v.shape[-1]}"
            return f"fused kernels take head sizes up to {MAX_HEAD_DIM}, got {sizes}; use 'chunked'"
        if q.device.type not in ("cpu", "cuda"):
            return f"its kernels with a log-sum-exp are known on cpu and cuda, got {q.device.type}; use 'chunked'"
        if q.is_cuda and q.dtype == torch.float64:
            return "no fused kernel takes float64 on a GPU; use 'chunked'"
        if any(branch.distance_law is not None for branch in call.branches):
            return "it has no factor by distance; use 'flex', 'dense' or 'chunked'"
        if q.is_cuda and q.dtype != torch.float32 and has_bias(call) and not takes_columns(call):
            return f"a distance bias would be rounded to {q.dtype}; use 'flex' or 'chunked'"
        return None

    def list_branches(self, call: AttentionCall) -> list[FoldedBranch]:
        return widen_branches(call) if takes_columns(call) else call.fold()

    def forward(self, call: AttentionCall, need_lse: bool) -> tuple[Tensor, Tensor | None]:
        if len(call.branches) == 1 and not need_lse and _has_torch_kernel(branch := call.fold()[0]):
            out = F.scaled_dot_product_attention(
                branch.q, branch.k, branch.v, is_causal=_decide(branch.causal), scale=branch.scale,
                enable_gqa=_decide(branch.groups > 1),
            )  # fmt: skip
            return out, None
        if (plan := plan_one_query(call)) is not None:
            return forward_one_query(call, plan)
        return super().forward(call, need_lse)

    def plan_in_graph(self, call: AttentionCall) -> MaskedPlan | None:
        return plan_branches(call)

    def share_masks(self, branches: list[FoldedBranch]) -> None:
        for branch in branches:
            if _band_of(branch) is None and is_one_tile(branch):
                get_whole_mask(branch)

    def forward_branches(self, branches: list[FoldedBranch]) -> tuple[Tensor, Tensor]:
        q, v = branches[0].q, branches[0].v
        tiled = [] if torch.compiler.is_compiling() else [_tiles_of(branch) for branch in branches]
        if all(tiles is None for tiles in tiled) or q.dtype == torch.float64 or not can_run_triton(q):
            return super().forward_branches(branches)
        from isentrope.backends.merge_kernel import launch

        parts: list[TileOutput] = []
        for branch, tiles in zip(branches, tiled, strict=True):
            if tiles is None:
                out, lse, first = self.forward_branch(branch)
                parts.append(TileOutput(out, lse, first, offset=branch.offset))
            for batch, tile in _chunk_tiles(branch, tiles or []):
                out, lse = forward_tile(tile)
                place = batch.corner.first, max(1, batch.stride)
                parts.append(TileOutput(out[..., : v.shape[-1]], lse, *place, offset=branch.offset))
        return launch(parts, (q.shape[0], q.shape[1], q.shape[2]))

    def forward_branch(self, branch: FoldedBranch) -> PartialOutput:
        if (mask := find_whole_mask(branch)) is not None:
            return _forward_whole(branch, mask)
        if (cut := tiles_on_cpu(branch, branch.groups)) is not None:
            return forward_tiles(branch, Operands(*_get_operands(branch, shared=True), branch.scale), cut)
        if (band := _band_of(branch)) is not None:
            return forward_band(branch, band)
        if (tiles := _tiles_of(branch)) is not None:
            return _forward_chunks(branch, tiles)
        return _forward_masked(branch)

    def backward_branch(self, branch: FoldedBranch, grad: Tensor, out: Tensor, lse: Tensor) -> BranchGradients:
        size = max(branch.q.shape[-1], branch.v.shape[-1])
        # the mask makes weights e^{s - lse} of a query without keys 0, for any finite lse
        lse = torch.where(lse == -inf, 0.0, lse)
        if (cut := tiles_on_cpu(branch)) is not None:
            outputs, operands = (_pad(grad, size), _pad(out, size), lse), Operands(*_get_operands(branch), branch.scale)
            return _finish_gradients(branch, *backward_tiles(branch, operands, cut, outputs))
        if (band := _band_of(branch)) is not None:
            rows = slice(band.first, band.last)
            g, o = (_pad(x[:, :, rows], size) for x in (grad, out))
            gradients = backward_tile(_make_tile(branch, band), g, o, lse[:, :, rows])
            return _finish_gradients(branch, *gradients)._replace(first=band.first, begin=band.begin)
        tiles = _tiles_of(branch)
        if tiles is None and is_one_tile(branch):
            tile = _make_whole_tile(branch, get_whole_mask(branch))
            parts = backward_tile(tile, _pad(grad, size), _pad(out, size), lse)
            return _finish_gradients(branch, *(x.to(lse.dtype) for x in parts))
        # every tile adds to dk and dv: sums are kept in fp32
        dq = torch.zeros_like(branch.q, dtype=lse.dtype)
        dk, dv = (x.new_zeros(x.shape[0], lse.shape[1], *x.shape[2:], dtype=lse.dtype) for x in (branch.k, branch.v))
        for batch, tile in _chunk_tiles(branch, tiles or []):
            _backward_chunks(batch, tile, (grad, out, lse), (dq, dk, dv))
        for rows, columns, tile in _masked_tiles(branch) if tiles is None else ():
            g, o = (_pad(x[:, :, rows], size) for x in (grad, out))
            tq, tk, tv = backward_tile(tile, g, o, lse[:, :, rows])
            dq[:, :, rows] += tq[..., : dq.shape[-1]]
            dk[:, :, columns] += tk[..., : dk.shape[-1]]
            dv[:, :, columns] += tv[..., : dv.shape[-1]]
        return _finish_gradients(branch, dq, dk, dv)


def forward_band(branch: FoldedBranch, band: Band) -> PartialOutput:
    """Compute a branch that is a band which kernels support, without its offset."""
    out, lse = forward_tile(_make_tile(branch, band))
    size = branch.v.shape[-1]
    return PartialOutput(out if out.shape[-1] == size else out[..., :size], lse, band.first)


def _finish_gradients(branch: FoldedBranch, *gradients: Tensor) -> BranchGradients:
    """Return gradients of all heads as those of q, k and v: sums over shared heads, in their sizes and dtypes."""
    dq, dk, dv = (x[..., : like.shape[-1]] for x, like in zip(gradients, (branch.q, branch.k, branch.v), strict=True))
    dk, dv = _sum_heads(dk, branch), _sum_heads(dv, branch)
    return BranchGradients(dq.to(branch.q.dtype), dk.to(branch.k.dtype), dv.to(branch.v.dtype))


def _repeat_heads(x: Tensor, branch: FoldedBranch) -> Tensor:
    return x.repeat_interleave(branch.groups, 1)


def _sum_heads(x: Tensor, branch: FoldedBranch) -> Tensor:
    heads = branch.k.shape[1]
    return x if x.shape[1] == heads else x.unflatten(1, (heads, branch.groups)).sum(2)


def _pad(x: Tensor, size: int) -> Tensor:
    """Return x with zeros up to the size, and contiguous vectors, which the kernels take for granted."""
    x = F.pad(x, (0, size - x.shape[-1])) if x.shape[-1] < size else x
    return x if x.stride(-1) == 1 else x.contiguous()


def _get_operands(branch: FoldedBranch, shared: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = branch.q, branch.k, branch.v
    size = max(q.shape[-1], v.shape[-1])
    if not shared and branch.groups > 1:
        k, v = _repeat_heads(k, branch), _repeat_heads(v, branch)
    return _pad(q, size), _pad(k, size), _pad(v, size)


def _decide(condition: bool) -> bool:
    """Return a condition as True or False; one of symbols in a graph becomes a guard, which bool() does not make it."""
    return True if condition else False  # noqa: SIM210


def _has_torch_kernel(branch: FoldedBranch) -> bool:
    """Return whether PyTorch's own function takes the branch, with a kernel that forms no table of all pairs."""
    q, k, v = branch.q, branch.k, branch.v
    if branch.slopes is not None or not (branch.unmasked or branch.causal):
        return False
    if any(x.stride(-1) != 1 for x in (q, k, v)):
        return False
    same_sizes = q.shape[-1] == v.shape[-1]
    return (branch.groups == 1 or (same_sizes and q.dtype != torch.float32)) if q.is_cuda else same_sizes


def _takes_flash(q: Tensor, v: Tensor) -> bool:
    """Return whether FlashAttention takes such tensors at all."""
    size = max(q.shape[-1], v.shape[-1])
    half = q.is_cuda and q.dtype in (torch.float16, torch.bfloat16) and cuda_capability_major(q.device) >= 8
    return half and size % 8 == 0 and size <= MAX_HEAD_DIM


def _list_bands(call: AttentionCall, branch: RotatedBranch) -> list[Band | None]:
    """Return the band of each span of a branch, None where no kernel supports it."""
    if branch.biased:
        return [None]
    layout, bands = call.layout, []
    for region in split_region(branch.region, layout):
        is_tiled = _find_tiles(region, layout) is not None
        bands.append(ALL_PAIRS if is_tiled else _find_band(region, layout, call.q, call.v))
    return bands


def _band_of(branch: FoldedBranch) -> Band | None:
    """Return the band that a branch is, None where no kernel supports it."""
    return None if branch.slopes is not None else _find_band(branch.region, branch.layout, branch.q, branch.v)


def _find_band(region: Region, layout: Layout, q: Tensor, v: Tensor) -> Band | None:
    if not layout.plain or len(region.spans) != 1:
        return None
    queries, keys = layout.queries, layout.keys
    if torch.compiler.is_compiling():  # in a graph lengths may be variables: only whole regions are known
        causal = is_causal(region, layout)
        return Band(0, queries, 0, keys, inf, 0 if causal else inf) if causal or is_unmasked(region, layout) else None
    band = region.spans[0].to_band(queries, keys)
    if band is None or band.full or band.causal:
        return band
    # FlashAttention takes a right side as long as the keys for unbounded, also where queries are more than keys
    bounded = band.right == inf or band.right < band.end - band.begin
    return band if bounded and _takes_flash(q, v) else None


def _tiles_of(branch: FoldedBranch) -> list[ChunkTiles] | None:
    """Return the batches of rectangles that a branch of whole chunks is, None for any other."""
    return None if branch.slopes is not None else _find_tiles(branch.region, branch.layout)


def _find_tiles(region: Region, layout: Layout) -> list[ChunkTiles] | None:
    return None if torch.compiler.is_compiling() else find_tiles(region, layout)


def _chunk_tiles(branch: FoldedBranch, tiles: list[ChunkTiles]) -> Iterator[tuple[ChunkTiles, Tile]]:
    """Yield batches of rectangles with each as one tile, whose rows are (row of the call, rectangle)."""
    q, k, v = _get_operands(branch)
    for batch in tiles:
        rows, keys, values = batch.view_rows(q), batch.view_columns(k), batch.view_columns(v)
        tile = Tile(rows.flatten(0, 1), keys.flatten(0, 1), values.flatten(0, 1), None, batch.band, branch.scale)
        yield batch, tile


def _forward_chunks(branch: FoldedBranch, tiles: list[ChunkTiles]) -> PartialOutput:
    """Compute batches of rectangles, merged by log-sum-exp where several have the same queries."""
    first = min((batch.corner.first for batch in tiles), default=0)
    rows, size = branch.q.shape[2] - first, branch.v.shape[-1]
    lse = torch.full((*branch.q.shape[:2], rows), -inf, dtype=accumulation_dtype(branch.q), device=branch.q.device)
    summed = share_queries(tiles)
    out = branch.v.new_zeros(*lse.shape, size, dtype=lse.dtype if summed else None)
    for batch, tile in _chunk_tiles(branch, tiles):
        tile_out, tile_lse = forward_tile(tile)
        shifted = batch.shift_rows(-first)
        o, total = shifted.view_rows(out), shifted.view_rows(lse)
        tile_out, tile_lse = (x.unflatten(0, o.shape[:2]) for x in (tile_out[..., :size], tile_lse))
        if summed:
            merged = torch.logaddexp(total, tile_lse)  # finite: every query of a rectangle sees a key
            o.mul_(torch.exp(total - merged)[..., None])
            o.add_(tile_out * torch.exp(tile_lse - merged)[..., None])
            total.copy_(merged)
        else:
            o.copy_(tile_out)
            total.copy_(tile_lse)
    return PartialOutput(out.to(branch.v.dtype), lse, first)


def _backward_chunks(
    batch: ChunkTiles,
    tile: Tile,
    outputs: tuple[Tensor, Tensor, Tensor],
    gradients: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Add dq, dk and dv of a batch of rectangles, from the merged gradient, output and log-sum-exp."""
    grad, out, lse = (batch.view_rows(x).flatten(0, 1) for x in outputs)
    parts = backward_tile(tile, _pad(grad, tile.q.shape[-1]), _pad(out, tile.q.shape[-1]), lse)
    views = batch.view_rows(gradients[0]), batch.view_columns(gradients[1]), batch.view_columns(gradients[2])
    for view, part in zip(views, parts, strict=True):
        view.add_(part[..., : view.shape[-1]].unflatten(0, view.shape[:2]))


def _make_tile(branch: FoldedBranch, band: Band) -> Tile:
    q, k, v = _get_operands(branch, shared=True)
    k, v = _take_rows(k, band.begin, band.end), _take_rows(v, band.begin, band.end)
    tile = Tile(_take_rows(q, band.first, band.last), k, v, None, band, branch.scale)
    if branch.groups == 1 or takes_fewer_key_heads(tile):
        return tile
    return tile._replace(k=_repeat_heads(k, branch), v=_repeat_heads(v, branch))


def _take_rows(x: Tensor, first: int, last: int) -> Tensor:
    return x if first == 0 and last == x.shape[2] else x[:, :, first:last]


def _forward_masked(branch: FoldedBranch) -> PartialOutput:
    """Compute a branch under masks, in chunks of rows."""
    if is_one_tile(branch):
        return _forward_whole(branch, get_whole_mask(branch))
    size = branch.v.shape[-1]
    out = branch.v.new_zeros(*branch.q.shape[:-1], size)
    lse = torch.full(branch.q.shape[:-1], -inf, dtype=accumulation_dtype(branch.q), device=branch.q.device)
    for rows, _, tile in _masked_tiles(branch):
        o, tile_lse = forward_tile(tile)
        out[:, :, rows], lse[:, :, rows] = o[..., :size], tile_lse
    empty = branch.visible_counts == 0
    return PartialOutput(out.masked_fill_(empty[..., None], 0), lse.masked_fill_(empty, -inf))


def _forward_whole(branch: FoldedBranch, mask: WholeMask) -> PartialOutput:
    """Compute a branch under one mask."""
    out, lse = forward_tile(_make_whole_tile(branch, mask))
    size = branch.v.shape[-1]
    out = out if out.shape[-1] == size else out[..., :size]
    return PartialOutput(out.masked_fill_(mask.empty_rows, 0), lse.masked_fill_(mask.empty, -inf))


def _make_whole_tile(branch: FoldedBranch, mask: WholeMask) -> Tile:
    return Tile(*_get_operands(branch), mask.bias, ALL_PAIRS, branch.scale)


def _masked_tiles(branch: FoldedBranch) -> Iterator[tuple[slice, slice, Tile]]:
    """Yield the rows of a branch in chunks, each with the keys it may see and their mask."""
    q, k, v = _get_operands(branch)
    queries, step = q.shape[2], count_chunk_rows(branch)
    for first in range(0, queries, step):
        rows = slice(first, min(first + step, queries))
        low, high = branch.layout.key_range(branch.region, rows.start, rows.stop)
        if low < high:
            columns = slice(low, high)
            mask = get_additive_mask(branch, rows, columns)
            yield rows, columns, Tile(q[:, :, rows], k[:, :, columns], v[:, :, columns], mask, ALL_PAIRS, branch.scale)
