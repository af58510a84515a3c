"""STRING: far keys moved to distances that training saw often."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import Self

from torch import Tensor

from isentrope.core.region import band
from isentrope.parts import check_integer
from isentrope.positions.branch import Branch, Lengths, ModelRotary
from isentrope.positions.rope import PositionMap

MAX_LOCAL = 128
LOCAL_SHARE = 5


@dataclass(frozen=True)
class STRING(PositionMap):
    """Distance Δ for |Δ| < S, sign(Δ) · (|Δ| - S + W) beyond: S = shift, W = local (An et al., 2024).

    The largest distances of the training length are the rarest in training, and here unused: with S = n_tr / 3 a row of
    n_tr keys has distances up to ⅔ n_tr + W, and the training length is reached at about 4/3 n_tr keys. It acts
    inside the training length too, by intent: rows of up to `shift` keys alone are left as they are.

    Attributes:
        shift: S; a third of the training length by default.
        local: W, from 1 to `shift`; by default 128, or a fifth of `shift` where that is less.
    """

    shift: int | None = None
    local: int | None = None
    keys_cacheable = False
    has_far_keys = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("shift", "local"):
            if getattr(self, key) is not None:
                check_integer(self, key, 1)
        if self.shift is not None and self.local is not None and self.local > self.shift:
            raise ValueError(
                f"STRING(local=…): expected at most the shift of {self.shift}, got {self.local}; lower it, or leave it "
                "out"
            )

    @property
    def near_window(self) -> int | None:
        return self.shift

    def _require_shift(self) -> int:
        if self.shift is None:
            raise ValueError(
                "STRING(shift=…): expected a distance, or a training length to compute it from, got neither; write "
                "string:shift=… or add a temperature with a train_length"
            )
        return self.shift

    def resolve(self, train_length: int | None) -> Self:
        if self.shift is not None or train_length is None:
            return self
        return replace(self, shift=max(1, train_length // 3))

    def fit(self, model: ModelRotary) -> Self:
        self._require_shift()
        return super().fit(model)

    def idle(self, length: int) -> bool:
        return self.shift is not None and length <= self.shift

    def branches(self, query: Tensor, key: Tensor, heads: int, lengths: Lengths) -> tuple[Branch, ...]:
        shift = self._require_shift()
        local = max(1, min(MAX_LOCAL, shift // LOCAL_SHARE)) if self.local is None else self.local
        return (
            Branch(band(1 - shift, shift), query, key),
            Branch(band(-inf, 1 - shift), query - (shift - local), key, far=True),
            Branch(band(shift, inf), query + (shift - local), key, far=True),
        )
