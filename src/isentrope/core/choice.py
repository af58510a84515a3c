"""Choices of far keys: groups of queries, blocks of keys, and which blocks each group has chosen."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

Position = TypeVar("Position", int, Tensor)


@dataclass(frozen=True)
class BlockChoice:
    """How groups of queries choose blocks of far keys; `isentrope.Retrieve` explains the options."""

    blocks: int = 16
    size: int = 128
    sinks: int = 128
    queries: int = 32
    score: str = "representative"
    heads: str = "each"
    votes: int = 4
    pool: int = 4

    @property
    def pools(self) -> int:
        """How many means of queries a group has."""
        return -(-self.queries // self.pool)

    @property
    def first_block(self) -> int:
        """The first block after the first tokens."""
        return -(-self.sinks // self.size)

    def count_blocks(self, position: Position, window: int) -> Position:
        """Return how many blocks from the first key on are far for a query, the first tokens included."""
        count = (position - window + 1) // self.size
        return count.clamp_min(0) if isinstance(count, Tensor) else max(0, count)

    def count_most_far(self) -> int:
        """Return how many far keys a query sees at most: first and chosen ones, and those before the window."""
        return (self.blocks + self.first_block + 1) * self.size + self.queries - 2

    def hides_keys(self, keys: int, window: int) -> bool:
        """Return whether the last of so many queries has more blocks to choose from than it may choose."""
        return self.count_blocks(keys - 1, window) - self.first_block > self.blocks

    def count_hidden_at(self, position: int, window: int) -> int:
        """Return how many far keys a single query at a position does not see."""
        return max(0, self.count_blocks(position, window) - self.first_block - self.blocks) * self.size

    def count_hidden(self, position: Tensor, window: int) -> Tensor:
        """Return how many far keys queries do not see, from positions (batch or 1, queries) of consecutive ones."""
        index = torch.arange(position.shape[1], device=position.device)
        first = torch.maximum(position // self.queries * self.queries, position - index)  # of the query's group
        candidates = self.count_blocks(first, window) - self.first_block
        return (candidates - self.blocks).clamp_min(0) * self.size


@dataclass(frozen=True)
class QueryGroups:
    """The groups of the last `queries` of positions 0 … keys - 1, whose far keys are `window` or more behind.

    Query i is in group i // choice.queries. A call has only its own queries: its first group may lack some.
    """

    choice: BlockChoice
    window: int
    queries: int
    keys: int

    @property
    def offset(self) -> int:
        """The position of the first query."""
        return self.keys - self.queries

    @property
    def lead(self) -> int:
        """How many queries of the first group are not in the call."""
        return self.offset % self.choice.queries

    @property
    def count(self) -> int:
        return -(-(self.lead + self.queries) // self.choice.queries)

    def first_position(self, group: int) -> int:
        """Return the position of the first query of a group."""
        return max(self.offset, self.offset - self.lead + group * self.choice.queries)

    def end_block(self, group: int) -> int:
        """Return the block after the last that a group may choose; with nothing to choose, the first after sinks."""
        far = self.choice.count_blocks(self.first_position(group), self.window)
        return max(far, self.choice.first_block)

    def end_blocks(self, device: torch.device) -> Tensor:
        """Return `end_block` of every group, (groups,)."""
        first = torch.arange(self.count, device=device) * self.choice.queries + (self.offset - self.lead)
        far = self.choice.count_blocks(first.clamp_min(self.offset), self.window)
        return far.clamp_min(self.choice.first_block)

    def first_choosing(self) -> int:
        """Return the first group that has more blocks to choose from than it may choose; `count` if there is none."""
        low, high = 0, self.count
        while low < high:
            middle = (low + high) // 2
            if self.end_block(middle) - self.choice.first_block > self.choice.blocks:
                high = middle
            else:
                low = middle + 1
        return low


@dataclass(frozen=True, eq=False)
class ChosenBlocks:
    """The blocks that each group of queries has chosen.

    Attributes:
        groups: the groups of the call.
        index: (batch, kv_heads, groups, blocks), ascending, and -1 after the last where there are fewer.
    """

    groups: QueryGroups
    index: Tensor

    def take_heads(self, heads: slice) -> ChosenBlocks:
        """Return the choice of some key heads."""
        return replace(self, index=self.index[:, heads])

    def mask(self, rows: slice | None = None, columns: slice | None = None) -> Tensor:
        """Return which pairs the choice allows, (batch, kv_heads, rows, columns); it knows nothing of the window."""
        groups, device = self.groups, self.index.device
        query = torch.arange(groups.queries, device=device)[rows or slice(None)]
        group = (query + groups.lead) // groups.choice.queries
        block = torch.arange(groups.keys, device=device)[columns or slice(None)] // groups.choice.size
        total = -(-groups.keys // groups.choice.size)
        # one column more takes the places that are empty
        table = torch.zeros(*self.index.shape[:3], total + 1, dtype=torch.bool, device=device)
        table.scatter_(3, torch.where(self.index < 0, total, self.index), True)
        always = torch.arange(total + 1, device=device)
        table |= (always < groups.choice.first_block) | (always >= groups.end_blocks(device)[:, None])
        return table[:, :, group][..., block]
