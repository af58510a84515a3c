"""One query a row that chooses its far keys: what its kernels need to know, worked out once for all layers."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from isentrope.backends.protocol import triton_refusal
from isentrope.core.call import AttentionCall, RotatedBranch
from isentrope.core.choice import BlockChoice
from isentrope.core.rotation import is_transformed

MAX_CANDIDATES = 1 << 14  # blocks whose scores one program holds
MIN_MATRIX_SIZE = 16  # rows or columns that tensor cores take


class BranchTables(NamedTuple):
    """Angles, τ and offset of a branch as a kernel reads them; any tensor stands for one that is not read."""

    tables: tuple[Tensor, Tensor, Tensor, Tensor]  # cos and sin of the query, of the keys
    tau: Tensor
    offset: Tensor
    tau_head: int
    offset_head: int
    key_row: int
    rotates_queries: bool
    rotates_keys: bool
    has_tau: bool
    has_offset: bool


class OneQueryPlan(NamedTuple):
    """What the kernels need besides q, k, v and the scale."""

    choice: BlockChoice
    window: int
    candidates: int  # blocks to choose from
    padded_candidates: int
    padded_groups: int
    padded_block: int
    tail: int  # from this slot on all keys are seen
    near: BranchTables
    far: BranchTables
    joint: bool  # all heads choose together
    normalise: bool
    branches: list[RotatedBranch]  # kept, so that no other list has their id


def get_plan(call: AttentionCall) -> OneQueryPlan | None:
    """Return the plan of a call whose one query a row chooses far keys, None where the kernels do not take it."""
    if call.q.shape[2] != 1 or call.dropout is not None or call.needs_grad or is_transformed():
        return None
    q, k, v = call.q, call.k, call.v
    if k.stride(-1) != 1 or v.stride(-1) != 1 or q.stride(-1) != 1:
        return None
    key = ("one query", id(call.branches), q.dtype, q.shape, k.shape[1], v.shape[3], call.choice, call.normalise)
    return call.layout.cached(key, lambda: _make_plan(call))


def _make_plan(call: AttentionCall) -> OneQueryPlan | None:
    choice, layout = call.choice, call.layout
    half = (torch.float16, torch.bfloat16) if call.q.is_cuda else (torch.float16,)  # Triton's interpreter: no bfloat16
    if choice is None or choice.score != "representative" or call.q.dtype not in (*half, torch.float32):
        return None
    if triton_refusal(call) is not None or not layout.plain or len(call.branches) != 2:
        return None
    if any(b.entropy_law is not None or b.distance_law is not None for b in call.branches):
        return None
    far = next(branch for branch in call.branches if branch.far)
    near = next(branch for branch in call.branches if not branch.far)
    window = 1 - int(far.region.spans[0].high)
    if len(near.region.spans) != 1 or layout.key_range(near.region, 0, 1) != (layout.keys - window, layout.keys):
        return None
    end = choice.count_blocks(layout.keys - 1, window)
    candidates = end - choice.first_block
    tables = [_make_tables(branch, layout.slots) for branch in (near, far)]
    if tables[0] is None or tables[1] is None or not choice.blocks < candidates <= MAX_CANDIDATES:
        return None
    groups, block = (max(MIN_MATRIX_SIZE, _round_up_to_power(n)) for n in (call.groups, choice.size))
    return OneQueryPlan(
        choice, window, candidates, _round_up_to_power(candidates), groups, block, end * choice.size,
        tables[0], tables[1], choice.heads == "all", call.normalise, call.branches,
    )  # fmt: skip


def _make_tables(branch: RotatedBranch, unused: Tensor) -> BranchTables | None:
    """Return the tensors of a branch, `unused` for absent ones; None where rows have values of their own."""
    angles = branch.query_angles, branch.key_angles
    tensors = [x for pair in angles if pair is not None for x in pair] + [
        x for x in (branch.tau, branch.offset) if x is not None
    ]
    if any(x.shape[0] != 1 for x in tensors):
        return None
    if any(x.stride(-1) != 1 for pair in angles if pair is not None for x in pair):
        return None
    (cos_q, sin_q), (cos_k, sin_k) = (pair or (unused, unused) for pair in angles)
    tau, offset = (unused if x is None else x for x in (branch.tau, branch.offset))
    tau_head, offset_head = (0 if x is None or x.shape[1] == 1 else x.stride(1) for x in (branch.tau, branch.offset))
    key_row = 0 if branch.key_angles is None or cos_k.shape[2] == 1 else cos_k.stride(2)
    return BranchTables(
        (cos_q, sin_q, cos_k, sin_k), tau, offset, tau_head, offset_head, key_row,
        branch.query_angles is not None, branch.key_angles is not None,
        branch.tau is not None, branch.offset is not None,
    )  # fmt: skip


def _round_up_to_power(n: int) -> int:
    return 1 << (n - 1).bit_length()
