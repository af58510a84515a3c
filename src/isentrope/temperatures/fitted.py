"""A temperature read from a table: what calibration on a user's own text leaves behind."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from isentrope.temperatures.laws import Temperature


@dataclass(frozen=True)
class Fitted(Temperature):
    """τ(n) interpolated linearly in ln n between `lengths`, the last slope continued beyond the last of them.

    table: one value a length, or a row of them a head, or such rows for every layer: (lengths), (heads, lengths) or
    (layers, heads, lengths); a head axis of 1 serves all heads. `lengths[0]` is the training length: clamped, τ = 1
    up to there.
    """

    lengths: tuple[int, ...]
    table: Any

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "lengths", _as_tuple(self.lengths))
        object.__setattr__(self, "table", _as_tuple(self.table))
        lengths = self.lengths
        if not isinstance(lengths, tuple) or not lengths or not all(type(n) is int and n > 0 for n in lengths):
            raise ValueError(f"Fitted(lengths=…): expected positive integers, got {lengths!r}")
        if any(a >= b for a, b in pairwise(lengths)):
            raise ValueError(f"Fitted(lengths=…): expected increasing lengths, got {lengths!r}")
        try:
            table = torch.tensor(self.table, dtype=torch.float64)
            shape = table.shape
        except (TypeError, ValueError) as error:
            raise ValueError(f"Fitted(table=…): expected nested numbers, got {self.table!r}") from error
        if not table.isfinite().all():
            raise ValueError(f"Fitted(table=…): expected finite numbers, got {self.table!r}")
        if not 1 <= len(shape) <= 3 or shape[-1] != len(lengths):
            raise ValueError(
                "Fitted(table=…): expected shape ([layers,] [heads,] lengths) "
                f"with {len(lengths)} lengths, got {tuple(shape)}"
            )

    @property
    def unit_length(self) -> float:
        return self.lengths[0]

    def for_layer(self, layer: int) -> Fitted:
        if torch.tensor(self.table).dim() < 3:
            return self
        if not 0 <= layer < len(self.table):
            raise ValueError(f"Fitted: expected a layer in 0 … {len(self.table) - 1}, got {layer}")
        return Fitted(self.lengths, self.table[layer], clamp=self.clamp, count=self.count)

    def law(self, n: Tensor, head_dim: int) -> Tensor:
        table = torch.tensor(self.table, dtype=n.dtype, device=n.device)
        if table.dim() == 3:
            raise ValueError("Fitted: the table has a layer axis; take for_layer(i) first")
        return interpolated(n, self.lengths, table)


def interpolated(n: Tensor, lengths: tuple[int, ...], table: Tensor) -> Tensor:
    """τ(n) from a table (lengths) or (heads, lengths), straight in ln n; gradients pass to the table."""
    per_head = table.dim() == 2
    if per_head and n.dim() >= 2:
        n = n.squeeze(-2)  # the head axis of (batch, 1, queries)
    if len(lengths) == 1:
        tau = table[..., :1].expand(*table.shape[:-1], n.numel()).reshape(*table.shape[:-1], *n.shape)
    else:
        grid = torch.tensor(lengths, dtype=n.dtype, device=n.device).log()
        right = torch.searchsorted(grid, n.log()).clamp(1, len(grid) - 1)
        weight = (n.log() - grid[right - 1]) / (grid[right] - grid[right - 1])
        tau = torch.lerp(table[..., right - 1], table[..., right], weight)
    return tau.movedim(0, -2) if per_head and n.dim() else tau


def _as_tuple(value: Any) -> Any:
    if isinstance(value, Tensor):
        value = value.tolist()
    return tuple(_as_tuple(v) for v in value) if isinstance(value, (list, tuple)) else value
