"""Positions that differ by frequency: DPE."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from isentrope.parts import MAX_FACTOR, check_integers
from isentrope.positions.branch import Lengths, ModelRotary, RotaryPair
from isentrope.positions.regions import NearAndFar


@dataclass(frozen=True)
class DPE(NearAndFar):
    """Distance Δ for |Δ| < w; beyond, ⌊i/s_g⌋ + w - ⌊w/s_g⌋ against ⌊j/s_g⌋ for pairs of group g (Lu et al., 2025).

    Pair m of P is in group ⌊m G / P⌋ of G, the fastest pairs first. A single scale is SelfExtend with that group.

    Attributes:
        window: w; n_tr / 8 in the paper.
        scales: s_g, as many as there are groups, eight in the paper. They have no default: the paper finds them on a
            model by search, as `isentrope.calibration.scales.search_scales` does, from twice the extension in all.
    """

    scales: tuple[int, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integers(self, "scales", 1, int(MAX_FACTOR))

    def idle(self, length: int) -> bool:
        return super().idle(length) or set(self.scales) == {1}

    def far(self, query: Tensor, key: Tensor, sign: int, lengths: Lengths) -> RotaryPair:
        w = self.window
        queries = [query // scale + sign * (w - w // scale) for scale in self.scales]
        return torch.stack(queries, -1), torch.stack([key // scale for scale in self.scales], -1)

    def rotated_size(self, head_dim: int) -> int:
        dim = super().rotated_size(head_dim)
        if len(self.scales) > dim // 2:
            raise ValueError(
                f"DPE(scales=…): expected at most {dim // 2}, the number of rotated pairs of a head, "
                f"got {len(self.scales)}"
            )
        return dim

    def fit(self, model: ModelRotary) -> Self:
        self.rotated_size(model.dim)
        return super().fit(model)
