"""Attention in one layer of an extended model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from isentrope.builder import Inputs
from isentrope.core.caching import bounded_cache
from isentrope.core.compile import values_are_readable
from isentrope.core.dtypes import get_autocast_dtype
from isentrope.core.layout import Layout
from isentrope.core.region import CAUSAL, EVERYTHING, Region
from isentrope.functional import attention, build_attention, plan_attention, run_attention, run_plan
from isentrope.hf.decoding import prepare_launch, run_earlier, run_launch, takes_launch
from isentrope.hf.introspection import LayerInfo
from isentrope.hf.layer_plan import LayerPlan
from isentrope.hf.layout_cache import CachedLayout, LayoutCache, LayoutKind, TracedCall, TracedLayout
from isentrope.hf.mask import apply_position_ids, make_frames_mask, make_layout
from isentrope.hf.names import IMPLEMENTATION, LAYER, PAGED_STEP
from isentrope.hf.sharding import CONTEXT_PARALLEL_ERROR, HEADS_ERROR, is_context_parallel
from isentrope.hf.sink_logits import apply_sink_logits, attend_with_sink_logits, check_sink_gradients
from isentrope.masks import Mask
from isentrope.parallel.context import SequenceParallel
from isentrope.parallel.heads import shard_temperature
from isentrope.parallel.key_parts import Options
from isentrope.parallel.rows import ShardedRows, is_shard_mask
from isentrope.recipe import Recipe

MAX_NATIVE_MASKS = 64  # of all models; one has two or three
MAX_MASK_ELEMENTS = 1 << 24  # of a matrix that SDPA may take for a window; at 131,072 tokens it would take 50 GB


@dataclass(frozen=True, eq=False)
class NativeMask(Mask):
    """The mask that a layer had before; equal ones are one object, which caches find by identity."""

    visible: Region

    def region(self, causal: bool) -> Region:
        return self.visible


_native_mask = bounded_cache(MAX_NATIVE_MASKS)(NativeMask)


class LayerCall(NamedTuple):
    """What transformers passes to the attention function of a layer; `module` is that layer."""

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None = None
    scaling: float | None = None
    dropout: float = 0.0
    position_ids: Tensor | None = None
    sink_logits: Tensor | None = None


class Layer(nn.Module):
    """The attention of one layer of an extended model.

    Args:
        info: the layer as it was before.
        plan: what the recipe makes of it.
        backend: as in `isentrope.attention`.
        index: of the layer in the order in which layers run.
        layouts: shared by all layers of the model.
        model_recipes: the recipes of all layers, those with the same parts once.

    Attributes:
        rope: the model's frequencies, where queries and keys arrive unrotated; None where they arrive rotated.
        rotated_recipe: `recipe` for queries and keys that arrive rotated all the same, as those of a paged cache do;
            None where they never do.
        rolled: by how many entries queries and keys are rolled, so that a recipe finds those that rotate first.
        causal: whether no query sees ahead.
        heads: of the queries that it is called with.
        eager_attention: the model's own attention function, where it has no SDPA.
        parallel: the processes that share a sequence.
    """

    parallel: SequenceParallel | None = None

    def __init__(
        self,
        info: LayerInfo,
        plan: LayerPlan,
        backend: str,
        index: int,
        layouts: LayoutCache,
        model_recipes: tuple[Recipe, ...],
    ) -> None:
        super().__init__()
        recipe = self.recipe = self.planned_recipe = plan.recipe  # `recipe` is another while laws are learned
        self.rotated_recipe = plan.rotated_recipe
        self.native_mask, self.causal = _native_mask(info.region), info.causal
        rotates = recipe.position is not None and recipe.position.rotates
        self.rope = plan.skipped_rope if rotates else None
        self.rolled = 0 if self.rope is None else self.rope.roll
        self.backend, self.index, self.layouts, self.model_recipes = backend, index, layouts, model_recipes
        self.eager_attention = info.eager_attention
        self.reads_evicted_keys = recipe.counts_unseen_keys or recipe.depends_on_place
        self.layout_kind = LayoutKind(self.rope is None, self.native_mask)
        self.parts = recipe.parts
        # for an error that may be raised while a graph is traced, where no part can be printed
        self.description = " + ".join(map(str, self.parts)) or "attention with windows, sinks or of the model's own"
        # registered, so that they train, move and are saved
        learned: dict[str, nn.Module] = {
            getattr(law, "keys", "all"): law for law in recipe.temperatures if isinstance(law, nn.Module)
        }
        self.heads = info.local_heads.count
        self.shard_temperature = partial(shard_temperature, heads=info.local_heads, head_dim=info.head_dim)
        self.temperature = learned["all"] if "all" in learned else nn.ModuleDict(learned) if learned else None

    def idle(self, length: int, framed: bool) -> bool:
        """Return whether rows of up to `length` keys come out as from the model before it was extended."""
        # where a cache has evicted keys, positions and lengths exceed the number of keys
        beyond = framed and self.reads_evicted_keys
        return not beyond and self.planned_recipe.idle(length)

    def forward(self, call: LayerCall) -> Tensor:
        query, key, sink_logits = call.query, call.key, call.sink_logits
        if self.parallel is not None and (rows := self._find_rows(self.parallel, call)) is not None:
            return self._run_parallel(self.parallel, call, rows)
        if is_context_parallel(query):
            self._check_context_parallel(sink_logits)
        traced = self._get_traced(call) if torch.compiler.is_compiling() else None
        if traced is not None and (out := self._attend_like_earlier(call, traced)) is not None:
            return out
        entry = self.get_entry(call) if takes_launch(self, call) else None
        if entry is not None and (out := run_launch(self, call, entry)) is not None:
            return out
        shared = traced if entry is None else entry
        layout = self.get_layout(call) if shared is None else shared.layout
        if layout.implicit and self.idle(key.shape[2], layout.framed):
            if self.eager_attention is not None and self._model_idle(key.shape[2]):
                return self._run_eager(call, layout)
            if sink_logits is None and (call.dropout or not self._needs_large_mask(call, layout)):
                return self._run_sdpa(call, layout)
        if entry is not None and prepare_launch(self, call, entry):
            out = run_launch(self, call, entry)
            assert out is not None
            return out
        return self.attend(call, layout, traced=traced)

    def attend(
        self, call: LayerCall, layout: Layout, rotated: bool = False, traced: TracedLayout | None = None
    ) -> Tensor:
        """Attend under the recipe, whether or not it is idle, or under `rotated_recipe`."""
        query, key, value, sink_logits = call.query, call.key, call.value, call.sink_logits
        _check_dropout(call)
        query, key, value = _autocast(query, key, value)
        recipe, options = self.get_attention_arguments(layout, call.scaling, rotated)
        if sink_logits is not None:
            out = attend_with_sink_logits(query, key, value, recipe, sink_logits, options | {"backend": self.backend})
        elif traced is None:
            out = attention(query, key, value, recipe, backend=self.backend, **options)
        else:
            built = build_attention(Inputs(query, key, value, **options), recipe)
            plan = plan_attention(built, self.backend)
            if recipe is self.recipe and built.shared is not None:
                traced.add_call(TracedCall(recipe, self._list_options(call, query), built, plan))
            out = run_attention(built, self.backend) if plan is None else run_plan(plan, query, key, value)
        return out.transpose(1, 2).contiguous()

    def _attend_like_earlier(self, call: LayerCall, traced: TracedLayout) -> Tensor | None:
        """Attend as an earlier layer of a graph did; None where none had this recipe, or where that was idle."""
        if call.dropout or call.sink_logits is not None:
            return None
        query, key, value = _autocast(call.query, call.key, call.value)
        earlier = traced.find_call(self.recipe, self._list_options(call, query))
        if earlier is None:
            return None
        if earlier.plan is not None and not torch.is_grad_enabled():
            out = run_plan(earlier.plan, query, key, value)
        else:
            out = run_attention(earlier.call.set_tensors(query, key, value), self.backend)
        return out.transpose(1, 2).contiguous()

    def _list_options(self, call: LayerCall, query: Tensor) -> tuple[Any, ...]:
        return call.scaling, self.causal, query.shape[1], query.shape[3], call.value.shape[3], query.dtype

    def _find_rows(self, parallel: SequenceParallel, call: LayerCall) -> ShardedRows | None:
        """Return the rows that other processes have parts of, None where the whole is here."""
        if call.mask is not None and is_shard_mask(call.mask):
            return parallel.read(call.mask, call.query, call.key)
        if self.layouts.sharded:
            raise ValueError(
                "context parallel: the mask of shard() did not reach attention; accelerate's own context parallelism "
                "removes masks, use one of the two"
            )
        return parallel.read_balanced(call.position_ids, call.key) if is_context_parallel(call.query) else None

    def _run_parallel(self, parallel: SequenceParallel, call: LayerCall, rows: ShardedRows) -> Tensor:
        """Attend with the queries of this process to the keys of all."""
        _check_dropout(call)
        recipe, options = self.get_attention_arguments(None, call.scaling)
        how = Options(
            recipe, self.causal, self.native_mask, options["scale"], self.backend, jumping=self.rope is not None
        )
        qkv = _autocast(call.query, call.key, call.value)
        if call.sink_logits is not None:
            check_sink_gradients((*qkv, call.sink_logits))
        if rows.cached:
            if self.rope is not None:
                rows.check_positions(call.position_ids)
            out, lse = parallel.decode(qkv, rows, how)
        else:
            out, lse = parallel.attend(qkv, rows, how, need_lse=call.sink_logits is not None)
        if call.sink_logits is not None and lse is not None:
            out = apply_sink_logits(out, lse, call.sink_logits)
        return out.transpose(1, 2).contiguous()

    def _check_context_parallel(self, sink_logits: Tensor | None) -> None:
        """Refuse all but causal attention as the model has it, which torch's own SDPA then runs."""
        own_function = self.eager_attention is not None
        if self.parts or sink_logits is not None or own_function or self.native_mask.visible != CAUSAL:
            raise ValueError(CONTEXT_PARALLEL_ERROR.format(what=self.description))

    def get_layout(self, call: LayerCall) -> Layout:
        """Return the positions of a call's tokens, which the layers of a forward pass share."""
        if torch.compiler.is_compiling():
            return self._get_traced(call).layout
        if type(call.query) is not Tensor or call.query.is_meta:
            return self._compute_layout(call)
        return self.get_entry(call).layout

    def _get_traced(self, call: LayerCall) -> TracedLayout:
        """Return the layout in a graph that is being traced, with the calls that layers share."""
        sizes = call.query.shape[2], call.key.shape[2]
        return self.layouts.get_traced(
            self.layout_kind, sizes, call.mask, call.position_ids, lambda: self._compute_layout(call)
        )

    def get_entry(self, call: LayerCall) -> CachedLayout:
        """Return the layout with what else the layers of a forward pass share."""
        query, key = call.query, call.key
        # a captured graph computes its own: what a pass before it has left behind would never change again
        captured = not values_are_readable(query)
        shape = (query.shape[0], query.shape[2], key.shape[2], query.device, captured)
        layer = self.index, self.layout_kind
        return self.layouts.get(
            layer, shape, call.mask, call.position_ids, lambda: self._compute_layout(call), captured
        )

    def _compute_layout(self, call: LayerCall) -> Layout:
        layout, position_ids = make_layout(call.mask, call.query, call.key), call.position_ids
        if self.rope is None or position_ids is None:
            return layout
        fits = position_ids.dim() == 2 and position_ids.shape[1] == layout.queries
        if not fits:
            return layout
        return apply_position_ids(layout, position_ids, call.mask, self.native_mask.visible, self.layouts.evicting)

    def get_attention_arguments(
        self, layout: Layout | None, scaling: float | None, rotated: bool = False
    ) -> tuple[Recipe, dict[str, Any]]:
        """Return the recipe and the options with which this layer calls `attention`."""
        scale = None if self.recipe.score is not None and self.recipe.score.normalises else scaling
        recipe = (self.rotated_recipe if rotated else None) or self.recipe
        if scale is not None and self.rope is not None and not rotated:
            scale = scale * self.rope.scaling**2
        if self.temperature is not None:  # as they are registered: they may have been wrapped since
            laws_by_keys = (
                self.temperature if isinstance(self.temperature, nn.ModuleDict) else {"all": self.temperature}
            )
            registered = dict(laws_by_keys.items())
            laws = (registered.get(getattr(law, "keys", "all"), law) for law in recipe.temperatures)
            recipe = replace(recipe, temperature=tuple(map(self.shard_temperature, laws)))
        return recipe, {"causal": self.causal, "mask": self.native_mask, "layout": layout, "scale": scale}

    def _rotate(self, call: LayerCall, layout: Layout) -> tuple[Tensor, Tensor]:
        """Return queries and keys as the model rotates them, in its dtype."""
        if self.rope is None:
            return call.query, call.key
        query, key = (x.roll(-self.rolled, -1) if self.rolled else x for x in (call.query, call.key))
        return self.rope.rotate(query, layout.query, layout), self.rope.rotate(key, layout.key, layout)

    def _find_masked_region(self, call: LayerCall, layout: Layout) -> Region | None:
        """Return the region that SDPA takes as a matrix, None where it needs none."""
        region = layout.simplify(self.native_mask.visible)
        needless = region == EVERYTHING or (region == CAUSAL and layout.queries == layout.keys)
        return None if call.mask is None and needless else region

    def _make_mask(self, call: LayerCall, layout: Layout) -> Tensor | None:
        """Return the mask that SDPA takes, None where it needs none."""
        region = self._find_masked_region(call, layout)
        return None if region is None else layout.visible(region)

    def _needs_large_mask(self, call: LayerCall, layout: Layout) -> bool:
        """Return whether SDPA would take a large matrix for a window, where other layers change the output anyway."""
        if call.mask is None and self.native_mask.visible in (CAUSAL, EVERYTHING):
            return False
        large = layout.queries * layout.keys > MAX_MASK_ELEMENTS and not self._model_idle(layout.keys)
        return large and self._find_masked_region(call, layout) is not None

    def _run_sdpa(self, call: LayerCall, layout: Layout) -> Tensor:
        """Run the model's own attention, bit for bit: its rotation and transformers' SDPA."""
        query, key = self._rotate(call, layout)
        # layers that share a layout in a graph have the same mask
        (mask,) = layout.cached_in_graph("mask of the model", lambda: (self._make_mask(call, layout),))
        options: dict[str, Any] = {"dropout": call.dropout, "scaling": call.scaling, "is_causal": self.causal}
        return sdpa_attention_forward(call.module, query, key, call.value, mask, **options)[0]

    def _model_idle(self, length: int) -> bool:
        """Return whether no layer changes anything, and rows are no longer than some part allows for."""
        # without parts a recipe changes frequencies alone, at any length, where an eager matrix of weights may not fit
        recipes = self.model_recipes
        return any(recipe.parts for recipe in recipes) and all(recipe.idle(length) for recipe in recipes)

    def _run_eager(self, call: LayerCall, layout: Layout) -> Tensor:
        """Run the attention function of a model without SDPA, which holds all weights at once."""
        assert self.eager_attention is not None
        query, key = self._rotate(call, layout)
        zero = torch.zeros((), dtype=query.dtype, device=query.device)
        visible = layout.visible(layout.simplify(self.native_mask.visible))
        mask = torch.where(visible, zero, torch.finfo(query.dtype).min)
        options = {"scaling": call.scaling, "dropout": call.dropout}
        return self.eager_attention(call.module, query, key, call.value, mask, **options)[0]


def _check_dropout(call: LayerCall) -> None:
    if call.dropout:
        raise ValueError(
            f"attention dropout: expected 0 where a recipe changes attention, got {call.dropout}; "
            "load the model with attention_dropout=0"
        )


def _autocast(*tensors: Tensor) -> Any:
    """Return tensors in the dtype of autocast, as SDPA takes them."""
    dtype = get_autocast_dtype(tensors[0].device.type)
    return tensors if dtype is None else tuple(x.to(dtype) for x in tensors)


def get_layer(module: nn.Module) -> Any:
    """Return the `Layer` of an attention module, or None."""
    return getattr(module, LAYER, None)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    position_ids: Tensor | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend in an extended model; the signature is that of transformers' `AttentionInterface`."""
    layer: Any = module._modules.get(LAYER)  # `getattr` finds modules last, in Python
    if layer is None:
        raise RuntimeError(
            "this model's config has an isentrope recipe that was not applied: load it with "
            "isentrope.load(folder), or call isentrope.extend(model, recipe)"
        )
    if is_causal is not None and is_causal != layer.causal:
        raise ValueError(
            f"is_causal: this layer was extended with is_causal={layer.causal}; restore the model to change it"
        )
    if query.shape[1] != layer.heads:
        raise ValueError(HEADS_ERROR.format(expected=layer.heads, actual=query.shape[1]))
    if layer.rolled:
        query, key = query.roll(layer.rolled, -1), key.roll(layer.rolled, -1)
    step = others.get(PAGED_STEP)
    if not torch.compiler.is_dynamo_compiling() and step is None and s_aux is None and not dropout:
        out = run_earlier(layer, query, key, value, attention_mask, scaling, position_ids)
        if out is not None:
            return out, None
    call = LayerCall(module, query, key, value, attention_mask, scaling, dropout, position_ids, s_aux)
    return (layer(call) if step is None else step.attend(layer, call)), None


AttentionInterface.register(IMPLEMENTATION, attention_forward)
AttentionMaskInterface.register(IMPLEMENTATION, make_frames_mask)
