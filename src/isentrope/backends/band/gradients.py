"""Gradients of a branch whose queries each see intervals of keys, from the merged output and log-sum-exp.

Kernels for Hopper in Gluon, or others in Triton (`band-backward`, off by default: slower than PyTorch's).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from isentrope.backends.band.intervals import Interval, list_intervals
from isentrope.backends.band.spans import HEAD_DIMS, has_kernel
from isentrope.backends.padding import needs_zeros
from isentrope.backends.protocol import TRITON_HEAD_DIMS
from isentrope.core.call import FoldedBranch
from isentrope.core.compile import can_run_triton
from isentrope.core.switches import BAND_BACKWARD, BAND_SPANS_BACKWARD, is_on


def takes_gradients(branch: FoldedBranch) -> bool:
    """Return whether a kernel here is to compute a branch: PyTorch's are faster for triangles and all pairs."""
    layout, (q, k, v) = branch.layout, (branch.q, branch.k, branch.v)
    if branch.biased or branch.chosen is not None or not can_run_triton(q) or torch.compiler.is_compiling():
        return False
    if any(x.shape[-1] not in TRITON_HEAD_DIMS or x.stride(-1) != 1 for x in (q, k, v)) or q.dtype == torch.float64:
        return False
    if not (is_on(BAND_BACKWARD) or has_fast_gradients(q, v)):
        return False
    if not layout.plain or len(branch.region.spans) != 1:
        return True
    band = branch.region.spans[0].to_band(layout.queries, layout.keys)
    return band is None or not (band.full or band.causal)


def has_fast_gradients(q: Tensor, v: Tensor) -> bool:
    """Return whether the kernels for Hopper compute gradients of such tensors."""
    if q.shape[-1] not in HEAD_DIMS or v.shape[-1] != q.shape[-1] or q.dtype not in (torch.float16, torch.bfloat16):
        return False
    return is_on(BAND_SPANS_BACKWARD) and q.is_cuda and has_kernel(q.device)


def backward_intervals(branch: FoldedBranch, grad: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv of one branch, from the merged output and log-sum-exp.

    Padding may be anything for the kernels for Hopper, and is zeros for the others.
    """
    from isentrope.backends.band.row_terms_kernel import compute_row_terms

    q, k, v, fast = branch.q, branch.k, branch.v, has_fast_gradients(branch.q, branch.v)
    kernel = _import_kernel(fast)
    options = {"padded": needs_zeros(branch.layout)} if fast else {}
    intervals = list_intervals(branch.layout, branch.region)
    dtype = q.dtype if len(intervals) == 1 else torch.float32
    blocks, terms = kernel.choose_blocks(q.shape[-1], v.shape[-1])[:2], compute_row_terms(out, grad, lse)
    total: tuple[Tensor, ...] | None = None
    for n, interval in enumerate(intervals):
        key = ("query ranges", branch.region, n, blocks)
        ranges = branch.layout.cached(key, partial(find_query_ranges, interval, branch.layout.keys, *blocks))
        part = kernel.launch(q, k, v, grad, terms, branch.scale, interval, ranges, dtype, **options)
        total = part if total is None else tuple(a.add_(b) for a, b in zip(total, part, strict=True))
    assert total is not None
    dq, dk, dv = (x.to(q.dtype) for x in total)
    return dq, dk, dv


def _import_kernel(fast: bool) -> Any:
    """Return the module that launches it; Triton may not be installed."""
    if fast:
        import isentrope.backends.band.hopper_backward_kernel as hopper_backward_kernel

        return hopper_backward_kernel
    import isentrope.backends.band.backward_kernel as backward_kernel

    return backward_kernel


def find_query_ranges(interval: Interval, keys: int, rows: int, columns: int) -> Tensor:
    """Return the blocks of queries that see something of each block of keys.

    Args:
        interval: visible slots of each query, (batch or 1, queries) each.
        keys: in a row.
        rows: queries in a block.
        columns: keys in a block.

    Returns:
        int32 (batch or 1, blocks of keys, 2): the first block of queries, and the one after the last.
    """
    low, high = interval
    seen = low < high
    spare = -low.shape[1] % rows
    low = torch.nn.functional.pad(torch.where(seen, low, keys), (0, spare), value=keys)
    high = torch.nn.functional.pad(torch.where(seen, high, 0), (0, spare))
    least, most = low.unflatten(1, (-1, rows)).amin(2), high.unflatten(1, (-1, rows)).amax(2)
    start = torch.arange(0, keys, columns, device=low.device, dtype=low.dtype)[None, :, None]
    overlap = (least[:, None] < start + columns) & (most[:, None] > start)
    first = overlap.to(torch.int8).argmax(2)
    last = overlap.shape[2] - overlap.flip(2).to(torch.int8).argmax(2)
    last = torch.where(overlap.any(2), last, first)
    return torch.stack((first, last), -1).to(torch.int32).contiguous()
