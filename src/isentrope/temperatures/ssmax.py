"""Scalable-Softmax: a learned temperature."""

from __future__ import annotations

from math import log

import torch
from torch import Tensor, nn

from isentrope.core.dtypes import lengths_as_float
from isentrope.parts import MAX_HEADS, Part, check_bool, check_choice, check_integer
from isentrope.temperatures.laws import COUNTS, KEYS
from isentrope.utils.messages import format_value


class SSMax(nn.Module, Part):
    """τ = s_h · ln n (+ b_h), Scalable-Softmax (Nakanishi, 2025): one learned slope per head h.

    Slopes start at the reciprocal of the mean of ln n over 1 … init_length, so that training starts near τ = 1.

    Attributes:
        init_length: n up to which τ is 1 on average at the start.
        bias: whether b_h is learned too.
        clamp: always false: a learned law has no length with τ = 1.
        count: what n counts: "visible" keys, those of the "sequence", or the "position" + 1.
        keys: whose scores τ multiplies: "all", "near" or "far".
    """

    needs_training = True
    learns = True

    def __init__(
        self,
        heads: int,
        init_length: int = 1024,
        bias: bool = False,
        *,
        clamp: bool = False,
        count: str = "visible",
        keys: str = "all",
    ) -> None:
        super().__init__()
        self.heads, self.init_length, self.bias, self.clamp, self.count = heads, init_length, bias, clamp, count
        self.keys = keys
        check_integer(self, "heads", 1, MAX_HEADS)
        check_integer(self, "init_length", 4)
        check_bool(self, "bias")
        check_choice(self, "count", COUNTS)
        check_choice(self, "keys", KEYS)
        if clamp is not False:
            raise ValueError(
                f"SSMax(clamp=…): expected False, a learned law has no length with τ = 1, got {format_value(clamp)}"
            )
        self.slope = nn.Parameter(torch.empty(self.heads))
        self.offset = nn.Parameter(torch.empty(self.heads)) if bias else None
        self.reset()

    def reset(self) -> None:
        """Initialise the parameters."""
        nn.init.constant_(self.slope, 1 / (log(self.init_length) - 1))
        if self.offset is not None:
            nn.init.zeros_(self.offset)

    def scale(self, n: Tensor, head_dim: int) -> Tensor:
        """Return τ (…, heads, queries) for n (…, 1, queries), or (heads, queries) for n (queries)."""
        n = lengths_as_float(n)
        tau = self.slope.to(n.dtype)[:, None] * torch.log(n)
        return tau if self.offset is None else tau + self.offset.to(n.dtype)[:, None]

    def for_layer(self, layer: int) -> SSMax:
        return self
