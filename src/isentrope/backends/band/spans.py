"""Calls as a few spans of keys, which the kernel for Hopper attends over in one pass. Without Triton, as plans are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from isentrope.backends.band.intervals import Attended, Interval, list_intervals
from isentrope.backends.band.key_span import MAX_SPANS, TILE_QUERIES, KeySpan
from isentrope.backends.padding import blank_queries, needs_zeros
from isentrope.core.caching import MAX_DEVICES, bounded_cache
from isentrope.core.call import AttentionCall, FoldedBranch, describe_tensors
from isentrope.core.compile import cuda_capability_major, device_context
from isentrope.core.layout import Layout
from isentrope.core.region import Region, Span
from isentrope.core.switches import BAND_SPANS, is_on, list_switches
from isentrope.core.tile_shapes import HOPPER

HEAD_DIMS = (64, 128)
MAX_KEYS = 1 << 15  # of far spans in whole rows: longer ones are not timed, and PyTorch's kernels cost nothing there
MIN_TILES = 128  # of all heads and rows; with fewer, smaller tiles keep more of a card busy
ENTROPY_SCALES = (1e-6, 1e6)  # factors of scores with which those of hidden keys stay finite, and below all others
# Gluon changes from one release of Triton to the next: that on which the kernel ran; others take `kernel.py`
TRITON_RELEASES = ((3, 6),)


def forward_spans(call: AttentionCall, need_entropy: bool = False) -> Attended | None:
    """Compute a call, whose padding may be anything; None where the kernel does not take it."""
    prepared = _get_prepared(call, need_entropy)
    if prepared is None:
        return None
    if (blanked := blank_queries(call)) is not call:  # whose queries may lie otherwise in memory
        prepared = _get_prepared(blanked, need_entropy)
    return None if prepared is None else prepared.run(blanked.q, blanked.k, blanked.v)


def _get_prepared(call: AttentionCall, need_entropy: bool) -> PreparedSpans | None:
    key = "spans", need_entropy, list_switches(), *describe_tensors(call.q, call.k, call.v)
    return call.cached(key, lambda: _prepare(call, need_entropy))


def _prepare(call: AttentionCall, need_entropy: bool) -> PreparedSpans | None:
    lowest, highest = ENTROPY_SCALES
    if need_entropy and not lowest < call.scale < highest:
        return None
    places = _place_call(call)
    if places is None:
        return None
    return PreparedSpans(call, places, need_entropy)


class PreparedSpans:
    """A call of which all is worked out but its tensors, of which it holds none; those of others are laid out alike.

    Args:
        call: the call.
        places: where its spans are.
        need_entropy: whether to compute that of attention weights.
    """

    def __init__(self, call: AttentionCall, places: list[Place], need_entropy: bool) -> None:
        from isentrope.backends.band.span_launch import SpanLaunch  # Triton may not be installed

        branches = call.branches
        first = [next(n for n, x in enumerate(branches) if branch.rotates_keys_like(x)) for branch in branches]
        rotations = list(dict.fromkeys(first))
        self._rotate = call.prepare_keys([branches[n] for n in rotations])
        self._order = [rotations.index(first[place.region]) for place in places]  # of the keys of each span
        spans = [
            KeySpan(
                call.q, call.k, left, right, interval, branches[n].query_angles, branches[n].tau, branches[n].offset
            )
            for n, left, right, interval in places
        ]
        padded = needs_zeros(call.layout)
        self._launch = SpanLaunch(spans, call.v, call.scale, call.normalise, padded, need_entropy)

    def run(self, q: Tensor, k: Tensor, v: Tensor) -> Attended:
        """Attend with tensors of which nothing but addresses and contents differs, without gradients."""
        with device_context(q):
            rotated = self._rotate(k)
            attended = self._launch.run((q,) * len(self._order), [rotated[n] for n in self._order], v)
        return attended if attended.entropy is None else attended._replace(entropy=attended.entropy.clamp_min(0))


def takes_spans(call: AttentionCall) -> bool:
    """Return whether the kernel takes a call, all heads of which it computes in little memory."""
    return _place_call(call) is not None


def _place_call(call: AttentionCall) -> list[Place] | None:
    q = call.q
    if not _takes_tensors(q, call.v, call.scale):
        return None
    return _place_spans(call.layout, [branch.region for branch in call.branches])


def forward_folded_spans(branches: Sequence[FoldedBranch]) -> Attended | None:
    """Compute branches of folded queries, whose padding may be anything; None where the kernel does not take them."""
    first, q = branches[0], branches[0].q
    if not _takes_tensors(q, first.v, first.scale) or any(x.biased or x.chosen is not None for x in branches):
        return None
    if any(x.q.stride() != q.stride() or x.scale != first.scale for x in branches):
        return None
    places = _place_spans(first.layout, [branch.region for branch in branches])
    if places is None:
        return None
    spans = [
        KeySpan(branches[n].q, branches[n].k, left, right, interval, offset=branches[n].offset)
        for n, left, right, interval in places
    ]
    from isentrope.backends.band.span_launch import SpanLaunch

    padded = needs_zeros(first.layout)
    launch = SpanLaunch(spans, first.v, first.scale, normalise=False, padded=padded, need_entropy=False)
    with device_context(q):
        return launch.run([x.q for x in spans], [x.k for x in spans], first.v)


def _takes_tensors(q: Tensor, v: Tensor, scale: float) -> bool:
    batch, heads, queries, size = q.shape
    if batch * heads * (queries // TILE_QUERIES) < MIN_TILES or scale <= 0:
        return False
    if size not in HEAD_DIMS or v.shape[-1] != size or q.stride(-1) != 1:
        return False
    return is_on(BAND_SPANS) and q.is_cuda and has_kernel(q.device)


@bounded_cache(MAX_DEVICES)
def has_kernel(device: torch.device) -> bool:
    """Return whether the kernels for Hopper run on a device."""
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


def _place_spans(layout: Layout, regions: Iterable[Region]) -> list[Place] | None:
    """Return the spans of regions, those with a query's own key first; None where the kernel does not take them."""
    regions = tuple(regions)
    return layout.cached(("key spans", *regions), lambda: _find_places(layout, regions))


def _find_places(layout: Layout, regions: tuple[Region, ...]) -> list[Place] | None:
    spans = [(n, span) for n, region in enumerate(regions) for span in region.spans]
    queries, keys = layout.queries, layout.keys
    if not 0 < len(spans) <= MAX_SPANS:
        return None
    order = sorted(range(len(spans)), key=lambda i: not spans[i][1].low <= 0 < spans[i][1].high)
    if not layout.plain:
        lists = [list_intervals(layout, region)[: len(region.spans)] for region in regions]
        intervals = [interval for each in lists for interval in each]
        if len({low.shape for low, _ in intervals}) > 1:  # the kernel has one stride for all
            return None
        return [Place(spans[i][0], 0, 0, intervals[i]) for i in order]
    own = spans[order[0]][1]  # without a query's own key a tile might have none, which the kernel does not expect
    if not own.low <= 0 < own.high:
        return None
    if queries > keys or any(span.depends_on_place for _, span in spans) or (len(spans) > 1 and keys > MAX_KEYS):
        return None
    return [Place(spans[i][0], *_bound(spans[i][1], keys)) for i in order]


def _bound(span: Span, keys: int) -> tuple[int, int]:
    """Return how many keys before and after a query's own are the first and the last of a span, at most all."""
    return int(min(keys, -span.low)), int(min(keys, span.high - 1))
