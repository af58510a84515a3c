"""Positions to train at, so that a short window sees long distances."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from isentrope.parts import Part, check_integer


@dataclass(frozen=True)
class PoSE(Part):
    """Positional skip-wise training (Zhu et al., 2023): position ids in two chunks with a random gap between them.

    A row of L tokens is split at a random place; the first chunk keeps positions 0, 1, …, the second is moved ahead by
    a skip drawn from 0 … target_length - L. Draw anew for every example of every epoch.
    """

    target_length: int = 4096

    def __post_init__(self) -> None:
        check_integer(self, "target_length", 1)

    def sample(self, batch: int, length: int, generator: torch.Generator | None = None) -> Tensor:
        """Position ids (batch, length), increasing along each row."""
        if length > self.target_length:
            raise ValueError(f"PoSE: expected length ≤ target_length={self.target_length}, got {length}")
        # one token alone cannot be split
        split = torch.randint(1, max(length, 2), (batch, 1), generator=generator)
        skip = torch.randint(0, self.target_length - length + 1, (batch, 1), generator=generator)
        index = torch.arange(length).expand(batch, length)
        return index + skip * (index >= split)
