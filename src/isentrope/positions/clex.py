"""CLEX: rotary frequencies learned as a continuous function of the length."""

from __future__ import annotations

from math import log
from typing import Any

import torch
from torch import Tensor, nn

from isentrope.core.caching import get_constant
from isentrope.core.compile import can_run_triton
from isentrope.core.rotation import is_transformed
from isentrope.parts import MAX_BASE, check_choice, check_integer, check_number
from isentrope.positions.branch import Branch, Lengths, ModelRotary, Position
from isentrope.positions.rope import DEFAULT_BASE, LAYOUTS, rope_exponents
from isentrope.utils.messages import format_value

# weights are dim/2 × hidden, and each t up to max_factor costs a few small kernels
MAX_DIM, MAX_HIDDEN, MAX_TRAINED_FACTOR = 1 << 12, 1 << 14, 1 << 16


class CLEX(nn.Module, Position):
    """d ln θ / dt = W_down tanh(W_up (ln θ + ln θ_ntk(t))) + d ln θ_ntk / dt, from t = 1 on (Chen et al., 2023).

    θ_ntk(t) is RoPE with base · (2t - 1)^{d/(d-2)}, and a row of L keys uses t = ⌈L / train_length⌉. W_down starts at
    zero, so that an untrained CLEX is NTK scaling. In training, call `sample` before each step: it draws one t from
    1 … max_factor for all layers.

    Attributes:
        max_factor: the largest t that training draws.
        hidden: rows of W_up; as many as there are pairs by default.
        base: of the frequencies: by default the model's, and 10,000 without a model.
        layout: pairs are (m, m + d/2), "half" as in Llama, or (2m, 2m + 1), "interleaved" as in GAU-α.
        rotary_dim: number of entries that are rotated, from the first; all by default.
    """

    rotates = True
    keys_cacheable = False
    learns = True
    factor: Tensor
    steps = 2  # Runge–Kutta steps per unit of t

    def __init__(
        self,
        dim: int,
        train_length: int,
        max_factor: int = 16,
        hidden: int | None = None,
        *,
        base: float | None = None,
        layout: str = "half",
        rotary_dim: int | None = None,
    ) -> None:
        super().__init__()
        self._path: tuple[Any, Tensor] | None = None
        self.dim, self.train_length, self.max_factor, self.hidden = dim, train_length, max_factor, hidden
        self.base, self.layout, self.rotary_dim = base, layout, rotary_dim
        check_integer(self, "dim", 4, MAX_DIM)
        check_integer(self, "train_length", 1)
        check_integer(self, "max_factor", 1, MAX_TRAINED_FACTOR)
        if base is not None:
            check_number(self, "base", MAX_BASE, above=1)
        self.rope_theta = DEFAULT_BASE if base is None else base
        check_choice(self, "layout", LAYOUTS)
        if self.dim % 2:
            raise ValueError(f"CLEX(dim=…): expected an even number, got {self.dim}")
        if rotary_dim is not None and rotary_dim != dim:
            raise ValueError(
                f"CLEX(rotary_dim=…): expected the same as dim={dim}, or None, got {format_value(rotary_dim)}"
            )
        if hidden is not None:
            check_integer(self, "hidden", 1, MAX_HIDDEN)
        pairs = self.dim // 2
        self.up = nn.Linear(pairs, self.hidden or pairs, bias=False)
        self.down = nn.Linear(self.hidden or pairs, pairs, bias=False)
        self.register_buffer("factor", torch.ones((), dtype=torch.int64), persistent=False)
        self.reset()

    def reset(self) -> None:
        """Initialise the weights: NTK scaling at t = 1."""
        nn.init.kaiming_uniform_(self.up.weight, a=5**0.5)  # as nn.Linear does
        nn.init.zeros_(self.down.weight)
        nn.init.ones_(self.factor)

    def sample(self, generator: torch.Generator | None = None) -> int:
        """Draw and return the t of the next training step."""
        t = int(torch.randint(1, self.max_factor + 1, (), generator=generator))
        self.factor.fill_(t)
        return t

    def train(self, mode: bool = True) -> CLEX:
        self._path = None  # a captured training step changes weights without changing their version
        return super().train(mode)

    def rotated_size(self, head_dim: int) -> int:
        if self.dim > head_dim:
            raise ValueError(f"CLEX(dim=…): expected at most the head size {head_dim}, got {self.dim}")
        return self.dim

    def branches(self, query: Tensor, key: Tensor, heads: int, lengths: Lengths) -> tuple[Branch, ...]:
        return (Branch(query=query, key=key),)

    def frequencies(self, head_dim: int, length: Tensor | int, dtype: torch.dtype, device: torch.device) -> Tensor:
        self.rotated_size(head_dim)
        if self.training:
            return self.path(self.max_factor, dtype, device).index_select(0, (self.factor - 1).view(1))[0]
        if isinstance(length, int):
            t = max(-(-length // self.train_length), 1)
            return self._cached_path(t, dtype, device)[-1]
        t_rows = torch.div(length - 1, self.train_length, rounding_mode="floor").clamp_min(0)
        return self._cached_path(int(t_rows.max()) + 1, dtype, device)[t_rows]

    @property
    def longest(self) -> int:  # type: ignore[override]
        return self.train_length * self.max_factor

    def fit(self, model: ModelRotary) -> CLEX:
        model.check_unscaled(self.name())
        if self.dim != model.dim:
            raise ValueError(
                f"{model.model_type}: CLEX(dim=…) must be {model.dim}, the entries it rotates, got {self.dim}"
            )
        if self.base is None:
            self.rope_theta = float(model.base or DEFAULT_BASE)
        return self

    def rescale(self, model: ModelRotary, length: Tensor | int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.frequencies(model.dim, length, dtype, device)

    def _cached_path(self, last: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return `path`, computed once for unchanged weights: it takes thousands of small steps at long lengths."""
        weights = self.up.weight, self.down.weight
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or any(w.is_inference() for w in weights):
            return self.path(last, dtype, device)
        key, known = (last, dtype, device, self.rope_theta, *((w.data_ptr(), w._version) for w in weights)), self._path
        if known is None or known[0] != key:
            with torch.inference_mode(False), torch.no_grad():
                known = self._path = key, self.path(last, dtype, device)
        return known[1]

    def path(self, last: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return θ at t = 1 … last, (last, pairs). Only the learned part is integrated; θ_ntk has a closed form."""
        exponents = get_constant(rope_exponents, device, self.dim, dtype)
        ntk = get_constant(list_log_bases, device, self.rope_theta, self.dim, last, self.steps, dtype)
        up, down = self.up.weight.to(dtype), self.down.weight.to(dtype)
        if runs_in_kernel(up):
            from isentrope.positions.clex_kernel import LearnedPath

            learned = LearnedPath.apply(up, down, exponents, ntk, 1 / self.steps)
        else:
            learned = self._integrate(up, down, exponents, last)
        return (learned[:: self.steps] - ntk[:: 2 * self.steps, None] * exponents).exp()

    def _integrate(self, up: Tensor, down: Tensor, exponents: Tensor, last: int) -> Tensor:
        """Return the learned part of ln θ before each Runge–Kutta step and after the last, (steps + 1, pairs)."""
        ntk_up = up @ exponents  # W_up ln θ_ntk(t) is a multiple of it

        def slope(t: float, learned: Tensor) -> Tensor:
            return down @ torch.tanh(torch.addmv(ntk_up, up, learned, beta=-2 * log_base(self.rope_theta, self.dim, t)))

        states, h = [torch.zeros_like(exponents)], 1 / self.steps
        for part in range(self.steps * (last - 1)):
            now, learned = 1 + part * h, states[-1]
            k1 = slope(now, learned)
            k2 = slope(now + h / 2, torch.add(learned, k1, alpha=h / 2))
            k3 = slope(now + h / 2, torch.add(learned, k2, alpha=h / 2))
            k4 = slope(now + h, torch.add(learned, k3, alpha=h))
            states.append(torch.add(learned, (k1 + k4).add(k2 + k3, alpha=2), alpha=h / 6))
        return torch.stack(states)


def log_base(base: float, dim: int, t: float) -> float:
    """Return the logarithm of the base of θ_ntk(t), base · (2t - 1)^{d/(d-2)}."""
    return log(base * (2 * t - 1) ** (dim / (dim - 2)))


def list_log_bases(base: float, dim: int, last: int, steps: int, dtype: torch.dtype) -> Tensor:
    """Return `log_base` at t = 1 … last, every half of a Runge–Kutta step."""
    values = [log_base(base, dim, 1 + n / (2 * steps)) for n in range(2 * steps * (last - 1) + 1)]
    return torch.tensor(values, dtype=dtype)


def runs_in_kernel(up: Tensor) -> bool:
    """Return whether one launch can do all steps: on a GPU, unless a graph is traced or matrices are large."""
    if torch.compiler.is_compiling() or is_transformed() or up.dtype != torch.float32 or not can_run_triton(up):
        return False
    from isentrope.positions.clex_kernel import fits

    return fits(*up.shape)
