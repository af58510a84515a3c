"""Refuse a key-value cache that holds keys in another form than the recipe's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache

from isentrope.core.compile import values_are_readable
from isentrope.hf.layout_cache import LayoutCache
from isentrope.parallel.cache import FILLED_UNDER
from isentrope.utils.messages import truncate

MADE_FOR = "isentrope_made_for"  # attribute of a cache that drops keys: the recipe that never sees them


class CacheRecipe:
    """Hooks on an extended model, which mark the caches that it fills with its recipe.

    Keys are cached unrotated, or rotated at the recipe's frequencies. Those of the plain model, of another recipe, or
    learned for the plain model (prefix tuning) would be rotated twice or not at all.

    Args:
        text: the model's recipe.
        changes_keys: whether it caches keys otherwise than the plain model.
        layouts: of the model, where it is noted whether a pass is over a cache that drops keys.
    """

    def __init__(self, text: str, changes_keys: bool, layouts: LayoutCache) -> None:
        self.text, self.recipe, self.layouts = text, text if changes_keys else None, layouts

    def check(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """A hook before the model runs: mark an empty cache, and refuse one that was filled elsewhere."""
        cache = next((x for x in (kwargs.get("past_key_values"), *args) if isinstance(x, Cache)), None)
        made_for: str | None = getattr(cache, MADE_FOR, None)
        if not torch.compiler.is_compiling():
            self.layouts.set_evicting(made_for is not None)
        if cache is None:
            return
        if torch.compiler.is_compiling():  # where the mark cannot be read without a graph for each of its values
            self._mark(cache)
            return
        if made_for is not None and made_for != self.text:
            raise ValueError(
                f"past_key_values: expected a StreamingCache made for {truncate(self.text)}, got one made for "
                f"{truncate(made_for)}, which keeps other keys; make a new one"
            )
        if (filled_under := getattr(cache, FILLED_UNDER, None)) == self.recipe:
            return
        length: int | Tensor = cache.get_seq_length()
        if isinstance(length, Tensor) and not values_are_readable(length):
            return
        if length:
            expected = (
                "with keys of the plain model" if self.recipe is None else f"filled under {truncate(self.recipe)}"
            )
            raise ValueError(
                f"past_key_values: expected an empty cache, or one {expected}, got {int(length)} tokens "
                f"{_describe_origin(filled_under)}"
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


def _describe_origin(filled_under: str | None) -> str:
    """Say where a cache was filled, and what to do instead."""
    if filled_under is not None:
        return f"cached under {truncate(filled_under)}; start a new cache"
    return (
        "cached elsewhere, whose keys may be rotated otherwise; start a new cache (in place of PEFT's prefix tuning, "
        f"use prompt tuning), or, if its keys are this model's own, copy {FILLED_UNDER} of the cache they are from"
    )
