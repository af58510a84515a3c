"""Ulysses: before attention heads are exchanged for tokens, so that each process has some heads of the whole sequence.

Jacobs et al., "DeepSpeed Ulysses" (2023).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from isentrope.core.caching import LRUCache
from isentrope.functional import attention
from isentrope.parallel.context import SequenceParallel
from isentrope.parallel.exchanges import QKV, Output
from isentrope.parallel.heads import LocalHeads, shard_position, shard_share, shard_temperature
from isentrope.parallel.key_parts import Options
from isentrope.parallel.processes import Processes
from isentrope.parallel.rows import ShardedRows
from isentrope.parallel.split import Split
from isentrope.recipe import Recipe

MAX_RECIPES = 256  # as many as a model has layers


class Ulysses(SequenceParallel):
    """A sequence spread over processes, each of which attends with some heads to the whole of it.

    Args:
        group: as for `ContextParallel`.
        layout: as for `ContextParallel`; work is the same either way.

    Raises:
        ValueError: `torch.distributed` was not initialised.
    """

    def __init__(self, group: Any = None, layout: str = "contiguous") -> None:
        super().__init__(group, layout)
        self._recipes = LRUCache[Hashable, tuple[Recipe, Recipe]](MAX_RECIPES)

    def attend(self, qkv: QKV, rows: ShardedRows, options: Options, need_lse: bool = False) -> Output:
        q, k, v = qkv
        heads, recipe = self._check(q, k, options.recipe), options.recipe.resolve()
        copies = max(1, self.size // k.shape[1])  # a key head that several processes need
        k, v = (x.repeat_interleave(copies, 1) if copies > 1 else x for x in (k, v))
        q, k, v = (_GiveHeads.apply(x, rows.split, self.processes) for x in (q, k, v))
        result = attention(
            q, k, v, self._shard(recipe, heads, q.shape[-1]), causal=options.causal, mask=options.mask,
            layout=rows.get_whole(options.jumping, q.device), scale=options.scale, backend=options.backend,
            return_lse=need_lse,
        )  # fmt: skip
        out, lse = (result[0], result[1].lse) if need_lse else (result, None)
        out = _GiveTokens.apply(out, rows.split, self.processes)
        return out, None if lse is None else _GiveTokens.apply(lse[..., None], rows.split, self.processes)[..., 0]

    def _shard(self, recipe: Recipe, heads: LocalHeads, head_dim: int) -> Recipe:
        """Return a recipe for some of the heads, the same for all calls, which then share what is cached for it."""
        if not recipe.cacheable:
            return shard_recipe(recipe, heads, head_dim)
        key = (id(recipe), heads, head_dim)  # kept with the recipe, so that no other can have its id
        return self._recipes.get(key, lambda: (recipe, shard_recipe(recipe, heads, head_dim)))[1]

    def _check(self, q: Tensor, k: Tensor, recipe: Recipe) -> LocalHeads:
        """Return the query heads that this process attends with."""
        size, heads, kv_heads = self.size, q.shape[1], k.shape[1]
        if heads % size or (kv_heads % size and size % kv_heads):
            raise ValueError(
                f"Ulysses: expected query heads and key heads that {size} processes can share evenly, got {heads} and "
                f"{kv_heads}; use ContextParallel, or another number of processes"
            )
        if recipe.retrieve is not None and (recipe.retrieve.heads == "all" or kv_heads < size):
            # query heads that share a key head choose together
            raise ValueError(
                f"Ulysses: {recipe.retrieve} chooses with heads that would be in several of {size} processes; use "
                "ContextParallel, or heads=each and as many processes as key heads at most"
            )
        return LocalHeads(self.rank * heads // size, heads // size, heads)


def shard_recipe(recipe: Recipe, heads: LocalHeads, head_dim: int) -> Recipe:
    """Return a recipe for some of the heads."""
    if heads.count == heads.total:
        return recipe
    laws = tuple(shard_temperature(law, heads, head_dim) for law in recipe.temperatures)
    position = None if recipe.position is None else shard_position(recipe.position, heads)
    return replace(recipe, position=position, temperature=laws, share=shard_share(recipe.share, heads))


class _GiveHeads(torch.autograd.Function):
    """(batch, heads, own tokens, size) → (batch, own heads, all tokens, size)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, split: Split, processes: Processes) -> Tensor:
        ctx.split, ctx.processes = split, processes
        return _give_heads(x, split, processes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _give_tokens(grads[0], ctx.split, ctx.processes), None, None


class _GiveTokens(torch.autograd.Function):
    """(batch, own heads, all tokens, size) → (batch, heads, own tokens, size)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, split: Split, processes: Processes) -> Tensor:
        ctx.split, ctx.processes = split, processes
        return _give_tokens(x, split, processes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _give_heads(grads[0], ctx.split, ctx.processes), None, None


def _give_heads(x: Tensor, split: Split, processes: Processes) -> Tensor:
    batch, heads, tokens, size = x.shape
    own = heads // split.size
    # (heads of one receiver, tokens, batch, size) for one receiver after another
    buffer = x.unflatten(1, (split.size, own)).permute(1, 3, 2, 0, 4).flatten(0, 1)
    counts = [split.count(rank) for rank in range(split.size)]
    received, _ = processes.exchange(buffer, [tokens] * split.size, counts)
    ordered = received.index_select(0, _order(split).to(x.device))
    return ordered.permute(2, 1, 0, 3).reshape(batch, own, split.length, size)


def _give_tokens(x: Tensor, split: Split, processes: Processes) -> Tensor:
    batch, size = x.shape[0], x.shape[-1]
    tokens, counts = split.count(processes.rank), [split.count(rank) for rank in range(split.size)]
    buffer = x.permute(2, 1, 0, 3).index_select(0, _slots(split).to(x.device))
    received, _ = processes.exchange(buffer, counts, [tokens] * split.size)
    return received.unflatten(0, (split.size, tokens)).permute(3, 0, 2, 1, 4).reshape(batch, -1, tokens, size)


def _slots(split: Split) -> Tensor:
    """Return the slots of all processes, one process after another."""
    return torch.cat([torch.arange(r.start, r.stop) for rank in range(split.size) for r in split.chunks(rank)])


def _order(split: Split) -> Tensor:
    """Return where each slot lies among those of `_slots`."""
    return _slots(split).argsort()
