"""Values of a law at every number of keys, kept on the device, for calls with one query a row.

Such a call computes a handful of numbers, and the operations of a formula, each a launch, would take longer than the
rest of what its layers share. A table of a law is computed once; a step reads one entry of it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor
from torch.nn import functional as F

from isentrope.core.caching import MAX_LAW_TABLES, LRUCache
from isentrope.core.compile import values_are_readable

MIN_TABLE_ENTRIES = 1 << 10
MAX_TABLE_ELEMENTS = 1 << 18  # heads included
MAX_EXACT_COUNT = 1 << 24  # fp32 has every integer below
ALIGNED_ENTRIES = 4  # in fp32, as kernels are compiled for: rows begin at multiples of these, or there would be two

_tables = LRUCache[Hashable, "Tensor | None"](MAX_LAW_TABLES)


def look_up_law(
    law: Callable[[Tensor], Tensor], key: Hashable, n: Tensor | int, max_n: int, like: Tensor
) -> Tensor | None:
    """Return law(n) for one query a row, (rows, heads or 1, 1); None where there is no table.

    Args:
        law: computes values (1, heads or 1, entries) from n (1, 1, entries); the same whenever `key` is.
        key: names the law.
        n: number of keys, for all rows or (rows,).
        max_n: what n never exceeds, where it is a tensor.
        like: a tensor with the device and dtype of the values.
    """
    start, entries = 0, max(MIN_TABLE_ENTRIES, 1 << max_n.bit_length())
    if isinstance(n, int):  # the next steps read the entries after it, so that a short table serves them
        if n >= MAX_EXACT_COUNT:
            return None
        start, entries = n - n % MIN_TABLE_ENTRIES, MIN_TABLE_ENTRIES
    if entries > MAX_TABLE_ELEMENTS or type(like) is not Tensor:  # a tensor without values must not be kept
        return None
    full_key = (key, start, entries, like.dtype, like.device)
    if not values_are_readable(like) and full_key not in _tables:
        return None  # what a graph is captured with must not be computed by its first replay
    table = _tables.get(full_key, lambda: _make_table(law, range(start, start + entries), like))
    if table is None:
        return None
    if isinstance(n, int):
        return table[n - start : n - start + 1, :, None]
    return F.embedding(n, table)[..., None]


def _make_table(law: Callable[[Tensor], Tensor], counts: range, like: Tensor) -> Tensor | None:
    """Return the values of a law, (entries, heads or 1), in aligned rows; None where that is too many."""
    with torch.no_grad():
        n = torch.arange(counts.start, counts.stop, dtype=like.dtype, device=like.device)
        values = law(n[None, None])
    heads = values.shape[1]
    if values.numel() > MAX_TABLE_ELEMENTS:
        return None
    return F.pad(values[0].mT, (0, -heads % ALIGNED_ENTRIES)).contiguous()[:, :heads]


def fits_heads(x: Tensor, heads: int) -> bool:
    """Return whether x (batch, heads or 1, …) has one value for all heads or one for each; both may be symbols."""
    return bool(x.shape[1] == 1 or x.shape[1] == heads)
