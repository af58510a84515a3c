"""Options with a value for each layer and head: a number, a table (heads), or a table (layers, heads)."""

from __future__ import annotations

from numbers import Real
from typing import Any

import torch
from torch import Tensor

from isentrope.core.caching import get_constant
from isentrope.utils.messages import format_value


def check_table(part: object, key: str, minimum: float, maximum: float) -> None:
    """Check that an option is a number, a table (heads) or (layers, heads) of numbers, and store it as tuples."""
    table = _as_tuples(getattr(part, key))
    rows = table if isinstance(table, tuple) and table and isinstance(table[0], tuple) else (table,)
    sizes = {len(row) if isinstance(row, tuple) else 0 for row in rows}
    values: list[Any] = [value for row in rows for value in (row if isinstance(row, tuple) else (row,))]
    if not all(_is_between(value, minimum, maximum) for value in values) or not values or len(sizes) > 1:
        raise ValueError(
            f"{type(part).__name__}({key}=…): expected a number from {minimum:g} to {maximum:g}, or a table of them, "
            f"(heads) or (layers, heads), got {format_value(getattr(part, key))}"
        )
    object.__setattr__(part, key, _as_floats(table))


def _is_between(value: Any, minimum: float, maximum: float) -> bool:
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    return is_number and bool(minimum <= value <= maximum)


def _as_tuples(value: Any) -> Any:
    value = value.tolist() if hasattr(value, "tolist") else value
    return tuple(_as_tuples(v) for v in value) if isinstance(value, (list, tuple)) else value


def _as_floats(table: Any) -> Any:
    return tuple(_as_floats(v) for v in table) if isinstance(table, tuple) else float(table)


def take_layer(part: object, table: Any, layer: int) -> Any:
    """Return the row of one layer, of a table with a layer axis; any other table as it is.

    Raises:
        ValueError: the table has no such layer.
    """
    if not isinstance(table, tuple) or not isinstance(table[0], tuple):
        return table
    if not 0 <= layer < len(table):
        raise ValueError(f"{type(part).__name__}: expected a layer in 0 … {len(table) - 1}, got {layer}")
    return table[layer]


def broadcast_heads(part: object, table: Any, n: Tensor) -> Tensor | float:
    """Return a number as it is, or a table (heads) as (heads, 1), in the dtype of n and ready to multiply it.

    Raises:
        ValueError: the table has a layer axis.
    """
    if not isinstance(table, tuple):
        return float(table)
    if isinstance(table[0], tuple):
        raise ValueError(f"{type(part).__name__}: the table has a layer axis; call for_layer(i) first")
    return get_constant(_as_column, n.device, table, n.dtype)


def _as_column(table: tuple[float, ...], dtype: torch.dtype) -> Tensor:
    return torch.tensor(table, dtype=dtype)[:, None]
