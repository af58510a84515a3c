"""Attention with one more logit in each head's softmax, which takes weight and has no value (GPT-OSS)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isentrope.functional import attention
from isentrope.recipe import Recipe

GRADIENT_ERROR = "sink logits: a recipe carries them without gradients only; use torch.no_grad()"


def attend_with_sink_logits(
    query: Tensor, key: Tensor, value: Tensor, recipe: Recipe, sink_logits: Tensor, options: dict[str, Any]
) -> Tensor:
    """Attend as `attention` does, with `sink_logits` (heads,) beside the scores."""
    check_sink_gradients((query, key, value, sink_logits))
    out, aux = attention(query, key, value, recipe, return_lse=True, **options)
    return apply_sink_logits(out, aux.lse, sink_logits)


def check_sink_gradients(tensors: tuple[Tensor, ...]) -> None:
    """Refuse gradients, which the log-sum-exp does not have."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise ValueError(GRADIENT_ERROR)


def apply_sink_logits(out: Tensor, lse: Tensor, sink_logits: Tensor) -> Tensor:
    """Return the output of a softmax with one more logit in each head, which has no value."""
    if out.requires_grad:  # from what the recipe learns: the log-sum-exp has no gradient
        raise ValueError(GRADIENT_ERROR)
    kept = torch.sigmoid(lse - sink_logits.to(lse.dtype)[:, None])
    return out * kept[..., None].to(out.dtype)
