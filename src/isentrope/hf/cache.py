"""A key-value cache of constant size: the first tokens and a window, everything between let go."""

from __future__ import annotations

from math import inf
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from isentrope.core.region import band
from isentrope.hf.extend import extension
from isentrope.hf.mask import Evicting
from isentrope.hf.rope import streaming
from isentrope.masks import Lambda, Sink
from isentrope.positions import Position
from isentrope.recipe import Recipe


class StreamingLayer(DynamicLayer):
    """Keys and values of `sinks` first tokens and the last `size` - 1, which with the next token make a window."""

    is_croppable = False

    def __init__(self, sinks: int, size: int) -> None:
        super().__init__()
        self.sinks, self.size = sinks, size
        self.cumulative_length = 0  # all tokens ever seen

    @property
    def held(self) -> int:
        """Tokens in the cache."""
        return 0 if not self.is_initialized or self.keys is None else self.keys.shape[-2] * (self.keys.numel() > 0)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        self.cumulative_length += key_states.shape[-2]
        keys, values = (
            torch.cat((old, new), -2) for old, new in ((self.keys, key_states), (self.values, value_states))
        )
        self.keys, self.values = self._kept(keys), self._kept(values)
        return keys, values

    def _kept(self, x: Tensor) -> Tensor:
        """What the next token may still see."""
        recent = self.size - 1
        if x.shape[-2] <= self.sinks + recent:
            return x
        return torch.cat((x[..., : self.sinks, :], x[..., x.shape[-2] - recent :, :]), -2)

    def get_seq_length(self) -> int:
        return self.cumulative_length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.held + query_length, Evicting(0)

    def get_max_length(self) -> int:
        return self.sinks + self.size

    def reset(self) -> None:
        self.keys = self.values = None
        self.is_initialized = False
        self.cumulative_length = 0

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise ValueError("StreamingCache: tokens cannot be taken back, what they pushed out is gone")


class StreamingCache(Cache):
    """For `generate(past_key_values=StreamingCache(model))`: any length at constant memory.

    The model must be extended with a `sink` mask (StreamingLLM), or with `rerope` and a `lambda` mask (LM-Infinite).
    Both see the first tokens and a window and measure positions inside the cache, so nothing is lost by forgetting the
    rest. Rows of a batch must have no padding.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        state = extension(model)
        kept = _kept(state.recipe)
        own = [-span.low for layer in state.layers for span in layer.band.spans if span.low != -inf]
        if kept is not None and own and max(own) >= kept[1]:
            raise ValueError(
                f"StreamingCache: expected a window of at least {max(own) + 1:g}, the model's own, in the recipe, got "
                f"{kept[1]}: what the model stops seeing by itself cannot be told apart in the cache"
            )
        if kept is None:
            raise ValueError(
                "StreamingCache: expected a model extended with 'sink:sinks=…,size=…', or with 'rerope:window=…' and "
                "'lambda:sinks=…,window=…' of at least that window, and a temperature that counts visible keys, got "
                f"{str(state.recipe)!r}"
            )
        count = 1 + max(layer.index for layer in state.layers)
        super().__init__(layers=[StreamingLayer(*kept) for _ in range(count)])

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Positions are counted inside the cache."""
        return self.layers[layer_idx].held  # type: ignore[union-attr]


def _kept(recipe: Recipe) -> tuple[int, int] | None:
    """Sinks and window of a recipe that neither sees nor counts the tokens between; None for any other."""
    mask, position = recipe.mask, recipe.position
    if getattr(recipe.temperature, "count", "visible") != "visible" or not isinstance(mask, (Sink, Lambda)):
        return None
    size = mask.size if isinstance(mask, Sink) else mask.window
    if mask.region(True) != Sink(mask.sinks, size).region(True):
        return None
    capped = position is not None and _capped(position, size)
    return (mask.sinks, size) if capped else streaming(mask, position)


def _capped(position: Position, size: int) -> bool:
    """Whether keys `size` or more behind are met at one distance, as in ReRoPE: it does not matter which are left."""
    query, key = torch.arange(2)[None], torch.arange(2)[None]
    for branch in position.branches(query, key, 1):
        far = branch.region & band(-inf, 1 - size)
        placed = isinstance(branch.query, Tensor) or isinstance(branch.key, Tensor)
        if branch.slopes is not None or (far.spans and placed):
            return False
    return True
