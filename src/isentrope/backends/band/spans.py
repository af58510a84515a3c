"""Calls as a few spans of keys, which the kernel for Hopper attends over in one pass. Without Triton, as plans are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from isentrope.backends.band.intervals import Attended, Interval, list_intervals
from isentrope.backends.band.key_span import MAX_SPANS, TILE_QUERIES, KeySpan
from isentrope.backends.padding import blank_queries, needs_zeros
from isentrope.core.caching import MAX_DEVICES, bounded_cache
from isentrope.core.call import AttentionCall, FoldedBranch
from isentrope.core.compile import cuda_capability_major
from isentrope.core.layout import Layout
from isentrope.core.region import Region, Span
from isentrope.core.switches import BAND_SPANS, BAND_SPANS_PADDING, is_on
from isentrope.core.tile_shapes import HOPPER

HEAD_DIMS = (64, 128)
# pairs of a query and a key that it sees, of all heads: with fewer, a call waits for the host rather than its kernels
MIN_PAIRS = 400_000_000
MAX_KEYS = 1 << 15  # of far spans in whole rows: longer ones are not timed, and PyTorch's kernels cost nothing there
SAMPLES = 64  # queries whose keys are counted
MIN_TILES = 128  # of all heads and rows; with fewer, smaller tiles keep more of a card busy
ENTROPY_SCALES = (1e-6, 1e6)  # factors of scores with which those of hidden keys stay finite, and below all others
# Gluon changes from one release of Triton to the next: that on which the kernel ran; others take `kernel.py`
TRITON_RELEASES = ((3, 6),)


def forward_spans(call: AttentionCall, need_entropy: bool = False) -> Attended | None:
    """Compute a call, whose padding may be anything; None where the kernel does not take it."""
    q, (lowest, highest) = call.q, ENTROPY_SCALES
    if not _takes_tensors(q, call.v, call.scale) or (need_entropy and not lowest < call.scale < highest):
        return None
    places = _place_spans(call.layout, [branch.region for branch in call.branches], q.shape[0] * q.shape[1])
    if places is None or (needs_zeros(call.layout) and not is_on(BAND_SPANS_PADDING)):
        return None
    call = blank_queries(call)
    keys: list[Tensor] = []
    for branch in call.branches:
        same = (k for k, other in zip(keys, call.branches, strict=False) if branch.rotates_keys_like(other))
        k = next(same, None)
        keys.append(call.fold_keys(branch) if k is None else k)
    spans = []
    for n, left, right, interval in places:
        branch = call.branches[n]
        spans.append(KeySpan(call.q, keys[n], left, right, interval, branch.query_angles, branch.tau, branch.offset))
    return _launch(spans, call.v, call.scale, call.normalise, needs_zeros(call.layout), need_entropy)


def forward_folded_spans(branches: Sequence[FoldedBranch]) -> Attended | None:
    """Compute branches of folded queries, whose padding is zeros; None where the kernel does not take them."""
    first, q = branches[0], branches[0].q
    if not _takes_tensors(q, first.v, first.scale) or any(x.biased or x.chosen is not None for x in branches):
        return None
    if any(x.q.stride() != q.stride() or x.scale != first.scale for x in branches):
        return None
    places = _place_spans(first.layout, [branch.region for branch in branches], q.shape[0] * q.shape[1])
    if places is None:
        return None
    spans = [
        KeySpan(branches[n].q, branches[n].k, left, right, interval, offset=branches[n].offset)
        for n, left, right, interval in places
    ]
    return _launch(spans, first.v, first.scale, False)


def _launch(
    spans: list[KeySpan], v: Tensor, scale: float, normalise: bool, padded: bool = False, need_entropy: bool = False
) -> Attended:
    from isentrope.backends.band.hopper_kernel import launch

    entropy = v.new_empty(spans[0].q.shape[:3], dtype=torch.float32) if need_entropy else None
    out, lse = launch(spans, v, scale, normalise, padded, entropy)
    return Attended(out, lse, None if entropy is None else entropy.clamp_min(0))


def _takes_tensors(q: Tensor, v: Tensor, scale: float) -> bool:
    batch, heads, queries, size = q.shape
    if batch * heads * (queries // TILE_QUERIES) < MIN_TILES or scale <= 0:
        return False
    if size not in HEAD_DIMS or v.shape[-1] != size or q.stride(-1) != 1:
        return False
    return is_on(BAND_SPANS) and q.is_cuda and _has_kernel(q.device)


@bounded_cache(MAX_DEVICES)
def _has_kernel(device: torch.device) -> bool:
    if torch.version.hip is not None or cuda_capability_major(device) != HOPPER:  # its instructions are no other's
        return False
    import triton  # type: ignore[import-untyped]

    return tuple(map(int, triton.__version__.split(".")[:2])) in TRITON_RELEASES


class Place(NamedTuple):
    """Where a span of a region is: its number, and `left`, `right` and `interval` of a KeySpan."""

    region: int
    left: int
    right: int
    interval: Interval | None = None


def _place_spans(layout: Layout, regions: Iterable[Region], heads: int) -> list[Place] | None:
    """Return the spans of regions, or None where the kernel does not take them, or gains nothing.

    Args:
        layout: of the call.
        regions: of its branches.
        heads: of all its rows.
    """
    regions = tuple(regions)
    places, pairs = layout.cached(("key spans", *regions), lambda: _find_places(layout, regions))
    return places if heads * pairs >= MIN_PAIRS else None


def _find_places(layout: Layout, regions: tuple[Region, ...]) -> tuple[list[Place] | None, float]:
    """Return the places of spans, those with a query's own key first, and the pairs of a head; inf if not known."""
    spans = [(n, span) for n, region in enumerate(regions) for span in region.spans]
    queries, keys = layout.queries, layout.keys
    if not 0 < len(spans) <= MAX_SPANS:
        return None, 0
    order = sorted(range(len(spans)), key=lambda i: not spans[i][1].low <= 0 < spans[i][1].high)
    if not layout.plain:
        lists = [list_intervals(layout, region)[: len(region.spans)] for region in regions]
        intervals = [interval for each in lists for interval in each]
        if len({low.shape for low, _ in intervals}) > 1:  # the kernel has one stride for all
            return None, 0
        return [Place(spans[i][0], 0, 0, intervals[i]) for i in order], inf
    if queries > keys or any(span.depends_on_place for _, span in spans) or (len(spans) > 1 and keys > MAX_KEYS):
        return None, 0
    places = [Place(spans[i][0], *_bound(spans[i][1], keys)) for i in order]
    return places, sum(_count_pairs(place, queries, keys) for place in places)


def _count_pairs(place: Place, queries: int, keys: int) -> int:
    """Return about how many pairs of a query and a key a span of a whole row has."""
    step = -(-queries // SAMPLES)
    seen = (min(x + place.right + 1, keys) - max(x - place.left, 0) for x in range(keys - queries, keys, step))
    return step * sum(max(0, count) for count in seen)


def _bound(span: Span, keys: int) -> tuple[int, int]:
    """Return how many keys before and after a query's own are the first and the last of a span."""
    return keys if span.low == -inf else -int(span.low), keys if span.high == inf else int(span.high) - 1
