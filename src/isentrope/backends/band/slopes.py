"""Calls with a linear distance bias in the band kernel, which leaves out keys too far to count (`slopes_kernel`)."""

from __future__ import annotations

import torch

from isentrope.backends.band.intervals import Attended
from isentrope.backends.merge import PartialOutput
from isentrope.core.call import AttentionCall
from isentrope.core.position_columns import MIN_QUERIES
from isentrope.core.switches import BAND_SLOPES, is_on

MAX_KEYS = 1 << 24  # distances are whole numbers in fp32


def find_window(call: AttentionCall) -> tuple[int, int] | None:
    """Return how many keys before and after its own each query sees, None if the kernel is not to add the bias.

    It takes whole rows with one window, or none, around every query, without gradients.
    """
    branch, layout = call.branches[0], call.layout
    if branch.slopes is None or len(call.branches) > 1 or not is_on(BAND_SLOPES) or call.needs_grad:
        return None
    if not layout.plain or not MIN_QUERIES <= layout.queries <= layout.keys <= MAX_KEYS:
        return None
    if branch.distance_law is not None or branch.chosen is not None or branch.offset is not None:
        return None
    span = branch.region.spans[0] if len(branch.region.spans) == 1 else None
    if span is None or span.chunk or span.start > 0 or span.stop < layout.keys or not span.low <= 0 < span.high:
        return None
    return int(min(-span.low, layout.keys)), int(min(span.high - 1, layout.keys))


def forward_slopes(
    call: AttentionCall, window: tuple[int, int], far: PartialOutput | None = None, need_entropy: bool = False
) -> Attended:
    """Compute a call with a linear bias in one pass, merged with `far`, the output of other keys."""
    from isentrope.backends.band.kernel import launch

    assert far is None or not need_entropy
    branch = call.branches[0]
    assert branch.slopes is not None
    k = call.fold_keys(branch)
    key_norms = torch.linalg.vector_norm(k, dim=-1, dtype=torch.float32).amax(-1)
    entropy = call.q.new_empty(call.q.shape[:3], dtype=torch.float32) if need_entropy else None
    out, lse = launch(
        call.q, k, call.v, *window, branch.query_angles, branch.tau, call.scale, call.normalise, far=far,
        entropy=entropy, slopes=(branch.slopes, key_norms),
    )  # fmt: skip
    return Attended(out, lse, None if entropy is None else entropy.clamp_min(0))
