"""Dual Chunk Attention: positions that begin anew in every chunk."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import Self

import torch
from torch import Tensor

from isentrope.core.region import chunks
from isentrope.parts import check_integer
from isentrope.positions.branch import Branch, Lengths, ModelRotary
from isentrope.positions.rope import PositionMap

LOCAL_SHARE = 6  # a chunk of ¾ n_tr has n_tr / 8 local keys


@dataclass(frozen=True)
class DualChunk(PositionMap):
    """Key j at j mod L, L = chunk - local, and query i where its chunk says: Dual Chunk Attention (An et al., 2024).

    Against keys of its own chunk of L positions, query i is at i mod L; against the chunk before, at
    min((i mod L) + L, chunk); against older ones, which are the far keys, at min(2L - 1, chunk). Distances up to
    `local` are true, none exceeds `chunk`, and rows of up to `chunk` keys are left as they are. For keys ahead, query
    and key change places and the distance its sign.

    Attributes:
        chunk: the largest distance; ¾ of the training length by default.
        local: the distance that is true across the edge of a chunk, at most half of `chunk`; a sixth of `chunk` by
            default, which is ⅛ of the training length.
    """

    chunk: int | None = None
    local: int | None = None
    keys_cacheable = False
    depends_on_place = True
    has_far_keys = True
    far_keys_are_one_span = False  # they begin at the edge of a chunk

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chunk is not None:
            check_integer(self, "chunk", 2)
        if self.local is not None:
            check_integer(self, "local", 0)
        if self.chunk is not None and self.local is not None and 2 * self.local > self.chunk:
            raise ValueError(
                f"DualChunk(local=…): expected at most half of the chunk of {self.chunk}, got {self.local}; "
                "lower it, or leave it out"
            )

    def _require_sizes(self) -> tuple[int, int]:
        """Return the chunk and L."""
        if self.chunk is None:
            raise ValueError(
                "DualChunk(chunk=…): expected a length, or a training length to compute it from, got neither; write "
                "dualchunk:chunk=… or add a temperature with a train_length"
            )
        return self.chunk, self.chunk - (self.chunk // LOCAL_SHARE if self.local is None else self.local)

    @property
    def near_window(self) -> int | None:
        """L, the least distance behind which a key may be far; None while the chunk is not known."""
        return None if self.chunk is None else self._require_sizes()[1]

    def resolve(self, train_length: int | None) -> Self:
        if self.chunk is not None or train_length is None:
            return self
        return replace(self, chunk=max(2, 3 * train_length // 4))

    def fit(self, model: ModelRotary) -> Self:
        self._require_sizes()
        return super().fit(model)

    def idle(self, length: int) -> bool:
        return self.chunk is not None and length <= self.chunk

    def branches(self, query: Tensor, key: Tensor, heads: int, lengths: Lengths) -> tuple[Branch, ...]:
        chunk, step = self._require_sizes()
        farthest = min(2 * step - 1, chunk)
        own = query % step
        keys = own if key is query else key % step
        behind = (own + step).clamp(max=chunk)  # for keys of the chunk before
        ahead = (keys + step).clamp(max=chunk)  # and its mirror, for queries of the chunk before a key
        if query.shape[1] > 1:
            return (
                Branch(chunks(step, 0, 1), own, keys),
                Branch(chunks(step, -1, 0), behind, keys),
                Branch(chunks(step, -inf, -1), farthest, keys, far=True),
                Branch(chunks(step, 1, 2), own, ahead),
                Branch(chunks(step, 2, inf), own, farthest, far=True),
            )
        # One query, as in generation: at `behind` for all near keys, and keys not behind it moved along, so that there
        # are two branches and one rotation of the keys.
        difference = key // step - query // step
        moved = torch.where(difference > 0, ahead, keys) + (behind - own)
        keys = torch.where(difference < 0, keys, moved)
        return (
            Branch(chunks(step, -1, 2), behind, keys),
            Branch(chunks(step, -inf, -1), farthest, keys, far=True),
            Branch(chunks(step, 2, inf), own, farthest, far=True),
        )
