"""Scores: how alike a query and a key are, before temperature and position bias."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from isentrope.parts import Part, check_number

# Below the first no score is told from 0; in fp32 one of the size of the second is known to three digits.
MIN_ALPHA, MAX_ALPHA = 1e-4, 1e4


class Score(Part):
    """s(q, k) = factor · q·k, of unit vectors where the score normalises."""

    normalises = False

    def factor(self, head_dim: int) -> float:
        raise NotImplementedError


@dataclass(frozen=True)
class Dot(Score):
    """s(q, k) = q·k / √d, scaled dot-product attention (Vaswani et al., 2017)."""

    def idle(self, length: int) -> bool:
        return True

    def factor(self, head_dim: int) -> float:
        return head_dim**-0.5


@dataclass(frozen=True)
class Cosine(Score):
    """s(q, k) = α · q·k / (‖q‖ ‖k‖), scaled cosine attention; α is the paper's CosScale.

    The paper takes α = 128, and 16 under windowed attention. It is a choice made at training time: a model
    trained with dot products does not survive the swap.
    """

    alpha: float = 128.0
    normalises = True
    needs_training = True

    def __post_init__(self) -> None:
        check_number(self, "alpha", MAX_ALPHA, least=MIN_ALPHA)

    def _shown(self, key: str, value: Any, default: Any) -> bool:
        return True  # the scale is what a reader looks for, default or not

    def factor(self, head_dim: int) -> float:
        return self.alpha


def unit(x: Tensor) -> Tensor:
    """x / ‖x‖ along the last axis; a zero vector stays zero. Expects fp32 or wider."""
    # dividing by the largest entry first keeps the sum of squares away from overflow and underflow. The result does not
    # depend on it, so neither need the gradient: through amax, that looks for the entry which equals the maximum, and a
    # compiler that works x out anew with other roundings finds none and divides by zero
    peak = x.detach().abs().amax(-1, keepdim=True)
    x = x / torch.where(peak > 0, peak, torch.ones_like(peak))
    # the largest entry is now 1, so the sum is at least 1 unless x is zero: then the floor keeps the gradient finite
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True).clamp_min(0.5))
