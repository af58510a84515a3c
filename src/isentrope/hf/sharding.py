"""Models sharded over several processes: which heads are local, and what cannot be extended as it is."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from isentrope.positions import Branch, Lengths, Position
from isentrope.share import Share
from isentrope.temperatures import Temperature

CONTEXT_PARALLEL_ERROR = (
    "context parallel: each process holds a part of the text, where {what} is not supported yet; leave it out, or run "
    "without context_parallel"
)


@dataclass(frozen=True)
class LocalHeads:
    """The attention heads of a layer that are in this process: `count` of `total`, from `first` on."""

    first: int
    count: int
    total: int


def find_local_heads(model: PreTrainedModel, module: nn.Module, count: int) -> LocalHeads:
    """Find which heads an attention module with `count` of them has, under tensor parallelism."""
    size, rank = _find_tensor_parallel_group(model, module)
    config = getattr(module, "config", None) or model.config.get_text_config()
    split = size > 1 and getattr(config, "num_attention_heads", None) != count
    return LocalHeads(rank * count, count, size * count) if split else LocalHeads(0, count, count)


def _find_tensor_parallel_group(model: PreTrainedModel, module: nn.Module) -> tuple[int, int]:
    """Return the size of the group that shares a module's attention heads, and this process's rank in it."""
    size, mesh = getattr(model, "tp_size", None) or 1, getattr(model, "_device_mesh", None)
    if size > 1 and mesh is not None:
        named = mesh["tp"] if "tp" in (mesh.mesh_dim_names or ()) else mesh
        return size, named.get_local_rank()
    for weight in module.parameters():
        for axis, placement in enumerate(getattr(weight, "placements", ())):
            if placement.is_shard(0):
                return weight.device_mesh.size(axis), weight.device_mesh.get_local_rank(axis)  # type: ignore[attr-defined]
    return 1, 0


@dataclass(frozen=True)
class HeadwiseTemperature(Temperature):
    """A law with one temperature for each head of a layer, for the heads that are in this process."""

    law: Any = None
    heads: LocalHeads = LocalHeads(0, 1, 1)

    def idle(self, length: int) -> bool:
        return bool(self.law.idle(length))

    def scale(self, n: Tensor, head_dim: int) -> Tensor:
        return self.law.scale(n, head_dim)[..., self.heads.first : self.heads.first + self.heads.count, :]


@dataclass(frozen=True)
class HeadwisePosition(Position):
    """A method without rotation whose bias differs from head to head, for the heads that are in this process."""

    method: Position
    heads: LocalHeads

    def branches(self, query: Tensor, key: Tensor, heads: int, lengths: Lengths) -> tuple[Branch, ...]:
        local = slice(self.heads.first, self.heads.first + self.heads.count)
        branches = self.method.branches(query, key, self.heads.total, lengths)
        return tuple(b if b.slopes is None else replace(b, slopes=b.slopes[local]) for b in branches)


def shard_temperature(law: Any, heads: LocalHeads, head_dim: int) -> Any:
    """Return a law for the heads that are in this process; raise ValueError where it learns one value for each."""
    if heads.count == heads.total or not hasattr(law, "scale"):  # of the others no head has values of its own
        return law
    if law.scale(torch.full((1, 1, 1), 1 << 20), head_dim).shape[-2] == 1:
        return law
    if isinstance(law, nn.Module):
        raise ValueError(
            f"tensor parallel: {law} learns a value for each of {heads.total} heads, of which this process holds "
            f"{heads.count}, and the other processes would not receive what it learns; "
            "extend the model without tensor parallelism"
        )
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


def check_unsharded(model: nn.Module, kind: str) -> None:
    """Refuse a model whose parameters `fully_shard` has already spread: they are whole only while it runs."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # where it was never imported, nothing is sharded
    if fsdp is None:
        return
    if any(isinstance(module, (fsdp.FSDPModule, fsdp.FullyShardedDataParallel)) for module in model.modules()):
        raise ValueError(
            f"{kind}: its parameters are already sharded (FSDP); call isentrope.extend first, then shard it"
        )


def is_context_parallel(query: Tensor) -> bool:
    """Return whether torch's context parallelism is active: it replaces SDPA, or passes distributed tensors."""
    attention = F.scaled_dot_product_attention
    if attention is not torch._C._nn.scaled_dot_product_attention:
        return ".tensor.experimental." in attention.__module__
    return type(query) is not Tensor and hasattr(query, "placements")
