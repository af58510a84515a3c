"""Choose the blocks of far keys that groups of queries see, and cut padded rows into calls that can choose."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from isentrope.backends.protocol import TRITON_HEAD_DIMS
from isentrope.backends.wide_matmul import factor_dtype, matmul_wide
from isentrope.builder import Inputs, build_call
from isentrope.core.call import AttentionCall, RotatedBranch
from isentrope.core.choice import ChosenBlocks, QueryGroups
from isentrope.core.compile import can_run_triton
from isentrope.core.dtypes import accumulation_dtype, autocast_disabled
from isentrope.core.layout import Layout
from isentrope.core.rotation import rotate_and_scale
from isentrope.recipe import Recipe, as_recipe

# of groups, or queries, against all keys that they choose from
MAX_CHUNK_SCORES = {"cpu": 1 << 22, "cuda": 1 << 27}
MIN_CHUNK_GROUPS, MAX_CHUNKS = 128, 16  # where more groups would fit
MAX_CACHED_PLACES = 1 << 23  # groups times blocks, a byte each, that are kept with a layout


def select_blocks(q: Tensor, k: Tensor, recipe: Recipe | str, *, scale: float | None = None) -> Tensor:
    """Return which blocks of far keys the groups of queries choose, in causal attention over unpadded rows.

    Args:
        q: queries, (batch, heads, queries, d), the last at the last key.
        k: keys before rotation, (batch, kv_heads, keys, d).
        recipe: a `Recipe` with `Retrieve`, or its text.
        scale: as in `attention`.

    Returns:
        Block numbers (batch, kv_heads, groups, blocks), ascending, with -1 after the last where a group has fewer:
        block b is keys b · size … (b + 1) · size - 1. Blocks that are always seen are not among them.

    Raises:
        ValueError: the recipe chooses no keys, or cannot in such a call.
    """
    recipe = as_recipe(recipe).resolve()
    if recipe.retrieve is None:
        raise ValueError(f"recipe: expected one with retrieve, such as rerope:window=…+retrieve, got {recipe}")
    inputs = Inputs(q, k, k, causal=True, scale=scale)
    with autocast_disabled(q), torch.no_grad():
        call = build_call(inputs, recipe)
        window = recipe.position.near_window
        groups = QueryGroups(recipe.retrieve, window, q.shape[2], k.shape[2])
        far = _find_far(call)
        return _choose_all(call, groups) if far is None else _choose(call, call.branches[far], groups)


def choose_blocks(call: AttentionCall) -> AttentionCall:
    """Return a call over unpadded rows whose far branch has its blocks chosen."""
    choice, far = call.choice, _find_far(call)
    if choice is None or far is None:
        return replace(call, choice=None)
    branch = call.branches[far]
    groups = QueryGroups(choice, 1 - int(branch.region.spans[0].high), call.layout.queries, call.layout.keys)
    if groups.first_choosing() == groups.count:  # everything is seen
        return replace(call, choice=None)
    with torch.no_grad():
        chosen = ChosenBlocks(groups, _choose(call, branch, groups))
    branches = [replace(b, chosen=chosen) if n == far else b for n, b in enumerate(call.branches)]
    return replace(call, branches=branches, choice=None)


def _find_far(call: AttentionCall) -> int | None:
    return next((n for n, branch in enumerate(call.branches) if branch.far and branch.region.spans), None)


class _Chunk(NamedTuple):
    """Groups that are scored at once, and which of the blocks from the first after the sinks each may not choose."""

    start: int
    stop: int
    outside: Tensor


def _choose_all(call: AttentionCall, groups: QueryGroups) -> Tensor:
    """Return all blocks that groups may choose from, and -1 from the first that has too many."""
    device, choice = call.q.device, groups.choice
    block = choice.first_block + torch.arange(choice.blocks, device=device)
    block = torch.where(block < groups.end_blocks(device)[:, None], block, -1)
    return block.expand(call.k.shape[0], call.k.shape[1], -1, -1).clone()


def _choose(call: AttentionCall, branch: RotatedBranch, groups: QueryGroups) -> Tensor:
    """Return the numbers of chosen blocks, (batch, kv_heads, groups, blocks), group by group in chunks."""
    choice, first = groups.choice, groups.choice.first_block
    score: _Representatives | _Votes
    score = _Votes(call, groups) if choice.score == "votes" else _Representatives(call, branch, groups)
    best = []
    for chunk in _list_chunks(call.layout, groups, score.count_groups()):
        columns = slice(first * choice.size, (first + chunk.outside.shape[1]) * choice.size)
        scores = score.compute(chunk, columns)
        scores = scores.unflatten(1, (call.k.shape[1], -1)) if choice.heads == "each" else scores[:, None]
        best.append(_find_largest(scores.mean(2).masked_fill(chunk.outside, -1), choice.blocks).sort(-1).values)
    if not best:
        return _choose_all(call, groups)
    chosen = (torch.cat(best, 2) + first).expand(-1, call.k.shape[1], -1, -1)
    start = groups.count - chosen.shape[2]
    if not start:
        return chosen.contiguous()
    all_blocks = call.layout.cached(("all blocks", groups, call.k.shape[:2]), lambda: _choose_all(call, groups))
    return torch.cat((all_blocks[:, :, :start], chosen), 2)


def _list_chunks(layout: Layout, groups: QueryGroups, step: int) -> Iterable[_Chunk]:
    """Return the groups that choose, `step` at once; those of one layout are made once, unless they are large."""
    blocks = groups.end_block(groups.count - 1) - groups.choice.first_block
    if groups.count * blocks > MAX_CACHED_PLACES:
        return _make_chunks(groups, step, layout.device)
    return layout.cached(("choosing groups", groups, step), lambda: list(_make_chunks(groups, step, layout.device)))


def _make_chunks(groups: QueryGroups, step: int, device: torch.device) -> Iterator[_Chunk]:
    first, ends = groups.choice.first_block, groups.end_blocks(device)[:, None]
    for start in range(groups.first_choosing(), groups.count, step):
        stop = min(groups.count, start + step)
        yield _Chunk(start, stop, torch.arange(first, groups.end_block(stop - 1), device=device) >= ends[start:stop])


def _find_largest(scores: Tensor, count: int) -> Tensor:
    """Return the places of the largest scores of each row; of equal ones, the first."""
    width = scores.shape[-1]
    # bits of floats are ordered like them, of negative ones the other way round; places make all numbers different
    bits = scores.float().contiguous().view(torch.int32).to(torch.int64)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    places = torch.arange(width - 1, -1, -1, device=scores.device)
    largest: Tensor = (bits * (1 << 31) + places).topk(count, -1).indices
    return largest


class _Representatives:
    """softmax over blocks of the largest product of a mean query with a key of the block, the largest of all means."""

    def __init__(self, call: AttentionCall, branch: RotatedBranch, groups: QueryGroups) -> None:
        folded = call.fold_branch(replace(branch, entropy_law=None))  # that is measured over chosen keys
        choice, dtype = groups.choice, factor_dtype(folded.q)
        counted = call.layout.cached(("pooled queries", groups), lambda: _count_pooled(groups, call.q.device))
        members, self.absent = counted
        self.means = _pool_queries(folded.q, groups, members).to(dtype)  # (batch, heads, groups · pools, d)
        self.pools = choice.pools
        self.keys, self.scale, self.groups = folded.k.to(dtype), call.scale, groups
        self.fused = _takes_score_kernel(self.means, self.keys)

    def count_groups(self) -> int:
        """Return how many groups to score at once."""
        columns = self.groups.keys // self.groups.choice.size + 1 if self.fused else self.groups.keys
        # keys that only later groups may choose are scored for all groups of a chunk
        largest = max(MIN_CHUNK_GROUPS, self.groups.count // MAX_CHUNKS)
        return min(max(1, _limit_rows(self.means, columns) // self.pools), largest)

    def compute(self, chunk: _Chunk, columns: slice) -> Tensor:
        """Return scores (batch, heads, groups, blocks) of some groups for the blocks of some keys."""
        rows = slice(chunk.start * self.pools, chunk.stop * self.pools)
        q, k, size = self.means[:, :, rows], self.keys[:, :, columns], self.groups.choice.size
        if self.fused:
            from isentrope.backends.blocks.score_kernel import launch

            best = launch(q, k, size)
        else:
            products = matmul_wide(q.unflatten(1, (k.shape[1], -1)).flatten(2, 3), k.mT).unflatten(-1, (-1, size))
            best = products.amax(-1).unflatten(2, (-1, q.shape[2])).flatten(1, 2)
        best = (self.scale * best).unflatten(2, (-1, self.pools)).masked_fill(chunk.outside[:, None], -inf)
        shares = torch.softmax(best, -1)
        if self.absent is not None:
            shares = shares.masked_fill(self.absent[rows].view(-1, self.pools, 1), 0.0)
        return shares.amax(3)


def _split_pools(x: Tensor, groups: QueryGroups) -> Tensor:
    """Return (…, queries, d) as (…, groups · pools, pool, d), with zeros for queries that are not in the call."""
    choice, count = groups.choice, groups.count
    after = count * choice.queries - groups.lead - groups.queries
    filler = choice.pools * choice.pool - choice.queries
    x = F.pad(x, (0, 0, groups.lead, after)) if groups.lead or after else x
    x = x.unflatten(-2, (count, choice.queries))
    x = F.pad(x, (0, 0, 0, filler)) if filler else x
    return x.unflatten(-2, (choice.pools, choice.pool)).flatten(-4, -3)


def _count_pooled(groups: QueryGroups, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Return how many queries each mean is of, 1 for none, and which are of none; None where there is no such mean."""
    members = _split_pools(torch.ones(groups.queries, 1, device=device), groups).sum(1)
    whole = groups.lead == 0 and groups.queries % groups.choice.queries == 0
    return members.clamp_min(1), None if whole else members[:, 0] == 0


def _pool_queries(q: Tensor, groups: QueryGroups, members: Tensor) -> Tensor:
    """Return the means of `pool` neighbouring queries of each group.

    A group that a call has a part of has its first or last means of fewer queries, or of none.
    """
    return _split_pools(q, groups).sum(-2, dtype=accumulation_dtype(q)) / members


class _Votes:
    """Votes of all queries for the keys with the largest products, without rotation."""

    def __init__(self, call: AttentionCall, groups: QueryGroups) -> None:
        self.q, self.k = (rotate_and_scale(x, None, None, call.normalise, False) for x in (call.q, call.k))
        self.q, self.k = self.q.to(factor_dtype(call.q)), self.k.to(factor_dtype(call.q))
        self.groups = groups
        self.fused = _takes_score_kernel(self.q, self.k)

    def count_groups(self) -> int:
        """Return how many groups to score at once."""
        groups, choice = self.groups, self.groups.choice
        if self.fused:
            return _limit_rows(self.q, groups.keys // choice.size + 1)
        return max(1, _limit_rows(self.q, groups.keys) // choice.queries)

    def compute(self, chunk: _Chunk, columns: slice) -> Tensor:
        """Return votes (batch, heads, groups, blocks) of some groups for the blocks of some keys."""
        groups, choice, (start, stop, outside) = self.groups, self.groups.choice, chunk
        first = max(0, start * choice.queries - groups.lead)
        last = min(groups.queries, stop * choice.queries - groups.lead)
        group = (torch.arange(first, last, device=self.q.device) + groups.lead) // choice.queries - start
        votes = (self._vote if self.fused else self._find_top)(slice(first, last), columns, outside, group)
        blocks = outside.shape[1]
        target = (group[:, None] * blocks + votes.clamp_min(0) // choice.size).flatten(2)
        count = torch.zeros(*target.shape[:2], (stop - start) * blocks, device=self.q.device)
        return count.scatter_add_(2, target, (votes >= 0).flatten(2).to(count.dtype)).unflatten(2, (-1, blocks))

    def _vote(self, rows: slice, columns: slice, outside: Tensor, group: Tensor) -> Tensor:
        """Return the keys, counted from the first column, that queries vote for; -1 for none."""
        from isentrope.backends.blocks.vote_kernel import launch

        choice = self.groups.choice
        ends = (~outside).sum(1) * choice.size + columns.start
        slots = launch(self.q[:, :, rows], self.k, columns.start, ends[group], choice.votes)
        return torch.where(slots < 0, -1, slots.to(torch.int64) - columns.start)

    def _find_top(self, rows: slice, columns: slice, outside: Tensor, group: Tensor) -> Tensor:
        """Do what `_vote` does with all products at once."""
        q = self.q[:, :, rows].unflatten(1, (self.k.shape[1], -1))
        products = matmul_wide(q.flatten(2, 3), self.k[:, :, columns].mT)
        products = products.unflatten(2, q.shape[2:4]).flatten(1, 2)  # (batch, heads, queries, keys)
        hidden = outside[group].repeat_interleave(self.groups.choice.size, -1)
        products = products.masked_fill(hidden, -inf)
        top = _find_largest(products, min(self.groups.choice.votes, products.shape[-1]))
        return torch.where(products.gather(-1, top) == -inf, -1, top)


def _takes_score_kernel(q: Tensor, k: Tensor) -> bool:
    """Return whether Triton kernels multiply such queries and keys."""
    sizes = k.shape[-1] in TRITON_HEAD_DIMS and k.stride(-1) == 1 and q.stride(-1) == 1
    return sizes and q.dtype != torch.float64 and can_run_triton(q)


def _limit_rows(x: Tensor, keys: int) -> int:
    """Return how many rows of x (batch, heads, rows, d) to multiply with all keys at once."""
    limit = MAX_CHUNK_SCORES.get(x.device.type, 1 << 22)
    return max(1, limit // (x.shape[0] * x.shape[1] * keys))
