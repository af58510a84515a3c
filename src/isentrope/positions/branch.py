"""What a position method yields: at which rotary positions queries and keys meet, region by region."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from isentrope.parts import Part
from isentrope.region import EVERYTHING, Region


@dataclass(frozen=True)
class Branch:
    """Inside `region`, query i and key j meet rotated to the positions `query`_i and `key`_j.

    query, key: real positions (batch or 1, length), one number for all, or None for no rotation.
    slopes: (heads,), a bias -slope · |i - j| on the score.
    """

    region: Region = field(default_factory=lambda: EVERYTHING)
    query: Tensor | float | None = None
    key: Tensor | float | None = None
    slopes: Tensor | None = None


class Position(Part):
    """A position method: `branches` says where queries and keys meet, `frequencies` how fast angles turn.

    The regions of the branches are disjoint and cover every pair; attention merges them exactly.
    """

    rotates = False
    # keys rotated once may stay in a cache: one branch, and angles that do not depend on the length
    keys_cacheable = True

    def branches(self, query: Tensor, key: Tensor, heads: int) -> tuple[Branch, ...]:
        """query (batch or 1, queries), key (batch or 1, keys): the positions of this call."""
        raise NotImplementedError

    def frequencies(self, head_dim: int, length: Tensor | int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """θ (pairs,) of a method that rotates, or (…, pairs) where it depends on the length (…) of the row."""
        raise NotImplementedError

    def token(self) -> Hashable:
        """What angles depend on besides the part's own options; where it is the same they may be kept."""
        return None

    def resolved(self, train_length: int | None) -> Position:
        """The method with a training length it was not given filled in."""
        return self


@dataclass(frozen=True)
class NoPE(Position):
    """No position information at all."""

    needs_training = True

    def branches(self, query: Tensor, key: Tensor, heads: int) -> tuple[Branch, ...]:
        return (Branch(),)
