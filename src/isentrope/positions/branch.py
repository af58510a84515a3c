"""What a position method yields: at which rotary positions queries and keys meet, region by region."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from isentrope.core.region import EVERYTHING, Region
from isentrope.parts import Part


@dataclass(frozen=True)
class Branch:
    """Inside `region`, query i and key j meet rotated to the positions `query`_i and `key`_j.

    query, key: real positions (batch or 1, length), one number for all, or None for no rotation.
    slopes: (heads,), a bias -slope · |i - j| on the score.
    """

    region: Region = field(default_factory=lambda: EVERYTHING)
    query: Tensor | float | None = None
    key: Tensor | float | None = None
    slopes: Tensor | None = None


@dataclass(frozen=True, eq=False)
class ModelRotary:
    """The rotary embedding of a model that a position method is applied to.

    theta: its frequencies now, (pairs,). layout: of its pairs, "half" or "interleaved".
    kind, base: `rope_type` and `rope_theta` of its config; "default" is θ_m = base^{-2m/d}, d = 2 · pairs.
    """

    model_type: str
    theta: Tensor
    layout: str = "half"
    kind: str = "default"
    base: float | None = None

    @property
    def dim(self) -> int:
        """How many entries of a head turn."""
        return 2 * self.theta.shape[-1]

    def check_unscaled(self, name: str) -> None:
        """Raise ValueError where frequencies computed from the base alone would lose what the model has."""
        advice = "take 'rerope', 'leakyrerope', 'selfextend' or 'pi', which keep them"
        if self.kind != "default":
            raise ValueError(
                f"{self.model_type}: its frequencies are already scaled (rope_type {self.kind!r}), and {name} would "
                f"replace them; load it with rope_type 'default', or {advice}"
            )
        exponents = torch.arange(0, self.dim, 2, device=self.theta.device) / self.dim
        # a model in half precision may have rounded them: bf16 keeps eight bits
        if self.base is None or not torch.allclose(self.theta.float(), self.base**-exponents, rtol=2**-8, atol=0):
            raise ValueError(
                f"{self.model_type}: its frequencies are not base^(-2m/{self.dim}) for rope_theta {self.base}, "
                f"and {name} would replace them; {advice}"
            )


class Position(Part):
    """A position method: `branches` says where queries and keys meet, `frequencies` how fast angles turn.

    The regions of the branches are disjoint and cover every pair; attention merges them exactly.
    """

    rotates = False
    # the longest row that a method is made for, where it has one
    longest: int | None = None
    # keys rotated once may stay in a cache: one branch, and angles that do not depend on the length
    keys_cacheable = True

    def branches(self, query: Tensor, key: Tensor, heads: int) -> tuple[Branch, ...]:
        """query (batch or 1, queries), key (batch or 1, keys): the positions of this call."""
        raise NotImplementedError

    def frequencies(self, head_dim: int, length: Tensor | int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """θ (pairs,) of a method that rotates, or (…, pairs) where it depends on the length (…) of the row."""
        raise NotImplementedError

    def fit(self, model: ModelRotary) -> Position:
        """The method with what it leaves open taken from a model, or a ValueError where the two exclude each other."""
        return self

    def rescale(self, model: ModelRotary, length: Tensor | int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """`frequencies` of a fitted method on a model that has its own, `model.theta`."""
        raise ValueError(
            f"{self.name()}: does not say what it makes of a model's own frequencies; implement "
            f"{type(self).__name__}.rescale(model, length, dtype, device) to extend a model with it"
        )

    def cache_key(self) -> Hashable:
        """What angles depend on besides the part's own options; where it is the same they may be kept."""
        return None

    def resolve(self, train_length: int | None) -> Position:
        """The method with a training length it was not given filled in."""
        return self


@dataclass(frozen=True)
class NoPE(Position):
    """No position information at all."""

    needs_training = True

    def branches(self, query: Tensor, key: Tensor, heads: int) -> tuple[Branch, ...]:
        return (Branch(),)
