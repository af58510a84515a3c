"""What is asked of attention, and what of a backend: one branch of it, with everything folded into q and k."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import ceil

import torch
from torch import Tensor

from isentrope.core.compile import can_run_triton
from isentrope.core.layout import Layout
from isentrope.core.region import CAUSAL, EVERYTHING, Region
from isentrope.core.rotation import Angles, rotate_and_scale

SIZES = (32, 64, 128, 256)  # of vectors that Triton kernels have


@dataclass(frozen=True, eq=False)
class RotatedBranch:
    """Pairs in `region` meet with their queries and keys turned by these angles, and a bias -slopes · |Δ|."""

    region: Region
    query: Angles | None
    key: Angles | None
    slopes: Tensor | None


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """One attention as it is asked for: q and k raw, τ (batch or 1, heads or 1, queries), and where pairs meet."""

    q: Tensor
    k: Tensor
    v: Tensor
    layout: Layout
    branches: list[RotatedBranch]
    tau: Tensor | None
    scale: float
    normalise: bool
    interleaved: bool

    def refusal(self) -> str | None:
        """Why Triton kernels, which fold queries themselves, cannot take it; gradients aside."""
        q, k, v, turns = self.q, self.k, self.v, self._turns
        if not can_run_triton(q):
            return "it needs Triton and a GPU"
        if q.shape[-1] not in SIZES or v.shape[-1] not in SIZES:
            return f"it takes head sizes {', '.join(map(str, SIZES))}, got {q.shape[-1]} and {v.shape[-1]}"
        if any(x.stride(-1) != 1 for x in (q, k, v)):
            return "it takes vectors whose entries are next to each other"
        if any(m.slopes is not None for m in self.branches):
            return "it has no distance bias"
        if turns and (self.interleaved or any(2 * cos.shape[-1] != q.shape[-1] for cos, _ in turns)):
            return "it turns whole vectors, laid out in halves"
        return None

    @property
    def differentiated(self) -> bool:
        """Whether gradients are asked for."""
        if not torch.is_grad_enabled():
            return False
        parts = (self.q, self.k, self.v, self.tau, *(x for turn in self._turns for x in turn))
        return any(x is not None and x.requires_grad for x in parts)

    @property
    def _turns(self) -> list[Angles]:
        return [turn for m in self.branches for turn in (m.query, m.key) if turn is not None]

    def folded(self) -> list[FoldedBranch]:
        """A call for each meeting, with angles, τ and norms folded into q and k."""
        return [self.call(at) for at in self.branches]

    def call(self, at: RotatedBranch) -> FoldedBranch:
        query = rotate_and_scale(self.q, at.query, self.tau, self.normalise, self.interleaved)
        return FoldedBranch(query, self.keys(at), self.v, self.scale, at.region, self.layout, at.slopes)

    def keys(self, at: RotatedBranch, most: int | None = None) -> Tensor:
        """The keys as a meeting has them, or the first of them."""
        k, turn = self.k, at.key
        if most is not None:
            k, turn = k[:, :, :most], turn and (turn[0][:, :, :most], turn[1][:, :, :most])
        return rotate_and_scale(k, turn, None, self.normalise, self.interleaved)

    def split_heads(self, most: int) -> Iterator[tuple[slice, AttentionCall]]:
        """The same a few heads at a time, each share with at most so many entries of q if that is possible."""
        kv_heads = self.k.shape[1]
        groups = self.q.shape[1] // kv_heads
        count = max(1, most * kv_heads // self.q.numel())
        count = ceil(kv_heads / ceil(kv_heads / count))  # evenly
        for first in range(0, kv_heads, count):
            keys = slice(first, first + count)
            heads = slice(first * groups, (first + count) * groups)
            tau = self.tau if self.tau is None or self.tau.shape[1] == 1 else self.tau[:, heads]
            branches = [m if m.slopes is None else replace(m, slopes=m.slopes[heads]) for m in self.branches]
            q, k, v = self.q[:, heads], self.k[:, keys], self.v[:, keys]
            yield heads, replace(self, q=q, k=k, v=v, branches=branches, tau=tau)


@dataclass(frozen=True, eq=False)
class FoldedBranch:
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
    def unfolded(self) -> AttentionCall:
        """The same, as a question with nothing left to fold."""
        at = RotatedBranch(self.region, None, None, self.slopes)
        return AttentionCall(self.q, self.k, self.v, self.layout, [at], None, self.scale, False, False)

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

    def split(self) -> list[FoldedBranch]:
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
        return self.layout.count_keys("visible", self.region)[:, None]

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
