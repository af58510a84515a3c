"""Rotary position embeddings whose frequencies are changed pair by pair: LongRoPE, CoPE, Resonance."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import pi
from typing import Any, Self

import torch
from torch import Tensor

from isentrope.core.caching import get_constant
from isentrope.parts import MAX_FACTOR, MAX_HEAD_DIM, check_integer, check_numbers
from isentrope.positions.branch import ModelRotary
from isentrope.positions.rope import Rotary, TrainedLength, YaRN, rope_exponents

MIN_PAIR_FACTOR = 1e-3  # of LongRoPE: lists that were found by search have factors a little below 1


@dataclass(frozen=True)
class LongRoPE(TrainedLength):
    """θ_m = base^{-2m/d} / λ_m: a factor for each pair, found by search (Ding et al., 2024).

    λ is `factors`. With `short` or an original length L₀, rows of up to L₀ keys have the factors `short`, ones if they
    are left out, as in transformers; keys rotated for a shorter row then have the wrong angles, so raw keys are cached.
    Without `factors`, `extend` takes both lists and L₀ from the config of a model whose rope_type is longrope.

    These are the frequencies alone. Models with longrope also multiply scores by the square of their attention factor,
    1 + ln s / ln L₀ for an extension by s: `extend` keeps it, and for any other model it is the temperature
    `LogN(train_length=L₀)`, which has this value at s · L₀ keys. The true positions of the first tokens, which the
    paper keeps beside its factors, are not part of published configs and not of this method.

    Attributes:
        factors: λ, one for each pair.
        short: λ of rows of up to the original length.
    """

    factors: tuple[float, ...] | None = None
    short: tuple[float, ...] | None = None
    original_length: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("factors", "short"):
            if getattr(self, key) is not None:
                check_numbers(self, key, MIN_PAIR_FACTOR, MAX_FACTOR)
        if self.factors is None and (self.short is not None or self.original_length is not None):
            raise ValueError("LongRoPE(factors=…): expected factors beside short and original_length, got None")
        if self.factors is not None and self.short is not None and len(self.short) != len(self.factors):
            raise ValueError(
                f"LongRoPE(short=…): expected {len(self.factors)} numbers, one for each of factors, "
                f"got {len(self.short)}"
            )

    @property
    def keys_cacheable(self) -> bool:  # type: ignore[override]
        return self.factors is not None and self.short is None and self.original_length is None

    def resolve(self, train_length: int | None) -> Self:
        return self if self.short is None else super().resolve(train_length)

    def rotated_size(self, head_dim: int) -> int:
        dim = super().rotated_size(head_dim)
        if self.factors is not None and len(self.factors) != dim // 2:
            raise ValueError(
                f"LongRoPE(factors=…): expected {dim // 2} numbers, one for each rotated pair of a head, "
                f"got {len(self.factors)}"
            )
        return dim

    def frequencies(self, head_dim: int, length: Tensor | int, dtype: torch.dtype, device: torch.device) -> Tensor:
        if self.factors is None:
            raise ValueError(
                "LongRoPE(factors=…): expected a number for each pair, got None; give them, or extend a model whose "
                "config has them"
            )
        dim = self.rotated_size(head_dim)
        long = get_constant(_divided_frequencies, device, dim, self.rope_theta, self.factors, dtype)
        if self.keys_cacheable:
            return long
        factors = self.short or (1.0,) * (dim // 2)
        short = get_constant(_divided_frequencies, device, dim, self.rope_theta, factors, dtype)
        if isinstance(length, int):
            return long if length > self.require_original_length() else short
        return torch.where(length[..., None] > self.require_original_length(), long, short)

    def fit(self, model: ModelRotary) -> Self:
        if self.factors is None:
            return self._take_over(model)
        if model.kind == self.name():
            raise ValueError(
                f"{model.model_type}: its config has factors of its own; leave factors out, or load it with rope_type "
                "'default'"
            )
        fitted = super().fit(model)
        fitted.rotated_size(model.dim)
        if not fitted.keys_cacheable:
            fitted.require_original_length()
        return fitted

    def rescale(self, model: ModelRotary, length: Tensor | int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the method's own frequencies at the model's base."""
        return self.frequencies(model.dim, length, dtype, device)

    def _take_over(self, model: ModelRotary) -> Self:
        """Return the method with the factors of a model's config."""
        if model.kind != self.name():
            raise ValueError(
                f"{model.model_type}: its config has no factors for longrope (rope_type {model.kind!r}); add them as "
                "longrope:factors=(…), one for each pair"
            )
        values = model.parameters
        options: dict[str, Any] = {
            "factors": values["long_factor"],
            "short": values["short_factor"],
            "original_length": values["original_max_position_embeddings"],
        }
        self.check_base(model)
        return replace(self.match_model(model, model.base), **options)


@dataclass(frozen=True)
class CoPE(TrainedLength):
    """θ_m · ½ (1 + cos(π (m - a) / (c - 1))) for the last c pairs m = a …: softly clipped RoPE (Li et al., 2026).

    The slowest pair stands still, and the fade towards it is smooth: a hard cut would ring at long distances. c is
    `clip`; by default these are the pairs that do not complete a turn within the original length. θ is RoPE's, or that
    of a model, which may have a scaling of its own.

    Attributes:
        clip: c, the number of pairs that fade.
    """

    clip: int | None = None
    original_length: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.clip is not None:
            check_integer(self, "clip", 0, MAX_HEAD_DIM // 2)

    def resolve(self, train_length: int | None) -> Self:
        return self if self.clip is not None else super().resolve(train_length)

    def frequencies(self, head_dim: int, length: Tensor | int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._fade(super().frequencies(head_dim, length, dtype, device))

    def fit(self, model: ModelRotary) -> Self:
        fitted = _fit_own_frequencies(self, model)
        if self.clip is None:
            self.require_original_length()
        return fitted

    def rescale(self, model: ModelRotary, length: Tensor | int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the model's own frequencies with their fade."""
        return self._fade(model.theta.to(device, dtype))

    def _fade(self, theta: Tensor) -> Tensor:
        pairs = theta.shape[-1]
        pair = torch.arange(pairs, device=theta.device)
        slow = 2 * pi / theta > self.require_original_length() if self.clip is None else pair >= pairs - self.clip
        count = slow.sum()
        step = (pair - (pairs - count)).clamp_min(0).to(theta.dtype)
        return theta * (0.5 * (1 + torch.cos(pi * step / (count - 1).clamp_min(1))))


@dataclass(frozen=True)
class Resonance(YaRN):
    """2π / round(2π / θ_m) for YaRN's frequencies θ: whole wavelengths (Wang et al., 2024).

    A pair that completes a turn in training then has no new phase at any distance. With factor = 1, the default, θ is
    RoPE's, or that of a model, which may have a scaling of its own.
    """

    factor: float = 1.0

    def resolve(self, train_length: int | None) -> Self:
        return self if self.factor == 1 else super().resolve(train_length)

    def frequencies(self, head_dim: int, length: Tensor | int, dtype: torch.dtype, device: torch.device) -> Tensor:
        source = Rotary if self.factor == 1 else YaRN
        return _round_wavelengths(source.frequencies(self, head_dim, length, dtype, device))

    def fit(self, model: ModelRotary) -> Self:
        return _fit_own_frequencies(self, model) if self.factor == 1 else super().fit(model)

    def rescale(self, model: ModelRotary, length: Tensor | int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the model's own frequencies with whole wavelengths, those of YaRN in their place where it scales."""
        if self.factor == 1:
            return _round_wavelengths(model.theta.to(device, dtype))
        return self.frequencies(model.dim, length, dtype, device)


def _fit_own_frequencies(position: Any, model: ModelRotary) -> Any:
    """Return a method that changes the frequencies which a model has."""
    position.check_base(model)
    return position.match_model(model, model.base)


def _divided_frequencies(dim: int, base: float, factors: tuple[float, ...], dtype: torch.dtype) -> Tensor:
    # formed as transformers forms it, so that both round alike
    return 1.0 / (torch.tensor(factors, dtype=dtype) * base ** rope_exponents(dim, dtype))


def _round_wavelengths(theta: Tensor) -> Tensor:
    return 2 * pi / (2 * pi / theta).round().clamp_min(1)
