"""Recipes for some of a layer's heads, where processes share them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from isentrope.positions import Branch, Lengths, Position
from isentrope.share import Share
from isentrope.temperatures import Temperature


@dataclass(frozen=True)
class LocalHeads:
    """The attention heads of a layer that are in this process: `count` of `total`, from `first` on.

    `group` are the processes that have the others, where each is to learn the same for all heads.
    """

    first: int
    count: int
    total: int
    group: Any = None

    def __deepcopy__(self, memo: dict[int, Any]) -> LocalHeads:
        return self  # a group cannot be copied


@dataclass(frozen=True)
class HeadwiseTemperature(Temperature):
    """A law for the heads that are in this process, which learns from those of all."""

    law: Any = None
    heads: LocalHeads = LocalHeads(0, 1, 1)

    @property
    def learns(self) -> bool:  # type: ignore[override]
        return bool(getattr(self.law, "learns", False))

    def idle(self, length: int) -> bool:
        return bool(self.law.idle(length))

    def scale(self, n: Tensor, head_dim: int) -> Tensor:
        tau = self.law.scale(n, head_dim)
        if tau.requires_grad and self.heads.group is not None:
            tau = _SumGradients.apply(tau, self.heads.group)
        if tau.shape[-2] == 1:  # one temperature for all heads
            return tau
        return tau[..., self.heads.first : self.heads.first + self.heads.count, :]


class _SumGradients(torch.autograd.Function):
    """The same values; their gradients are summed over processes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


@dataclass(frozen=True)
class HeadwisePosition(Position):
    """A method without rotation whose bias differs from head to head, for the heads that are in this process."""

    method: Position
    heads: LocalHeads

    def branches(self, query: Tensor, key: Tensor, heads: int, lengths: Lengths) -> tuple[Branch, ...]:
        local = slice(self.heads.first, self.heads.first + self.heads.count)
        branches = self.method.branches(query, key, self.heads.total, lengths)
        return tuple(b if b.slopes is None else replace(b, slopes=b.slopes[local]) for b in branches)


def has_heads(law: Any, head_dim: int) -> bool:
    """Return whether a law has a temperature for each head."""
    # of laws of the entropy or the distance no head has values of its own
    if not hasattr(law, "scale"):
        return False
    weights = law.parameters() if isinstance(law, nn.Module) else iter(())
    device = next((weight.device for weight in weights), None)
    return bool(law.scale(torch.full((1, 1, 1), 1 << 20, device=device), head_dim).shape[-2] > 1)


def shard_temperature(law: Any, heads: LocalHeads, head_dim: int) -> Any:
    """Return a law for the heads that are in this process."""
    learns = getattr(law, "learns", False) and hasattr(law, "scale")
    if heads.count == heads.total or not (learns or has_heads(law, head_dim)):
        return law
    count, keys = getattr(law, "count", "visible"), getattr(law, "keys", "all")
    return HeadwiseTemperature(count=count, keys=keys, law=law, heads=heads)


def shard_share(share: Any, heads: LocalHeads) -> Any:
    """Return a share law for the heads that are in this process."""
    if heads.count == heads.total or not isinstance(share, Share):
        return share
    if not isinstance(share.beta, tuple) or len(share.beta) == 1:
        return share
    return replace(share, beta=share.beta[heads.first : heads.first + heads.count])


def shard_position(position: Position, heads: LocalHeads) -> Position:
    """Return a position method for the heads that are in this process; raise ValueError where it cannot be split."""
    if heads.count == heads.total:
        return position
    positions = torch.arange(2)[None]
    if all(branch.slopes is None for branch in position.branches(positions, positions, heads.total, (2, 2))):
        return position
    if position.rotates:
        raise ValueError(
            f"tensor parallel: {position} has a bias for each head and rotates, which is not supported there"
        )
    return HeadwisePosition(position, heads)
