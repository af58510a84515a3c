"""Attention of groups of queries over the far keys that each group sees, in plain PyTorch.

The keys of a few groups at a time are gathered, so that memory stays linear.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from isentrope.backends.merge import PartialOutput
from isentrope.backends.wide_matmul import factor_dtype, matmul_wide
from isentrope.core.call import FoldedBranch
from isentrope.core.choice import ChosenBlocks, QueryGroups
from isentrope.core.dtypes import accumulation_dtype

# of gathered keys and values, and of scores
MAX_TILE_ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 25}


class GroupTile(NamedTuple):
    """Groups start … stop - 1 and their gathered keys.

    slots: of the keys, (batch, kv_heads, groups, columns).
    visible: (batch or 1, kv_heads or 1, groups, queries, columns).
    """

    start: int
    stop: int
    slots: Tensor
    visible: Tensor


def forward_gathered(branch: FoldedBranch) -> PartialOutput:
    """Compute a branch over its chosen blocks."""
    chosen, dtype = _get_chosen(branch), accumulation_dtype(branch.q)
    out = branch.v.new_zeros(*branch.q.shape[:-1], branch.v.shape[-1])
    lse = torch.full(branch.q.shape[:-1], -torch.inf, dtype=dtype, device=branch.q.device)
    for tile in _iterate_tiles(branch, chosen):
        _, k, v = _gather(branch, tile)
        q = _take_rows(branch.q, branch, tile).to(k.dtype)
        scores = _compute_scores(q, k, branch, tile)
        top = scores.amax(-1, keepdim=True).clamp_min(torch.finfo(dtype).min)
        weights = torch.exp(scores - top)
        total = weights.sum(-1, keepdim=True)
        o = matmul_wide(weights.to(v.dtype), v) / total.clamp_min(torch.finfo(dtype).tiny)
        rows = _rows(chosen.groups, tile)
        out[:, :, rows] = _put_rows(o, branch, tile).to(out.dtype)
        lse[:, :, rows] = _put_rows(top + total.log(), branch, tile).squeeze(-1)
    return PartialOutput(out, lse)


def backward_gathered(branch: FoldedBranch, grad: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk, dv of a branch over its chosen blocks, from the merged output and log-sum-exp."""
    chosen, dtype = _get_chosen(branch), accumulation_dtype(branch.q)
    delta = (grad.to(dtype) * out.to(dtype)).sum(-1, keepdim=True)
    anchor = torch.where(lse == -torch.inf, 0.0, lse)[..., None]
    dq = torch.zeros_like(branch.q)
    dk, dv = (torch.zeros_like(x, dtype=dtype, memory_format=torch.contiguous_format) for x in (branch.k, branch.v))
    for tile in _iterate_tiles(branch, chosen):
        slots, k, v = _gather(branch, tile)
        q, g = (_take_rows(x, branch, tile).to(k.dtype) for x in (branch.q, grad))
        p = torch.exp(_compute_scores(q, k, branch, tile) - _take_rows(anchor, branch, tile))
        ds = p * (matmul_wide(g, v.mT) - _take_rows(delta, branch, tile)) * branch.scale
        dq[:, :, _rows(chosen.groups, tile)] = _put_rows(matmul_wide(ds.to(k.dtype), k), branch, tile).to(dq.dtype)
        for total, part in ((dk, matmul_wide(ds.to(k.dtype).mT, q)), (dv, matmul_wide(p.to(k.dtype).mT, g))):
            part = part.unflatten(1, (total.shape[1], -1)).flatten(2, 3)
            total.scatter_add_(2, slots[..., None].expand_as(part), part)
    return dq, dk.to(branch.k.dtype), dv.to(branch.v.dtype)


def _get_chosen(branch: FoldedBranch) -> ChosenBlocks:
    assert branch.chosen is not None
    return branch.chosen


def _iterate_tiles(branch: FoldedBranch, chosen: ChosenBlocks) -> Iterator[GroupTile]:
    groups, choice, device = chosen.groups, chosen.groups.choice, branch.q.device
    size, first_keys = choice.size, min(groups.keys, choice.first_block * choice.size)
    edge = min(groups.keys, size + choice.queries - 2)
    columns = choice.blocks * size + first_keys + edge
    vectors, rows = branch.k.shape[-1] + branch.v.shape[-1], choice.queries * branch.groups
    limit = MAX_TILE_ELEMENTS.get(device.type, 1 << 22)
    step = max(1, limit // (branch.k.shape[0] * branch.k.shape[1] * columns * (vectors + rows)))
    block_keys, always = torch.arange(size, device=device), torch.arange(first_keys, device=device)
    for start in range(0, groups.count, step):
        stop = min(groups.count, start + step)
        end = groups.end_blocks(device)[start:stop, None] * size
        index = chosen.index[:, :, start:stop]
        block_slots = (index[..., None] * size + block_keys).flatten(3)
        # the first tokens, and what lies between the last block and the window
        slots = torch.cat((always.expand(stop - start, -1), end + torch.arange(edge, device=device)), 1)
        own = torch.arange(start * choice.queries, stop * choice.queries, device=device) + groups.offset - groups.lead
        own = own.unflatten(0, (stop - start, choice.queries))
        visible = (slots[:, None] <= own[..., None] - groups.window)[None, None]
        listed = (index >= 0).repeat_interleave(size, -1)[:, :, :, None]
        shape = (*index.shape[:3], choice.queries)
        visible = torch.cat((listed.expand(*shape, -1), visible.expand(*shape, -1)), -1)
        slots = torch.cat((block_slots, slots.expand(*index.shape[:3], -1)), -1)
        yield GroupTile(start, stop, slots.clamp(0, groups.keys - 1), visible)


def _gather(branch: FoldedBranch, tile: GroupTile) -> tuple[Tensor, Tensor, Tensor]:
    """Return slots (batch, kv_heads, all columns), and keys and values (batch, kv_heads · groups, columns, size)."""
    slots = tile.slots.flatten(2)
    gathered = (
        x.gather(2, slots[..., None].expand(-1, -1, -1, x.shape[-1]))
        .unflatten(2, tile.slots.shape[2:])
        .flatten(1, 2)
        .to(factor_dtype(branch.q))
        for x in (branch.k, branch.v)
    )
    return slots, *gathered


def _compute_scores(q: Tensor, k: Tensor, branch: FoldedBranch, tile: GroupTile) -> Tensor:
    """Return masked scores, (batch, kv_heads · groups, heads sharing a key head · queries, columns)."""
    scores = matmul_wide(q, k.mT) * branch.scale
    visible = tile.visible.flatten(1, 2)
    shape = scores.shape
    scores = scores.unflatten(2, (branch.groups, -1)).masked_fill(~visible[:, :, None], -torch.inf)
    return scores.reshape(shape)


def _rows(groups: QueryGroups, tile: GroupTile) -> slice:
    """Return the queries of a tile's groups that are in the call."""
    size = groups.choice.queries
    return slice(max(0, tile.start * size - groups.lead), min(groups.queries, tile.stop * size - groups.lead))


def _take_rows(x: Tensor, branch: FoldedBranch, tile: GroupTile) -> Tensor:
    """Return x (batch, heads, queries, …) as (batch, kv_heads · groups, heads sharing a key head · queries, …)."""
    groups = _get_chosen(branch).groups
    rows, size = _rows(groups, tile), groups.choice.queries
    before = groups.lead if tile.start == 0 else 0
    after = (tile.stop - tile.start) * size - before - (rows.stop - rows.start)
    x = F.pad(x[:, :, rows], (0, 0, before, after))
    x = x.unflatten(2, (-1, size)).unflatten(1, (branch.k.shape[1], -1))
    return x.transpose(2, 3).flatten(3, 4).flatten(1, 2)


def _put_rows(x: Tensor, branch: FoldedBranch, tile: GroupTile) -> Tensor:
    """Return what `_take_rows` would take, from its result."""
    groups = _get_chosen(branch).groups
    x = x.unflatten(1, (branch.k.shape[1], -1)).unflatten(3, (branch.groups, -1)).transpose(2, 3)
    x = x.flatten(1, 2).flatten(2, 3)
    rows = _rows(groups, tile)
    before = groups.lead if tile.start == 0 else 0
    return x[:, :, before : before + rows.stop - rows.start]
