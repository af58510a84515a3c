"""LaMPE: far positions squeezed into a range that grows with the length as a sigmoid does."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import exp, inf
from typing import Any, Self

import torch
from torch import Tensor

from isentrope.core.region import band
from isentrope.parts import check_integer, check_number
from isentrope.positions.branch import Branch, Lengths, ModelRotary, RotaryPair
from isentrope.positions.regions import LengthMap, at_least_one

# a · n_tr and b, between the two published fits: 0.36 and -0.65 (Llama 2), 0.86 and -2.47 (Llama 3)
DEFAULT_SLOPE, DEFAULT_INTERCEPT = 0.55, -1.55
MAX_SLOPE, MAX_INTERCEPT = 1.0, 100.0
DEFAULT_TAIL = 200
NEVER = 1 << 60  # a distance that no pair has


@dataclass(frozen=True)
class LaMPE(LengthMap):
    """Far positions m(p) = ⌊p U / (n - 1)⌋, U(n) = ⌊S / (1 + e^{-(a n + b)})⌋, in rows n > n_tr (Zhang et al., 2025).

    Distances are Δ for |Δ| < h, and m(i) - m(j) + b₁ beyond, b₁ = h - m(h) - 1. In the tail, from Δ₀ = n - 1 - R on,
    they rise by 1 again: Δ - Δ₀ + m(Δ₀) + b₁, so that the last queries and the first keys tell neighbours apart; R is
    raised to the end of its plateau of m. From key to key a distance rises by 0 or 1, and stays below n_tr; the tail is
    left out where plateaus are so long that it would not. Keys ahead of the query are mirrored. Rows of up to n_tr keys
    keep their positions.

    The published method multiplies logits by (1 + 0.1 ln 2)²: add `yarntemperature:factor=2`. Its fits: a = 8.673e-5,
    b = -0.648, S = 2489 for Llama 2 (n_tr 4096); a = 1.0493e-4, b = -2.4666, S = 6204 for Llama 3 (n_tr 8192).

    Attributes:
        window: h; by default n_tr / 8.
        reach: S as a share of n_tr, ¾ by default.
        slope: a; by default 0.55 / n_tr.
        intercept: b.
        tail: R; by default 200, and at most n_tr / 16. Where several queries of a row meet rows of different lengths
            (padding, documents) it is refused, unless `length` is given: write tail=0.
        length: n for every row, best the most that rows will have; by default, each row has its own (see `LengthMap`).
        train_length: n_tr; by default that of the model, or of the recipe's temperature.
    """

    window: int = None  # type: ignore[assignment]
    reach: float | None = field(default=None, kw_only=True)
    slope: float | None = field(default=None, kw_only=True)
    intercept: float = field(default=DEFAULT_INTERCEPT, kw_only=True)
    tail: int | None = field(default=None, kw_only=True)
    length: int | None = field(default=None, kw_only=True)
    train_length: int | None = field(default=None, kw_only=True)
    window_follows = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "intercept", MAX_INTERCEPT, minimum=-MAX_INTERCEPT)
        if self.slope is not None:
            check_number(self, "slope", MAX_SLOPE, minimum=0)
        if self.tail is not None:
            check_integer(self, "tail", 0)

    @property
    def far_keys_are_one_span(self) -> bool:
        return self.tail == 0

    @staticmethod
    def default_window(train_length: int) -> int:
        return max(1, train_length // 8)

    def fit(self, model: ModelRotary) -> Self:
        fitted = super().fit(model)
        self.tail_size()
        return fitted

    def idle(self, length: int) -> bool:
        trained = self.require_train_length()
        return super().idle(length) or (length if self.length is None else self.length) <= trained

    def tail_size(self) -> int:
        """Return R before it is raised.

        Raises:
            ValueError: distances would exceed the training length.
        """
        trained, limit = self.require_train_length(), self.farthest()
        tail = min(DEFAULT_TAIL, trained // 16) if self.tail is None else self.tail
        if limit + self.window + tail > trained:
            raise ValueError(
                f"LaMPE: expected reach · train_length + window + tail of at most the training length {trained}, "
                f"got {limit} + {self.window} + {tail}; lower one of them"
            )
        return tail

    def extent_at(self, length: Tensor | int) -> Tensor | int:
        """Return U of rows of this length: n - 1, which leaves positions as they are, up to the training length."""
        limit, trained = self.farthest(), self.require_train_length()
        slope = DEFAULT_SLOPE / trained if self.slope is None else self.slope
        if isinstance(length, Tensor):
            extent = limit / (1 + torch.exp(-(slope * length.double() + self.intercept)))
            return torch.where(length > trained, extent.long(), length - 1).clamp_min(1)
        squeezed = int(limit / (1 + exp(-(slope * length + self.intercept))))
        return max(1, squeezed if length > trained else length - 1)

    def map_positions(self, position: Any, length: Tensor | int) -> Any:
        """Return m of positions, integers or a tensor of them, in rows of this length."""
        n = length if self.length is None else self.length
        return position * self.extent_at(n) // at_least_one(n - 1)

    def shift_at(self, length: Tensor | int) -> Any:
        """Return b₁ of rows of this length; 0 where positions stay as they are."""
        shift = self.window - 1 - self.map_positions(self.window, length)
        return shift.clamp_min(0) if isinstance(shift, Tensor) else max(0, shift)

    def tail_start(self, length: Tensor | int) -> Any:
        """Return Δ₀ of rows of this length, the distance from which on pairs are in the tail; `NEVER` without one."""
        n, tail = length if self.length is None else self.length, self.tail_size()
        if not tail:
            return NEVER
        last, extent = at_least_one(n - 1), self.extent_at(n)
        start = -(-((last - tail) * extent // last) * last // extent)  # the start of its plateau
        farthest = last - start + self.map_positions(start, n) + self.shift_at(n)
        fits = (start > self.window) & (farthest < self.require_train_length())
        return torch.where(fits, start, NEVER) if isinstance(fits, Tensor) else start if fits else NEVER

    def far(self, query: Tensor, key: Tensor, sign: int, lengths: Lengths) -> RotaryPair:
        q, k = self.map_positions(query, lengths[0]), self.map_positions(key, lengths[1])
        start = self.tail_start(lengths[0])
        if query.shape[-1] == 1 and (isinstance(start, Tensor) or start < NEVER):
            # a single query has its tail in the positions of its keys, so that decoding has two branches
            tail = key + q - query + sign * (start - self.map_positions(start, lengths[0]))
            k = torch.where(sign * (query - key) >= start, tail, k)
        return q + sign * self.shift_at(lengths[0]), k

    def branches(self, query: Tensor, key: Tensor, heads: int, lengths: Lengths) -> tuple[Branch, ...]:
        branches = super().branches(query, key, heads, lengths)
        if query.shape[-1] == 1:
            return branches
        start = self.tail_start(lengths[0])
        if isinstance(start, Tensor):
            raise ValueError(
                "LaMPE(tail=…): rows of different lengths (padding, documents) have tails of their own, which a call "
                "with several queries cannot have; set tail=0, or length=… to the most tokens that rows will have"
            )
        if start >= NEVER:
            return branches
        near, *others = branches
        outer = start - self.map_positions(start, lengths[0]) - self.shift_at(lengths[0])  # b₂
        middle = band(1 - start, start)
        return (
            near,
            *(replace(branch, region=branch.region & middle) for branch in others),
            Branch(band(-inf, 1 - start), query - outer, key, far=True),
            Branch(band(start, inf), query + outer, key, far=True),
        )
