"""Methods with RoPE inside a window and another distance outside: ReRoPE, Leaky ReRoPE, SelfExtend.

For keys behind the query the distance is positive, for keys ahead of it (bidirectional models) it is negative.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from torch import Tensor

from isentrope.core.region import band
from isentrope.parts import MAX_FACTOR, check_integer, check_number
from isentrope.positions.branch import Branch, Lengths, RotaryPair
from isentrope.positions.rope import PositionMap


@dataclass(frozen=True)
class NearAndFar(PositionMap):
    """RoPE for |Δ| < window, the positions from `far` beyond."""

    window: int
    keys_cacheable = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer(self, "window", 1)

    @property
    def near_window(self) -> int:
        return self.window

    def idle(self, length: int) -> bool:
        return length <= self.window

    def far(self, query: Tensor, key: Tensor, sign: int, lengths: Lengths) -> RotaryPair:
        """Return the positions of queries and keys for keys behind the query (sign 1) or ahead of it (sign -1).

        The other arguments are those of `branches`.
        """
        raise NotImplementedError

    def branches(self, query: Tensor, key: Tensor, heads: int, lengths: Lengths) -> tuple[Branch, ...]:
        w = self.window
        return (
            Branch(band(1 - w, w), query, key),
            Branch(band(-inf, 1 - w), *self.far(query, key, 1, lengths), far=True),
            Branch(band(w, inf), *self.far(query, key, -1, lengths), far=True),
        )


@dataclass(frozen=True)
class ReRoPE(NearAndFar):
    """Distance Δ for |Δ| < w, sign(Δ) · w beyond: no angle that the model was not trained on (Su, 2023)."""

    def far(self, query: Tensor, key: Tensor, sign: int, lengths: Lengths) -> RotaryPair:
        return sign * self.window, None


@dataclass(frozen=True)
class LeakyReRoPE(NearAndFar):
    """Distance Δ for |Δ| < w, sign(Δ) · (w + (|Δ| - w) / leak) beyond (Su, 2023)."""

    leak: float = 16.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "leak", MAX_FACTOR, minimum=1)

    def far(self, query: Tensor, key: Tensor, sign: int, lengths: Lengths) -> RotaryPair:
        shift = sign * self.window * (1 - 1 / self.leak)
        return query.double() / self.leak + shift, key.double() / self.leak


@dataclass(frozen=True)
class SelfExtend(NearAndFar):
    """Distance Δ for |Δ| < w; beyond, ⌊i/g⌋ + w - ⌊w/g⌋ against ⌊j/g⌋: grouped positions (Jin et al., 2024)."""

    group: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer(self, "group", 1)

    def far(self, query: Tensor, key: Tensor, sign: int, lengths: Lengths) -> RotaryPair:
        shift = sign * (self.window - self.window // self.group)
        return query // self.group + shift, key // self.group
