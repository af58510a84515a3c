"""Which process has which tokens, and how tokens get to where they are needed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from isentrope.parallel.processes import Processes

LAYOUTS = ("zigzag", "contiguous")
MAX_PLANS = 256
BLOCKS_PER_SHARE = 8  # of appended tokens: a process may have so much more than its share
Ranges = tuple[range, ...]


@dataclass(frozen=True)
class Split:
    """`length` tokens over `size` processes, evenly up to one token a chunk.

    Contiguous: process r has chunk r of `size`. Zigzag: chunks r and 2 · size - 1 - r of 2 · size, so that causal
    attention gives all processes the same work.

    The last `appended` of these tokens came later, and were not spread evenly: processes take turns at blocks of them,
    first the one that has the token before. Blocks grow with the text, so that parts stay few and about equal.
    """

    length: int
    size: int
    zigzag: bool
    appended: int = 0

    def chunks(self, rank: int) -> Ranges:
        """Return the slots of a process, in order; neighbouring chunks are one."""
        return _list_chunks(self)[rank]

    def append(self, tokens: int) -> Split:
        """Return the split with so many more tokens, or fewer appended ones where it is negative."""
        return replace(self, length=self.length + tokens, appended=self.appended + tokens)

    def count(self, rank: int) -> int:
        """Return how many tokens a process has."""
        return sum(map(len, self.chunks(rank)))


def join_ranges(ranges: Iterable[range]) -> Ranges:
    """Return disjoint ranges in order that have all slots of these."""
    joined: list[range] = []
    for one in sorted((r for r in ranges if r), key=lambda r: r.start):
        if joined and one.start <= joined[-1].stop:
            joined[-1] = range(joined[-1].start, max(joined[-1].stop, one.stop))
        else:
            joined.append(one)
    return tuple(joined)


def intersect_ranges(a: Iterable[range], b: Sequence[range]) -> Ranges:
    """Return the slots that are in both."""
    pairs = (range(max(x.start, y.start), min(x.stop, y.stop)) for x in a for y in b)
    return join_ranges(pairs)


@lru_cache(MAX_PLANS)
def _list_chunks(split: Split) -> tuple[Ranges, ...]:
    """Return the slots of every process."""
    size, even = split.size, split.length - split.appended
    count = 2 * size if split.zigzag else size
    parts: list[list[range]] = [[] for _ in range(size)]
    for i in range(count):
        parts[min(i, 2 * size - 1 - i)].append(range(i * even // count, (i + 1) * even // count))
    rank, first = 0 if split.zigzag else size - 1, even
    while first < split.length:
        block = max(1, first // (BLOCKS_PER_SHARE * size))
        parts[rank].append(range(first, min(first + block, split.length)))
        rank, first = (rank + 1) % size, first + block
    return tuple(map(join_ranges, parts))


class Exchange(NamedTuple):
    """What one process sends and receives.

    Attributes:
        source: the tokens it sends, by their place in its part of the sequence, in the order of receivers.
        sent: how many go to each process.
        received: how many come from each process.
        order: puts received tokens into the order of their slots.
    """

    source: Tensor
    sent: tuple[int, ...]
    received: tuple[int, ...]
    order: Tensor


@lru_cache(MAX_PLANS)
def plan_exchange(split: Split, wanted: tuple[Ranges, ...], rank: int) -> Exchange:
    """Plan how every process gets the slots it wants; `wanted` has those of each, disjoint and in order."""
    own = split.chunks(rank)
    sent = [_list_slots(intersect_ranges(own, ranges)) for ranges in wanted]
    received = [_list_slots(intersect_ranges(split.chunks(r), wanted[rank])) for r in range(split.size)]
    slots = _list_slots(own)
    source = torch.searchsorted(slots, torch.cat(sent))
    order = torch.cat(received).argsort()
    return Exchange(source, tuple(map(len, sent)), tuple(map(len, received)), order)


def _list_slots(ranges: Ranges) -> Tensor:
    return torch.cat([torch.arange(r.start, r.stop) for r in ranges]) if ranges else torch.empty(0, dtype=torch.int64)


class _Fetch(torch.autograd.Function):
    """Tokens (tokens, …) of all processes; gradients go back to the process that has the token, and are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: Exchange, processes: Processes) -> Tensor:
        ctx.plan, ctx.processes, ctx.tokens = plan, processes, x.shape[0]
        out, _ = processes.exchange(x.index_select(0, plan.source.to(x.device)), plan.sent, plan.received)
        return out.index_select(0, plan.order.to(x.device))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        grad, plan = grads[0], ctx.plan
        order = plan.order.to(grad.device)
        arrived = torch.empty_like(grad).index_copy_(0, order, grad)
        out, _ = ctx.processes.exchange(arrived, plan.received, plan.sent)
        return add_tokens(out, plan, ctx.tokens), None, None


def add_tokens(x: Tensor, plan: Exchange, tokens: int) -> Tensor:
    """Return the sums of what other processes sent back for each token of this one."""
    wide = torch.float32 if x.dtype.itemsize < 4 else x.dtype
    total = x.new_zeros((tokens, *x.shape[1:]), dtype=wide)
    return total.index_add_(0, plan.source.to(x.device), x.to(wide)).to(x.dtype)


def fetch(x: Tensor, wanted: tuple[Ranges, ...], split: Split, processes: Processes, dim: int = 2) -> Tensor:
    """Return the tokens that this process wants, in the order of their slots; differentiable.

    Args:
        x: the tokens that this process has, along `dim`.
        wanted: slots that each process wants, disjoint and in order.
        split: which process has which tokens.
        processes: that share the sequence.
        dim: along which tokens lie.
    """
    plan = plan_exchange(split, wanted, processes.rank)
    tokens: Tensor = _Fetch.apply(x.movedim(dim, 0).contiguous(), plan, processes)
    return tokens.movedim(0, dim)
