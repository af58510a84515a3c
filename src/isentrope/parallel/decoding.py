"""Attention of new tokens, which all processes have, to a cache of which each process has a part.

Every process attends to its own keys; outputs and log-sum-exps of all are then merged (`key_parts.py`), in the same
order in each, so that all continue with the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from isentrope.backends.merge import merge_into
from isentrope.core.call import AttentionCall
from isentrope.core.dtypes import accumulation_dtype, autocast_disabled
from isentrope.dispatch import dispatch
from isentrope.parallel.exchanges import QKV, LocalKeys
from isentrope.parallel.key_parts import Options, PartwiseCall
from isentrope.parallel.processes import Processes
from isentrope.parallel.rows import ShardedRows
from isentrope.parallel.split import Ranges
from isentrope.parallel.visible import combine_masks, find_keys
from isentrope.recipe import Recipe

MAX_QUERY_DIFFERENCE = 0.05  # of the same token in several processes, relative to entries: rounding alone


def check_recipe(recipe: Recipe) -> None:
    """Raise ValueError for a recipe that cannot be computed part by part."""
    if recipe.retrieve is not None:
        raise ValueError(
            f"prefill: {recipe.retrieve} chooses among all keys, which a cache in parts does not have in one place; "
            "pass to=0 to generate in one process, or to='each' in every process by itself"
        )


@torch.no_grad()
def check_queries(q: Tensor, processes: Processes) -> None:
    """Check, in the first layer of a pass, that all processes were given the same new tokens.

    Raises:
        ValueError: they were not, and would go on with a cache of several texts.
    """
    queries = processes.gather(q).float()
    # not to the largest: a bias, which all tokens have, may be far larger than what tells them apart
    size = queries[:1].abs() + queries.square().mean().sqrt()
    if bool(((queries - queries[:1]).abs() > MAX_QUERY_DIFFERENCE * size).any()):
        raise ValueError(
            "context parallel: expected the same new tokens in all processes, got others; pass the same ids in each, "
            "and set the same seed before tokens are sampled"
        )


@torch.no_grad()
def attend_to_shards(qkv: QKV, options: Options, rows: ShardedRows, processes: Processes) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp of new tokens, the same in all processes.

    Args:
        qkv: queries of the new tokens, keys and values that this process has, new ones included.
        options: how to attend.
        rows: which process has which keys.
        processes: that share the cache.
    """
    q = qkv[0]
    with autocast_disabled(q):
        calls = list(_list_calls(qkv, options, rows))
        if any(hasattr(law, "by_entropy") for law in options.recipe.temperatures):
            entropy = _compute_entropy(q, calls, options, processes)
            calls = [_set_entropy(call, entropy) for call in calls]
        out, lse = _start_merge(q, qkv[2].shape[-1])
        for call in calls:
            result = dispatch(call, options.backend, True, False)
            assert result.lse is not None
            merge_into(out, lse, result.out.to(out.dtype), result.lse.to(lse.dtype))
        out, lse = _merge_shards(out, lse, processes)
    return out.to(q.dtype), lse


def _list_calls(qkv: QKV, options: Options, rows: ShardedRows) -> Iterator[AttentionCall]:
    """Yield a call for each run of consecutive keys of this process that queries see."""
    q, k, v = qkv
    queries = range(rows.split.length - q.shape[2], rows.split.length)
    region = combine_masks((options.recipe.mask, options.mask), options.causal)
    keys: Ranges = rows.layouts.get(("keys", region), lambda: find_keys(region, queries, rows.table))
    source = LocalKeys(rows.chunks())
    whole = PartwiseCall(options, rows, ((queries, keys),), source)
    for parts in source.stream(k, v):
        for _, _, number, slots in whole.blocks(parts):
            yield whole.build(q, *parts[number].take(slots), queries, slots)


def _start_merge(q: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp over no keys."""
    dtype = accumulation_dtype(q)
    return q.new_zeros(*q.shape[:-1], size, dtype=dtype), q.new_full(q.shape[:-1], -torch.inf, dtype=dtype)


def _merge_shards(out: Tensor, lse: Tensor, processes: Processes) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp over the keys of all processes, in one exchange."""
    outs, lses = processes.gather(torch.cat((out, lse[..., None]), -1)).split((out.shape[-1], 1), -1)
    lse = torch.logsumexp(lses, 0)
    # a query that sees no key anywhere has -inf - (-inf): with a finite L it keeps its zeros
    weights = torch.exp(lses - lse.clamp_min(torch.finfo(lse.dtype).min))
    return (weights * outs).sum(0), lse[..., 0]


def _compute_entropy(q: Tensor, calls: list[AttentionCall], options: Options, processes: Processes) -> Tensor:
    """Return the entropy of attention without laws of entropy: H = L + Σ_p e^{L_p - L} (H_p - L_p) over parts p."""
    mean, lse = _start_merge(q, 1)  # the mean of -s, merged like an output
    for call in calls:
        plain = replace(call, branches=[replace(branch, entropy_law=None) for branch in call.branches])
        result = dispatch(plain, options.backend, True, True)
        assert result.lse is not None and result.entropy is not None
        seen = result.lse > -torch.inf
        part = torch.where(seen, result.entropy - result.lse, 0.0)
        merge_into(mean, lse, part[..., None].to(mean.dtype), result.lse.to(lse.dtype))
    mean, lse = _merge_shards(mean, lse, processes)
    return torch.where(lse > -torch.inf, lse + mean[..., 0], 0.0).clamp_min(0)


def _set_entropy(call: AttentionCall, entropy: Tensor) -> AttentionCall:
    branches = [
        branch
        if (law := branch.entropy_law) is None
        else replace(branch, tau=law.by_entropy(entropy), entropy_law=None)
        for branch in call.branches
    ]
    return replace(call, branches=branches)
