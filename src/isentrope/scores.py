"""Scores: the similarity of a query and a key, before temperature and position bias."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from isentrope.parts import Part, check_number

# Scores below the first are all but 0; of those near the second, fp32 keeps three digits.
MIN_ALPHA, MAX_ALPHA = 1e-4, 1e4


class Score(Part):
    """s(q, k) = factor · q·k, of q / ‖q‖ and k / ‖k‖ where the score normalises."""

    normalises = False

    def factor(self, head_dim: int) -> float:
        """Return the factor of the product, for vectors of `head_dim` entries."""
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

    The paper takes α = 128, and 16 under windowed attention. A model trained with dot products does not work with it.
    Source: Li et al., 2025, "Information Entropy Invariance".

    Attributes:
        alpha: α.
    """

    alpha: float = 128.0
    normalises = True
    needs_training = True

    def __post_init__(self) -> None:
        check_number(self, "alpha", MAX_ALPHA, minimum=MIN_ALPHA)

    def _writes_option(self, key: str, value: Any, default: Any) -> bool:
        return True  # a recipe's text always shows the scale

    def factor(self, head_dim: int) -> float:
        return self.alpha
