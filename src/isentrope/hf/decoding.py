"""Decoding one token: the first layer prepares the launch of a kernel, and those after it run it with their tensors.

A launch is kept with the layout of a forward pass (`LayoutCache`), by all that may differ between its layers: the
recipe, and the sizes, memory order, dtypes and devices of q, k and v. It depends on no values of these.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.modules import module as hooks

from isentrope.builder import Inputs
from isentrope.core.call import describe_tensors
from isentrope.core.dtypes import AUTOCASTING_DEVICES, get_autocast_dtype
from isentrope.core.rotation import is_transformed
from isentrope.functional import prepare_attention
from isentrope.hf.layout_cache import CachedLayout
from isentrope.hf.sharding import is_context_parallel

if TYPE_CHECKING:
    from isentrope.hf.layer import Layer, LayerCall

SDPA = torch._C._nn.scaled_dot_product_attention  # as long as nobody has replaced it


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


def run_earlier(
    layer: Layer,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    position_ids: Tensor | None,
) -> Tensor | None:
    """Attend by the launch of an earlier layer of the pass, in one function; None where `Layer.forward` has to decide.

    What it checks are the conditions of `Layer.forward`, `takes_launch` and `LayoutCache.get` for that. Each of their
    functions would take a layer of a decoded token longer than what it asks for.
    """
    layouts = layer.layouts
    entry = layouts.entries.get(layer.layout_kind)
    if entry is None or not entry.launches or entry.layer_index >= layer.index:
        return None
    if entry.mask() is not mask or entry.position_ids() is not position_ids or torch.is_grad_enabled():
        return None
    if layer.parallel is not None or layer.temperature is not None or is_transformed():
        return None
    if layer._forward_hooks or layer._forward_pre_hooks or hooks._global_forward_hooks or "forward" in layer.__dict__:
        return None
    if not (type(query) is type(key) is type(value) is Tensor) or hooks._global_forward_pre_hooks:
        return None
    if F.scaled_dot_product_attention is not SDPA and is_context_parallel(query):
        return None
    version = None if position_ids is None or position_ids.is_inference() else position_ids._version
    device, shape, kind = query.device, query.shape, query.device.type
    captured = query.is_cuda and torch.cuda.is_current_stream_capturing()
    same = entry.version == version and entry.shape == (shape[0], shape[2], key.shape[2], device, captured)
    if not same or (kind in AUTOCASTING_DEVICES and torch.is_autocast_enabled(kind)):
        return None
    tensors = describe_tensors(query, key, value)
    prepared = entry.launches.get((id(layer.recipe), layer.causal, layer.backend, scaling, tensors))
    if prepared is None:
        return None
    if layer.index + 1 == layouts.layer_count:
        layouts.entries.clear()
    else:
        entry.layer_index = layer.index
    out = query.new_empty(shape[0], shape[2], shape[1], value.shape[3])
    prepared[1].run(query, key, value, out)
    return out


def run_launch(layer: Layer, call: LayerCall, entry: CachedLayout) -> Tensor | None:
    """Attend by the launch of an earlier layer; None where none has had this recipe and such tensors."""
    prepared = entry.launches.get(_make_key(layer, call)) if entry.launches else None
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
