"""Scale-invariant attention: a factor and a bias of scores by distance."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from isentrope.parts import MAX_LENGTH, Part, check_choice, check_number
from isentrope.temperatures.laws import KEYS

MIN_DISTANCE = 1e-3


@dataclass(frozen=True)
class ScaleInvariant(Part):
    """a s + m with a² = 1 + 2 ln(1 + |Δ| / distance), m = 1 - a²: an octave of distances keeps its share of attention.

    For normally distributed scores of variance 1, the expected weight e^{m + a² / 2} of a key falls like 1 / |Δ|, so
    that the total from Δ to 2Δ, and how few keys it lies on, do not depend on Δ. Models are trained with it: it changes
    attention at every length. Source: Anson et al., 2025, "Scale-invariant attention".

    Attributes:
        distance: where the logarithm sets in, in tokens; 10 in the paper.
        keys: whose scores change, as for `Temperature`. |Δ| is the distance between tokens, whatever distance a
            position method rotates by.
    """

    distance: float = 10.0
    keys: str = field(default="all", kw_only=True)
    needs_training = True

    def __post_init__(self) -> None:
        check_number(self, "distance", MAX_LENGTH, minimum=MIN_DISTANCE)
        check_choice(self, "keys", KEYS)

    def by_distance(self, distance: Tensor) -> tuple[Tensor, Tensor]:
        """Return a and m for each |Δ|."""
        growth = 2 * torch.log1p(distance / self.distance)
        return torch.sqrt(1 + growth), -growth

    def for_layer(self, layer: int) -> ScaleInvariant:
        return self
