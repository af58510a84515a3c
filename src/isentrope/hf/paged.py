"""Attention over transformers' paged cache, where the requests of a step are one packed row (continuous batching).

A step is one forward pass: new tokens of many requests side by side, and pages with the keys of each. Requests within
the length at which a recipe is idle take the plain engine's own attention, bit for bit; the others are gathered into
few calls of `isentrope.attention`, each with a layout that all layers of the step share.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from inspect import signature
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from isentrope.core.layout import Layout, Rows
from isentrope.core.region import Region
from isentrope.hf.layer import Layer, LayerCall
from isentrope.hf.names import PAGED_STEP

MAX_PADDING = 2  # rows of one call have at least 1 / MAX_PADDING of the keys of its longest row
SLIDING = "sliding_attention"
# since 5.20 transformers passes a cache all arguments of an attention function
UPDATES_ARGUMENTS = "kwargs" in signature(PagedAttentionCache.update).parameters
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


class Batch(NamedTuple):
    """Requests whose attention is one call.

    queries: where their queries are in the packed row.
    keys: where their keys are among those gathered for the layer.
    rows: number of requests.
    layout: of the call.
    """

    queries: slice | Tensor
    keys: slice
    rows: int
    layout: Layout


class Plan(NamedTuple):
    """What a step does in layers of one recipe.

    plain: where the keys of requests that take the model's own attention are in the packed row; None where there are
        no such requests.
    gathered: which of the packed keys to gather, those of `batches` after the packed row itself where that is needed;
        None where the packed row is all that is needed.
    batches: calls under the recipe.
    """

    plain: Tensor | None
    gathered: Tensor | None
    batches: list[Batch]


class Pages:
    """The pages of one kind of layer in a step: where keys of each request are, and their positions."""

    def __init__(self, step: PagedStep, group: int, layer_type: str) -> None:
        arguments, self.group, self.sliding = step.arguments, group, layer_type == SLIDING
        lengths = arguments["cu_seq_lens_k"]
        lengths = lengths[layer_type] if isinstance(lengths, dict) else lengths
        ends = arguments["cu_seq_lens_q"]
        last = step.position_ids[0][ends[1:].long() - 1]
        count = len(last)
        # one copy from the device
        numbers = torch.cat((ends, lengths, last)).tolist()
        query_ends, key_ends, last_position = numbers[: count + 1], numbers[count + 1 : -count], numbers[-count:]
        queries, keys = ([b - a for a, b in pairwise(ends)] for ends in (query_ends, key_ends))
        dropped = [position + 1 - length for position, length in zip(last_position, keys, strict=True)]
        self.requests = Requests(queries, keys, dropped)
        self.first_query, self.first_key = query_ends[:-1], key_ends[:-1]
        self.total_queries, self.total_keys = query_ends[-1], key_ends[-1]
        self.device = step.position_ids.device
        self.position_ids = step.position_ids
        self.read_index = arguments["read_index"][group]
        self.values: dict[Hashable, Any] = {}
        self.holder = Layout(1, 1, 1, self.device)  # of the angles of packed queries and keys

    def cached(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return `make()`, computed once for the layers of the step."""
        if key not in self.values:
            self.values[key] = make()
        value: T = self.values[key]
        return value

    @property
    def key_positions(self) -> Tensor:
        """Positions of the packed keys in their requests, (1, keys)."""
        return self.cached("key positions", lambda: (self._slots() + self._spread(self._shifts(), "keys"))[None])

    def _slots(self) -> Tensor:
        return torch.arange(self.total_keys, device=self.device)

    def _shifts(self) -> list[int]:
        return [dropped - first for dropped, first in zip(self.requests.dropped, self.first_key, strict=True)]

    def _spread(self, values: Iterable[int], over: str) -> Tensor:
        """Return a value of each request for each of its queries, or keys."""
        lengths = getattr(self.requests, over)
        both = torch.tensor([list(values), lengths], device=self.device)
        return both[0].repeat_interleave(both[1], output_size=sum(lengths))

    def get_mask(self, region: Region, dtype: torch.dtype) -> Tensor:
        """Return the additive mask of the packed row, as the plain engine makes it: requests do not see each other."""
        return self.cached(("mask", region, dtype), lambda: self._make_mask(region, dtype))

    def _make_mask(self, region: Region, dtype: torch.dtype) -> Tensor:
        numbers = range(len(self.requests.keys))
        own = self._spread(numbers, "queries")[:, None] == self._spread(numbers, "keys")[None]
        distance = self.key_positions - self.position_ids[0][:, None]
        visible = torch.zeros_like(own)
        for span in region.spans:
            visible |= (distance >= span.low) & (distance < span.high)
        mask = torch.zeros(own.shape, dtype=dtype, device=self.device)
        return mask.masked_fill_(~(own & visible), torch.finfo(dtype).min)[None, None]

    def plan(self, layer: Layer, plain_allowed: bool) -> Plan:
        """Divide the requests among the model's own attention and calls under a layer's recipe."""
        return self.cached(("plan", id(layer.recipe), plain_allowed), lambda: self._plan(layer, plain_allowed))

    def _plan(self, layer: Layer, plain_allowed: bool) -> Plan:
        _, keys, dropped = self.requests
        idle = [plain_allowed and layer.idle(length, gone > 0) for length, gone in zip(keys, dropped, strict=True)]
        active = [number for number, is_idle in enumerate(idle) if not is_idle]
        groups = self._group(active, padded=layer.recipe.retrieve is None)
        if not active:
            return Plan(self._slots(), None, [])
        plain = self._spread(idle, "keys").bool().nonzero()[:, 0] if any(idle) else None
        first = self.total_keys if any(idle) else 0
        parts = [self._slots()] if any(idle) else []
        batches = []
        for numbers in groups:
            width = max(keys[number] for number in numbers)
            batches.append(self._make_batch(numbers, width, first))
            parts.append(self._index_keys(numbers, width))
            first += len(numbers) * width
        return Plan(plain, torch.cat(parts), batches)

    def _group(self, active: list[int], padded: bool) -> list[list[int]]:
        """Divide requests into those of equal shape; with `padded`, single queries over up to twice as many keys."""
        queries, keys, dropped = self.requests
        groups: dict[Hashable, list[int]] = {}
        width = 0
        for number in sorted(active, key=lambda number: (-keys[number], number)):
            shape: Hashable = (queries[number], keys[number], dropped[number])
            if padded and queries[number] == 1:
                width = width if width <= MAX_PADDING * keys[number] and width else keys[number]
                shape = width
            groups.setdefault(shape, []).append(number)
        return list(groups.values())

    def _make_batch(self, numbers: list[int], width: int, first: int) -> Batch:
        starts = [self.first_query[number] for number in numbers]
        count = self.requests.queries[numbers[0]]
        queries: slice | Tensor = slice(starts[0], starts[0] + count)
        if len(numbers) > 1:
            offsets = torch.arange(count, device=self.device)
            queries = (torch.tensor(starts, device=self.device)[:, None] + offsets).flatten()
        keys = slice(first, first + len(numbers) * width)
        return Batch(queries, keys, len(numbers), self._make_layout(numbers, count, width))

    def _make_layout(self, numbers: list[int], count: int, width: int) -> Layout:
        """Make the layout of a call whose rows are padded on the left."""
        keys = torch.tensor([self.requests.keys[number] for number in numbers])
        dropped = torch.tensor([self.requests.dropped[number] for number in numbers])
        size = len(numbers), count, width, self.device
        if bool(dropped.any()):
            origin = (width - keys - dropped)[:, None].expand(-1, count)
            slot = torch.arange(width - count, width).expand_as(origin)
            frames = origin.to(self.device), torch.full_like(origin, width).to(self.device), slot.to(self.device)
            return Layout(*size, frames=frames)
        if bool((keys == width).all()):
            return Layout(*size)
        return Layout(*size, Rows(keys.to(self.device), left_padded=True))

    def _index_keys(self, numbers: list[int], width: int) -> Tensor:
        """Return the packed keys of some requests, (requests · width,): padding is the first key of its request."""
        first = torch.tensor([self.first_key[number] for number in numbers], device=self.device)[:, None]
        length = torch.tensor([self.requests.keys[number] for number in numbers], device=self.device)[:, None]
        slots = torch.arange(width, device=self.device) - width + length
        return (first + slots.clamp_min(0)).flatten()


class PagedStep:
    """One forward pass over a paged cache, shared by its layers.

    Args:
        arguments: what transformers passes to the model: cache, indices and cumulative lengths.
    """

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments = arguments
        self.cache: PagedAttentionCache = arguments["cache"]
        self.position_ids: Tensor = arguments["position_ids"]
        self.pages: dict[int, Pages] = {}

    def attend(self, layer: Layer, call: LayerCall) -> Tensor:
        """Write the keys and values of a call to the cache, and attend to those of each request.

        Returns:
            The output (1, queries, heads, d).
        """
        index = call.module.layer_idx
        group, layer_type = _find_group(self.cache, index)  # type: ignore[arg-type]
        if group not in self.pages:
            self.pages[group] = Pages(self, group, layer_type)
        pages = self.pages[group]
        plan = pages.plan(layer, call.sink_logits is None and layer.eager_attention is None)
        key, value = self._update(call, pages, plan)
        if not plan.batches:
            return _run_plain(layer, call._replace(key=key, value=value), pages, plan)
        heads, size = call.query.shape[1], value.shape[-1]
        if plan.plain is not None:
            packed = call._replace(key=key[: pages.total_keys], value=value[: pages.total_keys])
            out = _run_plain(layer, packed, pages, plan)
        else:
            out = call.query.new_empty(1, pages.total_queries, heads, size)
        for batch in plan.batches:
            rows = [_view_rows(x[batch.keys], batch.rows) for x in (key, value)]
            query = call.query[0][:, batch.queries].unflatten(1, (batch.rows, -1)).transpose(0, 1)
            result = layer.attend(call._replace(query=query, key=rows[0], value=rows[1], mask=None), batch.layout)
            out[0, batch.queries] = result.flatten(0, 1)
        return out

    def _update(self, call: LayerCall, pages: Pages, plan: Plan) -> tuple[Tensor, Tensor]:
        """Write new keys and values to the cache and gather those of a plan, (keys, heads, d) each."""
        indices = self.arguments["read_index"]
        # layers with a window read before they write, and mark new keys in the order of the packed row
        direct = plan.gathered is not None and len(pages.read_index) > 0 and not pages.sliding
        if direct:
            indices = list(indices)
            indices[pages.group] = pages.cached(("read", id(plan)), lambda: pages.read_index[plan.gathered])
        key, value = _update_cache(self.cache, call, self.arguments | {"read_index": indices})
        if plan.gathered is None or direct:
            return key, value
        return key.index_select(0, plan.gathered), value.index_select(0, plan.gathered)


def _run_plain(layer: Layer, call: LayerCall, pages: Pages, plan: Plan) -> Tensor:
    """Run the model's own attention over the packed row, as the plain engine does: its rotation and SDPA.

    In the same row, for outputs that are the plain engine's bit for bit. Requests under the recipe are in it too: their
    keys are not rotated, and their outputs are not used.
    """
    query, key = call.query, call.key.transpose(0, 1)[None]
    if layer.rope is not None:
        query = layer.rope.rotate(query, pages.position_ids, pages.holder)
        if not plan.batches:
            key = layer.rope.rotate(key, pages.key_positions, pages.holder)
        else:
            idle = plan.plain
            assert idle is not None
            positions = pages.cached(("positions", id(plan)), lambda: pages.key_positions[:, idle])
            rotated = layer.rope.rotate(key[:, :, idle], positions, pages.holder)
            key = key.index_copy(2, idle, rotated)
    mask = pages.get_mask(layer.native_mask.visible, query.dtype)
    value = call.value.transpose(0, 1)[None]
    return sdpa_attention_forward(call.module, query, key, value, mask, scaling=call.scaling, is_causal=False)[0]


def _view_rows(x: Tensor, rows: int) -> Tensor:
    """Return gathered keys or values (rows · keys, heads, d) as (rows, heads, keys, d)."""
    return x.unflatten(0, (rows, -1)).transpose(1, 2)


def _find_group(cache: Any, layer_index: int) -> tuple[int, str]:
    """Return the number and the type of the group of layers whose pages a layer shares."""
    if hasattr(cache, "layer_to_allocator"):
        allocator = cache.layer_to_allocator[layer_index]
        return allocator.index, allocator.layer_type
    windowed = cache.sliding_windows[layer_index] > 1  # transformers before 5.20
    return cache.layer_index_to_group_indices[layer_index][0], SLIDING if windowed else "full_attention"


def _update_cache(cache: Any, call: LayerCall, arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return what the cache reads for a call after it has written to it, (keys, heads, d) each."""
    states = {"key_states": call.key, "value_states": call.value, "layer_idx": call.module.layer_idx}
    if UPDATES_ARGUMENTS:
        key, value = cache.update(**states, kwargs=arguments)
        return key[0].transpose(0, 1), value[0].transpose(0, 1)
    names = "read_index", "write_index"  # transformers before 5.20
    key, value = cache.update(**states, **{name: arguments[name] for name in names})
    return key, value


def begin_step(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A hook on an extended model: describe a pass over a paged cache to its layers."""
    if not isinstance(kwargs.get("cache"), PagedAttentionCache):
        return None
    # transformers takes a mask of four dimensions as it is, and makes no other
    mask = torch.empty(1, 1, 0, 0, device=kwargs["position_ids"].device)
    return args, kwargs | {PAGED_STEP: PagedStep(kwargs), "attention_mask": mask}
