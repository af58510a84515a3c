"""The oracle: one dense score matrix, one softmax, as in a textbook. Runs in fp64 when given fp64."""

from __future__ import annotations

import torch
from torch import Tensor

from isentrope.backends.protocol import Backend
from isentrope.core.call import AttentionCall
from isentrope.core.dtypes import accumulation_dtype


class ReferenceBackend(Backend):
    """Plain PyTorch, differentiable any number of times, the log-sum-exp included."""

    name = "reference"
    has_weights = True
    lse_has_gradient = True
    chooses_keys = True

    def forward(self, call: AttentionCall, need_lse: bool) -> tuple[Tensor, Tensor]:
        p, lse = compute_weights(call)
        if call.dropout is not None:
            p = call.dropout(p)
        v = call.v.repeat_interleave(call.groups, 1)
        return (p @ v.to(p.dtype)).to(v.dtype), lse


def compute_weights(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Return attention weights and log-sum-exps; a query that sees nothing has weights 0 and lse -inf."""
    dtype = accumulation_dtype(call.q)
    scores: Tensor | None = None
    for branch in call.fold():
        k = branch.k.repeat_interleave(branch.groups, 1)
        s = branch.scale * (branch.q.to(dtype) @ k.to(dtype).mT)
        factor, bias = branch.distance_terms()
        if factor is not None:
            s = s * factor
        if bias is not None:
            s = s + bias.to(dtype)
        if branch.offset is not None:
            s = s + branch.offset[..., None].to(dtype)
        outside = torch.full_like(s, -torch.inf) if scores is None else scores
        scores = torch.where(branch.mask(), s, outside)
    assert scores is not None
    lse = torch.logsumexp(scores, -1)
    anchor = torch.where(lse == -torch.inf, 0.0, lse)
    return torch.exp(scores - anchor[..., None]), lse
