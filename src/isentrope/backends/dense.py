"""All attention weights at once, products in the dtype of q: the fastest at short lengths, and with dropout."""

from __future__ import annotations

import torch
from torch import Tensor

from isentrope.backends.protocol import Backend
from isentrope.backends.wide_matmul import matmul_wide
from isentrope.core.call import AttentionCall
from isentrope.core.compile import maybe_compile


class DenseBackend(Backend):
    """Plain PyTorch, its softmax fused on a GPU."""

    name = "dense"
    has_weights = True
    chooses_keys = True

    def forward(self, call: AttentionCall, need_lse: bool) -> tuple[Tensor, Tensor]:
        branches = call.fold()
        scores = [matmul_wide(branch.q, branch.k.repeat_interleave(branch.groups, 1).mT) for branch in branches]
        masks = [None if branch.unmasked else branch.mask() for branch in branches]
        terms = [branch.distance_terms() for branch in branches]
        offsets = [branch.offset for branch in branches]
        v = call.v.repeat_interleave(call.groups, 1)
        dtype = v.dtype if call.dropout is None else scores[0].dtype
        tensors = (*scores, *masks, *(x for pair in terms for x in pair), *offsets)
        run = maybe_compile(_softmax, tensors, len(branches), call.scale, dtype)
        weights, lse = run(scores, masks, terms, offsets, call.scale, dtype)
        if call.dropout is not None:
            weights = call.dropout(weights)
        out = torch.bmm(weights.to(v.dtype).flatten(0, 1), v.flatten(0, 1))  # matmul would copy v, a slice, first
        return out.unflatten(0, v.shape[:2]), lse


def _softmax(
    scores: list[Tensor],
    masks: list[Tensor | None],
    terms: list[tuple[Tensor | None, Tensor | None]],
    offsets: list[Tensor | None],
    scale: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return weights over all branches, whose regions do not overlap, and log-sum-exps, in one pass."""
    total: Tensor | None = None
    for s, mask, (factor, bias), offset in zip(scores, masks, terms, offsets, strict=True):
        s = s * scale
        if factor is not None:
            s = s * factor.to(s.dtype)
        if bias is not None:
            s = s + bias.to(s.dtype)
        if offset is not None:
            s = s + offset[..., None].to(s.dtype)
        if mask is not None:
            s = torch.where(mask, s, -torch.inf if total is None else total)
        total = s
    assert total is not None
    lse = torch.logsumexp(total, -1)
    anchor = torch.where(lse == -torch.inf, 0.0, lse)
    return torch.exp(total - anchor[..., None]).to(dtype), lse
