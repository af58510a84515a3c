"""The part of a batch that a process has, as an attention mask that passes through any model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from isentrope.core.caching import LRUCache
from isentrope.core.frames import find_runs, find_token_span
from isentrope.core.layout import Layout, get_layout
from isentrope.core.partial_layout import PartialLayout, RowTable
from isentrope.parallel.processes import Processes
from isentrope.parallel.split import Ranges, Split, fetch

COLUMNS = 7  # origin, end, slot, position, length of the whole, flags, tokens that were appended to a cache
FRAMED, JUMPING = 1, 2  # flags: rows are padded or packed; positions do not count from the beginning of a frame
MAX_SLOT = (1 << 31) - 1
LAYOUTS_PER_PROCESS = 8  # of one forward pass: two chunks by two parts of each process in a ring, two kinds of layers


def make_table(batch: int, length: int, attention_mask: Tensor | None, position_ids: Tensor | None) -> RowTable:
    """Return the frames and positions of whole rows, as transformers and `extend` read them in one process.

    Padding is what the mask hides. Without a mask, rows are packed where positions do not go up by one. Positions that
    only begin elsewhere make no difference.
    """
    frames = None
    if attention_mask is not None and not bool(attention_mask.all()):
        first, last = find_token_span(attention_mask)
        frames = (first.expand(batch, length), (last + 1).expand(batch, length))
    if position_ids is None:
        return RowTable(length, frames)
    if attention_mask is None:
        jumps = F.pad(position_ids.diff(dim=1) != 1, (1, 0)).cumsum(1)
        if bool(jumps.any()):
            low, high = find_runs(jumps)
            return RowTable(length, (low.expand(batch, length), high.expand(batch, length)))
    slots = torch.arange(length, device=position_ids.device)[None]
    low, high = frames if frames is not None else (torch.zeros_like(slots), torch.full_like(slots, length))
    inside = (slots >= low) & (slots < high)
    steady = (position_ids - slots).diff(dim=1) == 0
    counted = bool((steady | ~(inside[:, 1:] & inside[:, :-1])).all())
    return RowTable(length, frames, None if counted else position_ids.expand(batch, length))


def make_mask(table: RowTable, split: Split, rank: int, batch: int, device: torch.device) -> Tensor:
    """Return what attention needs to know of this process's tokens, (batch, 1, tokens, `COLUMNS`) in int32."""
    slots = torch.arange(table.length, device=device)[None].expand(batch, -1)
    low, high = table.frames or (torch.zeros_like(slots), torch.full_like(slots, table.length))
    flags = FRAMED * (table.frames is not None) + JUMPING * (table.positions is not None)
    positions = slots if table.positions is None else table.positions
    columns = [low, high, slots, positions, *(torch.full_like(slots, x) for x in (table.length, flags, 0))]
    mask = torch.stack([x.to(device) for x in columns], -1).to(torch.int32)
    return torch.cat([mask[:, r.start : r.stop] for r in split.chunks(rank)], 1)[:, None]


class ShardedOffset(int):
    """The kv_offset of a cache of which this process has a part; `appended` tokens of it came after the prompt."""

    appended: int

    def __new__(cls, appended: int) -> ShardedOffset:
        offset = super().__new__(cls, 0)
        offset.appended = appended
        return offset

    def make_mask(self, frames: Tensor, length: int, framed: bool) -> Tensor:
        """Return the mask of new tokens, which all processes have, from their (origin, end, slot) among `length`."""
        columns = (length, FRAMED * framed, self.appended + frames.shape[2])
        constant = torch.tensor(columns, dtype=frames.dtype, device=frames.device).expand(*frames.shape[:3], -1)
        return torch.cat((frames, frames[..., 2:], constant), -1)


def is_shard_mask(mask: object) -> bool:
    """Return whether a mask comes from `make_mask`."""
    if not isinstance(mask, Tensor) or mask.dim() != 4:
        return False
    return mask.dtype == torch.int32 and mask.shape[1] == 1 and mask.shape[-1] == COLUMNS


class ShardedRows(NamedTuple):
    """The rows of one forward pass, of which this process has a part."""

    split: Split
    rank: int
    batch: int
    table: RowTable
    layouts: LRUCache[tuple[object, ...], Any]

    @property
    def cached(self) -> bool:
        """Whether keys come from a cache, and all processes have the same queries: the last tokens."""
        return self.split.appended > 0

    def chunks(self, rank: int | None = None) -> Ranges:
        """Return the slots of a process, by default this one."""
        return self.split.chunks(self.rank if rank is None else rank)

    def count_from(self, jumping: bool) -> RowTable:
        """Return the rows, without positions of their own unless a layer takes those."""
        return self.table if jumping else replace(self.table, positions=None)

    def get_partial(self, queries: range, keys: range, jumping: bool, complete: bool, device: torch.device) -> Layout:
        """Return the layout of some queries and keys; layers of a forward pass share it."""
        table = self.count_from(jumping)

        def make() -> Layout:
            return PartialLayout(self.batch, queries, keys, table, complete, device)

        return self.layouts.get((queries, keys, table.positions is None, complete, device), make)

    def check_positions(self, position_ids: Tensor | None) -> None:
        """Check that new tokens continue those in the cache; the layers of a forward pass do it once.

        Raises:
            ValueError: they do not.
        """
        if position_ids is None or position_ids.dim() != 2:
            return
        self.layouts.get(("positions",), lambda: self._check_positions(position_ids))

    def _check_positions(self, position_ids: Tensor) -> bool:
        length, device = self.split.length, position_ids.device
        slots = torch.arange(length - position_ids.shape[1], length, device=device)[None]
        first = torch.zeros_like(slots)
        if self.table.frames is not None:
            first = self.table.frames[0][:, -slots.shape[1] :].to(device)
        if not bool(((position_ids == slots) | (position_ids == slots - first) | (slots < first)).all()):
            raise ValueError("position_ids: expected positions that continue those of the cached keys, got others")
        return True

    def get_whole(self, jumping: bool, device: torch.device) -> Layout:
        """Return the layout of whole rows, as one process has it."""
        table, length = self.count_from(jumping), self.split.length

        def make() -> Layout:
            if table.frames is None and table.positions is None:
                return get_layout(self.batch, length, length, device)
            frames = None
            if table.frames is not None:
                slots = torch.arange(length, device=device)[None].expand(self.batch, -1)
                frames = (table.frames[0].to(device), table.frames[1].to(device), slots)
            positions = None if table.positions is None else table.positions.to(device)
            return Layout(self.batch, length, length, device, frames=frames, position_ids=positions)

        return self.layouts.get(("whole", table.positions is None, device), make)


def read_rows(mask: Tensor, processes: Processes, zigzag: bool) -> ShardedRows:
    """Read a mask of `make_mask`; padded or packed rows are completed from the other processes.

    Raises:
        ValueError: the mask is that of another number of processes or another layout.
    """
    length, flags, appended = mask[0, 0, 0, 4:].tolist()
    split = Split(length, processes.size, zigzag, appended)
    if appended:
        frames = None
        if flags & FRAMED:
            low, high = (mask[:, 0, -1:, column].to(torch.int64).expand(-1, length) for column in (0, 1))
            frames = (low, high)
        layouts = new_layouts(max(processes.size, len(split.chunks(processes.rank))))
        return ShardedRows(split, processes.rank, mask.shape[0], RowTable(length, frames), layouts)
    tokens = torch.cat([torch.arange(r.start, r.stop) for r in split.chunks(processes.rank)])
    if not torch.equal(mask[0, 0, :, 2].cpu().to(torch.int64), tokens):
        raise ValueError(
            "attention_mask: expected the tokens of this process, got others; pass what shard() of the same object gave"
        )
    frames = positions = None
    if flags:
        everything = ((range(length),),) * processes.size
        with torch.inference_mode(False):  # or a later backward could not save it
            whole = fetch(mask[:, 0].clone(), everything, split, processes, dim=1).to(torch.int64)
        frames = (whole[..., 0], whole[..., 1]) if flags & FRAMED else None
        positions = whole[..., 3] if flags & JUMPING else None
    table = RowTable(length, frames, positions)
    return ShardedRows(split, processes.rank, mask.shape[0], table, new_layouts(processes.size))


def new_layouts(parts: int) -> LRUCache[tuple[object, ...], Any]:
    """Return an empty cache for the layouts of a forward pass, over parts of so many processes."""
    return LRUCache(LAYOUTS_PER_PROCESS * (1 + parts))
