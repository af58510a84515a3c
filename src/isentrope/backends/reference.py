"""The oracle: one dense score matrix, one softmax, as in a textbook. Runs in fp64 when given fp64."""

from __future__ import annotations

import torch
from torch import Tensor

from isentrope.core.call import Call
from isentrope.core.dtypes import accumulation_dtype


def refusal(calls: list[Call]) -> str | None:
    return None


def probabilities(calls: list[Call]) -> tuple[Tensor, Tensor]:
    """Attention weights and log-sum-exps over all branches; a query that sees nothing has weights 0 and lse -inf."""
    dtype = accumulation_dtype(calls[0].q)
    scores: Tensor | None = None
    for call in calls:
        k = call.k.repeat_interleave(call.groups, 1)
        s = call.scale * (call.q.to(dtype) @ k.to(dtype).mT)
        if (bias := call.bias()) is not None:
            s = s + bias.to(dtype)
        outside = torch.full_like(s, -torch.inf) if scores is None else scores
        scores = torch.where(call.mask(), s, outside)
    assert scores is not None
    lse = torch.logsumexp(scores, -1)
    anchor = torch.where(lse == -torch.inf, 0.0, lse)
    return torch.exp(scores - anchor[..., None]), lse


def attend(calls: list[Call], need_lse: bool) -> tuple[Tensor, Tensor]:
    p, lse = probabilities(calls)
    if (drop := calls[0].dropout) is not None:
        p = drop(p)
    v = calls[0].v.repeat_interleave(calls[0].groups, 1)
    return (p @ v.to(p.dtype)).to(v.dtype), lse


def entropy(calls: list[Call]) -> Tensor:
    """-Σ p ln p, by definition."""
    p, _ = probabilities(calls)
    return torch.special.entr(p).sum(-1)
