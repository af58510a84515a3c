"""Where the queries and keys of one call sit: positions, padding, documents.

Everything is derived per query as index intervals over the keys, in O(queries) memory.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from math import inf
from threading import Lock
from typing import Any, TypeVar

import torch
from torch import Tensor

from isentrope.core.compile import values_are_readable
from isentrope.core.region import Region, Span
from isentrope.utils.text import format_value

PositionIds = Tensor | tuple[Tensor, Tensor]
Frames = tuple[Tensor, Tensor, Tensor]
T = TypeVar("T")
# layouts kept between calls, and what is kept with each: angles and block masks grow with the length
MAX_LAYOUTS = 2
MAX_CACHED_VALUES = 16
_ABSENT = object()


class Layout:
    """The geometry of one attention call.

    query, key: positions (batch or 1, length). Each query looks into one frame of the keys, `frame_low ≤ slot <
    frame_high`: its row without padding, or its document. Positions count from `origin`, the frame's first slot unless
    a cache has let go of the keys before.

    frames: in place of `lengths` and `documents`, (origin, end, own slot) of each query, (batch or 1, queries) each.
    With as many keys as queries, key j has the frame of query j; otherwise a row is one frame, that of its last query.
    """

    def __init__(
        self,
        batch: int,
        queries: int,
        keys: int,
        device: torch.device,
        *,
        lengths: Tensor | Sequence[int] | None = None,
        left_padded: bool = False,
        documents: Tensor | None = None,
        frames: Frames | None = None,
        position_ids: PositionIds | None = None,
    ) -> None:
        self.batch, self.queries, self.keys, self.device = batch, queries, keys, device
        self._memory: dict[Hashable, Any] = {}
        self.slots = torch.arange(keys, device=device)
        self.offset: int | None = keys - queries
        self.framed = frames is not None
        if frames is None:
            self._frame_rows(lengths, left_padded, documents)
        else:
            self._take(frames)
        self._sorted: tuple[Tensor, Tensor] | None = None
        self.implicit = position_ids is None
        if position_ids is not None:
            self._place(position_ids)

    def _take(self, frames: Frames) -> None:
        """Frames as the caller knows them."""
        self.origin, high, slot = frames
        self.padded, self.anchored, self.offset = True, False, None
        self.frame_low, self.frame_high = self.origin.clamp_min(0), high.clamp_max(self.keys)
        same = self.queries == self.keys
        low = self.origin if same else self.origin[:, -1:]
        high = self.frame_high if same else self.frame_high[:, -1:].expand(-1, self.keys)
        self._key_frame, self._key_origin = (low.clamp_min(0).expand(-1, self.keys), high), low
        self.key = self.slots[None] - low
        self.query, self.own_slot = slot - self.origin, slot

    def _frame_rows(self, lengths: Tensor | Sequence[int] | None, left_padded: bool, documents: Tensor | None) -> None:
        """Frames from what is padding and where documents begin."""
        batch, queries, keys, device = self.batch, self.queries, self.keys, self.device
        slots = self.slots[None]
        # frame of every key slot
        low, high = torch.zeros_like(slots), torch.full_like(slots, keys)
        self.padded = lengths is not None
        if lengths is not None:
            count = _check_lengths(lengths, batch, keys, device)[:, None]
            low, high = (keys - count, high) if left_padded else (low, count)
            low, high = torch.broadcast_tensors(low, high)
        if documents is not None:
            run_low, run_high = runs(_check_documents(documents, batch, keys, device))
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

    def _place(self, position_ids: PositionIds) -> None:
        """Take positions from the caller. Spans then become intervals by searching the sorted key positions."""
        query, key = _check_position_ids(position_ids, self.batch, self.queries, self.keys, self.device)
        if query is None and key is not None:
            query = key if self.queries == self.keys else _at(key, self.own_slot)
        self.query = self.query if query is None else query
        self.key = self.key if key is None else key
        low, high = self._key_frame
        slots = self.slots
        inside = (slots >= low) & (slots < high)
        inside, low, key = torch.broadcast_tensors(inside, low, self.key)
        same = inside[:, 1:] & inside[:, :-1] & (low[:, 1:] == low[:, :-1])
        if values_are_readable(key) and bool((same & (key[:, 1:] < key[:, :-1])).any()):
            raise ValueError(
                "position_ids: expected key positions that do not decrease within a row (or within a document: "
                "pass mask=Document(ids) for packed rows), got a decrease"
            )
        # frames follow one another: shifting each by its first slot keeps the row sorted; padding goes to the ends
        stride = 1 << 40
        order = torch.where(
            slots < low, -stride, torch.where(slots >= high, stride * (self.keys + 1), key + low * stride)
        )
        self._sorted = (order.contiguous(), self.frame_low * stride)

    def cached(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` returned the first time: calls that share a layout, as the layers of a model do, share it."""
        if torch.compiler.is_compiling():
            return make()
        made: Any = self._memory.get(key, _ABSENT)
        if made is _ABSENT:
            with torch.inference_mode(False):  # or a later call could not save it for its backward
                made = make()
        with _lock:
            self._memory.pop(key, None)
            self._memory[key] = made  # the last again
            while len(self._memory) > MAX_CACHED_VALUES:
                del self._memory[next(iter(self._memory))]
        return made

    @property
    def plain(self) -> bool:
        """Whether every row is one whole, unpadded sequence at its natural positions."""
        return self.implicit and not self.padded and self.anchored

    def padding(self) -> tuple[Tensor, Tensor]:
        """Queries (batch or 1, queries) that stand at no token, and slots (batch or 1, keys) that no query sees."""
        return self.cached("padding", self._padding)

    def _padding(self) -> tuple[Tensor, Tensor]:
        queries = (self.own_slot < self.frame_low) | (self.own_slot >= self.frame_high)
        low, high = self.frame_low.amin(1, keepdim=True), self.frame_high.amax(1, keepdim=True)
        return queries, (self.slots < low) | (self.slots >= high)

    @property
    def banded(self) -> bool:
        """Whether a span is the same band of slots in every row, so that `key_range` can narrow it."""
        return self.implicit and self.offset is not None

    def simplify(self, region: Region) -> Region:
        """The region without what cannot matter at this size; where the caller places queries, it is left alone."""
        natural = self.implicit and not self.framed and self.queries <= self.keys
        return region.within(self.queries, self.keys) if natural else region

    def bounds(self, region: Region) -> tuple[Tensor, Tensor]:
        """Each query's visible slots: low, high (batch or 1, queries, spans), intervals [low, high)."""
        return self.cached(("bounds", region), lambda: self._bounds(region))

    def visible(self, region: Region, rows: slice | None = None, columns: slice | None = None) -> Tensor:
        """Visible pairs, (batch or 1, 1, rows, columns)."""
        low, high = self.bounds(region)
        slots = self.slots if columns is None else self.slots[columns]
        if rows is not None:
            low, high = low[:, rows], high[:, rows]
        low, high = low[..., None], high[..., None]
        return ((slots >= low) & (slots < high)).any(2)[:, None]

    def _bounds(self, region: Region) -> tuple[Tensor, Tensor]:
        pairs = [self._interval(span) for span in region.spans] or [(self.frame_low, self.frame_low)]
        pairs = [torch.broadcast_tensors(*pair) for pair in pairs]
        lows, highs = zip(*pairs, strict=True)
        rows = max(low.shape[0] for low in lows)
        low = torch.stack([x.expand(rows, -1) for x in lows], -1)
        high = torch.stack([x.expand(rows, -1) for x in highs], -1)
        return low, torch.maximum(low, high)

    def _interval(self, span: Span) -> tuple[Tensor, Tensor]:
        low = self._slot(span.start, span.low, latest=True)
        high = self._slot(span.stop, span.high, latest=False)
        clip = (self.frame_low, self.frame_high)
        return (
            self.frame_low if low is None else torch.minimum(torch.maximum(low, clip[0]), clip[1]),
            self.frame_high if high is None else torch.minimum(torch.maximum(high, clip[0]), clip[1]),
        )

    def _slot(self, fixed: float, relative: float, latest: bool) -> Tensor | None:
        """The first slot at or after the later (or earlier) of the positions `fixed` and query + `relative`."""
        position: Tensor | None = None
        if abs(relative) != inf:
            position = self.query + int(relative)
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
        order, shift = self._sorted
        wanted = position + shift
        rows = max(order.shape[0], wanted.shape[0])
        return torch.searchsorted(order.expand(rows, -1).contiguous(), wanted.expand(rows, -1).contiguous())

    def key_range(self, region: Region, first: int, last: int) -> tuple[int, int]:
        """Slots that queries first … last - 1 may see, as plain numbers; never too few."""
        if not self.banded or self.offset is None:
            return 0, self.keys
        low, high = self.keys, 0
        for span in region.spans:
            a = max(0.0, first + self.offset + span.low)
            b = min(float(self.keys), last - 1 + self.offset + span.high)
            if self.anchored:
                a, b = max(a, span.start), min(b, span.stop)
            if a < b:
                low, high = min(low, int(a)), max(high, int(b))
        return (low, high) if low < high else (0, 0)

    def count(self, what: str, region: Region) -> Tensor:
        """n for each query (batch or 1, queries): keys seen, keys of the row, or position + 1."""
        if what == "visible":
            low, high = self.bounds(region)
            return self.cached(("count", region), lambda: (high - low).sum(-1))
        return self.query + 1 if what == "position" else self.frame_high - self.origin

    @property
    def row_lengths(self) -> tuple[Tensor | int, Tensor | int]:
        """Keys in the frame of each query and of each key: numbers where every frame is the whole row."""
        if not self.padded and self.anchored:
            return self.keys, self.keys
        return self.frame_high - self.origin, self._key_frame[1] - self._key_origin


_recent: OrderedDict[Hashable, Layout] = OrderedDict()
_lock = Lock()  # models may run in several threads


def layout_of(batch: int, queries: int, keys: int, device: torch.device, **rows: Any) -> Layout:
    """A layout; the last few of whole, unpadded rows are kept, for they return with every layer and step."""
    given = any(value is not None and value is not False for value in rows.values())
    probe = torch.empty(0, device=device)
    if (
        given or type(probe) is not Tensor or not values_are_readable(probe)
    ):  # padded, or a graph is being traced or captured
        return Layout(batch, queries, keys, device, **rows)
    key = (batch, queries, keys, device)
    with _lock:
        layout = _recent.pop(key, None)
        if layout is None:
            with torch.inference_mode(False):
                layout = Layout(batch, queries, keys, device)
        _recent[key] = layout  # the last again
        while len(_recent) > MAX_LAYOUTS:
            _recent.popitem(last=False)
    return layout


def token_span(mask: Tensor) -> tuple[Tensor, Tensor]:
    """First and last token of each row, (batch, 1), of a mask (batch, slots) with 0 at padding."""
    seen = mask.to(torch.int64)
    first = seen.argmax(1, keepdim=True)
    last = mask.shape[1] - 1 - seen.flip(1).argmax(1, keepdim=True)
    count = seen.sum(1, keepdim=True)
    last = torch.where(count == 0, first - 1, last)
    if values_are_readable(mask) and bool((count != last - first + 1).any()):
        raise ValueError("attention_mask: expected padding on the left or right of each row, got it between tokens")
    return first, last


def token_frames(mask: Tensor) -> Frames | None:
    """Frames of rows that a mask (batch, slots) pads; None where it is known to pad nothing."""
    if values_are_readable(mask) and bool(mask.all()):
        return None
    first, last = token_span(mask)
    slots = torch.arange(mask.shape[1], device=mask.device)[None].expand_as(mask)
    return first.expand_as(slots), (last + 1).expand_as(slots), slots


def _integers(value: Tensor | Sequence[int], name: str, device: torch.device) -> Tensor:
    try:
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name}: expected a tensor of integers, got {format_value(value)}") from error
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype == torch.bool:
        raise ValueError(f"{name}: expected integers, got {tensor.dtype}")
    return tensor.to(device=device, dtype=torch.int64)


def _check_lengths(lengths: Tensor | Sequence[int], batch: int, keys: int, device: torch.device) -> Tensor:
    count = _integers(lengths, "lengths", device)
    if count.shape != (batch,):
        raise ValueError(f"lengths: expected shape ({batch},), one number a row, got {tuple(count.shape)}")
    if values_are_readable(count) and bool(((count < 0) | (count > keys)).any()):
        raise ValueError(f"lengths: expected values in 0 … {keys} (the number of keys), got {count.tolist()}")
    return count


def _check_documents(documents: Tensor, batch: int, keys: int, device: torch.device) -> Tensor:
    given = _integers(documents, "Document(ids)", device)
    ids = torch.atleast_2d(given)
    if ids.shape not in ((1, keys), (batch, keys)):
        raise ValueError(f"Document(ids): expected shape ({keys},) or ({batch}, {keys}), got {tuple(given.shape)}")
    return ids


def runs(ids: Tensor) -> tuple[Tensor, Tensor]:
    """First slot, and slot after the last, of the run of equal ids that each slot is in."""
    slots = torch.arange(ids.shape[1], device=ids.device)
    starts = torch.ones_like(ids, dtype=torch.bool)
    starts[:, 1:] = ids[:, 1:] != ids[:, :-1]
    ends = torch.ones_like(starts)
    ends[:, :-1] = starts[:, 1:]
    low = torch.where(starts, slots, 0).cummax(1).values
    high = torch.where(ends, slots + 1, ids.shape[1]).flip(1).cummin(1).values.flip(1)
    return low, high


def _at(positions: Tensor, slots: Tensor) -> Tensor:
    """Positions (batch or 1, keys) at these slots (batch or 1, queries), counted on backwards before the first."""
    rows = max(positions.shape[0], slots.shape[0])
    held = slots.clamp(0, positions.shape[1] - 1)
    return positions.expand(rows, -1).gather(1, held.expand(rows, -1)) + (slots - held)


def _check_position_ids(
    position_ids: PositionIds, batch: int, queries: int, keys: int, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    """Positions of queries and keys.

    One tensor as long as the keys gives the keys, each query being at that of its own slot; one as long as the queries
    gives the queries, the keys staying at 0 … keys - 1; a pair gives both.
    """
    given = position_ids if isinstance(position_ids, tuple) else (position_ids,)
    tensors = [torch.atleast_2d(_integers(ids, "position_ids", device)) for ids in given]
    for ids in tensors:
        if ids.dim() != 2 or ids.shape[0] not in (1, batch):
            raise ValueError(f"position_ids: expected ({batch}, length) or (length,), got {tuple(ids.shape)}")
    if len(tensors) == 2 and (tensors[0].shape[1], tensors[1].shape[1]) == (queries, keys):
        return tensors[0], tensors[1]
    if len(tensors) == 1 and tensors[0].shape[1] == keys and queries <= keys:
        return None, tensors[0]
    if len(tensors) == 1 and tensors[0].shape[1] == queries:
        return tensors[0], None
    raise ValueError(
        f"position_ids: expected {keys} positions for the keys, {queries} for the queries, or a pair of both, "
        f"got {' and '.join(str(tuple(ids.shape)) for ids in tensors)}"
    )
