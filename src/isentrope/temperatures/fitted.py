"""A temperature interpolated from a table, as calibration writes it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from isentrope.parts import MAX_LENGTH, MAX_TEMPERATURE
from isentrope.temperatures.laws import Temperature
from isentrope.utils.messages import format_value

MAX_TABLE_DIMS = 3  # layers, heads, lengths


@dataclass(frozen=True)
class Fitted(Temperature):
    """τ(n) interpolated linearly in ln n between `lengths`, extrapolated with the last slope.

    Attributes:
        lengths: increasing; the first is the training length, up to which τ = 1 if clamped.
        table: τ at the lengths, (lengths), (heads, lengths) or (layers, heads, lengths); a head axis of 1 serves all
            heads.
    """

    lengths: tuple[int, ...]
    table: Any

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "lengths", _as_tuple(self.lengths, "lengths"))
        object.__setattr__(self, "table", _as_tuple(self.table, "table"))
        lengths = self.lengths
        are_integers = isinstance(lengths, tuple) and lengths and all(type(n) is int for n in lengths)
        if not are_integers or not all(0 < n <= MAX_LENGTH for n in lengths):
            raise ValueError(f"Fitted(lengths=…): expected positive integers ≤ 2^53, got {format_value(lengths)}")
        if any(1000 * b < 1001 * a for a, b in pairwise(lengths)):
            raise ValueError(
                f"Fitted(lengths=…): expected increasing lengths, 0.1 % apart, got {format_value(lengths)}"
            )
        shape = _shape(self.table)
        if shape is None:
            raise ValueError(
                f"Fitted(table=…): expected nested numbers from 0 to {MAX_TEMPERATURE:g}, "
                f"got {format_value(self.table)}"
            )
        if not 1 <= len(shape) <= MAX_TABLE_DIMS or shape[-1] != len(lengths):
            raise ValueError(
                f"Fitted(table=…): expected shape ([layers,] [heads,] lengths) with {len(lengths)} lengths, got {shape}"
            )

    @property
    def train_length(self) -> int:
        return self.lengths[0]

    @property
    def unit_length(self) -> float:
        return self.train_length

    def for_layer(self, layer: int) -> Fitted:
        if torch.tensor(self.table).dim() < 3:
            return self
        if not 0 <= layer < len(self.table):
            raise ValueError(f"Fitted: expected a layer in 0 … {len(self.table) - 1}, got {layer}")
        return replace(self, table=self.table[layer])

    def law(self, n: Tensor, head_dim: int) -> Tensor:
        table = torch.tensor(self.table, dtype=n.dtype, device=n.device)
        if table.dim() == 3:
            raise ValueError("Fitted: the table has a layer axis; call for_layer(i) first")
        return interpolate_table(n, self.lengths, table)


def interpolate_table(n: Tensor, lengths: tuple[int, ...], table: Tensor) -> Tensor:
    """Interpolate a table (lengths) or (heads, lengths) linearly in ln n; gradients flow to the table."""
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


def _as_tuple(value: Any, name: str, depth: int = 0) -> Any:
    if isinstance(value, Tensor):
        value = value.tolist()
    if not isinstance(value, (list, tuple)):
        return value
    if depth > MAX_TABLE_DIMS:
        raise ValueError(f"Fitted({name}=…): expected at most layers of heads of lengths, got {depth} levels or more")
    return tuple(_as_tuple(v, name, depth + 1) for v in value)


def _shape(table: Any) -> tuple[int, ...] | None:
    """Return the shape of nested tuples of temperatures; None if they are ragged or hold anything else."""
    if not isinstance(table, tuple):
        is_number = isinstance(table, Real) and not isinstance(table, bool)
        return () if is_number and 0 <= table <= MAX_TEMPERATURE else None
    inner = {_shape(row) for row in table}
    if len(inner) > 1 or None in inner:
        return None
    return len(table), *(inner.pop() if inner else ())  # type: ignore[misc]
