"""A span of keys as the kernel for Hopper takes it, and what it takes of them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from isentrope.core.rotation import Angles

MAX_SPANS = 3  # that the kernel has arguments for: near keys, and far ones on either side
TILE_QUERIES = 128


class KeySpan(NamedTuple):
    """Keys that queries see under one rotation.

    q: queries, raw or folded. k: keys ready to multiply.
    left, right: each query sees the keys from `left` before its own to `right` after it; negative for neither.
    interval: in their place, the first key of each query and the one after the last, int32 (batch or 1, queries) each.
    angles: rotation of the queries.
    tau, offset: a factor of the queries and a summand of the scores, (batch or 1, heads or 1, queries).
    """

    q: Tensor
    k: Tensor
    left: int = 0
    right: int = 0
    interval: tuple[Tensor, Tensor] | None = None
    angles: Angles | None = None
    tau: Tensor | None = None
    offset: Tensor | None = None
