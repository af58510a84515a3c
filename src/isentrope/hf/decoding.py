"""Decoding one token: the first layer prepares the launch of a kernel, and those after it run it with their tensors.

A launch is kept with the layout of a forward pass (`LayoutCache`), by all that may differ between its layers: the
recipe, and the sizes, memory order, dtypes and devices of q, k and v. It depends on no values of these.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from isentrope.builder import Inputs
from isentrope.core.call import describe_tensors
from isentrope.core.dtypes import get_autocast_dtype
from isentrope.core.rotation import is_transformed
from isentrope.functional import prepare_attention
from isentrope.hf.layout_cache import CachedLayout

if TYPE_CHECKING:
    from isentrope.hf.layer import Layer, LayerCall


def takes_launch(layer: Layer, call: LayerCall) -> bool:
    """Return whether a call may run the launch of an earlier layer: one query a row, nothing learned or traced."""
    query = call.query
    if torch.compiler.is_compiling() or query.shape[2] != 1 or torch.is_grad_enabled() or query.is_meta:
        return False
    if not (type(query) is type(call.key) is type(call.value) is Tensor) or call.sink_logits is not None:
        return False
    if call.dropout or layer.temperature is not None or is_transformed():
        return False
    return get_autocast_dtype(query.device.type) is None


def run_launch(layer: Layer, call: LayerCall, entry: CachedLayout) -> Tensor | None:
    """Attend by the launch of an earlier layer; None where none has had this recipe and such tensors."""
    prepared = entry.launches.get(_make_key(layer, call))
    if prepared is None:
        return None
    query, value = call.query, call.value
    batch, heads, queries, _ = query.shape
    out = query.new_empty(batch, queries, heads, value.shape[3])  # one query lies in memory as a launch writes it
    prepared[1].run(query, call.key, value, out)
    return out


def prepare_launch(layer: Layer, call: LayerCall, entry: CachedLayout) -> bool:
    """Prepare a launch for this layer and those after it; return whether there is one."""
    recipe, options = layer.get_attention_arguments(entry.layout, call.scaling)
    launch = prepare_attention(Inputs(call.query, call.key, call.value, **options), recipe, layer.backend)
    if launch is not None:
        # with the recipe, so that no other can have its id
        entry.launches[_make_key(layer, call)] = recipe, launch
    return launch is not None


def _make_key(layer: Layer, call: LayerCall) -> Hashable:
    # layers that rotate by other frequencies have other recipes
    tensors = describe_tensors(call.query, call.key, call.value)
    return id(layer.recipe), layer.causal, layer.backend, call.scaling, tensors
