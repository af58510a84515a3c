"""The pages of one kind of layer in a step of continuous batching: whose keys are where, and who attends with whom."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from isentrope.backends.protocol import Backend
from isentrope.backends.sdpa import MAX_MASKED_QUERIES
from isentrope.builder import Inputs, build_call
from isentrope.core.call import AttentionCall
from isentrope.core.compile import can_run_triton
from isentrope.core.layout import Layout
from isentrope.core.packed_layout import PackedKeys, PackedLayout
from isentrope.core.region import CAUSAL, Region
from isentrope.dispatch import BAND, DECODE, MAX_BRANCHED_Q_ELEMENTS, SDPA, choose_backend
from isentrope.hf.layer import Layer, LayerCall

MAX_PADDING = 2  # rows of one call have at least 1 / MAX_PADDING of the keys of its longest row
MASK_ALIGNMENT = 8  # SDPA copies masks whose rows begin elsewhere, in every layer
T = TypeVar("T")


class Requests(NamedTuple):
    """The requests of a step, as the pages of one kind of layer hold them.

    queries: new tokens of each.
    keys: keys of each that are read, the new ones included.
    dropped: keys of each that were dropped before those, where layers have a window.
    """

    queries: list[int]
    keys: list[int]
    dropped: list[int]


class PackedRow(NamedTuple):
    """Where the requests of a step are in its packed row, on the device.

    position_ids: of the queries, (1, queries).
    query_ends, key_ends: cumulative numbers of queries and of keys, (requests + 1,).
    last_positions: of the last query of each request, (requests,).
    """

    position_ids: Tensor
    query_ends: Tensor
    key_ends: Tensor
    last_positions: Tensor


class PreparedCall(NamedTuple):
    """A call that layers repeat with tensors of their own, which costs a fraction of building and dispatching it.

    call: with tensors of the same sizes.
    backend: chosen for it.
    scaling: of the layers that may repeat it.
    """

    call: AttentionCall
    backend: Backend
    scaling: float | None

    def run(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the output, (rows, queries, heads, d)."""
        call = self.call.set_tensors(query, key, value)
        vars(call)["shared"] = self.call.shared
        return self.backend.forward(call, need_lse=False)[0].transpose(1, 2).contiguous()


class Batch(NamedTuple):
    """Requests whose attention is one call.

    queries: where their queries are in the packed row, None for all of it.
    keys: where their keys are among those gathered for the layer, None for all of them.
    rows: of the call.
    shared: whether all rows have the same keys.
    layout: of the call.
    prepared: the call, where layers may repeat it.
    """

    queries: slice | Tensor | None
    keys: slice | None
    rows: int
    shared: bool
    layout: Layout
    prepared: PreparedCall | None = None


class Plan(NamedTuple):
    """What a step does in layers of one recipe.

    idle: which requests take the model's own attention.
    mask: of that attention, None where no request takes it.
    gathered: which of the packed keys to gather, those of rows of their own after the packed row itself where that is
        needed; None where the packed row is all that is needed.
    batches: calls under the recipe.
    """

    idle: list[bool]
    mask: Tensor | None
    gathered: Tensor | None
    batches: list[Batch]


class Pages:
    """The pages of one kind of layer in a step: where keys of each request are, and their positions."""

    def __init__(self, row: PackedRow, requests: Requests) -> None:
        self.row, self.requests, self.device = row, requests, row.position_ids.device
        self.first_query, self.first_key = ([0, *accumulate(x)][:-1] for x in requests[:2])
        self.total_queries, self.total_keys = sum(requests.queries), sum(requests.keys)
        self.values: dict[Hashable, Any] = {}
        self.plans: dict[Hashable, Plan] = {}

    def cached(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return `make()`, computed once for the layers of the step."""
        if key not in self.values:
            self.values[key] = make()
        value: T = self.values[key]
        return value

    @property
    def key_positions(self) -> Tensor:
        """Positions of the packed keys in their requests, (1, keys)."""
        return self.cached("key positions", lambda: (self.slots - self.packed.bounds[2, self.packed.sequence])[None])

    @property
    def packed(self) -> PackedKeys:
        """Where the keys of requests are in the packed row, computed on the device."""
        return self.cached("packed keys", self._find_packed_keys)

    def _find_packed_keys(self) -> PackedKeys:
        ends = self.row.key_ends.long()
        bounds = torch.stack((ends[:-1], ends[1:], ends[1:] - 1 - self.row.last_positions))
        return PackedKeys(bounds, torch.bucketize(self.slots, bounds[1], right=True))

    @property
    def query_requests(self) -> Tensor:
        """The request of each query, (queries,)."""
        return self.cached("query requests", self._find_query_requests)

    def _find_query_requests(self) -> Tensor:
        index = torch.arange(self.total_queries, device=self.device)
        return torch.bucketize(index, self.row.query_ends[1:].long(), right=True)

    def find_keys(self, chosen: list[bool]) -> tuple[Tensor, Tensor]:
        """Return where the keys of some requests are in the packed row, and their positions, (1, keys)."""
        index = self._to_device(chosen)[self.packed.sequence].nonzero()[:, 0]
        return index, self.key_positions[:, index]

    @property
    def slots(self) -> Tensor:
        """Numbers of the packed keys, (keys,)."""
        return self.cached("slots", lambda: torch.arange(self.total_keys, device=self.device))

    def _to_device(self, values: Any) -> Tensor:
        return torch.tensor(values, device=self.device)

    def get_mask(self, region: Region, dtype: torch.dtype) -> Tensor:
        """Return the additive mask of the packed row, as the plain engine makes it: requests do not see each other."""
        return self.cached(("mask", region, dtype), lambda: self._make_mask(region, dtype))

    def _make_mask(self, region: Region, dtype: torch.dtype) -> Tensor:
        hidden = self.query_requests[:, None] != self.packed.sequence
        if region != CAUSAL or len(self.requests.queries) < self.total_queries:
            hidden |= ~self._find_visible(region)  # otherwise each query is the last token of its request
        width = -(-self.total_keys // MASK_ALIGNMENT) * MASK_ALIGNMENT
        mask = torch.zeros(self.total_queries, width, dtype=dtype, device=self.device)[:, : self.total_keys]
        return mask.masked_fill_(hidden, torch.finfo(dtype).min)[None, None]

    def _find_visible(self, region: Region) -> Tensor:
        """Return which packed keys are at distances that a region has, (queries, keys)."""
        distance = self.key_positions - self.row.position_ids[0][:, None]
        visible = torch.zeros_like(distance, dtype=torch.bool)
        for span in region.spans:
            visible |= (distance >= span.low) & (distance < span.high)
        return visible

    def plan(self, layer: Layer, call: LayerCall) -> Plan:
        """Divide the requests among the model's own attention and calls under a layer's recipe."""
        plain_allowed = call.sink_logits is None and layer.eager_attention is None
        shapes = call.query.shape, call.key.shape, call.value.shape
        key = (id(layer.recipe), layer.native_mask, layer.backend, plain_allowed, call.query.dtype, shapes)
        plan = self.plans.get(key)
        if plan is None:
            plan = self.plans[key] = self._plan(layer, call, plain_allowed)
        return plan

    def _plan(self, layer: Layer, call: LayerCall, plain_allowed: bool) -> Plan:
        _, keys, dropped = self.requests
        idle = [plain_allowed and layer.idle(length, gone > 0) for length, gone in zip(keys, dropped, strict=True)]
        mask = self.get_mask(layer.native_mask.visible, call.query.dtype) if any(idle) else None
        active = [number for number, is_idle in enumerate(idle) if not is_idle]
        if not active:
            return Plan(idle, mask, None, [])
        together = layer.recipe.retrieve is None
        batches, rest = self._pack(layer, call, active) if together else ([], active)
        groups = self._group(rest, padded=together)
        batches += [self._take_alone(numbers[0]) for numbers in groups if len(numbers) == 1]
        rows = [numbers for numbers in groups if len(numbers) > 1]
        if not rows:
            return Plan(idle, mask, None, batches)
        parts = [self.slots] if batches or any(idle) else []
        first = self.total_keys if parts else 0
        batches = [batch._replace(keys=batch.keys or slice(self.total_keys)) for batch in batches]
        for numbers in rows:
            width = max(keys[number] for number in numbers)
            batches.append(self._make_rows(numbers, width, first))
            parts.append(self._index_rows(numbers, width))
            first += len(numbers) * width
        if len(parts) == 1:
            return Plan(idle, mask, parts[0], [batches[0]._replace(keys=None)])
        return Plan(idle, mask, torch.cat(parts), batches)

    def _pack(self, layer: Layer, call: LayerCall, active: list[int]) -> tuple[list[Batch], list[int]]:
        """Return calls over the packed row, of decoding requests and of prompts, and the requests that they leave."""
        queries = self.requests.queries
        few = sum(queries[number] for number in active if queries[number] > 1) <= MAX_MASKED_QUERIES
        batches, rest = [], active
        for by_row in (True, False):
            numbers = [number for number in rest if (few and by_row) or (queries[number] == 1) == by_row]
            batch = self._pack_some(layer, call, numbers, by_row) if len(numbers) > 1 else None
            if batch is not None:
                batches.append(batch)
                rest = [number for number in rest if number not in numbers]
        return batches, rest

    def _pack_some(self, layer: Layer, call: LayerCall, numbers: list[int], by_row: bool) -> Batch | None:
        """Return one call of some requests over the packed row; None where kernels would read more than they see."""
        if by_row and not can_run_triton(call.query):
            return None
        index = self._index_queries(numbers)
        sequence, position = self.query_requests, self.row.position_ids[0]
        if index is not None:
            sequence, position = sequence[index], position[index]
        # keys of prompts are rotated beforehand, and so no others are taken
        keys, packed = None if by_row else self._index_keys(numbers), self.packed
        if keys is not None:
            packed = PackedKeys(packed.bounds - keys.start, packed.sequence[keys])
        layout = PackedLayout(packed, sequence, position, by_row)
        built = _build_call(layer, call, layout)
        backend = choose_backend(built, layer.backend)
        # any other would hide the keys of other requests behind a mask, for work that grows with their number
        if backend not in ((DECODE, BAND) if can_run_triton(call.query) else (SDPA,)):
            return None
        prepared = _prepare(layer, call, layout, backend)
        return Batch(index, keys, layout.batch, by_row, layout, prepared)

    def _index_queries(self, numbers: list[int]) -> slice | Tensor | None:
        """Return where the queries of some requests, in their order, are in the packed row; None for all of it."""
        if len(numbers) == len(self.requests.queries):
            return None
        spans = [slice(self.first_query[n], self.first_query[n] + self.requests.queries[n]) for n in numbers]
        if numbers[-1] - numbers[0] == len(numbers) - 1:
            return slice(spans[0].start, spans[-1].stop)
        return self._to_device([query for span in spans for query in range(span.start, span.stop)])

    def _index_keys(self, numbers: list[int]) -> slice | None:
        """Return the packed keys from the first of some requests, in their order, to the last; None for all of them."""
        keys = slice(self.first_key[numbers[0]], self.first_key[numbers[-1]] + self.requests.keys[numbers[-1]])
        return None if keys == slice(0, self.total_keys) else keys

    def _take_alone(self, number: int) -> Batch:
        """Return the call of one request."""
        layout = self._make_layout([number], self.requests.queries[number], self.requests.keys[number])
        return Batch(self._index_queries([number]), self._index_keys([number]), 1, False, layout)

    def _group(self, active: list[int], padded: bool) -> list[list[int]]:
        """Divide requests into those of equal shape; with `padded`, single queries over different numbers of keys."""
        queries, keys, dropped = self.requests
        groups: dict[Hashable, list[int]] = {}
        width = 0
        for number in sorted(active, key=lambda number: (-keys[number], number)):
            shape: Hashable = (queries[number], keys[number], dropped[number])
            if padded and queries[number] == 1:
                if width > MAX_PADDING * keys[number] or not width:
                    width = keys[number]
                shape = width
            groups.setdefault(shape, []).append(number)
        return [sorted(numbers) for numbers in groups.values()]

    def _make_rows(self, numbers: list[int], width: int, first: int) -> Batch:
        """Return the call of some requests as rows of so many keys, the first of them at slot `first`."""
        queries = self._index_queries(numbers)
        layout = self._make_layout(numbers, self.requests.queries[numbers[0]], width)
        return Batch(queries, slice(first, first + len(numbers) * width), len(numbers), False, layout)

    def _make_layout(self, numbers: list[int], count: int, width: int) -> Layout:
        """Make the layout of a call whose rows are padded on the left."""
        size = len(numbers), count, width, self.device
        origins = [width - self.requests.keys[number] - self.requests.dropped[number] for number in numbers]
        if not any(origins) and all(self.requests.keys[number] == width for number in numbers):
            return Layout(*size)
        origin = torch.tensor(origins)[:, None].expand(-1, count)
        own_slot = torch.arange(width - count, width).expand_as(origin)
        frames = torch.stack((origin, torch.full_like(origin, width), own_slot)).to(self.device)  # one copy
        layout = Layout(*size, frames=(frames[0], frames[1], frames[2]))
        layout.offset = width - count  # in all rows, so that a window is a band of slots
        layout.harmless_padding = True  # a key of the same request
        return layout

    def _index_rows(self, numbers: list[int], width: int) -> Tensor:
        """Return the packed keys of some requests, (requests · width,): padding is the first key of its request."""
        lengths = [self.requests.keys[number] for number in numbers]
        if min(lengths) == width and len(numbers) == len(self.requests.keys):
            return self.slots
        ends = [self.first_key[number] + length - width for number, length in zip(numbers, lengths, strict=True)]
        bounds = self._to_device([ends, [self.first_key[number] for number in numbers]])[..., None]
        return torch.maximum(bounds[0] + torch.arange(width, device=self.device), bounds[1]).flatten()


def _build_call(layer: Layer, call: LayerCall, layout: PackedLayout) -> AttentionCall:
    """Build a layer's call of this layout, with tensors that stand for those of its sizes."""
    recipe, options = layer.get_attention_arguments(layout, call.scaling, rotated=layer.rotated_recipe is not None)
    rows = layout.batch, -1
    query = call.query[:, :, :1].expand(*rows, layout.queries, -1)
    key, value = (x[:, :, :1].expand(*rows, layout.keys, -1) for x in (call.key, call.value))
    return build_call(Inputs(query, key, value, **options), recipe)


def _prepare(layer: Layer, call: LayerCall, layout: PackedLayout, backend: Backend) -> PreparedCall | None:
    """Return the call for layers to repeat; None where each has more to do than to run a backend that reads no padding.

    That is where laws are learned, or depend on entropy, where autocast or gradients are on, and in large calls.
    """
    if layer.temperature is not None or call.sink_logits is not None or torch.is_grad_enabled():
        return None
    if torch.is_autocast_enabled(call.query.device.type) or backend.reads_padding:
        return None
    built = _build_call(layer, call, layout)  # again: what is cached has what layers share
    laws = any(branch.entropy_law is not None for branch in built.branches)
    if built.shared is None or laws or built.q.numel() > MAX_BRANCHED_Q_ELEMENTS:
        return None
    return PreparedCall(built, backend, call.scaling)
