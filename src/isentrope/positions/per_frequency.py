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

    The pairs are divided evenly into as many groups as there are `scales`, the fastest first; eight in the paper. A
    single scale is SelfExtend with that group. The paper finds each group's scale by search, from twice the extension
    in all of them: `isentrope.calibration.scales.search_scales`.
    """

    scales: tuple[int, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integers(self, "scales", 1, int(MAX_FACTOR))

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
