"""Laws for near and far keys: what they do to the share of the far set, exactly and in closed form.

A query sees n keys: W near ones, whose scores are left alone, and m = n - W far ones with logits τ s - b. In training
it saw m_ref = n_tr - W far keys with τ = 1, b = 0; r = m / m_ref. Assumptions: scores of far keys are independent and
Gaussian with mean 0 and standard deviation σ at any length (noise), and relevant keys are few. Four statements follow:

    noise share      b = ln r + (τ² - 1) σ²/2                     the far set keeps its share (`noise_bias`)
    relevant key     τ s* - b = s*                                a key of score s* keeps its odds against near keys
    both             |s* - σ²| >= σ √(2 ln r)                     else no τ and b do (`needle_tau`, `needle_limit`)
    least log loss   τ = 1, b = ln r - ln(T(n) / T(n_tr))         T: prior mass of far answers (`prior_bias`)

`docs/laws.md` has the derivation; `far_derivation` compares its steps with exact values. Every function broadcasts.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from isentrope.theory.common import Floats, Step, check_length, check_range
from isentrope.theory.key_sets import (
    KeySet,
    entropy_within,
    log_sum,
    log_sum_deviation,
    log_sum_gaussian,
    shares,
)
from isentrope.theory.special import exprel, inverse_squares


def far_share(
    n: ArrayLike,
    window: ArrayLike,
    reference: ArrayLike,
    beta: ArrayLike = 0.0,
    tau: ArrayLike = 1.0,
    sigma: ArrayLike = 1.0,
    near_mean: ArrayLike = 0.0,
) -> Floats:
    """E[Z_far / (Z_near + Z_far)]: the share of attention that far keys take, far logits τ s - β ln max(m / m_ref, 1).

    Args:
        n: keys that a query sees, near and far.
        window: W, the number of near keys.
        reference: m_ref, the far keys seen in training.
        beta: exponent of the share law; 0 is attention without one.
        tau: temperature of far keys.
        sigma: standard deviation of all scores.
        near_mean: mean score of near keys; that of far keys is 0.

    Returns:
        The expected share, exact. One temperature for all keys, other deviations or relevant keys: `shares`.
    """
    return shares(*_build_sets(n, window, reference, beta, tau, sigma, near_mean))[1]


def far_share_gaussian(
    n: ArrayLike,
    window: ArrayLike,
    reference: ArrayLike,
    beta: ArrayLike = 0.0,
    tau: ArrayLike = 1.0,
    sigma: ArrayLike = 1.0,
    near_mean: ArrayLike = 0.0,
) -> Floats:
    """E Z_far / (E Z_near + E Z_far), E Z = m e^{μ + σ²/2}: `far_share` in closed form.

    Args:
        n: keys that a query sees, near and far; more than `window`.
        window: W, the number of near keys.
        reference: m_ref, the far keys seen in training.
        beta: exponent of the share law.
        tau: temperature of far keys.
        sigma: standard deviation of all scores.
        near_mean: mean score of near keys.

    Returns:
        The share; accurate where τ²σ² is well below 2 ln m.
    """
    near, far = _build_sets(n, window, reference, beta, tau, sigma, near_mean)
    return 1 / (1 + np.exp(log_sum_gaussian(near) - log_sum_gaussian(far)))


def far_entropy(n: ArrayLike, window: ArrayLike, tau: ArrayLike = 1.0, sigma: ArrayLike = 1.0) -> Floats:
    """E H of attention within the far set, in nats: exact; a bias common to the set does not change it.

    Args:
        n: keys that a query sees, near and far; more than `window`.
        window: W, the number of near keys.
        tau: temperature of far keys.
        sigma: standard deviation of their scores.

    Returns:
        The expected entropy.
    """
    return entropy_within(KeySet(_count_far(n, window), 0.0, sigma).transform(tau))


def far_entropy_gaussian(n: ArrayLike, window: ArrayLike, tau: ArrayLike = 1.0, sigma: ArrayLike = 1.0) -> Floats:
    """max(ln m - τ²σ²/2, 0): `far_entropy` in closed form.

    Args:
        n: keys that a query sees, near and far; more than `window`.
        window: W, the number of near keys.
        tau: temperature of far keys.
        sigma: standard deviation of their scores.

    Returns:
        The entropy; accurate where τ²σ² is well below 2 ln m.
    """
    heat = check_range("tau", tau) * check_range("sigma", sigma)
    return np.maximum(np.log(_count_far(n, window)) - heat**2 / 2, 0.0)


def share_bias(n: ArrayLike, window: ArrayLike, reference: ArrayLike, beta: ArrayLike) -> Floats:
    """b = β ln max(m / m_ref, 1), m = n - W: the share law.

    Args:
        n: keys that a query sees, near and far.
        window: W, the number of near keys.
        reference: m_ref, the far keys seen in training.
        beta: 0 leaves attention alone; 1 makes up for the number of far keys.

    Returns:
        What is subtracted from far logits.
    """
    far = np.maximum(check_length("n", n) - check_length("window", window), 0.0)
    return np.asarray(beta) * np.log(np.maximum(far / check_length("reference", reference), 1.0))


def noise_bias(ratio: ArrayLike, tau: ArrayLike = 1.0, sigma: ArrayLike = 1.0, mean: ArrayLike = 0.0) -> Floats:
    """b = ln r + (τ² - 1) σ²/2 + (τ - 1) μ: under it E Z_far is what it was in training.

    Args:
        ratio: r, far keys over those seen in training.
        tau: temperature of far keys.
        sigma: standard deviation of their scores.
        mean: μ, the mean of their scores; a temperature on far keys alone is not indifferent to it.

    Returns:
        What is subtracted from far logits.
    """
    heat = check_range("tau", tau)
    variance = np.square(check_range("sigma", sigma))
    return np.log(check_length("ratio", ratio)) + (heat**2 - 1) * variance / 2 + (heat - 1) * np.asarray(mean)


def needle_tau(ratio: ArrayLike, strength: ArrayLike, sigma: ArrayLike = 1.0) -> Floats:
    """The τ nearest to 1 with b = (τ - 1) s* = `noise_bias`: a key of score s* and the noise both keep their odds.

    τ - 1 = 2 L / (g ± √(g² - 2 σ² L)), g = s* - σ², L = ln r, with the sign of g: keys above σ² are heated, those below
    it cooled. For σ = 0 this is 1 + ln r / s*, and with s* = ln m_ref it is LogN of the far keys, ln m / ln m_ref.

    Args:
        ratio: r, far keys over those seen in training.
        strength: s*, the score of the key above the mean of far scores.
        sigma: standard deviation of far scores.

    Returns:
        τ; nan where there is none, for |g| < σ √(2 L).
    """
    log_ratio = np.log(check_length("ratio", ratio))
    variance = np.square(check_range("sigma", sigma))
    gap = check_range("strength", strength) - variance
    square = gap**2 - 2 * variance * log_ratio
    with np.errstate(invalid="ignore", divide="ignore"):
        excess = 2 * log_ratio / (gap + np.copysign(np.sqrt(square), gap))
    return np.where((gap != 0) & (square >= 0), 1 + excess, np.where(log_ratio == 0, 1.0, np.nan))[()]


def needle_limit(ratio: ArrayLike, sigma: ArrayLike = 1.0) -> Floats:
    """σ² + σ √(2 ln r): the weakest key that heat lets keep its odds while the noise keeps its share.

    Args:
        ratio: r, far keys over those seen in training.
        sigma: standard deviation of far scores.

    Returns:
        The score above the mean of far scores.
    """
    deviation = check_range("sigma", sigma)
    return deviation**2 + deviation * np.sqrt(2 * np.log(check_length("ratio", ratio)))


def prior_bias(n: ArrayLike, window: ArrayLike, train_length: ArrayLike, kappa: ArrayLike = 2.0) -> Floats:
    """b = ln r - ln(T(n) / T(n_tr)), T(n) = ∫_W^n Δ^-κ dΔ: of least log loss where answers lie at Δ with density Δ^-κ.

    κ = 2 is b = ln(n / n_tr), whatever the window; κ = 0 is no bias. For n >> W and κ < 1 it is a share law with β = κ,
    for κ > 1 one with β = 1.

    Args:
        n: keys that a query sees, near and far.
        window: W, at most `train_length`.
        train_length: n_tr.
        kappa: how fast the density of answers falls with the distance.

    Returns:
        What is subtracted from far logits; 0 up to the training length.
    """
    near, trained = check_length("window", window), check_length("train_length", train_length)
    if np.any(near > trained):
        raise ValueError(f"window: expected at most train_length = {train_length!r}, got {window!r}")
    exponent = 1 - check_range("kappa", kappa)

    def log_inverse_density(length: Floats) -> Floats:
        # m / T(n) in units of W^κ, with n / W = e^x: (e^x - 1) / ∫_0^x e^{(1-κ) y} dy
        x = np.log(length / near)
        inverse: Floats = np.log(exprel(x)) - np.log(exprel(exponent * x))
        return inverse

    return log_inverse_density(np.maximum(check_length("n", n), trained)) - log_inverse_density(trained)


def far_derivation(
    n: ArrayLike, window: ArrayLike, train_length: ArrayLike, strength: ArrayLike, sigma: ArrayLike = 1.0
) -> tuple[Step, ...]:
    """Compare each closed form of the laws for far keys with its exact value.

    Args:
        n: keys that a query sees, near and far.
        window: W, the number of near keys.
        train_length: n_tr, more than `window`.
        strength: s*, the score of a relevant far key.
        sigma: standard deviation of the other scores.

    Returns:
        The steps in the order of the derivation.
    """
    far, reference = _count_far(n, window), _count_far(train_length, window)
    ratio, variance = np.maximum(far / reference, 1.0), np.square(check_range("sigma", sigma))
    noise, trained = KeySet(far, 0.0, sigma), KeySet(reference, 0.0, sigma)
    near, needle = KeySet(window, 0.0, sigma), KeySet(1, strength, 0.0)
    relative_variance = np.expm1(variance) / far
    tau = needle_tau(ratio, strength, sigma)
    law = (np.where(np.isnan(tau), 1.0, tau), noise_bias(ratio, np.where(np.isnan(tau), 1.0, tau), sigma))
    heated, moved = noise.transform(*law), needle.transform(*law)
    # Σ_{W <= Δ < n} Δ^-2
    counts = (np.asarray(count, dtype=np.float64) for count in (window, n, train_length))
    from_window, from_n, from_trained = (inverse_squares(count) for count in counts)
    distances = from_window - from_n, from_window - from_trained
    return (
        Step("E ln Z_far ≅ ln m + σ²/2", log_sum(noise), log_sum_gaussian(noise)),
        Step("E ln Z_far ≅ ln m + σ²/2 - v/2", log_sum(noise), log_sum_gaussian(noise) - relative_variance / 2),
        Step("√Var ln Z_far ≅ √v, v = (e^(σ²) - 1)/m", log_sum_deviation(noise), np.sqrt(relative_variance)),
        Step("H_far ≅ ln m - σ²/2", far_entropy(n, window, 1.0, sigma), far_entropy_gaussian(n, window, 1.0, sigma)),
        Step(
            "share without a law ≅ m/(m + W)",
            far_share(n, window, reference, 0.0, 1.0, sigma),
            far / (far + np.asarray(window)),
        ),
        Step("share with τ, b ≅ that of training", shares(near, heated)[1], shares(near, trained)[1]),
        Step("E ln Z_far with τ, b ≅ that of training", log_sum(heated), log_sum(trained)),
        Step(
            "share of a key s* with τ, b ≅ that of training",
            shares(near, heated, moved)[2],
            shares(near, trained, needle)[2],
        ),
        Step("τ ≅ 1 + ln r / s*", tau, 1 + np.log(ratio) / np.asarray(strength)),
        Step(
            "b = ln r - ln(ΣΔ^-2 ratio) ≅ ln(n/n_tr)",
            np.log(ratio) - np.log(distances[0] / distances[1]),
            prior_bias(n, window, train_length),
        ),
    )


def _count_far(n: ArrayLike, window: ArrayLike) -> Floats:
    far = check_length("n", n) - check_length("window", window)
    if np.any(far < 1):
        raise ValueError(f"n: expected more than window = {window!r}, got {n!r}")
    return far


def _build_sets(
    n: ArrayLike,
    window: ArrayLike,
    reference: ArrayLike,
    beta: ArrayLike,
    tau: ArrayLike,
    sigma: ArrayLike,
    near_mean: ArrayLike,
) -> tuple[KeySet, KeySet]:
    bias = share_bias(n, window, reference, beta)
    near, far = np.minimum(n, window), np.maximum(np.subtract(n, window), 0.0)
    return KeySet(near, near_mean, sigma), KeySet(far, 0.0, sigma).transform(tau, bias)
