"""Models sharded over several processes: which heads are local, and what cannot be extended as it is."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from isentrope.parallel.heads import LocalHeads
from isentrope.positions import CLEX
from isentrope.recipe import Recipe

CONTEXT_PARALLEL_ERROR = (
    "context parallel: each process holds a part of the text, where {what} is not supported yet by torch's own; pass "
    "parallel=isentrope.ContextParallel(…) to extend"
)

HEADS_ERROR = (
    "attention: this layer was extended with {expected} heads, and got {actual}: another program exchanges heads for "
    "tokens, as DeepSpeed's sequence parallelism does, or spread them after extend; pass parallel=isentrope.Ulysses(…) "
    "to extend in its place, and apply tensor parallelism before"
)


def find_local_heads(model: PreTrainedModel, module: nn.Module, count: int) -> LocalHeads:
    """Find which heads an attention module with `count` of them has, under tensor parallelism."""
    size, rank, group = _find_tensor_parallel_group(model, module)
    config = getattr(module, "config", None) or model.config.get_text_config()
    split = size > 1 and getattr(config, "num_attention_heads", None) != count
    return LocalHeads(rank * count, count, size * count, group) if split else LocalHeads(0, count, count)


def _find_tensor_parallel_group(model: PreTrainedModel, module: nn.Module) -> tuple[int, int, Any]:
    """Return the size of the group that shares a module's attention heads, this process's rank in it, and the group."""
    size, mesh = getattr(model, "tp_size", None) or 1, getattr(model, "_device_mesh", None)
    if size > 1 and mesh is not None:
        named = mesh["tp"] if "tp" in (mesh.mesh_dim_names or ()) else mesh
        return size, named.get_local_rank(), named.get_group()
    for weight in module.parameters():
        for axis, placement in enumerate(getattr(weight, "placements", ())):
            if placement.is_shard(0):
                mesh = weight.device_mesh  # type: ignore[attr-defined]
                return mesh.size(axis), mesh.get_local_rank(axis), mesh.get_group(axis)
    return 1, 0, None


def check_local_heads(recipe: Recipe, heads: LocalHeads) -> None:
    """Raise ValueError for parts of a recipe that need all heads of a layer, where a process holds some."""
    if heads.count == heads.total:
        return
    if recipe.retrieve is not None and recipe.retrieve.heads == "all":
        raise ValueError(
            f"tensor parallel: {recipe.retrieve} chooses with all {heads.total} heads together, of which this process "
            f"holds {heads.count}; use heads=each"
        )
    if isinstance(recipe.position, CLEX):
        raise ValueError(
            f"tensor parallel: {CLEX.name()} learns from all {heads.total} heads together, of which this "
            f"process holds {heads.count}; extend the model before it is spread over processes, with FSDP or parallel=…"
        )


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
