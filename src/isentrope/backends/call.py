"""What a backend is asked to compute: one branch of one attention call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from isentrope.layout import Layout
from isentrope.region import CAUSAL, EVERYTHING, Region


@dataclass(frozen=True, eq=False)
class Call:
    """softmax over the keys in `region` of  scale · q·k - slopes · |Δ|,  applied to v.

    q (batch, heads, queries, d), k (batch, kv_heads, keys, d), v (batch, kv_heads, keys, dv): positioned and tempered.
    dropout: what is done to the weights, on the backends that have them.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    region: Region
    layout: Layout
    slopes: Tensor | None = None
    dropout: Callable[[Tensor], Tensor] | None = None

    @property
    def groups(self) -> int:
        """Query heads per key head."""
        return self.q.shape[1] // self.k.shape[1]

    @property
    def everything(self) -> bool:
        """No mask at all."""
        return self.region == EVERYTHING and self.layout.plain

    @property
    def causal(self) -> bool:
        """The plain causal triangle of self-attention."""
        return self.region == CAUSAL and self.layout.plain and self.layout.queries == self.layout.keys

    def split(self) -> list[Call]:
        """The same keys as one call a span, where that lets a chunk of rows pass over the keys between spans."""
        if len(self.region.spans) < 2 or not self.layout.banded:
            return [self]
        return [replace(self, region=Region((span,))) for span in self.region.spans]

    @property
    def bounds(self) -> tuple[Tensor, Tensor]:
        """Visible slots of each query, [low, high): (batch or 1, queries, spans)."""
        return self.layout.bounds(self.region)

    @property
    def seen(self) -> Tensor:
        """How many keys each query sees in this branch: (batch or 1, 1, queries)."""
        return self.layout.count("visible", self.region)[:, None]

    def mask(self, rows: slice | None = None, columns: slice | None = None) -> Tensor:
        return self.layout.visible(self.region, rows, columns)

    def bias(self, rows: slice | None = None, columns: slice | None = None) -> Tensor | None:
        """-slopes · |Δ|, (batch or 1, heads, rows, columns) in the slopes' dtype."""
        if self.slopes is None:
            return None
        query, key = self.layout.query, self.layout.key
        query = query if rows is None else query[:, rows]
        key = key if columns is None else key[:, columns]
        distance = (query[:, None, :, None] - key[:, None, None]).abs()
        return -self.slopes[:, None, None] * distance
