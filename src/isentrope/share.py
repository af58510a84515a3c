"""The share law: a bias that keeps far keys from taking over attention as their number grows."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from isentrope.core.dtypes import lengths_as_float
from isentrope.head_tables import broadcast_heads, check_table, take_layer
from isentrope.parts import MAX_EXPONENT, Part, check_choice, check_integer

COUNTS = ("far", "visible")
DEFAULT_BETA = 0.5


@dataclass(frozen=True)
class Share(Part):
    """Far logits s - β ln(max(n_far / n_ref, 1)), where n_far keys are beyond the window of a position method.

    The weight of n_far keys of noise grows like n_far: with β = 1 they keep the share of attention that they had in
    training, with β = 0 they have all that they take.

    What is best mostly lies between, and depends on how much more a longer text holds that matters: ½ is at most half
    of the way off, and lowered the perplexity of every model that it was measured on (docs/laws.md).

    Attributes:
        beta: β, a number, a table (heads) or a table (layers, heads).
        reference: n_ref, the keys that a query saw in training; by default n_tr - window and at least 1 where far keys
            count, n_tr where all do.
        count: what n_far counts: the "far" keys that a query sees, or all "visible" ones.
        sinks: how many keys at the beginning of a text count as near ones at any distance: attention sinks, where
            models put attention that no key deserves (Xiao et al., 2023), lose their weight to a bias otherwise.
    """

    beta: Any = DEFAULT_BETA
    reference: int | None = None
    count: str = field(default="far", kw_only=True)
    sinks: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        check_integer(self, "sinks", 0)
        check_table(self, "beta", -MAX_EXPONENT, MAX_EXPONENT)
        check_choice(self, "count", COUNTS)
        if self.reference is not None:
            check_integer(self, "reference", 1)

    def bias(self, n_far: Tensor) -> Tensor:
        """Return the bias of queries with n_far far keys, (…, 1, queries): (…, heads or 1, queries), in fp32 or wider.

        Raises:
            ValueError: there is no reference, or the table has a layer axis.
        """
        if self.reference is None:
            raise ValueError(
                "Share: expected a reference, or a training length to compute it from, got neither; write "
                "share:beta=…,reference=… or add a temperature with a train_length"
            )
        n_far = lengths_as_float(n_far)
        return -broadcast_heads(self, self.beta, n_far) * torch.log(n_far / self.reference).clamp_min(0)

    def changes(self, keys: int, window: int) -> bool:
        """Return whether rows of so many keys have a bias, with a position method of this window."""
        most = keys - window if self.count == "far" else keys
        return self.reference is None or most > self.reference

    def resolve(self, train_length: int | None, window: int | None) -> Share:
        """Return the law with a missing reference filled in, where training length and window are known."""
        if self.reference is not None or train_length is None or window is None:
            return self
        return replace(self, reference=max(1, train_length - window) if self.count == "far" else train_length)

    def for_layer(self, layer: int) -> Share:
        """Return the law of one layer."""
        return self if (row := take_layer(self, self.beta, layer)) is self.beta else replace(self, beta=row)

    def idle(self, length: int) -> bool:
        return True  # by itself: `Recipe.idle` asks whether there are far keys that it changes
