"""One query a row against a cache of raw keys, in one Triton kernel: the step that generation is made of.

Keys are read once. A block of them that lies in the near region is turned in registers, far ones meet the query as they
are, and everything that changes from token to token (what is seen, angles, τ) is read from the device, so that a
captured graph goes on to be right. The keys of a row are shared out among many programs and their parts merged.
"""

from __future__ import annotations

import torch
from torch import Tensor

from isentrope.core.call import AttentionCall
from isentrope.core.layout import Layout
from isentrope.core.region import Region

MOST_BRANCHES = 2
MOST_SPANS = 2


def refusal(asked: AttentionCall) -> str | None:
    if asked.q.shape[2] != 1:
        return "it takes one query a row, got more"  # how many, written out, would bind a graph to that length
    if asked.q.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"it does not take {asked.q.dtype}"
    if len(asked.branches) > MOST_BRANCHES or any(len(m.region.spans) > MOST_SPANS for m in asked.branches):
        return f"it takes {MOST_BRANCHES} branches of {MOST_SPANS} spans"
    return "it has no backward" if asked.differentiated else asked.refusal()


def attend(asked: AttentionCall) -> tuple[Tensor, Tensor]:
    """Output (batch, heads, 1, dv) and log-sum-exp (batch, heads, 1)."""
    shape = [m.region for m in asked.branches]
    bounds = asked.layout.cached(("decode", *shape), lambda: _bounds(asked.layout, shape))
    turns = [turn for m in asked.branches for turn in (*(m.query or ()), *(m.key or ()))]
    which = [flag for m in asked.branches for flag in (m.query is not None, m.key is not None)]
    run = torch.ops.isentrope.decode if torch.compiler.is_compiling() else _run
    out, lse = run(asked.q, asked.k, asked.v, bounds, turns, which, asked.tau, asked.scale, asked.normalise)
    return out, lse


def _bounds(layout: Layout, regions: list[Region]) -> Tensor:
    """What the query of each row sees of each branch, [low, high) twice: (batch or 1, branches, 4)."""
    found = []
    for region in regions:
        low, high = (x[:, 0] for x in layout.bounds(region))
        pairs = torch.stack((low, high), -1).flatten(1)
        found.append(torch.nn.functional.pad(pairs, (0, 2 * MOST_SPANS - pairs.shape[1])))
    rows = max(x.shape[0] for x in found)
    return torch.stack([x.expand(rows, -1) for x in found], 1).to(torch.int32).contiguous()


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Tensor,
    turns: list[Tensor],
    which: list[bool],
    tau: Tensor | None,
    scale: float,
    normalise: bool,
) -> tuple[Tensor, Tensor]:
    from isentrope.backends.decode import kernel as decode_kernel

    return decode_kernel.launch(q, k, v, bounds, turns, which, tau, scale, normalise)


_decode = torch.library.custom_op("isentrope::decode", _run, mutates_args=())


@_decode.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    return q.new_empty(*q.shape[:-1], v.shape[-1]), q.new_empty(q.shape[:-1], dtype=torch.float32)
