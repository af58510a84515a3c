"""Attention in one layer of an extended model."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from isentrope.attention import attention
from isentrope.core.compile import values_are_readable
from isentrope.core.layout import Layout
from isentrope.core.region import CAUSAL, EVERYTHING, Region
from isentrope.hf.mask import frames_mask, layout_for
from isentrope.hf.rope import Rope
from isentrope.hf.sharding import CONTEXT_PARALLEL, context_parallel
from isentrope.masks import Lambda, Mask, Sink
from isentrope.recipe import Recipe

NO_GRADIENT = "sink logits: a recipe carries them without gradients only; use torch.no_grad()"
NAME = "isentrope"  # the attention implementation, and the attribute of an attention layer that holds its `Layer`


@dataclass(frozen=True, eq=False)
class Own(Mask):
    """The mask that a layer had before; made by `_own`, which makes one for all that are equal."""

    shown: Region

    def region(self, causal: bool) -> Region:
        return self.shown


_own = cache(Own)


class Pass(NamedTuple):
    """A layer's question where tokens stand, and the answer, kept no longer than its tensors are."""

    layer: int
    mask: Callable[[], Tensor | None]
    ids: Callable[[], Tensor | None]
    version: int | None
    shape: tuple[Any, ...]
    layout: Layout


class Together:
    """What `count` layers of a model have in common: the parts of their recipes, and what the last to run has seen."""

    def __init__(self, count: int, parts: tuple[Any, ...] = ()) -> None:
        self.count, self.parts = count, parts
        self.seen = dict[Hashable, Pass]()  # for each kind of layer

    def reference(self, tensor: Tensor | None, kind: Hashable) -> Callable[[], Tensor | None]:
        """A weak one; with the tensor goes what was seen."""
        if tensor is None:
            return _none

        def forget(gone: Any) -> None:
            last = self.seen.get(kind)
            if last is not None and (last.mask is gone or last.ids is gone):
                self.seen.pop(kind, None)

        return weakref.ref(tensor, forget)

    def __reduce__(self) -> tuple[Any, ...]:
        return Together, (self.count, self.parts)


def _none() -> None:
    return None


class Layer(nn.Module):
    """What an attention layer does: its recipe, its own mask, and where its keys are rotated.

    rope: the model's frequencies, where queries and keys arrive raw; None where they arrive rotated.
    causal: whether no query sees ahead.
    index: where the layer is in the order of those it runs together with.
    """

    def __init__(
        self, recipe: Recipe, native: Region, rope: Rope | None, backend: str, together: Together, index: int
    ) -> None:
        super().__init__()
        self.together, self.index = together, index
        self.recipe, self.native, self.rope, self.backend = recipe, _own(native), rope, backend
        self.causal = all(span.high <= 1 for span in native.spans)
        self.eager: Callable[..., tuple[Tensor, Any]] | None = (
            None  # the attention function the model ran with, if its own
        )
        self.evicting = isinstance(recipe.mask, (Sink, Lambda))
        self.kind = (rope is None, self.evicting, self.native)
        self.parts = tuple(
            part for part in (recipe.score, recipe.position, recipe.temperature, recipe.mask) if part is not None
        )
        # registered, so that it trains, moves and is saved
        self.temperature = recipe.temperature if isinstance(recipe.temperature, nn.Module) else None

    def idle(self, length: int, framed: bool) -> bool:
        """Whether rows of up to `length` keys come out as from the model that was extended."""
        # with a cache that has let go of keys, positions and lengths run past the number of keys
        beyond = framed and getattr(self.recipe.temperature, "count", "visible") != "visible"
        return not beyond and all(part.idle(length) for part in self.parts)

    def forward(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scaling: float | None,
        dropout: float,
        position_ids: Tensor | None,
        sink_logits: Tensor | None,
    ) -> Tensor:
        if context_parallel(query):
            self._check_context_parallel(sink_logits)
        layout = self.placed(query, key, mask, position_ids)
        if layout.implicit and self.idle(key.shape[2], layout.framed):
            if self.eager is not None and self._all_idle(key.shape[2]):
                return self._eager(module, query, key, value, layout, scaling, dropout)
            if sink_logits is None:
                return self._plain(module, query, key, value, mask, layout, scaling, dropout)
        if dropout:
            raise ValueError(
                f"attention dropout: expected 0 where a recipe changes attention, got {dropout}; "
                "load the model with attention_dropout=0"
            )
        if (dtype := _autocast(query.device.type)) is not None:  # as SDPA does
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        recipe, options = self.asked(layout, scaling)
        options["backend"] = self.backend
        if sink_logits is None:
            out = attention(query, key, value, recipe, **options)
        else:
            out = _with_sinks(query, key, value, recipe, sink_logits, options)
        return out.transpose(1, 2).contiguous()

    def _check_context_parallel(self, sink_logits: Tensor | None) -> None:
        """Refuse all but causal attention as the model has it, which torch's own SDPA then does."""
        if self.parts or sink_logits is not None or self.eager is not None or self.native.shown != CAUSAL:
            what = " + ".join(map(str, self.parts)) or "attention with windows, sinks or of the model's own"
            raise ValueError(CONTEXT_PARALLEL.format(what=what))

    def placed(self, query: Tensor, key: Tensor, mask: Tensor | None, position_ids: Tensor | None) -> Layout:
        """Where the tokens of a call stand; looked at once a forward pass, whose layers are handed the same tensors."""
        if type(query) is not Tensor or not values_are_readable(query):
            return self._placed(query, key, mask, position_ids)
        # ids made in inference mode have no version to tell whether they were changed: there a pass goes on as long as
        # later layers ask
        timeless = position_ids is not None and position_ids.is_inference()
        version = None if position_ids is None or timeless else position_ids._version
        shape = (query.shape[0], query.shape[2], key.shape[2], query.device)
        seen, last = self.together.seen, self.together.seen.get(self.kind)
        if (
            last is None
            or last.mask() is not mask
            or last.ids() is not position_ids
            or (last.version, last.shape) != (version, shape)
            or (timeless and last.layer >= self.index)
        ):
            layout = self._placed(query, key, mask, position_ids)
            held, ids = (self.together.reference(x, self.kind) for x in (mask, position_ids))
            last = Pass(self.index, held, ids, version, shape, layout)
        if self.index + 1 == self.together.count:
            seen.clear()
        else:
            seen[self.kind] = Pass(self.index, *last[1:])
        return last.layout

    def _placed(self, query: Tensor, key: Tensor, mask: Tensor | None, position_ids: Tensor | None) -> Layout:
        """At the caller's own positions, where those are not simply one after another."""
        layout = layout_for(mask, query, key)
        if self.rope is None or position_ids is None:
            return layout
        fits = position_ids.dim() == 2 and position_ids.shape[1] == layout.queries
        return _place(layout, position_ids, self.evicting) if fits else layout

    def asked(self, layout: Layout, scaling: float | None) -> tuple[Recipe, dict[str, Any]]:
        """The recipe and the options that `attention` is asked for."""
        scale = None if self.recipe.score is not None and self.recipe.score.normalises else scaling
        if scale is not None and self.rope is not None:
            scale = scale * self.rope.scaling**2
        recipe = self.recipe
        if self.temperature is not None:  # as it is registered: it may have been wrapped since
            recipe = replace(recipe, temperature=self.temperature)
        return recipe, {"causal": self.causal, "mask": self.native, "layout": layout, "scale": scale}

    def _plain(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        layout: Layout,
        scaling: float | None,
        dropout: float,
    ) -> Tensor:
        """The model's own attention, bit for bit: its rotation in its dtype, and transformers' SDPA."""
        if self.rope is not None:
            query = self.rope.rotated(query, layout.query, layout)
            key = self.rope.rotated(key, layout.key, layout)
        region = layout.simplify(self.native.shown)
        needless = region == EVERYTHING or (region == CAUSAL and layout.queries == layout.keys)
        dense = None if mask is None and needless else layout.visible(region)
        out, _ = sdpa_attention_forward(
            module, query, key, value, dense, dropout=dropout, scaling=scaling, is_causal=self.causal
        )
        return out

    def _all_idle(self, length: int) -> bool:
        """Whether no layer changes anything, and rows are no longer than some part allows for."""
        # without parts a recipe changes frequencies alone, at any length, where weights held at once may be too many
        return bool(self.together.parts) and all(part.idle(length) for part in self.together.parts)

    def _eager(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layout: Layout,
        scaling: float | None,
        dropout: float,
    ) -> Tensor:
        """The same of a model that has no SDPA: its own attention function, with all weights held at once."""
        assert self.eager is not None
        if self.rope is not None:
            query = self.rope.rotated(query, layout.query, layout)
            key = self.rope.rotated(key, layout.key, layout)
        zero = torch.zeros((), dtype=query.dtype, device=query.device)
        visible = layout.visible(layout.simplify(self.native.shown))
        mask = torch.where(visible, zero, torch.finfo(query.dtype).min)
        return self.eager(module, query, key, value, mask, scaling=scaling, dropout=dropout)[0]


def _autocast(device: str) -> torch.dtype | None:
    """The dtype that autocast asks for on a device, or None."""
    if device not in ("cpu", "cuda", "mps", "xpu") or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def layer_of(module: nn.Module) -> Any:
    """The `Layer` of an attention module, or None."""
    return getattr(module, NAME, None)


def _place(layout: Layout, position_ids: Tensor, evicting: bool) -> Layout:
    """The layout with its queries at these positions."""
    shift = position_ids.to(layout.device) - layout.query
    inside = layout.query >= 0  # not padding on the left
    if layout.framed:
        inside = inside & (layout.query < layout.frame_high - layout.origin)
    frame = layout.origin.expand_as(layout.query)
    # within a frame, positions may start anywhere; they must only go up by one
    steady = (shift[:, 1:] == shift[:, :-1]) | (frame[:, 1:] != frame[:, :-1]) | ~(inside[:, 1:] & inside[:, :-1])
    if not values_are_readable(steady):
        torch._assert_async(
            steady.all(), "position_ids that jump are not supported in a compiled model whose keys are cached raw"
        )
        return layout
    if bool(steady.all()):
        # keys of a cache stand where they were counted: from the first token, or from the first slot of a padded row
        counted = (shift == 0) | (shift == layout.origin) | ~inside
        if layout.queries != layout.keys and not evicting and not bool(counted.all()):
            raise ValueError("position_ids: expected positions that go on from the keys in the cache, got others")
        return layout
    if layout.queries != layout.keys:
        raise ValueError("position_ids: expected consecutive positions where keys come from a cache, got a jump")
    frames = (layout.origin, layout.frame_high, layout.query + layout.origin) if layout.framed else None
    return Layout(
        layout.batch, layout.queries, layout.keys, layout.device, frames=frames, position_ids=position_ids.clone()
    )


def _with_sinks(
    query: Tensor, key: Tensor, value: Tensor, recipe: Recipe, sink_logits: Tensor, options: dict[str, Any]
) -> Tensor:
    """Attention with one more logit in each head's softmax, which takes weight and gives nothing (GPT-OSS)."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value, sink_logits)):
        raise ValueError(NO_GRADIENT)
    out, aux = attention(query, key, value, recipe, return_lse=True, **options)
    if out.requires_grad:  # of what the recipe learns: the log-sum-exp has none
        raise ValueError(NO_GRADIENT)
    kept = torch.sigmoid(aux.lse - sink_logits.to(aux.lse.dtype)[:, None])
    return out * kept[..., None].to(out.dtype)


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
    **unused: Any,
) -> tuple[Tensor, None]:
    """For `AttentionInterface`."""
    layer = layer_of(module)
    if layer is None:
        raise RuntimeError(
            "this model's config asks for an isentrope recipe that was not applied: load it with "
            "isentrope.load(folder), or call isentrope.extend(model, recipe)"
        )
    if is_causal is not None and is_causal != layer.causal:
        raise ValueError(
            f"is_causal: this layer was extended with is_causal={layer.causal}; restore the model to change it"
        )
    return layer(module, query, key, value, attention_mask, scaling, dropout, position_ids, s_aux), None


AttentionInterface.register(NAME, attention_forward)
AttentionMaskInterface.register(NAME, frames_mask)
