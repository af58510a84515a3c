"""Layouts of queries of many sequences whose keys lie side by side, as the pages of requests are read."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from isentrope.core.frames import Frames
from isentrope.core.layout import Layout


class PackedKeys(NamedTuple):
    """Sequences whose keys lie side by side.

    bounds: first slot of each sequence, the slot after its last, and that of its position 0, which is before the first
        where earlier keys were dropped, (3, sequences).
    sequence: of each key, (keys,).
    """

    bounds: Tensor
    sequence: Tensor


class PackedLayout(Layout):
    """Some queries of packed sequences, each of which sees keys of its own sequence alone.

    Args:
        packed: the keys.
        sequence: of each query, (queries,).
        position: of each query in its sequence, (queries,).
        by_row: whether each query is a row of its own, and rows share the keys; otherwise all are one row.
    """

    def __init__(self, packed: PackedKeys, sequence: Tensor, position: Tensor, by_row: bool) -> None:
        axis = 1 if by_row else 0
        low, high, origin = packed.bounds[:, sequence].unsqueeze(axis + 1)
        self._packed, self._low = packed, low
        frames = origin, high, origin + position.unsqueeze(axis)
        batch, queries = low.shape
        super().__init__(batch, queries, len(packed.sequence), low.device, frames=frames)
        self.harmless_padding = True  # it is keys of other sequences

    def _set_frames(self, frames: Frames) -> None:
        self.origin, self.frame_high, self.own_slot = frames
        self.frame_low = self._low
        self.padded, self.anchored, self.offset = True, False, None
        low, high, self._key_origin = self._packed.bounds[:, None, self._packed.sequence]
        self._key_frame = low, high
        self.query, self.key = self.own_slot - self.origin, self.slots - self._key_origin
