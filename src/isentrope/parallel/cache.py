"""A key-value cache of which every process has a part, as the model of transformers takes it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from isentrope.parallel.rows import ShardedOffset
from isentrope.parallel.split import Split, intersect_ranges

FILLED_UNDER = "isentrope_recipe"  # attribute of a cache: the text of the recipe that its keys are for


class ShardedLayer(DynamicLayer):
    """The keys and values that this process has of a layer, in the order of their slots.

    All processes pass all new tokens; each keeps those that `split` gives it.

    Args:
        keys: of this process, (batch, kv_heads, tokens, size).
        values: the same.
        split: which process has which tokens of the whole.
        rank: of this process.
    """

    def __init__(self, keys: Tensor, values: Tensor, split: Split, rank: int) -> None:
        super().__init__()
        self.lazy_initialization(keys, values)
        self.keys, self.values, self.split, self.rank = keys, values, split, rank

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        assert self.keys is not None and self.values is not None
        first, new = self.split.length, key_states.shape[-2]
        self.split = self.split.append(new)
        own = intersect_ranges(self.split.chunks(self.rank), (range(first, first + new),))
        if own:
            self.keys, self.values = (
                torch.cat((old, *(x[..., r.start - first : r.stop - first, :] for r in own)), -2)
                for old, x in ((self.keys, key_states), (self.values, value_states))
            )
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self.split.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.split.length + query_length, ShardedOffset(self.split.appended)

    def reset(self) -> None:
        raise ValueError("cache: a cache in parts begins with a prompt; call prefill again")

    def crop(self, tokens_to_remove: int) -> None:
        """Remove tokens from the end; a positive number is the length to keep, as transformers had it before."""
        removed = self.split.length - tokens_to_remove if tokens_to_remove > 0 else -tokens_to_remove
        if removed > self.split.appended:
            raise ValueError(
                f"cache: expected at most {self.split.appended} tokens to remove, those after the prompt, got {removed}"
            )
        if removed > 0:
            assert self.keys is not None and self.values is not None
            self.split = self.split.append(-removed)
            count = self.split.count(self.rank)
            self.keys, self.values = self.keys[..., :count, :], self.values[..., :count, :]


def is_sharded(cache: object) -> bool:
    """Return whether a cache holds a part of the keys, and other processes the rest."""
    return isinstance(cache, Cache) and any(isinstance(layer, ShardedLayer) for layer in cache.layers)


def copy_mark(source: Cache, target: Cache) -> Cache:
    """Mark a cache as filled under the recipe of another, and return it."""
    setattr(target, FILLED_UNDER, getattr(source, FILLED_UNDER, None))
    return target
