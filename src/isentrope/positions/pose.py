"""Position ids for training at distances longer than the row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from isentrope.parts import Part, check_integer


@dataclass(frozen=True)
class PoSE(Part):
    """p_i = i for i < split, i + skip beyond: positional skip-wise training (Zhu et al., 2023).

    For a row of L tokens, `split` is drawn from 1 … L - 1 and `skip` from 0 … target_length - L. Draw new ids for every
    example of every epoch.
    """

    target_length: int = 4096

    def __post_init__(self) -> None:
        check_integer(self, "target_length", 1)

    def sample(self, batch: int, length: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw position ids (batch, length), increasing along each row."""
        if length > self.target_length:
            raise ValueError(f"PoSE: expected length ≤ target_length={self.target_length}, got {length}")
        # a row of one token has no split
        split = torch.randint(1, max(length, 2), (batch, 1), generator=generator)
        skip = torch.randint(0, self.target_length - length + 1, (batch, 1), generator=generator)
        index = torch.arange(length).expand(batch, length)
        return index + skip * (index >= split)
