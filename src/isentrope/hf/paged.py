"""Attention over transformers' paged cache, where the requests of a step are one packed row (continuous batching).

A step is one forward pass: new tokens of many requests side by side, and pages with the keys of each, rotated as in the
plain model wherever a recipe keeps its frequencies. Requests within the length at which a recipe is idle take the plain
engine's own attention, bit for bit and operation for operation; the others take two calls of `isentrope.attention` in
each layer, however many they are: one for requests that decode and one for prompts. Both read the packed row, under
layouts that all layers of the step share. Where no kernel takes such a row, requests of similar sizes are a call.
"""

from __future__ import annotations

from inspect import signature
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from isentrope.hf.captured_pages import CapturedPages, DecodingStep
from isentrope.hf.layer import Layer, LayerCall
from isentrope.hf.layout_cache import LayoutCache
from isentrope.hf.names import PAGED_STEP
from isentrope.hf.packed_row import Batch, PackedRow, Plan, RowPages
from isentrope.hf.pages import Pages, Requests

SLIDING = "sliding_attention"
# since 5.20 transformers passes a cache all arguments of an attention function
UPDATES_ARGUMENTS = "kwargs" in signature(PagedAttentionCache.update).parameters


class PagedStep:
    """One forward pass over a paged cache, shared by its layers.

    Args:
        arguments: what transformers passes to the model: cache, indices and cumulative lengths.
        captured: the step, where it may be captured as a graph, so that no length may be read here.
    """

    def __init__(self, arguments: dict[str, Any], captured: DecodingStep | None = None) -> None:
        self.arguments, self.captured = arguments, captured
        self.cache: PagedAttentionCache = arguments["cache"]
        query_ends, lengths = arguments["cu_seq_lens_q"], arguments["cu_seq_lens_k"]
        key_ends: dict[str, Tensor] = lengths if isinstance(lengths, dict) else {"": lengths}
        position_ids = arguments["position_ids"]
        last = position_ids[0][query_ends[1:].long() - 1]
        self.rows = {kind: PackedRow(position_ids, query_ends, each, last) for kind, each in key_ends.items()}
        self.requests = {} if captured is not None else _read_requests(last, query_ends, key_ends)
        self.pages: dict[int, RowPages] = {}

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
        if plan.batches[0].queries is None:
            return self._run_batch(layer, call, plan.batches[0], key, value)
        if plan.mask is not None:
            row = slice(pages.total_keys)
            packed = (key, value) if plan.gathered is None else (key[:, :, row], value[:, :, row])
            out = _run_plain(layer, call, *packed, pages, plan)
        else:
            out = call.query.new_zeros(1, pages.total_queries, call.query.shape[1], value.shape[-1])
        for batch in plan.batches:
            part = self._run_batch(layer, call, batch, key, value)
            if plan.own is not None:
                part = torch.where(plan.own, out[:, batch.queries], part)
            if isinstance(batch.queries, Tensor):
                out.index_copy_(1, batch.queries, part)
            else:
                out[:, batch.queries] = part
        return out

    def _get_pages(self, layer_index: int) -> RowPages:
        group, layer_type = _find_group(self.cache, layer_index)
        if group not in self.pages:
            kind = layer_type if layer_type in self.rows else next(iter(self.rows))
            self.pages[group] = self._make_pages(group, kind)
        return self.pages[group]

    def _make_pages(self, group: int, kind: str) -> RowPages:
        row = self.rows[kind]
        queries = row.position_ids.shape[1]
        keys = len(self.arguments["read_index"][group]) or queries  # nothing is read where all keys are new
        if self.captured is not None:
            return CapturedPages(row.pad(len(row.last_positions), queries, keys), (queries, keys), self.captured)
        requests = self.requests[kind]
        count = len(requests.queries)
        sizes = count, sum(requests.queries), sum(requests.keys)
        if sizes == (len(row.last_positions), queries, keys):
            return Pages(row, requests)
        return Pages(row.pad(count, queries, keys), requests.pad(queries, keys))

    def _run_batch(self, layer: Layer, call: LayerCall, batch: Batch, key: Tensor, value: Tensor) -> Tensor:
        """Attend under the recipe in some requests, and return (1, queries, heads, d)."""
        query = call.query
        if isinstance(batch.queries, Tensor):
            query = query.index_select(2, batch.queries)
        elif batch.queries is not None:
            query = query[:, :, batch.queries]
        if batch.keys is not None:
            key, value = key[:, :, batch.keys], value[:, :, batch.keys]
        if batch.shared:
            query = query.transpose(0, 2)
            key, value = (x.expand(batch.rows, -1, -1, -1) for x in (key, value))
        elif batch.rows > 1:
            query, key, value = (x[0].unflatten(1, (batch.rows, -1)).transpose(0, 1) for x in (query, key, value))
        if batch.prepared is not None and batch.prepared.scaling == call.scaling:
            out = batch.prepared.run(query, key, value)
        else:
            rows = call._replace(query=query, key=key, value=value, mask=None)
            out = layer.attend(rows, batch.layout, rotated=layer.rotated_recipe is not None)
        if batch.shared:
            return out.transpose(0, 1)
        return out.flatten(0, 1)[None] if batch.rows > 1 else out

    def _update(self, call: LayerCall, pages: RowPages, plan: Plan) -> tuple[Tensor, Tensor]:
        """Write new keys and values to the cache and gather those of a plan, (1, heads, keys, d) each."""
        # layers with a window read before they write, and mark new keys in the order of the packed row
        if plan.gathered is None:
            return _update_cache(self.cache, call, self.arguments)
        group, layer_type = _find_group(self.cache, call.module.layer_idx)  # type: ignore[arg-type]
        if len(self.arguments["read_index"][group]) and layer_type != SLIDING:
            arguments = pages.cached(("arguments", id(plan)), lambda: self._make_arguments(group, plan.gathered))
            return _update_cache(self.cache, call, arguments)
        key, value = _update_cache(self.cache, call, self.arguments)
        return _gather(key, plan.gathered), _gather(value, plan.gathered)

    def _make_arguments(self, group: int, gathered: Tensor | None) -> dict[str, Any]:
        """Return the arguments of the cache that read some of the packed keys."""
        indices = list(self.arguments["read_index"])
        indices[group] = indices[group][gathered]
        return self.arguments | {"read_index": indices}


def _read_requests(last: Tensor, query_ends: Tensor, key_ends: dict[str, Tensor]) -> dict[str, Requests]:
    """Return the requests of a step, by the kind of layer; a row that is padded has others at its end, without tokens.

    The only copy from the device in a step, before there is anything to wait for.
    """
    numbers = torch.cat((last, query_ends, *key_ends.values())).tolist()
    count = len(last)
    ends = [numbers[n : n + count + 1] for n in range(count, len(numbers), count + 1)]
    queries, *keys = ([b - a for a, b in pairwise(each)] for each in ends)
    count -= queries.count(0)
    return {
        kind: Requests(queries[:count], each[:count], [p + 1 - n for p, n in zip(numbers[:count], each, strict=False)])
        for kind, each in zip(key_ends, keys, strict=True)
    }


def _gather(x: Tensor, index: Tensor) -> Tensor:
    """Return some of the keys, or values, in a tensor (1, heads, keys, d); in memory keys come first, as in pages."""
    return x[0].transpose(0, 1).index_select(0, index).transpose(0, 1)[None]


def _run_plain(layer: Layer, call: LayerCall, key: Tensor, value: Tensor, pages: RowPages, plan: Plan) -> Tensor:
    """Run the model's own attention over the packed row, as the plain engine does: its rotation and SDPA.

    In the same row, for outputs that are the plain engine's bit for bit. Requests under the recipe are in it too, and
    their outputs are not used.
    """
    query = call.query
    if layer.rolled:  # as the model has them
        query, key = query.roll(-layer.rolled, -1), key.roll(-layer.rolled, -1)
    if layer.rope is not None and layer.rotated_recipe is None:
        query = layer.rope.rotate(query, pages.row.position_ids, pages)
        # on a GPU one launch for all keys is faster
        if plan.batches and isinstance(pages, Pages) and key.device.type == "cpu":
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
    return args, kwargs | {PAGED_STEP: PagedStep(kwargs, kwargs.get(PAGED_STEP)), "attention_mask": mask}
