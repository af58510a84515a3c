"""A key-value cache of constant size: the first tokens and a window, everything between evicted."""

from __future__ import annotations

from math import inf
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from isentrope.core.region import band
from isentrope.hf.cache_recipe import MADE_FOR
from isentrope.hf.extension import get_extension
from isentrope.hf.mask import EvictingOffset
from isentrope.hf.rope import LENGTH_DEPENDENT_ROPE_TYPES, get_streaming_window
from isentrope.masks import Lambda, Sink
from isentrope.positions import Position
from isentrope.recipe import Recipe
from isentrope.utils.messages import truncate


class StreamingLayer(DynamicLayer):
    """Keys and values of `sinks` first tokens and the last `size` - 1, which with the next token make a window."""

    is_croppable = False

    def __init__(self, sinks: int, size: int) -> None:
        super().__init__()
        self.sinks, self.size = sinks, size
        self.cumulative_length = 0  # of all tokens so far, evicted ones included

    @property
    def cached_length(self) -> int:
        """The number of tokens in the cache."""
        return 0 if not self.is_initialized or self.keys is None else self.keys.shape[-2] * (self.keys.numel() > 0)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        self.cumulative_length += key_states.shape[-2]
        keys, values = (
            torch.cat((old, new), -2) for old, new in ((self.keys, key_states), (self.values, value_states))
        )
        self.keys, self.values = self._evict(keys), self._evict(values)
        return keys, values

    def _evict(self, x: Tensor) -> Tensor:
        """Return the tokens that the next one may still see."""
        recent = self.size - 1
        if x.shape[-2] <= self.sinks + recent:
            return x
        return torch.cat((x[..., : self.sinks, :], x[..., x.shape[-2] - recent :, :]), -2)

    def get_seq_length(self) -> int:
        return self.cumulative_length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cached_length + query_length, EvictingOffset(0)

    def get_max_length(self) -> int:
        return self.sinks + self.size

    def reset(self) -> None:
        self.keys = self.values = None
        self.is_initialized = False
        self.cumulative_length = 0

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise ValueError(
                "StreamingCache: tokens cannot be removed again, what they evicted is gone; start a new cache"
            )


class StreamingCache(Cache):
    """Let `generate(past_key_values=StreamingCache(model))` reach any length at constant memory.

    A recipe with a `sink` mask (StreamingLLM), or with `rerope` and a `lambda` mask (LM-Infinite), sees only the first
    tokens and a window and measures positions inside the cache, so that evicting the rest loses nothing. With a recipe
    per layer every layer must have such a recipe, and the cache keeps what the widest needs. Rows of a batch must have
    no padding.

    Args:
        model: extended with such a recipe.

    Raises:
        ValueError: the model is not extended, or its recipe needs the evicted tokens.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        extension = get_extension(model)
        sizes = [_get_sinks_and_window(extension.recipe.for_layer(layer.index)) for layer in extension.layers]
        known = [size for size in sizes if size is not None]
        if len(known) < len(sizes):
            raise ValueError(
                "StreamingCache: expected a model extended with 'sink:sinks=…,size=…' and plain rotation, or with "
                "'rerope:window=…' and 'lambda:sinks=…,window=…' of at least that window, a temperature that counts "
                "visible keys, and a share law with at most as many sinks, in every layer, got "
                f"{truncate(str(extension.recipe))!r}"
            )
        # all layers share one mask, so that they keep the same tokens: those that any of them needs
        sinks, window = (max(each) for each in zip(*known, strict=True))
        ropes = [layer.rope for layer in extension.layers if layer.rope is not None]
        if any(rope.kind in LENGTH_DEPENDENT_ROPE_TYPES for rope in ropes):
            raise ValueError(
                "StreamingCache: expected angles that do not depend on the length of the text, which it does not keep; "
                f"{ropes[0].as_model().unscaled_advice or 'take another model'}"
            )
        native = [-span.low for layer in extension.layers for span in layer.region.spans if span.low != -inf]
        if native and max(native) >= window:
            raise ValueError(
                f"StreamingCache: expected a window of at least {max(native) + 1:g}, the model's own, in the recipe, "
                f"got {window}: the cache cannot distinguish tokens that the model's own window excludes"
            )
        count = 1 + max(layer.index for layer in extension.layers)
        super().__init__(layers=[StreamingLayer(sinks, window) for _ in range(count)])
        setattr(self, MADE_FOR, str(extension.recipe))

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Return the position of the next token, counted inside the cache."""
        return self.layers[layer_idx].cached_length  # type: ignore[union-attr]


def _get_sinks_and_window(recipe: Recipe) -> tuple[int, int] | None:
    """Return sinks and window of a recipe that neither sees nor counts the tokens between; None for any other."""
    mask, position = recipe.mask, recipe.position
    if recipe.counts_unseen_keys or recipe.retrieve is not None or not isinstance(mask, (Sink, Lambda)):
        return None
    size = mask.size if isinstance(mask, Sink) else mask.window
    if mask.region(True) != Sink(mask.sinks, size).region(True):
        return None
    if getattr(recipe.share, "sinks", 0) > mask.sinks:  # the slots after the sinks hold ever later tokens
        return None
    constant = position is not None and _has_constant_far_distance(position, size)
    return (mask.sinks, size) if constant else get_streaming_window(mask, position)


def _has_constant_far_distance(position: Position, size: int) -> bool:
    """Return whether all keys `size` or more behind are at one distance, as in ReRoPE: any of them may be evicted."""
    query, key = torch.arange(2)[None], torch.arange(2)[None]
    for branch in position.branches(query, key, 1, (2, 2)):
        far = branch.region & band(-inf, 1 - size)
        varies = isinstance(branch.query, Tensor) or isinstance(branch.key, Tensor)
        if branch.slopes is not None or (far.spans and varies):
            return False
    return True
