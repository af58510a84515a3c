"""Adaptive temperature: τ from the measured entropy of attention."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import exp
from typing import Any

import torch
from torch import Tensor

from isentrope.parts import MAX_TEMPERATURE, Part, check_choice, check_number
from isentrope.temperatures.laws import KEYS, MAX_ENTROPY
from isentrope.utils.messages import format_value

# fitted by the paper to the entropy of small trained models
COEFFICIENTS = (-0.037, 0.481, -2.3, 4.917, -1.791)
THRESHOLD = 0.5  # nats
MAX_COEFFICIENTS, MAX_COEFFICIENT = 16, 1e6


@dataclass(frozen=True)
class Adaptive(Part):
    """τ = max(1, Σ_m c_m H^m) where H > threshold, else 1: from the entropy H of a query's own attention, in nats.

    H is that of the attention which the rest of the recipe gives, measured for each query and head; attention then runs
    again with τ. It is exact on every backend, and costs one more pass over the keys. τ is a constant to gradients.

    The published polynomial is above 1 for H from 0.85 to 5.94 nats only: attention as even as over 380 keys or more is
    left alone. Source: Veličković et al., 2024, "softmax is not enough".

    Attributes:
        coefficients: c, that of the highest power first.
        threshold: the entropy up to which τ = 1.
        keys: whose scores τ multiplies, as for `Temperature`; H is of all keys in any case.
    """

    coefficients: tuple[float, ...] = COEFFICIENTS
    threshold: float = THRESHOLD
    keys: str = field(default="all", kw_only=True)

    def __post_init__(self) -> None:
        values = self.coefficients
        is_list = isinstance(values, (list, tuple)) and 1 <= len(values) <= MAX_COEFFICIENTS
        if not is_list or not all(map(_is_coefficient, values)):
            raise ValueError(
                f"Adaptive(coefficients=…): expected 1 to {MAX_COEFFICIENTS} numbers from {-MAX_COEFFICIENT:g} to "
                f"{MAX_COEFFICIENT:g}, the highest power first, got {format_value(values)}"
            )
        object.__setattr__(self, "coefficients", tuple(float(value) for value in values))
        check_number(self, "threshold", MAX_ENTROPY, minimum=0)
        check_choice(self, "keys", KEYS)

    def by_entropy(self, entropy: Tensor) -> Tensor:
        """Return τ for each entropy, at most 1000."""
        polynomial = torch.zeros_like(entropy)
        for coefficient in self.coefficients:
            polynomial = polynomial * entropy + coefficient
        return torch.where(entropy > self.threshold, polynomial.clamp(1.0, MAX_TEMPERATURE), torch.ones_like(entropy))

    def idle(self, length: int) -> bool:
        return length <= exp(self.threshold)  # the entropy is at most ln n

    def for_layer(self, layer: int) -> Adaptive:
        return self


def _is_coefficient(value: Any) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and abs(value) <= MAX_COEFFICIENT
