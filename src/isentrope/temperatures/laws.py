"""Temperature laws in closed form: each class is one formula, its method `law`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import e, log
from typing import Any

import torch
from torch import Tensor

from isentrope.core.compile import values_are_readable
from isentrope.core.dtypes import lengths_as_float
from isentrope.head_tables import broadcast_heads, check_table, take_layer
from isentrope.parts import (
    MAX_EXPONENT,
    MAX_FACTOR,
    MAX_LENGTH,
    MAX_TEMPERATURE,
    Part,
    check_bool,
    check_choice,
    check_integer,
    check_number,
)
from isentrope.utils.messages import format_value

COUNTS = ("visible", "sequence", "position")
KEYS = ("all", "near", "far")
MIN_BASE = 1.01  # of Softmax Plus, where τ = 100 ln n
MAX_COEFFICIENT = 100.0  # of Llama 4
DEFAULT_GAMMA = 0.63  # of Power, times ln n_tr
# Attention entropy in nats: at most ln 2^53, and ln n_tr must exceed it by the margin for τ to be finite.
MIN_ENTROPY, MAX_ENTROPY, ENTROPY_MARGIN = -20.0, 36.0, 1e-3


@dataclass(frozen=True)
class Temperature(Part):
    """τ(n): the factor of the scores of a query that attends over n keys.

    Attributes:
        clamp: whether τ = 1 for n ≤ `unit_length`, which leaves short inputs unchanged.
        count: what n counts. "visible": keys that the query sees after all masks; "sequence": unpadded keys of its row,
            or of its document; "position": its position + 1.
        keys: whose scores τ multiplies: "all", or those of one branch of a position method that has a window, the keys
            inside it ("near", with the query's own) or beyond it ("far"). In a layer that keeps a window of its own
            and its positions, all keys are near.
    """

    clamp: bool = field(default=True, kw_only=True)
    count: str = field(default="visible", kw_only=True)
    keys: str = field(default="all", kw_only=True)

    def __post_init__(self) -> None:
        check_bool(self, "clamp")
        check_choice(self, "count", COUNTS)
        check_choice(self, "keys", KEYS)

    @property
    def unit_length(self) -> float:
        """The length at which τ = 1."""
        raise NotImplementedError

    def law(self, n: Tensor, head_dim: int) -> Tensor:
        """Return τ(n) by the formula alone, for a float tensor n."""
        raise NotImplementedError

    def scale(self, n: Tensor, head_dim: int) -> Tensor:
        """Return τ for each entry of n, clamped if `clamp`, in fp32 or wider."""
        n = lengths_as_float(n)
        if not self.clamp:
            return self.law(n, head_dim)
        longer = n.clamp_min(self.unit_length)  # the law may be undefined below
        return torch.where(n > self.unit_length, self.law(longer, head_dim), torch.ones_like(n))

    def idle(self, length: int) -> bool:
        return self.clamp and length <= self.unit_length

    def for_layer(self, layer: int) -> Temperature:
        """Return the law of one layer; all layers have the same unless a law says otherwise."""
        return self


@dataclass(frozen=True)
class Constant(Temperature):
    """τ = 1: vanilla attention (Vaswani et al., 2017)."""

    @property
    def unit_length(self) -> float:
        return 1

    def law(self, n: Tensor, head_dim: int) -> Tensor:
        return torch.ones_like(n)


@dataclass(frozen=True)
class LogLength(Temperature):
    """τ = ln n (Chiang & Cholak, 2022)."""

    @property
    def unit_length(self) -> float:
        return e

    def law(self, n: Tensor, head_dim: int) -> Tensor:
        return torch.log(n)


@dataclass(frozen=True)
class SoftmaxPlus(Temperature):
    """τ = ln n / ln base, GAU-α's Softmax Plus (Su et al., 2022), published with base 512.

    Attributes:
        base: n at which τ = 1.
    """

    base: float = 512.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "base", MAX_LENGTH, above=MIN_BASE)

    @property
    def unit_length(self) -> float:
        return self.base

    def law(self, n: Tensor, head_dim: int) -> Tensor:
        return torch.log(n) / log(self.base)


@dataclass(frozen=True)
class LogN(Temperature):
    """τ = ln n / ln n_tr (Su, 2021), as in Qwen's log-n attention."""

    train_length: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer(self, "train_length", 2)

    @property
    def unit_length(self) -> float:
        return self.train_length

    def law(self, n: Tensor, head_dim: int) -> Tensor:
        return torch.log(n) / log(self.train_length)


@dataclass(frozen=True)
class Power(Temperature):
    """τ = (n / n_tr)^γ and at most 1000, γ = 0.63 / ln n_tr by default.

    Attributes:
        train_length: n_tr.
        gamma: γ, a number, a table (heads) or a table (layers, heads). The default is closer to 75 temperatures that
            were fitted to text, of five models, than InfoScale and LogN are.
    """

    train_length: int
    gamma: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer(self, "train_length", 2)
        if self.gamma is not None:
            check_table(self, "gamma", -MAX_EXPONENT, MAX_EXPONENT)

    @property
    def unit_length(self) -> float:
        return self.train_length

    def for_layer(self, layer: int) -> Power:
        return self if (row := take_layer(self, self.gamma, layer)) is self.gamma else replace(self, gamma=row)

    def law(self, n: Tensor, head_dim: int) -> Tensor:
        gamma = DEFAULT_GAMMA / log(self.train_length) if self.gamma is None else self.gamma
        tau = torch.exp(broadcast_heads(self, gamma, n) * torch.log(n / self.train_length))
        return tau.clamp_max(MAX_TEMPERATURE)


@dataclass(frozen=True)
class YaRNTemperature(Temperature):
    """τ = (0.1 ln(n / n_tr) + 1)², YaRN's pre-softmax scaling (Peng et al., 2023).

    With `factor` in place of `train_length`, the static form (0.1 ln factor + 1)² at every length, as YaRN is
    published; it is not clamped.

    Attributes:
        factor: YaRN's own factor s, for the static form.
    """

    train_length: int | None = None
    factor: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.train_length is None) == (self.factor is None):
            raise ValueError(
                "YaRNTemperature: expected either train_length or factor, "
                f"got train_length={format_value(self.train_length)}, factor={format_value(self.factor)}"
            )
        if self.train_length is None:
            check_number(self, "factor", MAX_FACTOR, minimum=1)
        else:
            check_integer(self, "train_length", 1)

    @property
    def unit_length(self) -> float:
        return 0 if self.train_length is None else self.train_length

    def law(self, n: Tensor, head_dim: int) -> Tensor:
        stretch = n / self.train_length if self.train_length is not None else torch.full_like(n, self.factor or 1)
        return (0.1 * torch.log(stretch) + 1) ** 2


@dataclass(frozen=True)
class InfoScale(Temperature):
    """τ = √(f(n) / f(n_tr)),  f(m) = 1 - e^{2ε/d} m^{-2/d}: the temperature that keeps attention entropy at ε.

    n_tr is the training length, d the head size; ε = 0 in the paper. Needs ln n > ε and ln n_tr > ε. Source: Li et al.,
    2025, "Information Entropy Invariance", Eq. 13–15.

    Attributes:
        epsilon: ε, in nats.
    """

    train_length: int
    epsilon: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer(self, "train_length", 1)
        check_number(self, "epsilon", MAX_ENTROPY, minimum=MIN_ENTROPY)
        if log(self.train_length) <= self.epsilon + ENTROPY_MARGIN:
            raise ValueError(self._describe_undefined(f"ln train_length > epsilon + {ENTROPY_MARGIN:g}"))

    def _describe_undefined(self, need: str, n: str = "") -> str:
        got = f"{n}train_length={self.train_length}, epsilon={self.epsilon:g}"
        return f"{type(self).__name__}: expected {need}, got {got}; lower epsilon"

    @property
    def unit_length(self) -> float:
        return self.train_length

    def law(self, n: Tensor, head_dim: int) -> Tensor:
        if not self.clamp and values_are_readable(n) and bool((n.log() <= self.epsilon).any()):
            raise ValueError(self._describe_undefined("ln n > epsilon", f"n={n.min().item():g}, "))
        return self._unscaled_tau(n, head_dim) / self._unscaled_tau(n.new_full((), self.train_length), head_dim)

    def _unscaled_tau(self, n: Tensor, head_dim: int) -> Tensor:
        """Return √f(n), with f as -expm1(-2 (ln n - ε) / d), which stays accurate for large d."""
        return torch.sqrt(-torch.expm1(-2 * (torch.log(n) - self.epsilon) / head_dim))


@dataclass(frozen=True)
class InfoScaleExact(InfoScale):
    """τ = g(n) / g(n_tr),  g(m) = √(1 - y) / y,  y = e^{2ε/d} m^{-2/d}: InfoScale without its Taylor step.

    Source: Li et al., 2025, "Information Entropy Invariance", Eq. 10.
    """

    def _unscaled_tau(self, n: Tensor, head_dim: int) -> Tensor:
        exponent = 2 * (torch.log(n) - self.epsilon) / head_dim
        return torch.sqrt(-torch.expm1(-exponent)) * torch.exp(exponent)


@dataclass(frozen=True)
class Llama4(Temperature):
    """τ = 1 + coefficient · ln(1 + ⌊(i + 1) / floor⌋) at position i, Llama 4's temperature tuning (Meta, 2025).

    Attributes:
        floor: positions of one step.
        coefficient: height of the steps.
    """

    floor: int = 8192
    coefficient: float = 0.1
    count: str = field(default="position", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer(self, "floor", 1)
        check_number(self, "coefficient", MAX_COEFFICIENT, minimum=0)

    @property
    def unit_length(self) -> float:
        return self.floor - 1

    def law(self, n: Tensor, head_dim: int) -> Tensor:
        return 1 + self.coefficient * torch.log1p(torch.floor(n / self.floor))
