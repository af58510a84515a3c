"""The pages of a step that is captured as a CUDA graph: one token of each request, whatever their lengths will be.

A graph repeats the same launches with the same addresses. So nothing here reads a value: where keys are, how many there
are and which requests take the model's own attention is computed on the device, from the tensors that the engine
changes in place. All that the host decides is in `DecodingStep`, by which graphs are kept apart.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from isentrope.core.packed_layout import PackedKeys, PackedLayout
from isentrope.dispatch import DECODE, choose_backend
from isentrope.hf.layer import Layer, LayerCall
from isentrope.hf.packed_row import Batch, PackedRow, Plan, RowPages, build_layer_call, prepare_call
from isentrope.utils.messages import truncate

CAPTURABLE = (DECODE,)  # backends that read all that changes from the device
LONGEST = 1 << 40  # request


class CaptureError(ValueError):
    """A layer whose attention cannot be captured."""


class DecodingStep(NamedTuple):
    """What a graph may depend on in a step that decodes one token of each request.

    rows: for how many requests there is room.
    shortest, longest: lengths of requests, the new token included.
    """

    rows: int
    shortest: int
    longest: int


class CapturedPages(RowPages):
    """The pages of one kind of layer in a step that decodes; query n is of request n, and the row is padded."""

    decodes = True

    def __init__(self, row: PackedRow, sizes: tuple[int, int], step: DecodingStep) -> None:
        super().__init__(row, *sizes)
        self.step = step

    def _plan(self, layer: Layer, call: LayerCall, plain_allowed: bool) -> Plan:
        limit = find_idle_length(layer) if plain_allowed else 0
        mask = None
        if self.step.shortest <= limit:
            mask = self.get_mask(layer.native_mask.visible, call.query.dtype)
        if self.step.longest <= limit:
            return Plan([], mask, None, [])
        # the last in the row is its padding; requests before it that are not there have no keys
        count = min(self.step.rows, len(self.row.last_positions) - 1)
        position, packed, own = self.row.position_ids[0, :count], self.packed, None
        if mask is not None:  # others see no keys here, and cost nothing
            low, high, origin = packed.bounds
            high = torch.where(self.row.last_positions < limit, low, high)
            packed = PackedKeys(torch.stack((low, high, origin)), packed.sequence)
            own = (position < limit)[:, None, None]
        layout = PackedLayout(packed, torch.arange(count, device=self.device), position, by_row=True)
        layout.complete_rows = False  # laws by their formulas: a table might be dropped while a graph has its address
        backend = choose_backend(build_layer_call(layer, call, layout), layer.backend)
        prepared = prepare_call(layer, call, layout, backend)
        if backend not in CAPTURABLE or prepared is None:
            raise CaptureError(f"{truncate(layer.description)} decodes by {backend.name}, or by laws of each layer")
        return Plan([], mask, None, [Batch(slice(count), None, count, True, layout, prepared)], own)


def find_idle_length(layer: Layer) -> int:
    """Return up to which length a layer leaves requests to the model's own attention."""
    low, high = 0, LONGEST
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if layer.idle(middle, False) else (low, middle - 1)
    return low
