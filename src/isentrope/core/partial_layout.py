"""Layouts of some queries of longer rows against some of the rows' keys, as several processes share a sequence."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from isentrope.core.layout import Layout
from isentrope.core.region import Region


@dataclass(frozen=True, eq=False)
class RowTable:
    """Whole rows, of which a process has a part.

    Attributes:
        length: tokens of each row, padding included.
        frames: of each token the first slot of its row or document and the slot after the last, (batch, length) each;
            None where every row is one unpadded document.
        positions: of each token, (batch, length), where they do not count from the beginning of its frame.
    """

    length: int
    frames: tuple[Tensor, Tensor] | None = None
    positions: Tensor | None = None


class PartialLayout(Layout):
    """Consecutive queries against consecutive keys of longer rows.

    Row lengths are those of the whole rows. With `complete` the keys are all that these queries see; otherwise numbers
    of visible keys count those that are elsewhere too.

    Args:
        batch: rows of the call.
        queries: slots of the queries in the whole rows.
        keys: slots of the keys in the whole rows.
        rows: the whole rows.
        complete: whether every key that a query sees is here.
        device: of the positions.
    """

    complete_rows = False

    def __init__(
        self, batch: int, queries: range, keys: range, rows: RowTable, complete: bool, device: torch.device
    ) -> None:
        frames = _shift_frames(queries, keys, rows, device)
        super().__init__(batch, len(queries), len(keys), device, frames=frames)
        self.complete, self.framed, self._rows = complete, rows.frames is not None, rows
        self.aligned = keys.start == 0 and queries.stop == keys.stop
        (self._row_end, low, high) = (frames[1], *_find_key_frames(keys, rows, device))
        self.frame_low, self.frame_high = (x.clamp(0, self.keys) for x in (self.origin, self._row_end))
        self._key_frame, self._key_origin = (low.clamp_min(0), high.clamp_max(self.keys)), low
        self._key_end, self.key = high, self.slots[None] - low
        if rows.frames is None:
            self.padded, self.anchored, self.offset = False, keys.start == 0, queries.start - keys.start
        if rows.positions is not None:
            assert complete, "positions that jump need all keys"
            self.implicit = False
            whole = rows.positions.to(device)
            self._set_positions((whole[:, queries.start : queries.stop], whole[:, keys.start : keys.stop]))

    @property
    def plain(self) -> bool:
        return self.complete and self.aligned and self.implicit and not self.framed

    def simplify(self, region: Region) -> Region:
        return region.simplify(self.queries, self.keys) if self.plain else region

    def count_keys(self, kind: str, region: Region) -> Tensor:
        if kind == "sequence":
            return self._row_end - self.origin
        if kind == "position" or self.complete:
            return super().count_keys(kind, region)
        return self.cached(("count of whole rows", region), lambda: self._count_everywhere(region))

    def _count_everywhere(self, region: Region) -> Tensor:
        """Return how many keys of the whole rows each query sees."""
        low, high = self._bounds(region, (self.origin, self._row_end))
        return (high - low).sum(-1)

    @property
    def row_lengths(self) -> tuple[Tensor | int, Tensor | int]:
        if not self.framed:
            return self._rows.length, self._rows.length
        return self._row_end - self.origin, self._key_end - self._key_origin

    def _padding(self) -> tuple[Tensor, Tensor]:
        queries = (self.own_slot < self.origin) | (self.own_slot >= self._row_end)
        low, high = (x[:, None] for x in self.find_tokens())
        return queries, (self.slots < low) | (self.slots >= high)


def _shift_frames(queries: range, keys: range, rows: RowTable, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return (origin, end, own slot) of each query, counted from the first key that is here."""
    slot = torch.arange(queries.start - keys.start, queries.stop - keys.start, device=device)[None]
    if rows.frames is None:
        return torch.full_like(slot, -keys.start), torch.full_like(slot, rows.length - keys.start), slot
    low, high = (x[:, queries.start : queries.stop].to(device) - keys.start for x in rows.frames)
    return low, high, slot.expand_as(low)


def _find_key_frames(keys: range, rows: RowTable, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the bounds of each key's frame, counted from the first key that is here."""
    if rows.frames is None:
        first = torch.full((1, len(keys)), -keys.start, device=device)
        return first, first + rows.length
    low, high = (x[:, keys.start : keys.stop].to(device) - keys.start for x in rows.frames)
    return low, high
