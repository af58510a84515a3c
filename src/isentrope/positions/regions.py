"""Methods with RoPE inside a window and another distance outside: ReRoPE, Leaky ReRoPE, SelfExtend, Jet-Long.

For keys behind the query the distance is positive, for keys ahead of it (bidirectional models) it is negative.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import inf
from typing import Self

from torch import Tensor

from isentrope.core.region import band
from isentrope.parts import MAX_FACTOR, MAX_LENGTH, check_integer, check_number
from isentrope.positions.branch import Branch, Lengths, ModelRotary, RotaryPair
from isentrope.positions.rope import PositionMap

DEFAULT_REACH = 0.75  # distances in the outer part of the training length are seldom trained well
MAX_REACH = 1.0


@dataclass(frozen=True)
class NearAndFar(PositionMap):
    """RoPE for |Δ| < window, the positions from `far` beyond.

    Attributes:
        window: w: nearer keys are at their own distance; half of the training length is a good start.
    """

    window: int
    keys_cacheable = False
    has_far_keys = True
    window_follows = False  # whether a window left out follows from the training length

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.window_follows and self.window_is_open):
            check_integer(self, "window", 1)

    @property
    def window_is_open(self) -> bool:
        """Whether the window was left out, and no training length is known yet."""
        return vars(self)["window"] is None

    @property
    def near_window(self) -> int | None:
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


class LengthMap(NearAndFar):
    """A method whose far positions may depend on the length n of the row.

    n counts the keys of a query's row or document that are there: text that is fed in pieces, or decoded, has at each
    step the map of the length so far, as with dynamic NTK. With `length` the map is that of rows of so many tokens,
    whatever their length, so that one pass, several passes and decoding agree exactly; longer rows follow the formula
    beyond it.

    Attributes:
        reach: the share of the training length that far distances may use.
        length: n, for every row.
        train_length: n_tr, the training length.
    """

    reach: float | None
    length: int | None
    train_length: int | None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reach is not None:
            check_number(self, "reach", MAX_REACH, above=0)
        for key in ("length", "train_length"):
            if getattr(self, key) is not None:
                check_integer(self, key, 1)
        if self.length is not None and not self.uses_length:
            raise ValueError(f"{type(self).__name__}(length=…): has no effect without reach; leave length out")
        if self.window_is_open and self.train_length is not None:
            object.__setattr__(self, "window", self.default_window(self.train_length))

    @staticmethod
    def default_window(train_length: int) -> int:
        """Return the window of a method that leaves it open."""
        raise NotImplementedError

    @property
    def uses_length(self) -> bool:
        """Whether the map is computed from a length and the training length."""
        return True

    @property
    def depends_on_row_length(self) -> bool:
        return self.uses_length and self.length is None

    def resolve(self, train_length: int | None) -> Self:
        if self.uses_length and self.train_length is None and train_length is not None:
            return replace(self, train_length=train_length)  # type: ignore[call-arg]
        return self

    def branches(self, query: Tensor, key: Tensor, heads: int, lengths: Lengths) -> tuple[Branch, ...]:
        if self.uses_length:
            self.require_train_length()
        return super().branches(query, key, heads, lengths)

    def fit(self, model: ModelRotary) -> Self:
        fitted = super().fit(model)
        if self.uses_length:
            self.farthest()
        if self.length is not None and self.idle(MAX_LENGTH):
            raise ValueError(
                f"{type(self).__name__}(length=…): rows of {self.length} tokens keep their positions, so that it would "
                "change nothing; set it to the most tokens that rows will have, or leave it out"
            )
        return fitted

    def require_train_length(self) -> int:
        """Return the length the model was trained at.

        Raises:
            ValueError: it was not given.
        """
        if self.train_length is None:
            raise ValueError(
                f"{type(self).__name__}(train_length=…): expected the length the model was trained at, got None; "
                "set it, or add a temperature that has a train_length"
            )
        return self.train_length

    def farthest(self) -> int:
        """Return the largest distance that far keys may be at: ⌊reach · n_tr⌋.

        Raises:
            ValueError: the training length is unknown, or the window reaches farther.
        """
        trained, reach = self.require_train_length(), DEFAULT_REACH if self.reach is None else self.reach
        limit = int(reach * trained + 1e-9)  # 0.57 · 100 is a little less than 57 in floating point
        if limit <= self.window:
            remedy = f"use a window of at most {limit - 1}" if limit > 1 else "raise reach"
            raise ValueError(
                f"{type(self).__name__}(reach=…): far distances up to {reach:g} · {trained} = {limit} lie within the "
                f"window of {self.window}; {remedy}"
            )
        return limit


@dataclass(frozen=True)
class LeakyReRoPE(LengthMap):
    """Distance Δ for |Δ| < w, sign(Δ) · (w + (|Δ| - w) / leak) beyond (Su, 2023).

    With `reach`, leak = max(1, (n - 1 - w) / (⌊reach · n_tr⌋ - w)) in a row of n keys, whose farthest distance is then
    at most reach · n_tr.

    Attributes:
        window: w.
        leak: 16 by default.
        reach: in place of leak, the share of the training length n_tr that far distances may use.
        length: with reach, n for every row; by default, each row has its own (see `LengthMap`).
        train_length: with reach, n_tr; by default that of the model, or of the recipe's temperature.
    """

    leak: float = 16.0
    reach: float | None = field(default=None, kw_only=True)
    length: int | None = field(default=None, kw_only=True)
    train_length: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "leak", MAX_FACTOR, minimum=1)
        if self.reach is not None and self.leak != type(self).leak:
            raise ValueError(f"LeakyReRoPE: expected leak or reach, got leak={self.leak:g} and reach={self.reach:g}")

    @property
    def uses_length(self) -> bool:
        return self.reach is not None

    def idle(self, length: int) -> bool:
        return super().idle(length) or (self.uses_length and bool(self.leak_at(length) == 1))

    def leak_at(self, length: Tensor | int) -> Tensor | float:
        """Return the leak of rows of this length."""
        if not self.uses_length:
            return self.leak
        n = length if self.length is None else self.length
        span = self.farthest() - self.window
        if isinstance(n, Tensor):
            return ((n.double() - 1 - self.window) / span).clamp_min(1)
        return max(1.0, (n - 1 - self.window) / span)

    def far(self, query: Tensor, key: Tensor, sign: int, lengths: Lengths) -> RotaryPair:
        query_leak, key_leak = map(self.leak_at, lengths)
        shift = sign * self.window * (1 - 1 / query_leak)
        return query.double() / query_leak + shift, key.double() / key_leak


@dataclass(frozen=True)
class SelfExtend(LengthMap):
    """Distance Δ for |Δ| < w; beyond, ⌊i/g⌋ + w - ⌊w/g⌋ against ⌊j/g⌋: grouped positions (Jin et al., 2024).

    With `reach`, g = max(1, ⌈(n - 1 - w) / (⌊reach · n_tr⌋ - w)⌉) in a row of n keys, whose farthest distance
    w - ⌊w/g⌋ + ⌊(n - 1)/g⌋ is then at most reach · n_tr.

    Attributes:
        window: w.
        group: g.
        reach: in place of group, the share of the training length n_tr that far distances may use; ¾ without either.
        length: with reach, n for every row; by default, each row has its own (see `LengthMap`).
        train_length: with reach, n_tr; by default that of the model, or of the recipe's temperature.
    """

    group: int | None = None
    reach: float | None = field(default=None, kw_only=True)
    length: int | None = field(default=None, kw_only=True)
    train_length: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.group is not None:
            check_integer(self, "group", 1)
            if self.reach is not None:
                raise ValueError(
                    f"SelfExtend: expected group or reach, got group={self.group} and reach={self.reach:g}"
                )

    @property
    def uses_length(self) -> bool:
        return self.group is None

    def idle(self, length: int) -> bool:
        return super().idle(length) or (self.uses_length and bool(self.group_at(length) == 1))

    def group_at(self, length: Tensor | int) -> Tensor | int:
        """Return the group of rows of this length."""
        if self.group is not None:
            return self.group
        n = length if self.length is None else self.length
        return at_least_one(-((self.window + 1 - n) // (self.farthest() - self.window)))

    def far(self, query: Tensor, key: Tensor, sign: int, lengths: Lengths) -> RotaryPair:
        query_group, key_group = map(self.group_at, lengths)
        shift = sign * (self.window - self.window // query_group)
        return query // query_group + shift, key // key_group


@dataclass(frozen=True)
class JetLong(LengthMap):
    """Distance Δ for |Δ| < w; beyond, ⌊i/G⌋ against ⌊j/G⌋, G = ⌈n / n_tr⌉ in a row of n keys (Tang et al., 2026).

    SelfExtend without its shift, and with a group that follows from the length: at the window's edge the distance falls
    from w - 1 to about w / G, so that keys just beyond it are at the distances of near ones. With `reach`,
    G = ⌊(n - 1) / (⌊reach · n_tr⌋ + 1)⌋ + 1, the smallest group with distances up to reach · n_tr.

    Attributes:
        window: w; by default n_tr / 16, at least 512 and at most 4096, and never above n_tr / 2.
        reach: the share of the training length n_tr that far distances may use; by default all of it.
        length: n for every row; by default, each row has its own (see `LengthMap`).
        train_length: n_tr; by default that of the model, or of the recipe's temperature.
    """

    window: int = None  # type: ignore[assignment]
    reach: float | None = field(default=None, kw_only=True)
    length: int | None = field(default=None, kw_only=True)
    train_length: int | None = field(default=None, kw_only=True)
    window_follows = True

    @staticmethod
    def default_window(train_length: int) -> int:
        return max(1, min(max(train_length // 16, 512), 4096, train_length // 2))

    def farthest(self) -> int:
        return self.require_train_length() - 1 if self.reach is None else super().farthest()

    def idle(self, length: int) -> bool:
        return bool(self.group_at(length) == 1) or super().idle(length)

    def group_at(self, length: Tensor | int) -> Tensor | int:
        """Return the group of rows of this length."""
        n = length if self.length is None else self.length
        return at_least_one((n - 1) // (self.farthest() + 1) + 1)

    def far(self, query: Tensor, key: Tensor, sign: int, lengths: Lengths) -> RotaryPair:
        query_group, key_group = map(self.group_at, lengths)
        return query // query_group, key // key_group


def at_least_one(x: Tensor | int) -> Tensor | int:
    """Return max(1, x), element by element."""
    return x.clamp_min(1) if isinstance(x, Tensor) else max(1, x)
