"""Refuse a key-value cache that holds keys in another form than the recipe's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache

from isentrope.core.compile import values_are_readable
from isentrope.parallel.cache import FILLED_UNDER
from isentrope.utils.messages import truncate


class CacheRecipe:
    """Hooks on an extended model, which mark the caches that it fills with its recipe.

    Keys are cached unrotated, or rotated at the recipe's frequencies. Those of the plain model, of another recipe, or
    learned for the plain model (prefix tuning) would be rotated twice or not at all.

    Args:
        recipe: the text of the model's recipe.
    """

    def __init__(self, recipe: str) -> None:
        self.recipe = recipe

    def check(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """A hook before the model runs: mark an empty cache, and refuse one that was filled elsewhere."""
        cache = kwargs.get("past_key_values")
        if not isinstance(cache, Cache):
            return
        if torch.compiler.is_compiling():  # where the mark cannot be read without a graph for each of its values
            self._mark(cache)
            return
        if (filled_under := getattr(cache, FILLED_UNDER, None)) == self.recipe:
            return
        length: int | Tensor = cache.get_seq_length()
        if isinstance(length, Tensor) and not values_are_readable(length):
            return
        if length:
            own, origin = truncate(self.recipe), f"under {truncate(filled_under)}" if filled_under else "elsewhere"
            raise ValueError(
                f"past_key_values: expected an empty cache, or one that this model filled under {own}, got "
                f"{int(length)} tokens cached {origin}, whose keys are rotated otherwise; start a new cache "
                "(in place of PEFT's prefix tuning, use prompt tuning)"
            )
        self._mark(cache)

    def mark_output(self, module: nn.Module, args: Any, output: Any) -> None:
        """A hook after the model has run: mark the cache that it made."""
        values = output.values() if isinstance(output, dict) else output if isinstance(output, tuple) else ()
        for value in values:
            if isinstance(value, Cache):
                self._mark(value)

    def _mark(self, cache: Cache) -> None:
        setattr(cache, FILLED_UNDER, self.recipe)
