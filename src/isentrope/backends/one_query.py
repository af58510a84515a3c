"""One query a row on a CPU: several branches in one kernel, with their log-sum-exp.

To rotate the query by a and a key by κ is to rotate the key alone, by κ - a. So the keys of every branch are brought to
the query of one of them, the base; regions and offsets of all branches are one bias; and the query heads that share a
key head are queries to the kernel, for which no key is copied.
"""

from __future__ import annotations

from collections.abc import Hashable
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from isentrope.backends.tile_kernels import ALL_PAIRS, Tile, forward_tile
from isentrope.core.call import AttentionCall, RotatedBranch
from isentrope.core.dtypes import accumulation_dtype
from isentrope.core.rotation import Angles, rotate_and_scale


class QueryPlan(NamedTuple):
    """What a call with one query a row does in every layer, whatever τ its laws have learned.

    base: the index of the branch by which the query is rotated and scaled.
    bias: offsets of visible keys, -inf for the others, (batch or 1, heads or 1, 1, keys).
    turned: the slots whose keys are rotated by `angles`: cos of every entry, and sin with the sign that its other has
        in the rotation, (batch or 1, 1, slots, 2 · pairs).
    """

    base: int
    bias: Tensor
    turned: slice
    angles: Angles | None


class _KeptPlan(NamedTuple):
    """A plan, and the tensors that it was made from: no others can have their ids."""

    plan: QueryPlan | None
    branches: list[RotatedBranch]


def plan_one_query(call: AttentionCall) -> QueryPlan | None:
    """Return the plan of a call, made once for the layers that share its layout; None where it takes other kernels."""
    if call.q.shape[2] != 1 or len(call.branches) == 1 or call.q.device.type != "cpu" or torch.compiler.is_compiling():
        return None
    if call.normalise or call.interleaved or call.q.shape[3] != call.v.shape[3] or call.needs_grad:
        return None
    if type(call.q) is not Tensor or torch._C._functorch.peek_interpreter_stack() is not None:
        return None
    if any(x.stride(-1) != 1 for x in (call.q, call.k, call.v)):
        return None
    if call.q.numel() == 0:
        return None
    branches = call.branches
    if any(branch.biased or branch.chosen is not None or branch.tau is not branches[0].tau for branch in branches):
        return None
    # branches are built anew at every call where a law learns, from the same tensors but for τ
    key = "one query", accumulation_dtype(call.q), *map(_identify, branches)
    return call.layout.cached(key, lambda: _KeptPlan(_make_plan(call), branches)).plan


def _identify(branch: RotatedBranch) -> Hashable:
    """Return all of a branch that a plan depends on."""
    angles = (None if pair is None else (id(pair[0]), id(pair[1])) for pair in (branch.query_angles, branch.key_angles))
    return branch.region, *angles, None if branch.offset is None else id(branch.offset)


def _make_plan(call: AttentionCall) -> QueryPlan | None:
    layout, branches = call.layout, call.branches
    base_index = next((n for n, branch in enumerate(branches) if branch.key_angles is None), 0)
    base = branches[base_index]
    dtype = accumulation_dtype(call.q)
    bias = torch.full((1, 1, 1, layout.keys), -inf, dtype=dtype)
    low, high, angles = layout.keys, 0, None
    for branch in branches:
        visible = layout.visible(branch.region)  # (batch or 1, 1, 1, keys)
        offset = torch.zeros((), dtype=dtype) if branch.offset is None else branch.offset[..., None].to(dtype)
        bias = torch.where(visible, offset, bias)
        turn = branch.key_angles
        if branch.query_angles is not base.query_angles:
            turn = _compose(turn, _compose(base.query_angles, _invert(branch.query_angles)))
        if turn is None:
            continue
        first, last = layout.key_range(branch.region, 0, 1)
        low, high = min(low, first), max(high, last)
        still: tuple[Tensor, Tensor] = angles or (torch.ones((), dtype=dtype), torch.zeros((), dtype=dtype))
        keys = visible.transpose(2, 3)
        angles = torch.where(keys, turn[0], still[0]), torch.where(keys, turn[1], still[1])
    seen = (bias > -inf).sum(-1)
    if int(seen.min()) == 0 or 2 * int(seen.max()) < layout.keys:  # nothing to sum, or windows, which are cut out
        return None
    turned = slice(low, max(low, high))
    if angles is not None:
        cos, sin = (x[:, :, turned] for x in angles)
        angles = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
    return QueryPlan(base_index, bias, turned, angles)


def _compose(one: Angles | None, other: Angles | None) -> Angles | None:
    """Return cos and sin of the sum of two angles."""
    if one is None or other is None:
        return other if one is None else one
    (cos, sin), (other_cos, other_sin) = one, other
    return cos * other_cos - sin * other_sin, sin * other_cos + cos * other_sin


def _invert(angles: Angles | None) -> Angles | None:
    return None if angles is None else (angles[0], -angles[1])


def forward_one_query(call: AttentionCall, plan: QueryPlan) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp of all branches."""
    rows, heads, _, size = call.q.shape
    shape = rows, call.k.shape[1], call.groups
    base = call.branches[plan.base]
    q = rotate_and_scale(call.q, base.query_angles, base.tau)
    bias = plan.bias if plan.bias.shape[1] == 1 else plan.bias.unflatten(1, shape[1:]).squeeze(3)
    tile = Tile(q.reshape(*shape, size), _turn_keys(call, plan), call.v, bias, ALL_PAIRS, call.scale)
    out, lse = forward_tile(tile)
    return out.reshape(rows, heads, 1, size), lse.reshape(rows, heads, 1)


def _turn_keys(call: AttentionCall, plan: QueryPlan) -> Tensor:
    """Return the keys as the query of the base is to see them."""
    if plan.angles is None:
        return call.k
    cos, sin = plan.angles
    k = call.k.clone()
    inside = k[:, :, plan.turned, : cos.shape[-1]]
    x = inside.to(cos.dtype)
    others = torch.cat(x.split(cos.shape[-1] // 2, -1)[::-1], -1)
    x.mul_(cos).addcmul_(others, sin)
    if x.dtype != k.dtype:  # otherwise it is a view of k
        inside.copy_(x)
    return k
