"""Layouts: positions, padding and documents of the queries and keys of one call.

Everything is derived per query as index intervals over the keys, in O(queries) memory.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, TypeVar

import torch
from torch import Tensor

from isentrope.core.caching import MAX_LAYOUT_VALUES, MAX_LAYOUTS, LRUCache
from isentrope.core.compile import values_are_readable
from isentrope.core.frames import Frames, find_runs
from isentrope.core.layout_checks import PositionIds, check_documents, check_lengths, check_position_ids, read_lengths
from isentrope.core.region import Region, Span
from isentrope.core.tracing import GraphCache

MAX_SPANS = 2  # of a region, where a row has one query
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Rows:
    """Padding and documents of the rows of a batch.

    Attributes:
        lengths: unpadded keys of each row, (batch,).
        left_padded: whether padding is on the left.
        documents: ids (batch or 1, keys) or (keys,); a run of equal ids is a document.
    """

    lengths: Tensor | Sequence[int] | None = None
    left_padded: bool = False
    documents: Tensor | None = None


class Layout:
    """The geometry of one attention call.

    A slot is an index into the keys. Each query sees keys of one frame alone, `frame_low ≤ slot < frame_high`: its row
    without padding, or its document. Positions count from `origin`, the frame's first slot unless a cache has dropped
    earlier keys.

    Args:
        batch: rows of the call.
        queries: in a row.
        keys: in a row.
        device: of the positions.
        rows: padding and documents; by default, rows are unpadded sequences.
        frames: in place of `rows`, (origin, end, own slot) of each query, (batch or 1, queries) each. With as many keys
            as queries, key j has the frame of query j; otherwise all keys of a row have the frame of its last query.
        position_ids: positions of keys, of queries, or a pair of both; by default, they count from the frame's origin.

    Attributes:
        query, key: positions, (batch or 1, length).
        own_slot: the slot that each query is aligned with, (batch or 1, queries).
        offset: own slot minus query index, where it is the same for all rows.
        padded: whether rows may have padding.
        anchored: whether every frame begins at slot 0.
        framed: whether the caller gave `frames`.
        implicit: whether positions are the default ones.
        harmless_padding: whether padding holds what queries may see, which needs no zeros.
        padded_queries_matter: whether outputs of padded queries are read; otherwise a backend may leave them zero.
        complete_rows: whether the keys are all keys of their rows.
    """

    complete_rows = True

    def __init__(
        self,
        batch: int,
        queries: int,
        keys: int,
        device: torch.device,
        rows: Rows | None = None,
        *,
        frames: Frames | None = None,
        position_ids: PositionIds | None = None,
    ) -> None:
        self.batch, self.queries, self.keys, self.device = batch, queries, keys, device
        self._values: LRUCache[Hashable, Any] | None = None
        self._traced = GraphCache() if torch.compiler.is_dynamo_compiling() else None
        self.offset: int | None = keys - queries
        self.framed = frames is not None
        self.padded_queries_matter, self.harmless_padding = True, False
        if rows is None and frames is None and queries <= keys and not torch.compiler.is_compiling():
            self._set_whole_rows()
        else:
            self.slots = torch.arange(keys, device=device)
            if frames is None:
                self._compute_frames(rows or Rows())
            else:
                self._set_frames(frames)
        self._sorted: tuple[Tensor, Tensor] | None = None
        self.implicit = position_ids is None
        if position_ids is not None:
            self._set_positions(position_ids)

    def _set_frames(self, frames: Frames) -> None:
        """Take frames from the caller."""
        self.origin, high, slot = frames
        self.padded, self.anchored, self.offset = True, False, None
        self.frame_low, self.frame_high = self.origin.clamp_min(0), high.clamp_max(self.keys)
        same = self.queries == self.keys
        low = self.origin if same else self.origin[:, -1:]
        high = self.frame_high if same else self.frame_high[:, -1:].expand(-1, self.keys)
        self._key_frame, self._key_origin = (low.clamp_min(0).expand(-1, self.keys), high), low
        self.key = self.slots[None] - low
        self.query, self.own_slot = slot - self.origin, slot

    def _set_whole_rows(self) -> None:
        """Take every row for one sequence without padding: all of it is views of one tensor."""
        queries, keys = self.queries, self.keys
        counts = torch.arange(keys + 1, device=self.device)
        row, self.slots, self.padded, self.anchored = counts[None], counts[:keys], False, True
        first, self.key, end = row[:, :1], row[:, :keys], row[:, keys:]
        self.query = self.own_slot = self.key if queries == keys else self.key[:, keys - queries :]
        # while one token is decoded every view counts
        self.frame_low, self.frame_high = (x if queries == 1 else x.expand(-1, queries) for x in (first, end))
        low, high = first.expand(-1, keys), end.expand(-1, keys)
        self.origin, self._key_frame, self._key_origin = self.frame_low, (low, high), low

    def _compute_frames(self, rows: Rows) -> None:
        """Compute frames from padding and documents."""
        lengths, left_padded, documents = rows.lengths, rows.left_padded, rows.documents
        batch, queries, keys, device = self.batch, self.queries, self.keys, self.device
        slots = self.slots[None]
        # the frame of every key slot
        low, high = torch.zeros_like(slots), torch.full_like(slots, keys)
        self.padded = lengths is not None
        if lengths is not None:
            count = check_lengths(lengths, batch, keys, device)[:, None]
            low, high = (keys - count, high) if left_padded else (low, count)
            low, high = torch.broadcast_tensors(low, high)
        if documents is not None:
            run_low, run_high = find_runs(check_documents(documents, batch, keys, device))
            low, high = torch.maximum(low, run_low), torch.minimum(high, run_high)
        low, high = low.expand(-1, keys), high.expand(-1, keys)
        self._key_frame, self._key_origin = (low, high), low

        # the slot that each query is aligned with
        index = torch.arange(queries, device=device)[None] + (keys - queries)
        if queries != keys and lengths is not None and not left_padded:
            index = index - keys + count  # the last query is the last unpadded key
            self.offset = None
        self.own_slot = index
        nearest = index.clamp(0, keys - 1).expand(max(index.shape[0], low.shape[0]), -1)
        self.frame_low, self.frame_high = (x.expand(nearest.shape[0], -1).gather(1, nearest) for x in (low, high))
        self.anchored = documents is None and not (lengths is not None and left_padded)

        self.key = slots - low
        self.query = self.key if queries == keys else index - self.frame_low
        self.origin = self.frame_low

    def _set_positions(self, position_ids: PositionIds) -> None:
        """Take positions from the caller; spans become intervals by searching the sorted key positions."""
        query, key = check_position_ids(position_ids, self.batch, self.queries, self.keys, self.device)
        if query is None and key is not None:
            query = key if self.queries == self.keys else _positions_at(key, self.own_slot)
        self.query = self.query if query is None else query
        self.key = self.key if key is None else key
        (low, high), slots = self._key_frame, self.slots
        inside = (slots >= low) & (slots < high)
        inside, low, key = torch.broadcast_tensors(inside, low, self.key)
        same = inside[:, 1:] & inside[:, :-1] & (low[:, 1:] == low[:, :-1])
        if values_are_readable(key) and bool((same & (key[:, 1:] < key[:, :-1])).any()):
            raise ValueError(
                "position_ids: expected key positions that do not decrease within a row (or within a document: "
                "pass mask=Document(ids) for packed rows), got a decrease"
            )
        # frames are consecutive: shifting each by its first slot keeps the row sorted; padding sorts to the ends
        stride = 1 << 40
        order = torch.where(
            slots < low, -stride, torch.where(slots >= high, stride * (self.keys + 1), key + low * stride)
        )
        self._sorted = (order.contiguous(), self.frame_low * stride)

    def cached(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return `make()`, computed once for all calls that share the layout, as the layers of a model do."""
        if torch.compiler.is_compiling():
            return self.cached_in_graph(key, make)
        if self._values is None:  # created here, since a layout inside a traced graph has none
            self._values = LRUCache(MAX_LAYOUT_VALUES)
        return self._values.get(key, make)

    def cached_in_graph(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return `make()`, traced once in the graph that the layout was made in; anew for a layout of no graph."""
        return make() if self._traced is None else self._traced.get(key, make)

    @property
    def plain(self) -> bool:
        """Whether every row is one unpadded sequence at its default positions."""
        return self.implicit and not self.padded and self.anchored

    def padding(self) -> tuple[Tensor, Tensor]:
        """Return padding queries (batch or 1, queries) and slots that no query sees (batch or 1, keys), as booleans."""
        return self.cached("padding", self._padding)

    def _padding(self) -> tuple[Tensor, Tensor]:
        (low, high), own = self.find_tokens(), self.own_slot
        queries = (own < self.frame_low) | (own >= self.frame_high)
        return queries, (self.slots < low[:, None]) | (self.slots >= high[:, None])

    def find_tokens(self) -> tuple[Tensor, Tensor]:
        """Return the first slot of each row that some query may see and the one after the last, (batch or 1,) each."""
        return self.frame_low.amin(1), self.frame_high.amax(1)

    @property
    def banded(self) -> bool:
        """Whether a span is the same band of slots in every row, so that `key_range` can bound it."""
        return self.implicit and self.offset is not None

    def simplify(self, region: Region) -> Region:
        """Drop what does not matter at this size; unchanged where the caller gave positions or frames."""
        natural = self.implicit and not self.framed and self.queries <= self.keys
        return region.simplify(self.queries, self.keys) if natural else region

    def bounds(self, region: Region) -> tuple[Tensor, Tensor]:
        """Return each query's visible slots as intervals [low, high), (batch or 1, queries, spans) each."""
        return self.cached(("bounds", region), lambda: self._bounds(region))

    def visible(self, region: Region, rows: slice | None = None, columns: slice | None = None) -> Tensor:
        """Return which pairs are visible, (batch or 1, 1, rows, columns)."""
        low, high = self.bounds(region)
        slots = self.slots if columns is None else self.slots[columns]
        if rows is not None:
            low, high = low[:, rows], high[:, rows]
        low, high = low[..., None], high[..., None]
        return ((slots >= low) & (slots < high)).any(2)[:, None]

    def _bounds(self, region: Region, frame: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        clip = (self.frame_low, self.frame_high) if frame is None else frame
        pairs = [self._interval(span, clip) for span in region.spans] or [(clip[0], clip[0])]
        lows, highs = zip(*(torch.broadcast_tensors(*pair) for pair in pairs), strict=True)
        rows = max(low.shape[0] for low in lows)
        low = torch.stack([x.expand(rows, -1) for x in lows], -1)
        high = torch.stack([x.expand(rows, -1) for x in highs], -1)
        return low, torch.maximum(low, high)

    def _interval(self, span: Span, clip: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        low = self._slot(span.start, span.low, self._chunk_edge(span.chunk, span.chunk_low), latest=True)
        high = self._slot(span.stop, span.high, self._chunk_edge(span.chunk, span.chunk_high), latest=False)
        return (
            clip[0] if low is None else torch.minimum(torch.maximum(low, clip[0]), clip[1]),
            clip[1] if high is None else torch.minimum(torch.maximum(high, clip[0]), clip[1]),
        )

    def _chunk_edge(self, size: int, difference: float) -> Tensor | None:
        """Return the first position of the chunk that is `difference` chunks after each query's."""
        if not size or abs(difference) == inf:
            return None
        return (self.query // size + int(difference)) * size

    def _slot(self, fixed: float, relative: float, edge: Tensor | None, latest: bool) -> Tensor | None:
        """Return the first slot at or after the latest (or earliest) of `fixed`, query + `relative` and `edge`."""
        position = edge
        if abs(relative) != inf:
            position = self.query + int(relative)
            if edge is not None:
                position = torch.maximum(position, edge) if latest else torch.minimum(position, edge)
        if abs(fixed) != inf:
            bound = int(fixed)
            if position is None:
                position = torch.full_like(self.query, bound)
            else:
                position = position.clamp(min=bound) if latest else position.clamp(max=bound)
        if position is None:
            return None
        if self._sorted is None:
            return position + self.origin
        order, target = self._sorted[0], position + self._sorted[1]
        rows = max(order.shape[0], target.shape[0])
        return torch.searchsorted(order.expand(rows, -1).contiguous(), target.expand(rows, -1).contiguous())

    def key_range(self, region: Region, first: int, last: int) -> tuple[int, int]:
        """Return an interval of slots that contains all that queries first … last - 1 see, as plain integers."""
        if not self.banded or self.offset is None:
            return 0, self.keys
        low, high = self.keys, 0
        for span in region.spans:
            oldest, newest = first + self.offset, last - 1 + self.offset
            lowest, highest = span.chunk_distances
            a = max(0.0, oldest + max(span.low, lowest))
            b = min(float(self.keys), newest + min(span.high, highest))
            if self.anchored:
                a, b = max(a, span.start), min(b, span.stop)
                if span.chunk:
                    a = max(a, (oldest // span.chunk + span.chunk_low) * span.chunk)
                    b = min(b, (newest // span.chunk + span.chunk_high) * span.chunk)
            if a < b:
                low, high = min(low, int(a)), max(high, int(b))
        return (low, high) if low < high else (0, 0)

    def count_keys(self, kind: str, region: Region) -> Tensor:
        """Return n for each query, (batch or 1, queries).

        Args:
            kind: "visible": keys it sees in the region; "sequence": keys of its frame; "position": its position + 1.
            region: the visible keys.
        """
        if kind == "visible":
            return self.count_slots(region)
        return self.query + 1 if kind == "position" else self.frame_high - self.origin

    def count_slots(self, region: Region) -> Tensor:
        """Return how many of the keys that are here each query sees, (batch or 1, queries)."""
        low, high = self.bounds(region)
        return self.cached(("count", region), lambda: (high - low).sum(-1))

    def slots_of_one_query(self, regions: tuple[Region, ...]) -> Tensor:
        """Return the slots that the one query of each row sees, [low, high) twice for each region, as int32.

        Shape (batch or 1, regions, 4). A region has at most `MAX_SPANS` spans.
        """
        return self.cached(("slots of one query", *regions), lambda: self._slots_of_one_query(regions))

    def _slots_of_one_query(self, regions: tuple[Region, ...]) -> Tensor:
        if self.plain and values_are_readable(self.slots):  # known here; a graph that is captured copies nothing
            ranges = [[self.key_range(Region((span,)), 0, 1) for span in region.spans] for region in regions]
            padded = [[n for pair in (*pairs, *[(0, 0)] * (MAX_SPANS - len(pairs))) for n in pair] for pairs in ranges]
            # not waited for: what so little is copied from may go
            return torch.tensor([padded], dtype=torch.int32).to(self.device, non_blocking=True)
        bounds = []
        for region in regions:
            low, high = (x[:, 0] for x in self.bounds(region))
            pairs = torch.stack((low, high), -1).flatten(1)
            bounds.append(torch.nn.functional.pad(pairs, (0, 2 * MAX_SPANS - pairs.shape[1])))
        rows = max(x.shape[0] for x in bounds)
        return torch.stack([x.expand(rows, -1) for x in bounds], 1).to(torch.int32).contiguous()

    def count_for_one_query(self, regions: tuple[Region, ...], counted: tuple[int, ...] | None = None) -> int | Tensor:
        """Return how many keys the one query of each row sees in some of the regions, by default in all.

        A plain integer where rows are unpadded, else (batch or 1,). Regions are disjoint.
        """
        chosen = tuple(range(len(regions))) if counted is None else counted
        if self.plain:
            spans = [Region((span,)) for n in chosen for span in regions[n].spans]
            return sum(high - low for low, high in (self.key_range(span, 0, 1) for span in spans))
        slots = self.slots_of_one_query(regions)
        sizes = self.cached(("counts of one query", *regions), lambda: slots[..., 1::2] - slots[..., ::2])
        if counted is None:
            return sizes.sum((1, 2))
        if len(counted) == 1 and len(regions[counted[0]].spans) == 1:
            return sizes[:, counted[0], 0]
        return sizes[:, list(counted)].sum((1, 2))

    @property
    def row_lengths(self) -> tuple[Tensor | int, Tensor | int]:
        """Number of keys in the frame of each query and of each key; plain integers where frames are whole rows."""
        if not self.padded and self.anchored:
            return self.keys, self.keys
        return self.frame_high - self.origin, self._key_frame[1] - self._key_origin


_recent = LRUCache[Hashable, "Layout"](MAX_LAYOUTS)


def find_layout(q: Tensor, keys: int) -> Layout | None:
    """Return the cached layout of unpadded rows with these queries and so many keys, where there is one."""
    if type(q) is not Tensor or not values_are_readable(q):
        return None
    batch, _, queries, _ = q.shape
    layout: Layout | None = _recent.find((batch, queries, keys, q.device))
    return layout


def get_layout(
    batch: int,
    queries: int,
    keys: int,
    device: torch.device,
    rows: Rows | None = None,
    *,
    frames: Frames | None = None,
    position_ids: PositionIds | None = None,
) -> Layout:
    """Return a layout; those of whole rows, and of rows whose lengths can be read, are cached for other layers."""
    known = rows is None
    if rows is not None and rows.documents is None and (lengths := read_lengths(rows.lengths, device)) is not None:
        known, rows = True, Rows(lengths, rows.left_padded)  # not the caller's tensor, which may change
    probe = torch.empty(0, device=device)
    # tensors of a traced or captured graph must not outlive it
    known = known and frames is None and position_ids is None and type(probe) is Tensor
    if not known or not values_are_readable(probe):
        return Layout(batch, queries, keys, device, rows, frames=frames, position_ids=position_ids)
    key = (batch, queries, keys, device) + (() if rows is None else (rows.lengths, rows.left_padded))
    return _recent.get(key, lambda: Layout(batch, queries, keys, device, rows))


def _positions_at(positions: Tensor, slots: Tensor) -> Tensor:
    """Return positions (batch or 1, keys) at slots (batch or 1, queries), extrapolated before the first key."""
    rows = max(positions.shape[0], slots.shape[0])
    inside = slots.clamp(0, positions.shape[1] - 1)
    return positions.expand(rows, -1).gather(1, inside.expand(rows, -1)) + (slots - inside)
