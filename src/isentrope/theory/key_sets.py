"""Softmax attention over several sets of keys whose logits are random: shares, log-sum-exp and entropy.

The logits of a set are independent and Gaussian, so that its softmax sum Z = Σ_j e^{s_j} is the partition function of
Derrida's random energy model (1981). With G a standard Gumbel variable and φ(t) = E exp(-t e^s),

    P(ln Z + G <= x) = E exp(-Z e^{-x}) = φ(e^{-x})^m

for m keys, a product of such factors for several sets. Its density, split by the set whose key is largest, integrates
to the expected share of each set (the Gumbel-max trick); its moments are those of ln Z plus those of G. So every
expectation below is one smooth integral over x, without sampling. Every function broadcasts; float64 throughout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from isentrope.theory.common import Floats, check_length, check_range

# of logits, above which the tables of the quadrature take more than a few megabytes
MAX_SIGMA = 16.0
# Trapezoidal step in x, and in σ times a key's deviate: integrands are analytic in a strip of half-width π/2, so that
# the error e^{-π²/h} of a step h is below 1e-16.
STEP = 0.25
# of deviates and of x beyond the mass of the integrand, where it is below 1e-17
DEVIATES, TAIL = 9.0, 40.0


@dataclass(frozen=True)
class KeySet:
    """Keys whose logits are independent and Gaussian; one key at a known logit is a set with count 1 and sigma 0.

    Args:
        count: number of keys.
        mean: of their logits.
        sigma: standard deviation of their logits.
    """

    count: ArrayLike
    mean: ArrayLike = 0.0
    sigma: ArrayLike = 1.0

    def __post_init__(self) -> None:
        check_range("count", self.count)
        check_range("mean", self.mean, minimum=-np.inf)
        check_range("sigma", self.sigma, maximum=MAX_SIGMA)

    def transform(self, tau: ArrayLike = 1.0, bias: ArrayLike = 0.0) -> KeySet:
        """Return the keys with logits τ s - b in place of s."""
        scale = check_range("tau", tau)
        return KeySet(self.count, scale * np.asarray(self.mean) - np.asarray(bias), scale * np.asarray(self.sigma))


def shares(*sets: KeySet) -> Floats:
    """E[Z_i / Σ_k Z_k]: the expected share of attention of each set.

    Args:
        sets: near keys, far keys and whatever else a query sees; at least one key in all.

    Returns:
        One row for each set, broadcast over the fields of all of them; rows add up to 1.
    """
    return _compute_moments(sets)[2 : 2 + len(sets)]


def log_sum(keys: KeySet) -> Floats:
    """E ln Z: the expected log-sum-exp of the keys."""
    return _compute_moments([keys])[0]


def log_sum_deviation(keys: KeySet) -> Floats:
    """√Var ln Z: how much the log-sum-exp varies between queries."""
    return np.sqrt(_compute_moments([keys])[1])


def log_sum_gaussian(keys: KeySet) -> Floats:
    """ln E Z = ln m + μ + σ²/2, at least E ln Z."""
    return np.log(check_length("count", keys.count)) + np.asarray(keys.mean) + np.square(keys.sigma) / 2


def log_sum_limit(keys: KeySet) -> Floats:
    """ln m + μ + σ²/2 where σ² < 2 ln m, else μ + σ √(2 ln m): E ln Z to leading order in ln m (Derrida, 1981).

    In the second case the largest logit alone makes up Z.
    """
    log_count = np.log(check_length("count", keys.count))
    frozen = np.asarray(keys.mean) + np.asarray(keys.sigma) * np.sqrt(2 * log_count)
    return np.where(np.square(keys.sigma) < 2 * log_count, log_sum_gaussian(keys), frozen)[()]


def entropy_within(keys: KeySet) -> Floats:
    """E H, H = ln Z - Σ_j s_j e^{s_j} / Z: the expected entropy of attention within one set, in nats."""
    moments = _compute_moments([keys])
    return np.maximum(moments[0] - moments[-1], 0.0)


def _compute_moments(sets: Sequence[KeySet]) -> Floats:
    """Return E ln Z, Var ln Z, and the share and the focus E[Σ_j s_j e^{s_j} / Z] of each set, along the first axis."""
    fields = np.broadcast_arrays(*(np.asarray(x, np.float64) for s in sets for x in (s.count, s.mean, s.sigma)))
    fewest = np.min(np.sum(fields[::3], axis=0))
    if fewest < 1:
        raise ValueError(f"count: expected at least 1 key in all sets together, got {fewest:g}")
    table = np.stack(fields).reshape(len(sets), 3, -1)
    moments = np.stack([_integrate(table[..., i]) for i in range(table.shape[-1])], -1)
    return moments.reshape(-1, *fields[0].shape)


def _integrate(sets: Floats) -> Floats:
    """Integrate over the density of x = ln Z + G, for rows (count, mean, sigma)."""
    sets_with_keys = sets[sets[:, 0] > 0]
    count, mean, sigma = sets_with_keys.T
    start = np.max(mean - DEVIATES * sigma) - 6  # G < -6 has probability e^{-403}
    stop = np.logaddexp.reduce(np.log(count) + mean + sigma**2 / 2) + TAIL  # P(x > stop) <= E Z e^{-stop}
    x = np.arange(start, stop, STEP)
    log_cdf, rates, focus = np.zeros_like(x), np.zeros((len(sets), len(x))), np.zeros((len(sets), len(x)))
    for row, (keys, mu, deviation) in enumerate(sets):
        if keys > 0:
            log_phi, rates[row], focus[row] = _transform_logits(x, mu, deviation)
            log_cdf += keys * log_phi
            rates[row] *= keys
            focus[row] *= keys
    weight = STEP * np.exp(log_cdf)
    density = weight * rates.sum(0)
    centre = x @ density
    variance = np.maximum((x - centre) ** 2 @ density - np.pi**2 / 6, 0.0)
    return np.array([centre - np.euler_gamma, variance, *(rates @ weight), *(focus @ weight)])


def _transform_logits(x: Floats, mean: float, sigma: float) -> tuple[Floats, Floats, Floats]:
    """Return ln φ, -t φ'/φ and the latter weighted by the logit, at t = e^{-x}, where φ(t) = E exp(-t e^s)."""
    step = STEP / max(sigma, 0.5)
    deviate = np.arange(-DEVIATES, sigma + DEVIATES, step)  # e^s moves the mass of the Gaussian to a deviate of σ
    chance = step * np.exp(-(deviate**2) / 2) / np.sqrt(2 * np.pi)
    logit = mean + sigma * deviate
    exposure = np.exp(np.minimum(logit - x[:, None], 700.0))
    survival = np.exp(-exposure)
    phi = survival @ chance
    missing = -np.expm1(-exposure) @ chance  # 1 - φ without cancellation
    with np.errstate(divide="ignore"):
        log_phi = np.where(missing < 0.5, np.log1p(-np.minimum(missing, 0.5)), np.log(phi))
    rate = exposure * survival / np.where(phi > 0, phi, 1.0)[:, None]
    return log_phi, rate @ chance, rate @ (chance * logit)
