"""The pages of one kind of layer in a step of continuous batching: whose keys are where, and who attends with whom."""

from __future__ import annotations

from collections.abc import Hashable
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from isentrope.backends.sdpa import MAX_MASKED_QUERIES
from isentrope.core.compile import can_run_triton
from isentrope.core.layout import Layout
from isentrope.core.packed_layout import PackedKeys, PackedLayout
from isentrope.dispatch import BAND, DECODE, SDPA, choose_backend
from isentrope.hf.layer import Layer, LayerCall
from isentrope.hf.packed_row import Batch, PackedRow, Plan, RowPages, build_layer_call, prepare_call

MAX_PADDING = 2  # rows of one call have at least 1 / MAX_PADDING of the keys of its longest row


class Requests(NamedTuple):
    """The requests of a step, as the pages of one kind of layer hold them.

    queries: new tokens of each.
    keys: keys of each that are read, the new ones included.
    dropped: keys of each that were dropped before those, where layers have a window.
    padded: whether the last is no request, but what the row is padded with.
    """

    queries: list[int]
    keys: list[int]
    dropped: list[int]
    padded: bool = False

    def pad(self, queries: int, keys: int) -> Requests:
        """Return them with what a row of so many queries and keys is padded with."""
        spare_queries, spare_keys = queries - sum(self.queries), keys - sum(self.keys)
        return Requests([*self.queries, spare_queries], [*self.keys, spare_keys], [*self.dropped, 0], True)


class Pages(RowPages):
    """The pages of one kind of layer in a step: where keys of each request are, and their positions."""

    def __init__(self, row: PackedRow, requests: Requests) -> None:
        super().__init__(row, sum(requests.queries), sum(requests.keys))
        self.requests = requests
        self.first_query, self.first_key = ([0, *accumulate(x)][:-1] for x in requests[:2])
        self.decodes = len(requests.queries) == self.total_queries

    def find_keys(self, chosen: list[bool]) -> tuple[Tensor, Tensor]:
        """Return where the keys of some requests are in the packed row, and their positions, (1, keys)."""
        index = self._to_device(chosen)[self.packed.sequence].nonzero()[:, 0]
        return index, self.key_positions[:, index]

    def _to_device(self, values: Any) -> Tensor:
        return torch.tensor(values, device=self.device)

    def _plan(self, layer: Layer, call: LayerCall, plain_allowed: bool) -> Plan:
        _, keys, dropped, padded = self.requests
        idle = [plain_allowed and layer.idle(length, gone > 0) for length, gone in zip(keys, dropped, strict=True)]
        if padded:
            idle.pop()
        mask = self.get_mask(layer.native_mask.visible, call.query.dtype) if any(idle) else None
        active = [number for number, is_idle in enumerate(idle) if not is_idle]
        if padded:
            idle.append(mask is not None)
        if not active:
            return Plan(idle, mask, None, [])
        together = layer.recipe.retrieve is None
        batches, rest = self._pack(layer, call, active) if together else ([], active)
        groups = self._group(rest, padded=together)
        batches += [self._take_alone(numbers[0]) for numbers in groups if len(numbers) == 1]
        rows = [numbers for numbers in groups if len(numbers) > 1]
        if not rows:
            return Plan(idle, mask, None, batches)
        parts = [self.slots] if batches or mask is not None else []
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
        built = build_layer_call(layer, call, layout)
        backend = choose_backend(built, layer.backend)
        # any other would hide the keys of other requests behind a mask, for work that grows with their number
        if backend not in ((DECODE, BAND) if can_run_triton(call.query) else (SDPA,)):
            return None
        prepared = prepare_call(layer, call, layout, backend)
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
        queries, keys, dropped, _ = self.requests
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
