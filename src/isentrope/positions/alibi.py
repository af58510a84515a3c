"""ALiBi: a linear distance bias."""

from __future__ import annotations

from dataclasses import dataclass
from math import floor, log2

import torch
from torch import Tensor

from isentrope.core.caching import get_constant
from isentrope.positions.branch import Branch, Lengths, Position


@dataclass(frozen=True)
class ALiBi(Position):
    """s - m_h |Δ|, m_h = 2^{-8h/H} for heads h = 1 … H (Press et al., 2021); no rotation.

    For H not a power of two: the slopes of the next lower power of two, then every other slope of twice that.
    """

    needs_training = True

    @staticmethod
    def slopes(heads: int) -> Tensor:
        """Return m_h, (heads,)."""

        def powers(count: int) -> list[float]:
            return [2 ** (-8 * h / count) for h in range(1, count + 1)]

        below = 2 ** floor(log2(heads))
        return torch.tensor(powers(below) + powers(2 * below)[::2][: heads - below], dtype=torch.float64)

    def branches(self, query: Tensor, key: Tensor, heads: int, lengths: Lengths) -> tuple[Branch, ...]:
        return (Branch(slopes=get_constant(ALiBi.slopes, query.device, heads)),)
