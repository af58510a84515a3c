"""The layout of a forward pass, computed by its first layer and reused by the others."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from types import NoneType
from typing import Any, NamedTuple

from torch import Tensor, nn

from isentrope.backends.protocol import GraphPlan
from isentrope.core.caching import register_owner
from isentrope.core.call import AttentionCall
from isentrope.core.layout import Layout
from isentrope.core.tracing import can_share_in_graph
from isentrope.masks import Mask
from isentrope.recipe import Recipe


@dataclass(slots=True)
class CachedLayout:
    """A layout and what it was computed from; the tensors by weak reference, so that it outlives none of them."""

    layer_index: int  # of the last layer that used it
    mask: Callable[[], Tensor | None]
    position_ids: Callable[[], Tensor | None]
    version: int | None  # of position_ids
    shape: tuple[Any, ...]
    layout: Layout
    launches: dict[Hashable, Any] = field(default_factory=dict)  # of decoding, by all that may differ between layers


class LayoutKind(NamedTuple):
    """What a layout depends on in a layer; layers with equal ones share it.

    rotated: whether queries and keys arrive rotated.
    mask: of the layer before it was extended; equal ones are one object.
    """

    rotated: bool
    mask: Mask


class TracedCall(NamedTuple):
    """A call in a graph that is being traced, and what it was built from besides the layout."""

    recipe: Recipe
    options: tuple[Any, ...]  # scaling, causal, heads, their size and dtype
    call: AttentionCall
    plan: GraphPlan | None


class TracedLayout(NamedTuple):
    """A layout in a graph that is being traced, the tensors it was computed from, and the calls built with it.

    Found in lists, by identity: hashes of a recipe take Dynamo milliseconds in every layer.
    """

    kind: LayoutKind
    mask: Tensor | None
    position_ids: Tensor | None
    sizes: tuple[int, int]  # queries and keys
    layout: Layout
    calls: list[TracedCall]

    def find_call(self, recipe: Recipe, options: tuple[Any, ...]) -> TracedCall | None:
        """Return the call that an earlier layer built from the same."""
        for traced in self.calls:
            if traced.recipe is recipe and traced.options == options:
                return traced
        return None

    def add_call(self, call: TracedCall) -> None:
        """Keep a call for the layers after this one, unless this is a graph inside the graph."""
        if can_share_in_graph():
            self.calls.append(call)


class LayoutCache:
    """The layouts of one model's current forward pass, one for each kind of layer.

    transformers passes every layer of a pass the same mask and position ids. Checking ids costs a copy from the GPU, so
    the first layer of a kind does that and the others reuse its layout. An entry is dropped with its tensors, and all
    of them after the last layer; a copied or pickled model begins with none. The gain is in `core/caching.py`.

    A compiled pass is traced with layouts of its own, from where the model begins to where it ends.

    Attributes:
        sharded: whether the pass began with a part of a sequence, of which other processes have the rest.
        paged_threads: those whose current pass is over a paged cache, as a server's is beside other passes.
        evicting_threads: those whose current pass is over a cache that drops keys.
        traced: the layouts of the pass that is being traced, None outside of one.
    """

    sharded = False
    traced: list[TracedLayout] | None = None

    def __init__(self, layer_count: int) -> None:
        self.layer_count = layer_count
        self.entries = dict[Hashable, CachedLayout]()
        self.paged_threads, self.evicting_threads = set[int](), set[int]()
        register_owner(self)

    def get(
        self,
        layer: tuple[int, Hashable],
        shape: tuple[Any, ...],
        mask: Tensor | None,
        position_ids: Tensor | None,
        compute: Callable[[], Layout],
        captured: bool = False,
    ) -> CachedLayout:
        """Return the layout of a call, computed anew unless it belongs to the pass that the last one was for.

        Launches are kept from one layer to those after it: where layers start over, another pass begins.

        Args:
            layer: the index of the layer among those that run, and its kind: layers of one kind share a layout.
            shape: whatever else must be equal for a layout to be reused.
            mask: as transformers passes it to the layer.
            position_ids: as transformers passes them to the layer.
            compute: makes the layout.
            captured: whether a graph is being captured, which may have been left before its last layer, and must not
                read what another has computed.
        """
        index, kind = layer
        # ids made in inference mode have no version that would show a change: a pass then ends where layers start over
        unversioned = position_ids is not None and position_ids.is_inference()
        version = None if position_ids is None or unversioned else position_ids._version
        entry = self.entries.get(kind)
        if (
            entry is None
            or entry.mask() is not mask
            or entry.position_ids() is not position_ids
            or (entry.version, entry.shape) != (version, shape)
            or ((unversioned or captured) and entry.layer_index >= index)
        ):
            mask_reference, ids_reference = (self._reference(x, kind) for x in (mask, position_ids))
            entry = CachedLayout(index, mask_reference, ids_reference, version, shape, compute())
        elif entry.layer_index >= index:
            entry.launches = {}
        if index + 1 == self.layer_count:
            self.entries.clear()
        else:
            entry.layer_index = index
            self.entries[kind] = entry
        return entry

    def set_paged(self, paged: bool) -> None:
        """Note whether the pass of this thread is over a paged cache."""
        _note_thread(self.paged_threads, paged)

    def set_evicting(self, evicting: bool) -> None:
        """Note whether the pass of this thread is over a cache that drops keys."""
        _note_thread(self.evicting_threads, evicting)

    @property
    def evicting(self) -> bool:
        """Whether the pass of this thread is over a cache that drops keys."""
        return len(self.evicting_threads) > 0 and threading.get_ident() in self.evicting_threads

    @property
    def paged(self) -> bool:
        """Whether the pass of this thread is over a paged cache."""
        # the first test is all that a graph traces: such passes are not compiled
        return len(self.paged_threads) > 0 and threading.get_ident() in self.paged_threads

    def begin_pass(self, module: nn.Module, args: Any) -> None:
        """A hook on the model, before it runs."""
        self.traced = [] if can_share_in_graph() else None

    def end_pass(self, module: nn.Module, args: Any, output: Any) -> None:
        """A hook on the model, after it has run: nothing of a graph may outlive it."""
        self.traced = None

    def get_traced(
        self,
        kind: LayoutKind,
        sizes: tuple[int, int],
        mask: Tensor | None,
        position_ids: Tensor | None,
        compute: Callable[[], Layout],
    ) -> TracedLayout:
        """Return the layout of a call in a graph that is being traced; `sizes` are its queries and keys."""
        for entry in self.traced or ():
            if entry.kind.mask is not kind.mask or entry.kind.rotated != kind.rotated:
                continue
            if entry.mask is mask and entry.position_ids is position_ids and entry.sizes == sizes:
                return entry
        entry = TracedLayout(kind, mask, position_ids, sizes, compute(), [])
        if self.traced is not None and can_share_in_graph():
            self.traced.append(entry)
        return entry

    def clear(self) -> None:
        """Drop all entries; the next layer computes its layout anew."""
        self.entries.clear()
        self.traced = None

    def _reference(self, tensor: Tensor | None, kind: Hashable) -> Callable[[], Tensor | None]:
        """Refer to a tensor weakly; the entry goes when the tensor does."""
        if tensor is None:
            return NoneType

        def forget(reference: Any) -> None:
            entry = self.entries.get(kind)
            if entry is not None and (entry.mask is reference or entry.position_ids is reference):
                self.entries.pop(kind, None)

        return weakref.ref(tensor, forget)

    def __reduce__(self) -> tuple[Any, ...]:
        return LayoutCache, (self.layer_count,)


def _note_thread(threads: set[int], belongs: bool) -> None:
    """Keep this thread among some, or not."""
    if belongs:
        threads.add(threading.get_ident())
    elif threads:
        threads.discard(threading.get_ident())
