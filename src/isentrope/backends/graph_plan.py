"""Branches under masks in a graph that is being traced: what layers alike share, and what each of them adds.

Dynamo interprets every instruction that a layer runs, a tenth of a millisecond each. So all that depends on no q, k or
v is worked out once: a plan has masks, angles and τ, and running it makes no choices and no objects.
"""

from __future__ import annotations

from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from isentrope.backends.additive_masks import WholeMask, get_whole_mask, is_one_tile
from isentrope.backends.merge import join
from isentrope.backends.padding import blank_vectors, get_padded_vectors, needs_zeros
from isentrope.backends.tile_kernels import forward_masked
from isentrope.core.call import AttentionCall, FoldedBranch, RotatedBranch
from isentrope.core.dtypes import accumulation_dtype, cast
from isentrope.core.rotation import Angles, rotate_and_scale


class PlannedBranch(NamedTuple):
    """A branch as every layer computes it.

    angles: of queries.
    keys: the index of their angles in a plan.
    tau: (batch or 1, heads or 1, queries); None where angles are multiplied by it, as those of whole vectors are unless
        heads differ.
    offset: of the same sizes.
    """

    angles: Angles | None
    keys: int
    tau: Tensor | None
    offset: Tensor | None
    mask: WholeMask


class MaskedPlan(NamedTuple):
    """All of a call but q, k and v, for tensors of the same sizes, without gradients.

    key_angles: by which keys are rotated, None for keys as they are; branches may share them.
    padding: padded queries and slots of keys that no query sees; None where nothing needs zeros.
    """

    branches: list[PlannedBranch]
    key_angles: list[Angles | None]
    scale: float
    normalise: bool
    interleaved: bool
    padding: tuple[Tensor, Tensor] | None

    def run(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the output of a layer."""
        branches, key_angles, scale, normalise, interleaved, padding = self
        if padding is not None:
            q, k, v = blank_vectors(q, k, v, *padding)
        if not q.stride(-1) == k.stride(-1) == v.stride(-1) == 1:  # kernels take that for granted
            q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        groups = q.shape[1] // k.shape[1]
        v = v if groups == 1 else v.repeat_interleave(groups, 1)
        rotated = []
        for angles in key_angles:
            keys = rotate_and_scale(k, angles, None, normalise, interleaved)
            rotated.append(keys if groups == 1 else keys.repeat_interleave(groups, 1))
        total = total_lse = None
        for angles, index, tau, offset, mask in branches:
            queries = rotate_and_scale(q, angles, tau, normalise, interleaved)
            bias, empty, empty_rows = mask
            out, lse = forward_masked(queries, rotated[index], v, bias, scale)
            out = out.masked_fill_(empty_rows, 0)
            if len(branches) == 1:
                return out
            lse = lse.masked_fill_(empty, -inf)
            lse = lse if offset is None else lse + offset
            out = cast(out, lse.dtype)
            if total is None or total_lse is None:
                total, total_lse = out, lse
            else:
                total, total_lse = join(total, total_lse, out, lse)
        assert total is not None
        return cast(total, v.dtype)


def plan_branches(call: AttentionCall) -> MaskedPlan | None:
    """Return the plan of a call in a graph whose branches are one mask each; None for any other."""
    if torch.is_grad_enabled() or call.choice is not None or call.dropout is not None:
        return None
    if call.q.shape[-1] != call.v.shape[-1] or any(not _is_planned(branch) for branch in call.branches):
        return None
    planned: list[PlannedBranch] = []
    firsts: list[RotatedBranch] = []  # of those that rotate keys alike
    for branch in call.branches:
        unrotated = FoldedBranch(call.q, call.k, call.v, call.scale, branch.region, call.layout, traced=branch.traced)
        if not is_one_tile(unrotated):
            return None
        index = next((n for n, first in enumerate(firsts) if first.rotates_keys_like(branch)), len(firsts))
        if index == len(firsts):
            firsts.append(branch)
        angles, tau = call.widen_angles(branch, "query"), branch.tau
        if angles is not None and tau is not None and tau.shape[1] == 1 and angles[0].shape[-1] == call.q.shape[-1]:
            angles, tau = (angles[0] * tau[..., None], angles[1] * tau[..., None]), None
        offset = None if branch.offset is None else cast(branch.offset, accumulation_dtype(call.q))
        planned.append(PlannedBranch(angles, index, tau, offset, get_whole_mask(unrotated)))
    key_angles = [call.widen_angles(branch, "key") for branch in firsts]
    padding = get_padded_vectors(call.layout) if needs_zeros(call.layout) else None
    return MaskedPlan(planned, key_angles, call.scale, call.normalise, call.interleaved, padding)


def _is_planned(branch: RotatedBranch) -> bool:
    return branch.traced is not None and branch.entropy_law is None and not branch.biased and branch.chosen is None
