"""Rotary position embeddings with one angle per distance: RoPE, PI, NTK, YaRN."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import ceil, floor, log, pi
from typing import Self

import torch
from torch import Tensor

from isentrope.core.caching import get_constant
from isentrope.parts import MAX_BASE, MAX_FACTOR, MAX_HEAD_DIM, check_bool, check_choice, check_integer, check_number
from isentrope.positions.branch import Branch, Lengths, ModelRotary, Position

LAYOUTS = ("half", "interleaved")
DEFAULT_BASE = 10000.0
MAX_ROTATIONS = 1e6  # of a pair within the original length


@dataclass(frozen=True)
class Rotary(Position):
    """Pair m of a vector at position p is rotated by p · θ_m.

    Attributes:
        base: of the frequencies: by default the model's, and 10,000 without a model.
        layout: pairs are (m, m + d/2), "half" as in Llama, or (2m, 2m + 1), "interleaved" as in GAU-α.
        rotary_dim: number of entries that are rotated, from the first; all by default.
    """

    base: float | None = field(default=None, kw_only=True)
    layout: str = field(default="half", kw_only=True)
    rotary_dim: int | None = field(default=None, kw_only=True)
    rotates = True

    def __post_init__(self) -> None:
        if self.base is not None:
            check_number(self, "base", MAX_BASE, above=1)
        check_choice(self, "layout", LAYOUTS)
        if self.rotary_dim is not None:
            check_integer(self, "rotary_dim", 2, MAX_HEAD_DIM)
            if self.rotary_dim % 2:
                raise ValueError(f"{type(self).__name__}(rotary_dim=…): expected an even number, got {self.rotary_dim}")

    @property
    def rope_theta(self) -> float:
        """The base of the frequencies."""
        return DEFAULT_BASE if self.base is None else self.base

    def rotated_size(self, head_dim: int) -> int:
        """Return the number of entries of a head that are rotated."""
        dim = head_dim if self.rotary_dim is None else self.rotary_dim
        if dim % 2:
            raise ValueError(f"{type(self).__name__}: expected an even head size to rotate in pairs, got {dim}")
        if dim > head_dim:
            raise ValueError(
                f"{type(self).__name__}(rotary_dim=…): expected at most the head size {head_dim}, got {dim}"
            )
        return dim

    def frequencies(self, head_dim: int, length: Tensor | int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return get_constant(rope_frequencies, device, self.rotated_size(head_dim), self.rope_theta, dtype)

    def branches(self, query: Tensor, key: Tensor, heads: int, lengths: Lengths) -> tuple[Branch, ...]:
        return (Branch(query=query, key=key),)

    def fit(self, model: ModelRotary) -> Self:
        if self.base in (None, model.base):
            model.check_unscaled(self.name())
        return self.match_model(model, self.base or model.base)

    def rescale(self, model: ModelRotary, length: Tensor | int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the method's own `frequencies` at the model's base, which replace the model's."""
        return self.frequencies(model.dim, length, dtype, device)

    def check_base(self, model: ModelRotary) -> None:
        """Check that a method which keeps or changes the model's frequencies is not given another base.

        Raises:
            ValueError: it is.
        """
        if self.base not in (None, model.base):
            raise ValueError(f"{model.model_type}: {self.name()} starts from the model's frequencies; leave base out")

    def match_model(self, model: ModelRotary, base: float | None) -> Self:
        """Return the method with the model's layout and number of rotated entries."""
        if self.layout not in (Rotary.layout, model.layout):
            raise ValueError(
                f"{model.model_type}: its pairs are laid out {model.layout!r}, the recipe's {self.layout!r}; "
                "leave layout out"
            )
        if self.rotary_dim not in (None, model.dim):
            raise ValueError(
                f"{model.model_type}: rotates {model.dim} entries of a head, the recipe {self.rotary_dim}; "
                "leave rotary_dim out"
            )
        return replace(self, base=base, layout=model.layout, rotary_dim=model.dim)


@dataclass(frozen=True)
class RoPE(Rotary):
    """θ_m = base^{-2m/d} (Su et al., 2021)."""

    base: float | None = None
    layout: str = "half"
    rotary_dim: int | None = None

    def fit(self, model: ModelRotary) -> Self:
        return self.match_model(model, self.base)

    def rescale(self, model: ModelRotary, length: Tensor | int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the model's own frequencies, unless the recipe has another base."""
        if self.base in (None, model.base):
            return model.theta.to(device, dtype)
        return super().rescale(model, length, dtype, device)


@dataclass(frozen=True)
class PI(Rotary):
    """θ_m = base^{-2m/d} / factor: positions divided by the factor, position interpolation (Chen et al., 2023).

    Attributes:
        factor: by which positions are divided: the length to read, over the training length.
    """

    factor: float

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "factor", MAX_FACTOR, minimum=1)

    def frequencies(self, head_dim: int, length: Tensor | int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return super().frequencies(head_dim, length, dtype, device) / self.factor

    def fit(self, model: ModelRotary) -> Self:
        self.check_base(model)
        return self.match_model(model, model.base)

    def rescale(self, model: ModelRotary, length: Tensor | int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return model.theta.to(device, dtype) / self.factor


@dataclass(frozen=True)
class PositionMap(Rotary):
    """A method that changes positions, in `branches`, and keeps the frequencies that a model has."""

    def fit(self, model: ModelRotary) -> Self:
        self.check_base(model)
        return self.match_model(model, self.base)

    def rescale(self, model: ModelRotary, length: Tensor | int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the model's own frequencies."""
        return model.theta.to(device, dtype)


class TrainedLength(Rotary):
    """A method that depends on the length the model was trained at.

    Attributes:
        original_length: L₀, the training length; by default the model's own.
    """

    original_length: int | None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.original_length is not None:
            check_integer(self, "original_length", 1)

    def resolve(self, train_length: int | None) -> Self:
        if self.original_length is None and train_length is not None:
            return replace(self, original_length=train_length)  # type: ignore[call-arg]
        return self

    def require_original_length(self) -> int:
        """Return the length the model was trained at.

        Raises:
            ValueError: it was not given.
        """
        if self.original_length is None:
            raise ValueError(
                f"{type(self).__name__}(original_length=…): expected the length the model was trained at, got None; "
                "set it, or add a temperature that has a train_length"
            )
        return self.original_length


@dataclass(frozen=True)
class NTK(TrainedLength):
    """θ_m = (base · s^{d/(d-2)})^{-2m/d}: NTK-aware scaling (bloc97, 2023).

    Static: s = factor. Dynamic: s = factor · L / L₀ - (factor - 1) for a row of L > L₀ keys, and 1 below, as in
    transformers; keys rotated for a shorter row then have the wrong angles. L₀ is the original length.

    Attributes:
        factor: s: the length to read, over the training length.
        dynamic: whether s grows with the row, and is 1 inside the original length.
    """

    factor: float
    dynamic: bool = False
    original_length: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "factor", MAX_FACTOR, minimum=1)
        check_bool(self, "dynamic")

    @property
    def keys_cacheable(self) -> bool:  # type: ignore[override]
        return not self.dynamic

    def fit(self, model: ModelRotary) -> Self:
        fitted = super().fit(model)
        if self.dynamic:
            self.require_original_length()
        return fitted

    def frequencies(self, head_dim: int, length: Tensor | int, dtype: torch.dtype, device: torch.device) -> Tensor:
        dim = self.rotated_size(head_dim)
        if dim == 2:
            raise ValueError("NTK: expected at least two rotated pairs, got one: its angle cannot change")
        if not self.dynamic:
            base = self.rope_theta * self.factor ** (dim / (dim - 2))
            return get_constant(rope_frequencies, device, dim, base, dtype)
        ratio = torch.as_tensor(length, device=device).to(dtype) / self.require_original_length()
        stretch = (self.factor * ratio - (self.factor - 1)).clamp_min(1)
        return rope_frequencies(dim, self.rope_theta * stretch[..., None] ** (dim / (dim - 2)), dtype)


@dataclass(frozen=True)
class YaRN(TrainedLength):
    """θ'_i = (θ_i / s)(1 - m_i) + θ_i m_i: slow pairs interpolated, fast ones kept (Peng et al., 2023).

    m_i = 1 - clamp((i - low) / (high - low), 0, 1), where low and high are the pairs that make `beta_fast` and
    `beta_slow` rotations within the original length L₀: pair(r) = d ln(L₀ / 2πr) / (2 ln base). These are the
    frequencies alone: YaRN as published is this and `YaRNTemperature(factor=s)`.

    Attributes:
        factor: s: the length to read, over the training length.
        beta_fast: pairs with more rotations are kept.
        beta_slow: pairs with fewer rotations are divided by s.
    """

    factor: float
    original_length: int | None = None
    beta_fast: float = field(default=32.0, kw_only=True)
    beta_slow: float = field(default=1.0, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "factor", MAX_FACTOR, minimum=1)
        check_number(self, "beta_fast", MAX_ROTATIONS, minimum=1 / MAX_ROTATIONS)
        check_number(self, "beta_slow", MAX_ROTATIONS, minimum=1 / MAX_ROTATIONS)

    def fit(self, model: ModelRotary) -> Self:
        fitted = super().fit(model)
        self.require_original_length()
        return fitted

    def frequencies(self, head_dim: int, length: Tensor | int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return get_constant(YaRN._frequencies, device, self, self.rotated_size(head_dim), dtype)

    def _frequencies(self, dim: int, dtype: torch.dtype) -> Tensor:
        def pair_with(rotations: float) -> float:
            return dim * log(self.require_original_length() / (2 * pi * rotations)) / (2 * log(self.rope_theta))

        low = max(floor(pair_with(self.beta_fast)), 0)
        high = min(ceil(pair_with(self.beta_slow)), dim - 1)
        if low == high:
            high += 0.001  # type: ignore[assignment]  # avoids dividing by zero
        theta = rope_frequencies(dim, self.rope_theta, dtype)
        m = 1 - ((torch.arange(dim // 2, dtype=dtype) - low) / (high - low)).clamp(0, 1)
        return theta / self.factor * (1 - m) + theta * m


def rope_frequencies(dim: int, base: float | Tensor, dtype: torch.dtype) -> Tensor:
    """Return base^{-2m/dim} for m = 0 … dim/2 - 1; a base (…, 1) gives (…, dim/2)."""
    device = base.device if isinstance(base, Tensor) else None
    return 1.0 / base ** rope_exponents(dim, dtype, device)


def rope_exponents(dim: int, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """Return 2m/dim for m = 0 … dim/2 - 1."""
    return torch.arange(0, dim, 2, dtype=torch.int64, device=device).to(dtype) / dim
