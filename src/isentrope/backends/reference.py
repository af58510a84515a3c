"""The oracle: one dense score matrix, one softmax, as in a textbook. Runs in fp64 when given fp64."""

from __future__ import annotations

import torch
from torch import Tensor

from isentrope.core.call import FoldedBranch
from isentrope.core.dtypes import accumulation_dtype


def refusal(branches: list[FoldedBranch]) -> str | None:
    return None


def probabilities(branches: list[FoldedBranch]) -> tuple[Tensor, Tensor]:
    """Attention weights and log-sum-exps over all branches; a query that sees nothing has weights 0 and lse -inf."""
    dtype = accumulation_dtype(branches[0].q)
    scores: Tensor | None = None
    for branch in branches:
        k = branch.k.repeat_interleave(branch.groups, 1)
        s = branch.scale * (branch.q.to(dtype) @ k.to(dtype).mT)
        if (bias := branch.bias()) is not None:
            s = s + bias.to(dtype)
        outside = torch.full_like(s, -torch.inf) if scores is None else scores
        scores = torch.where(branch.mask(), s, outside)
    assert scores is not None
    lse = torch.logsumexp(scores, -1)
    anchor = torch.where(lse == -torch.inf, 0.0, lse)
    return torch.exp(scores - anchor[..., None]), lse


def attend(branches: list[FoldedBranch], need_lse: bool) -> tuple[Tensor, Tensor]:
    p, lse = probabilities(branches)
    if (drop := branches[0].dropout) is not None:
        p = drop(p)
    v = branches[0].v.repeat_interleave(branches[0].groups, 1)
    return (p @ v.to(p.dtype)).to(v.dtype), lse


def entropy(branches: list[FoldedBranch]) -> Tensor:
    """-Σ p ln p, by definition."""
    p, _ = probabilities(branches)
    return torch.special.entr(p).sum(-1)
