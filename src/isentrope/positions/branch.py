"""Branches: the rotary positions of queries and keys, region by region."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from isentrope.core.region import EVERYTHING, Region
from isentrope.parts import Part
from isentrope.utils.messages import advise_unscaled

Lengths = tuple[Tensor | int, Tensor | int]  # keys in the row or document of each query and of each key
RotaryPair = tuple[Tensor | float | None, Tensor | float | None]  # positions of queries and keys, as in a branch


@dataclass(frozen=True)
class Branch:
    """Inside `region`, query i is rotated to position `query`_i and key j to position `key`_j.

    Attributes:
        region: the pairs of queries and keys.
        query, key: positions (batch or 1, length), (batch or 1, length, groups) where they differ between groups of
            rotary pairs, one number for all, or None for no rotation.
        slopes: (heads,), for a bias -slope · |i - j| on the score.
        far: whether these are the keys beyond the window of a method that has one.
    """

    region: Region = field(default_factory=lambda: EVERYTHING)
    query: Tensor | float | None = None
    key: Tensor | float | None = None
    slopes: Tensor | None = None
    far: bool = False


# kinds of scaled frequencies, and models whatever their kind, that are trained at the length after scaling
TRAINED_SCALINGS = ("llama3", "longrope")
TRAINED_SCALED = ("gpt_oss", "deepseek_v2", "deepseek_v3", "ministral3", "mistral4")


@dataclass(frozen=True, eq=False)
class ModelRotary:
    """The rotary embedding of a model that a position method is applied to.

    Attributes:
        model_type: the model's name, for error messages.
        theta: its frequencies, (pairs,).
        layout: of its pairs, "half" or "interleaved".
        kind: `rope_type` of its config; "default" is θ_m = base^{-2m/d}, d = 2 · pairs.
        base: `rope_theta` of its config.
        parameters: all `rope_parameters` of its config.
    """

    model_type: str
    theta: Tensor
    layout: str = "half"
    kind: str = "default"
    base: float | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)

    @property
    def dim(self) -> int:
        """Number of entries of a head that are rotated."""
        return 2 * self.theta.shape[-1]

    @property
    def unscaled_advice(self) -> str | None:
        """How to load the model without its scaling; None where there is none, or the model was trained with it."""
        if self.kind in ("default", *TRAINED_SCALINGS) or self.model_type in TRAINED_SCALED:
            return None
        return advise_unscaled(self.parameters.get("original_max_position_embeddings"), self.base)

    def check_unscaled(self, name: str) -> None:
        """Check that the model's frequencies follow from its base alone.

        Raises:
            ValueError: the method `name` computes frequencies from the base, which would discard the model's scaling.
        """
        remedy = "use a method that keeps them, such as 'rerope' or 'selfextend'"
        if self.kind != "default":
            advice = self.unscaled_advice
            raise ValueError(
                f"{self.model_type}: its frequencies are already scaled (rope_type {self.kind!r}), and {name} would "
                f"replace them; {'the model was trained with them: ' if advice is None else f'{advice}, or '}{remedy}"
            )
        exponents = torch.arange(0, self.dim, 2, device=self.theta.device) / self.dim
        # bf16 frequencies are rounded to eight bits
        if self.base is None or not torch.allclose(self.theta.float(), self.base**-exponents, rtol=2**-8, atol=0):
            raise ValueError(
                f"{self.model_type}: its frequencies are not base^(-2m/{self.dim}) for rope_theta {self.base}, "
                f"and {name} would replace them; {remedy}"
            )


class Position(Part):
    """A position method: `branches` gives the positions of queries and keys, `frequencies` the angle per position.

    The regions of the branches are disjoint and cover every pair; attention merges them exactly.
    """

    rotates = False
    longest: int | None = None  # the longest supported row
    depends_on_place = False  # positions depend on where a pair is in the row, not on its distance alone
    keys_cacheable = True  # whether rotated keys may be cached: one branch, and angles independent of the length

    @property
    def near_window(self) -> int | None:
        """The distance from which on keys are far, in a method whose branches say which are; None in any other."""
        return None

    @property
    def has_far_keys(self) -> bool:
        """Whether branches say which keys are far, also while the window is still open."""
        return self.near_window is not None

    @property
    def far_keys_are_one_span(self) -> bool:
        """Whether every key beyond one distance is far, in one branch, so that `Retrieve` can choose among them."""
        return True

    @property
    def depends_on_row_length(self) -> bool:
        """Whether positions depend on the length of the row, keys that a cache has dropped included."""
        return False

    def branches(self, query: Tensor, key: Tensor, heads: int, lengths: Lengths) -> tuple[Branch, ...]:
        """Return the branches for queries and keys at these positions.

        Args:
            query: positions, (batch or 1, queries).
            key: positions, (batch or 1, keys).
            heads: of the queries.
            lengths: number of keys in the row or document of each query and of each key: integers of the same shapes,
                or plain ones where rows are whole sequences. A method whose map depends on them has
                `keys_cacheable = False`; at each step of decoding they count the keys so far.
        """
        raise NotImplementedError

    def frequencies(self, head_dim: int, length: Tensor | int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return θ (pairs,) of a method that rotates, or (…, pairs) where it depends on the length (…) of the row."""
        raise NotImplementedError

    def fit(self, model: ModelRotary) -> Position:
        """Return the method with open options filled in from a model.

        Raises:
            ValueError: the method does not work with the model's rotary embedding.
        """
        return self

    def rescale(self, model: ModelRotary, length: Tensor | int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the frequencies of a fitted method on a model with its own, `model.theta`."""
        raise ValueError(
            f"{self.name()}: cannot rescale a model's own frequencies; implement "
            f"{type(self).__name__}.rescale(model, length, dtype, device) to extend a model with it"
        )

    def cache_key(self) -> Hashable:
        """Return what angles depend on besides the part's own options; angles with an equal key may be cached."""
        return None

    def resolve(self, train_length: int | None) -> Position:
        """Return the method with a missing training length filled in."""
        return self


@dataclass(frozen=True)
class NoPE(Position):
    """s(q_i, k_j) without rotation or bias: no position information (Kazemnejad et al., 2023)."""

    needs_training = True

    def branches(self, query: Tensor, key: Tensor, heads: int, lengths: Lengths) -> tuple[Branch, ...]:
        return (Branch(),)
