"""Attention over transformers' paged cache, where the requests of a step are one packed row (continuous batching).

A step is one forward pass: new tokens of many requests side by side, and pages with the keys of each, rotated as in the
plain model wherever a recipe keeps its frequencies. Requests within the length at which a recipe is idle take the plain
engine's own attention, bit for bit and operation for operation; the others are gathered into few calls of
`isentrope.attention`, each with a layout that all layers of the step share.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from inspect import signature
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from isentrope.core.layout import Layout
from isentrope.core.region import CAUSAL, Region
from isentrope.hf.layer import Layer, LayerCall
from isentrope.hf.layout_cache import LayoutCache
from isentrope.hf.names import PAGED_STEP

MAX_PADDING = 2  # rows of one call have at least 1 / MAX_PADDING of the keys of its longest row
FREE_PADDING = {"cuda": 1 << 15}  # keys of padding in a call that cost less than another call
MASK_ALIGNMENT = 8  # SDPA copies masks whose rows begin elsewhere, in every layer
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
    whole: whether these are all requests, in their order.
    """

    queries: slice | Tensor
    keys: slice
    rows: int
    layout: Layout
    whole: bool


class Plan(NamedTuple):
    """What a step does in layers of one recipe.

    idle: which requests take the model's own attention.
    mask: of that attention, None where no request takes it.
    gathered: which of the packed keys to gather, those of `batches` after the packed row itself where that is needed;
        None where the packed row is all that is needed.
    batches: calls under the recipe.
    """

    idle: list[bool]
    mask: Tensor | None
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
        return self.cached("key positions", self._compute_key_positions)

    def _compute_key_positions(self) -> Tensor:
        shifts = [dropped - first for dropped, first in zip(self.requests.dropped, self.first_key, strict=True)]
        return (self.slots + self._to_device(shifts)[self.key_requests])[None]

    def find_keys(self, chosen: list[bool]) -> tuple[Tensor, Tensor]:
        """Return where the keys of some requests are in the packed row, and their positions, (1, keys)."""
        index = self._to_device(chosen)[self.key_requests].nonzero()[:, 0]
        return index, self.key_positions[:, index]

    @property
    def slots(self) -> Tensor:
        """Numbers of the packed keys, (keys,)."""
        return self.cached("slots", lambda: torch.arange(self.total_keys, device=self.device))

    @property
    def key_requests(self) -> Tensor:
        """The request of each packed key, (keys,)."""
        return self.cached("key requests", lambda: self._number(self.requests.keys))

    def _number(self, lengths: list[int]) -> Tensor:
        """Return the number of each request as many times as it has queries, or keys."""
        numbers = torch.arange(len(lengths), device=self.device)
        if sum(lengths) == len(lengths):
            return numbers  # one each: every request has some
        return numbers.repeat_interleave(self._to_device(lengths), output_size=sum(lengths))

    def _to_device(self, values: Any) -> Tensor:
        return torch.tensor(values, device=self.device)

    def get_mask(self, region: Region, dtype: torch.dtype) -> Tensor:
        """Return the additive mask of the packed row, as the plain engine makes it: requests do not see each other."""
        return self.cached(("mask", region, dtype), lambda: self._make_mask(region, dtype))

    def _make_mask(self, region: Region, dtype: torch.dtype) -> Tensor:
        queries = self._number(self.requests.queries)
        hidden = queries[:, None] != self.key_requests
        if region != CAUSAL or len(self.requests.queries) < self.total_queries:
            hidden |= ~self._find_visible(region)  # otherwise each query is the last token of its request
        width = -(-self.total_keys // MASK_ALIGNMENT) * MASK_ALIGNMENT
        mask = torch.zeros(self.total_queries, width, dtype=dtype, device=self.device)[:, : self.total_keys]
        return mask.masked_fill_(hidden, torch.finfo(dtype).min)[None, None]

    def _find_visible(self, region: Region) -> Tensor:
        """Return which packed keys are at distances that a region has, (queries, keys)."""
        distance = self.key_positions - self.position_ids[0][:, None]
        visible = torch.zeros_like(distance, dtype=torch.bool)
        for span in region.spans:
            visible |= (distance >= span.low) & (distance < span.high)
        return visible

    def plan(self, layer: Layer, call: LayerCall) -> Plan:
        """Divide the requests among the model's own attention and calls under a layer's recipe."""
        plain_allowed = call.sink_logits is None and layer.eager_attention is None
        key = (id(layer.recipe), layer.native_mask, plain_allowed, call.query.dtype)
        plan = self.plans.get(key)
        if plan is None:
            plan = self.plans[key] = self._plan(layer, plain_allowed, call.query.dtype)
        return plan

    def _plan(self, layer: Layer, plain_allowed: bool, dtype: torch.dtype) -> Plan:
        _, keys, dropped = self.requests
        idle = [plain_allowed and layer.idle(length, gone > 0) for length, gone in zip(keys, dropped, strict=True)]
        mask = self.get_mask(layer.native_mask.visible, dtype) if any(idle) else None
        active = [number for number, is_idle in enumerate(idle) if not is_idle]
        if not active:
            return Plan(idle, mask, None, [])
        first = self.total_keys if any(idle) else 0
        parts = [self.slots] if any(idle) else []
        batches = []
        for numbers in self._group(active, padded=layer.recipe.retrieve is None):
            width = max(keys[number] for number in numbers)
            batches.append(self._make_batch(numbers, width, first))
            parts.append(self._index_keys(numbers, width))
            first += len(numbers) * width
        return Plan(idle, mask, torch.cat(parts) if len(parts) > 1 else parts[0], batches)

    def _group(self, active: list[int], padded: bool) -> list[list[int]]:
        """Divide requests into those of equal shape; with `padded`, single queries over different numbers of keys."""
        queries, keys, dropped = self.requests
        groups: dict[Hashable, list[int]] = {}
        width = padding = 0
        for number in sorted(active, key=lambda number: (-keys[number], number)):
            shape: Hashable = (queries[number], keys[number], dropped[number])
            if padded and queries[number] == 1:
                padding += width - keys[number]
                if not width or (
                    width > MAX_PADDING * keys[number] and padding > FREE_PADDING.get(self.device.type, 0)
                ):
                    width, padding = keys[number], 0
                shape = width
            groups.setdefault(shape, []).append(number)
        return [sorted(numbers) for numbers in groups.values()]

    def _make_batch(self, numbers: list[int], width: int, first: int) -> Batch:
        starts = [self.first_query[number] for number in numbers]
        count = self.requests.queries[numbers[0]]
        queries: slice | Tensor = slice(starts[0], starts[-1] + count)
        if starts[-1] + count - starts[0] > len(numbers) * count:
            offsets = torch.arange(count, device=self.device)
            queries = (self._to_device(starts)[:, None] + offsets).flatten()
        keys = slice(first, first + len(numbers) * width)
        whole = len(numbers) == len(self.requests.keys)
        return Batch(queries, keys, len(numbers), self._make_layout(numbers, count, width), whole)

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

    def _index_keys(self, numbers: list[int], width: int) -> Tensor:
        """Return the packed keys of some requests, (requests · width,): padding is the first key of its request."""
        lengths = [self.requests.keys[number] for number in numbers]
        if min(lengths) == width and len(numbers) == len(self.requests.keys):
            return self.slots
        ends = [self.first_key[number] + length - width for number, length in zip(numbers, lengths, strict=True)]
        bounds = self._to_device([ends, [self.first_key[number] for number in numbers]])[..., None]
        return torch.maximum(bounds[0] + torch.arange(width, device=self.device), bounds[1]).flatten()


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
        pages = self._get_pages(call.module.layer_idx)  # type: ignore[arg-type]
        plan = pages.plan(layer, call)
        key, value = self._update(call, pages, plan)
        if not plan.batches:
            return _run_plain(layer, call, key, value, pages, plan)
        if plan.batches[0].whole:
            return self._run_batch(layer, call, plan.batches[0], key, value).flatten(0, 1)[None]
        if plan.mask is not None:
            row = slice(pages.total_keys)
            out = _run_plain(layer, call, key[:, :, row], value[:, :, row], pages, plan)
        else:
            out = call.query.new_empty(1, pages.total_queries, call.query.shape[1], value.shape[-1])
        for batch in plan.batches:
            out[0, batch.queries] = self._run_batch(layer, call, batch, key, value).flatten(0, 1)
        return out

    def _get_pages(self, layer_index: int) -> Pages:
        group, layer_type = _find_group(self.cache, layer_index)
        if group not in self.pages:
            self.pages[group] = Pages(self, group, layer_type)
        return self.pages[group]

    def _run_batch(self, layer: Layer, call: LayerCall, batch: Batch, key: Tensor, value: Tensor) -> Tensor:
        """Attend under the recipe in some requests, and return (requests, queries, heads, d)."""
        parts = [x[0, :, part] for x, part in ((call.query, batch.queries), (key, batch.keys), (value, batch.keys))]
        query, key, value = (x.unflatten(1, (batch.rows, -1)).transpose(0, 1) for x in parts)
        rows = call._replace(query=query, key=key, value=value, mask=None)
        return layer.attend(rows, batch.layout, rotated=layer.rotated_recipe is not None)

    def _update(self, call: LayerCall, pages: Pages, plan: Plan) -> tuple[Tensor, Tensor]:
        """Write new keys and values to the cache and gather those of a plan, (1, heads, keys, d) each."""
        # layers with a window read before they write, and mark new keys in the order of the packed row
        if plan.gathered is None:
            return _update_cache(self.cache, call, self.arguments)
        if len(pages.read_index) and not pages.sliding:
            arguments = pages.cached(("arguments", id(plan)), lambda: self._make_arguments(pages, plan.gathered))
            return _update_cache(self.cache, call, arguments)
        key, value = _update_cache(self.cache, call, self.arguments)
        return _gather(key, plan.gathered), _gather(value, plan.gathered)

    def _make_arguments(self, pages: Pages, gathered: Tensor | None) -> dict[str, Any]:
        """Return the arguments of the cache that read some of the packed keys."""
        indices = list(self.arguments["read_index"])
        indices[pages.group] = pages.read_index[gathered]
        return self.arguments | {"read_index": indices}


def _gather(x: Tensor, index: Tensor) -> Tensor:
    """Return some of the keys, or values, in a tensor (1, heads, keys, d); in memory keys come first, as in pages."""
    return x[0].transpose(0, 1).index_select(0, index).transpose(0, 1)[None]


def _run_plain(layer: Layer, call: LayerCall, key: Tensor, value: Tensor, pages: Pages, plan: Plan) -> Tensor:
    """Run the model's own attention over the packed row, as the plain engine does: its rotation and SDPA.

    In the same row, for outputs that are the plain engine's bit for bit. Requests under the recipe are in it too, and
    their outputs are not used.
    """
    query = call.query
    if layer.rope is not None and layer.rotated_recipe is None:
        query = layer.rope.rotate(query, pages.position_ids, pages)
        if plan.batches and key.device.type == "cpu":  # elsewhere one launch for all keys is faster
            idle, positions = pages.cached(("idle", id(plan)), lambda: pages.find_keys(plan.idle))
            key = key.index_copy(2, idle, layer.rope.rotate(key[:, :, idle], positions, pages))
        else:
            key = layer.rope.rotate(key, pages.key_positions, pages)
    return sdpa_attention_forward(call.module, query, key, value, plan.mask, scaling=call.scaling, is_causal=False)[0]


def _find_group(cache: Any, layer_index: int) -> tuple[int, str]:
    """Return the number and the type of the group of layers whose pages a layer shares."""
    if hasattr(cache, "layer_to_allocator"):
        allocator = cache.layer_to_allocator[layer_index]
        return allocator.index, allocator.layer_type
    windowed = cache.sliding_windows[layer_index] > 1  # transformers before 5.20
    return cache.layer_index_to_group_indices[layer_index][0], SLIDING if windowed else "full_attention"


def _update_cache(cache: Any, call: LayerCall, arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return what the cache reads for a call after it has written to it, (1, heads, keys, d) each."""
    states = {"key_states": call.key, "value_states": call.value, "layer_idx": call.module.layer_idx}
    if UPDATES_ARGUMENTS:
        return cache.update(**states, kwargs=arguments.copy())  # which it changes
    names = "read_index", "write_index"  # transformers before 5.20
    key, value = cache.update(**states, **{name: arguments[name] for name in names})
    return key.transpose(0, 1)[None], value.transpose(0, 1)[None]


def begin_step(layouts: LayoutCache, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A hook on an extended model: describe a pass over a paged cache to its layers."""
    paged = isinstance(kwargs.get("cache"), PagedAttentionCache)
    layouts.set_paged(paged)
    if not paged:
        return None
    # transformers takes a mask of four dimensions as it is, and makes no other
    mask = torch.empty(1, 1, 0, 0, device=kwargs["position_ids"].device)
    return args, kwargs | {PAGED_STEP: PagedStep(kwargs), "attention_mask": mask}
