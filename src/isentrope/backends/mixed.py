"""Each branch where it is fastest on a GPU: triangles in `sdpa`, bands in `flex`, merged. Without gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from isentrope.backends import flex, sdpa
from isentrope.backends.call import Call
from isentrope.backends.merge import Part, merge


def refusal(calls: list[Call]) -> str | None:
    if not any(sdpa.triangular(call) for call in calls):
        return "it is for whole rows in half precision on a GPU, of which some branch is a triangle; use 'flex'"
    if torch.is_grad_enabled() and any(x.requires_grad for call in calls for x in (call.q, call.k, call.v)):
        return "it has no backward; use 'sdpa' or 'flex'"
    return flex.refusal(calls) or sdpa.refusal(calls)


def attend(calls: list[Call], need_lse: bool) -> tuple[Tensor, Tensor]:
    parts: list[Part] = []
    for call in calls:
        if sdpa.triangular(call):
            parts += [sdpa.KERNEL.forward(part) for part in call.split()]
        else:
            parts.append(Part(*flex.attend([call], True)))
    return merge(parts, calls[0].q.shape[2])
