"""The packed row of a step of continuous batching: whose keys are where, and calls that layers repeat."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from isentrope.backends.protocol import Backend
from isentrope.builder import Inputs, build_call
from isentrope.core.call import AttentionCall
from isentrope.core.layout import Layout
from isentrope.core.packed_layout import PackedKeys, PackedLayout
from isentrope.core.region import CAUSAL, Region
from isentrope.dispatch import MAX_BRANCHED_Q_ELEMENTS
from isentrope.hf.layer import Layer, LayerCall

MASK_ALIGNMENT = 8  # SDPA copies masks whose rows begin elsewhere, in every layer
T = TypeVar("T")


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

    def pad(self, count: int, queries: int, keys: int) -> PackedRow:
        """Return the row of the first `count` requests with one more, which has whatever is left of the row.

        The engine pads rows to a few sizes, and lengths of requests that are not there with zeros.
        """
        ends = slice(count + 1)
        query_ends, key_ends = (
            F.pad(x[ends], (0, 1), value=n) for x, n in ((self.query_ends, queries), (self.key_ends, keys))
        )
        # no key of it is before position 0, wherever it begins
        last_positions = F.pad(self.last_positions[:count], (0, 1), value=keys)
        return PackedRow(self.position_ids, query_ends, key_ends, last_positions)


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
    own: which of their queries take the model's own attention after all, (queries, 1, 1), where the host does not know.
    """

    idle: list[bool]
    mask: Tensor | None
    gathered: Tensor | None
    batches: list[Batch]
    own: Tensor | None = None


class RowPages:
    """The pages of one kind of layer in a step, as far as the device knows them; plans are those of subclasses.

    Args:
        row: where requests are.
        total_queries, total_keys: of the packed row.

    Attributes:
        decodes: whether each query is known to be the last token of its request.
    """

    decodes = False

    def __init__(self, row: PackedRow, total_queries: int, total_keys: int) -> None:
        self.row, self.device = row, row.position_ids.device
        self.total_queries, self.total_keys = total_queries, total_keys
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

    @property
    def slots(self) -> Tensor:
        """Numbers of the packed keys, (keys,)."""
        return self.cached("slots", lambda: torch.arange(self.total_keys, device=self.device))

    def get_mask(self, region: Region, dtype: torch.dtype) -> Tensor:
        """Return the additive mask of the packed row, as the plain engine makes it: requests do not see each other."""
        return self.cached(("mask", region, dtype), lambda: self._make_mask(region, dtype))

    def _make_mask(self, region: Region, dtype: torch.dtype) -> Tensor:
        hidden = self.query_requests[:, None] != self.packed.sequence
        if region != CAUSAL or not self.decodes:
            hidden |= ~self._find_visible(region)
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
        tensors = call.query.dtype, call.query.shape, call.key.shape, call.value.shape
        key = (id(layer.recipe), layer.native_mask, layer.backend, plain_allowed, call.scaling, tensors)
        plan = self.plans.get(key)
        if plan is None:
            plan = self.plans[key] = self._plan(layer, call, plain_allowed)
        return plan

    def _plan(self, layer: Layer, call: LayerCall, plain_allowed: bool) -> Plan:
        raise NotImplementedError


def build_layer_call(layer: Layer, call: LayerCall, layout: PackedLayout) -> AttentionCall:
    """Build a layer's call of this layout, with tensors that stand for those of its sizes."""
    recipe, options = layer.get_attention_arguments(layout, call.scaling, rotated=layer.rotated_recipe is not None)
    rows = layout.batch, -1
    query = call.query[:, :, :1].expand(*rows, layout.queries, -1)
    key, value = (x[:, :, :1].expand(*rows, layout.keys, -1) for x in (call.key, call.value))
    return build_call(Inputs(query, key, value, **options), recipe)


def prepare_call(layer: Layer, call: LayerCall, layout: PackedLayout, backend: Backend) -> PreparedCall | None:
    """Return the call for layers to repeat; None where each has more to do than to run a backend that reads no padding.

    That is where laws are learned, or depend on entropy, where autocast or gradients are on, and in large calls.
    """
    if layer.temperature is not None or call.sink_logits is not None or torch.is_grad_enabled():
        return None
    if torch.is_autocast_enabled(call.query.device.type) or backend.reads_padding:
        return None
    built = build_layer_call(layer, call, layout)  # again: what is cached has what layers share
    laws = any(branch.entropy_law is not None for branch in built.branches)
    if built.shared is None or laws or built.q.numel() > MAX_BRANCHED_Q_ELEMENTS:
        return None
    return PreparedCall(built, backend, call.scaling)
