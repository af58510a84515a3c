"""Entropy of softmax attention on the hypersphere: exact, approximated, inverted.

One query, n keys uniform on the unit sphere in R^d, logits alpha cos θ. Then (Eq. 9)

    H(n, alpha, d) = ln n - KL(alpha, d),    KL(alpha, d) = alpha A_d(alpha) - ln E[e^{alpha cos θ}]

alpha = λ v d (Assumption 2; CosScale in cosine attention) and t = (alpha/d)² = λ²v². KL is the divergence of
the von Mises-Fisher distribution of concentration alpha from the uniform one: the focus of attention in nats.
The paper approximates the integrals by Laplace's method (Eq. 10), then by a Taylor step (Eq. 12); InfoScale
inverts Eq. 12. Here the integrals are Bessel functions and the inverse is a root, so that `derivation` can
give the error of each step.

Source: Information Entropy Invariance, "Theoretical Foundation of InfoScale", "Theorems of the Behaviors of
CosScale" and their appendices. Every function broadcasts; scalars in, scalar out; float64 throughout.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from isentrope.theory.common import Floats, Step, check_length, check_range
from isentrope.theory.special import bessel_moments, find_root, log_gamma

__all__ = [
    "concentration",
    "concentration_eq10",
    "concentration_eq12",
    "derivation",
    "entropy",
    "entropy_eq10",
    "entropy_eq12",
    "entropy_laplace",
    "invariant_scale",
    "kl_from_uniform",
    "log_mean_exp",
    "mean_cosine",
    "peak_cosine",
]

# Values are checked up to here, beyond the head dimension of any model.
MAX_DIMENSION = 1024


def log_mean_exp(alpha: ArrayLike, d: ArrayLike) -> Floats:
    """ln E[e^{alpha cos θ}] = ln 0F1(; b; alpha²/4) = lnΓ(b) + (1 - b) ln(alpha/2) + ln I_{b-1}(alpha).

    b = d/2; θ: angle to a uniform point of the unit sphere in R^d. Source: Eq. 9, the logarithm; Eq. 17.
    """
    return _moments(_check_alpha(alpha), _check_dimension(d))[0]


def mean_cosine(alpha: ArrayLike, d: ArrayLike) -> Floats:
    """A_d(alpha) = E[cos θ e^{alpha cos θ}] / E[e^{alpha cos θ}] = I_{d/2}(alpha) / I_{d/2-1}(alpha).

    The cosine a query sees on average under its attention weights. Source: Eq. 9, last fraction, over alpha.
    """
    return _moments(_check_alpha(alpha), _check_dimension(d))[1]


def kl_from_uniform(alpha: ArrayLike, d: ArrayLike) -> Floats:
    """KL = alpha A_d(alpha) - ln E[e^{alpha cos θ}]; alpha²/2d for alpha << d. Source: ln n minus Eq. 9."""
    return _moments(_check_alpha(alpha), _check_dimension(d))[2]


def entropy(n: ArrayLike, alpha: ArrayLike, d: ArrayLike) -> Floats:
    """H = ln n - KL(alpha, d): n keys, concentration alpha, dimension d. Source: Eq. 9, evaluated exactly.

    The law of large numbers (Assumption 1) needs KL well below ln n. Beyond that a few keys have all the
    weight: the entropy of a sample approaches 0 from above, while this value becomes negative.
    """
    return np.log(check_length("n", n)) - kl_from_uniform(alpha, d)


def entropy_laplace(n: ArrayLike, alpha: ArrayLike, d: ArrayLike) -> Floats:
    """H ≈ ln n + (d/2) ln((√(4t+1) - 1)/2t) - ½ ln √(4t+1), t = (alpha/d)².

    Source: derivation of InfoScale, the last line before the limit λ, v → 0.
    """
    return entropy_eq10(n, alpha, d) - np.log1p(4 * _t(alpha, d)) / 4


def entropy_eq10(n: ArrayLike, alpha: ArrayLike, d: ArrayLike) -> Floats:
    """H ≈ ln n + (d/2) ln((√(4t+1) - 1)/2t), t = (alpha/d)². Source: Eq. 10."""
    t = _t(alpha, d)
    # (√(4t+1) - 1)/2t = 1/(1 + 2t/(1 + √(4t+1))), which has no cancellation and includes t = 0.
    log_ratio: Floats = -np.log1p(2 * t / (1 + np.sqrt(4 * t + 1)))
    return np.log(check_length("n", n)) + _check_dimension(d) / 2 * log_ratio


def entropy_eq12(n: ArrayLike, alpha: ArrayLike, d: ArrayLike) -> Floats:
    """H ≈ ln n + (d/2) ln(1 - t), t = (alpha/d)²; nan where t >= 1. Source: Eq. 12, after the Taylor step."""
    t = _t(alpha, d)
    log_ratio: Floats = np.log1p(np.where(t < 1, -t, np.nan))
    return np.log(check_length("n", n)) + _check_dimension(d) / 2 * log_ratio


def peak_cosine(alpha: ArrayLike, d: ArrayLike) -> Floats:
    """η* = (-(d-3) + √((d-3)² + 4 alpha²)) / 2 alpha: where e^{alpha η} (1 - η²)^{(d-3)/2} is largest.

    At d = 2 that is unbounded and the formula exceeds 1, so d >= 3; at d = 3, alpha = 0 it is flat: nan.
    Source: Theorem 1, Eq. 18, here multiplied by its conjugate to avoid cancellation.
    """
    a, m = _check_alpha(alpha), _check_dimension(d, minimum=3) - 3
    with np.errstate(invalid="ignore"):
        peak: Floats = 2 * a / (m + np.hypot(m, 2 * a))
    return peak


def concentration(kl: ArrayLike, d: ArrayLike) -> Floats:
    """The alpha with KL(alpha, d) = kl: Eq. 9 solved for alpha. kl = ln n - ε leaves entropy ε at n keys."""
    target, dim = np.broadcast_arrays(check_range("kl", kl), _check_dimension(d))
    positive = np.where(target > 0, target, 1.0)
    # Lower bound: KL <= alpha²/2d, with slack since it is nearly an equality for alpha << d. Upper bound: Eq. 10
    # with KL's true growth ½(d-1) ln alpha in place of its own ½d ln alpha.
    low = np.log(2 * dim * positive) / 2 - 1e-9
    high = np.log(dim * np.sqrt(-np.expm1(-2 * positive / (dim - 1)))) + 2 * positive / (dim - 1)
    beyond = high > np.log(np.finfo(float).max)
    if beyond.any():
        raise ValueError(f"kl: expected an alpha within float64 at d = {d!r}, got {target[beyond][0]:g}")

    root = find_root(lambda log_alpha: np.log(_moments(np.exp(log_alpha), dim)[2] / positive), low, high)
    alpha: Floats = np.where(target > 0, np.exp(root), 0.0)[()]
    return alpha


def concentration_eq10(kl: ArrayLike, d: ArrayLike) -> Floats:
    """alpha = d √(1 - y)/y, y = e^{-2 kl/d}: Eq. 10 solved for alpha, without the Taylor step."""
    return concentration_eq12(kl, d) * np.exp(2 * check_range("kl", kl) / _check_dimension(d))


def concentration_eq12(kl: ArrayLike, d: ArrayLike) -> Floats:
    """alpha = d √(1 - e^{-2 kl/d}), kl = ln n - ε: Eq. 12 solved for alpha (Eq. 13, alpha = λ v d).

    InfoScale(n, n_tr) = concentration_eq12(ln n - ε, d) / concentration_eq12(ln n_tr - ε, d).
    """
    dim = _check_dimension(d)
    return dim * np.sqrt(-np.expm1(-2 * check_range("kl", kl) / dim))


def invariant_scale(n: ArrayLike, train_length: ArrayLike, alpha: ArrayLike, d: ArrayLike) -> Floats:
    """τ with H(n, τ alpha, d) = H(train_length, alpha, d): what InfoScale approximates.

    τ = concentration(KL(alpha, d) + ln(n/train_length), d) / alpha.
    """
    a = _check_alpha(alpha)
    if np.any(a == 0):
        raise ValueError("alpha: expected > 0 (uniform attention stays uniform at any scale), got 0")
    kl = kl_from_uniform(a, d) + np.log(check_length("n", n) / check_length("train_length", train_length))
    if np.any(kl < 0):
        raise ValueError(f"n: expected ln n >= the entropy at train_length = {train_length!r}, got {n!r}")
    return concentration(kl, d) / a


def derivation(n: ArrayLike, alpha: ArrayLike, d: ArrayLike) -> tuple[Step, ...]:
    """The paper's derivation of InfoScale, step by step, each against its exact value.

    cos θ* = 2√t/(1 + √(4t+1)) is the paper's peak, with d for d - 2. The inverse steps solve for the alpha that
    keeps the exact entropy. Accurate for alpha << d; Eq. 12 fails as t → 1. Source: Detailed Derivations of InfoScale.
    """
    a, dim = _check_alpha(alpha)[()], _check_dimension(d)
    log_mean, cosine, kl = _moments(a, dim)
    exact = entropy(n, a, d)
    log_sine = log_gamma(0.5) + log_gamma((dim - 1) / 2) - log_gamma(dim / 2)  # ln ∫ sin^{d-2} θ dθ
    c, root = _laplace_peak(_t(a, d))
    # sin² θ* = 2/(1 + √(4t+1)) and alpha (1/c + c) = d √(4t+1).
    laplace = a * c - dim / 2 * np.log((1 + root) / 2) + np.log(2 * np.pi / (dim * root)) / 2
    return (
        Step("Eq. 9: quadrature ≅ Bessel functions", _entropy_by_quadrature(n, a, d), exact),
        Step("ln ∫ sin^(d-2) θ dθ ≅ ln √(2π/d)", log_sine, np.log(2 * np.pi / dim) / 2),
        Step("ln ∫ e^(alpha cos θ) sin^(d-2) θ dθ ≅ Laplace", log_mean + log_sine, laplace),
        Step("E[alpha cos θ e^(alpha cos θ)] / E[e^(alpha cos θ)] ≅ alpha cos θ*", a * cosine, a * c),
        Step("H ≅ Laplace with its prefactor", exact, entropy_laplace(n, a, d)),
        Step("H ≅ Eq. 10", exact, entropy_eq10(n, a, d)),
        Step("H ≅ Eq. 12", exact, entropy_eq12(n, a, d)),
        Step("alpha ≅ Eq. 10 inverted", a, concentration_eq10(kl, d)),
        Step("alpha ≅ Eq. 12 inverted (InfoScale)", a, concentration_eq12(kl, d)),
    )


def _laplace_peak(t: Floats) -> tuple[Floats, Floats]:
    """cos θ* and √(4t+1): g(θ) = d (√t cos θ + ln sin θ) is largest at θ*, with g'' = -d √(4t+1)."""
    root = np.sqrt(4 * t + 1)
    return 2 * np.sqrt(t) / (1 + root), root


def _entropy_by_quadrature(n: ArrayLike, alpha: Floats, d: ArrayLike) -> Floats:
    """Evaluate Eq. 9 by Gauss-Legendre quadrature over 16 widths 1/√(-g'') on each side of θ*, where the mass is."""
    nodes, weights = np.polynomial.legendre.leggauss(200)

    def log_integral_and_mean(a: Floats, dim: Floats) -> tuple[Floats, Floats]:
        a, dim = (x[..., None] for x in np.broadcast_arrays(a, dim))
        c, root = _laplace_peak((a / dim) ** 2)
        peak, reach = np.arccos(c), 16 / np.sqrt(dim * root)
        low, high = np.maximum(peak - reach, 0), np.minimum(peak + reach, np.pi)
        theta = low + (high - low) * (nodes + 1) / 2
        mass = weights * np.exp(a * (np.cos(theta) - c) + (dim - 2) * np.log(np.sin(theta)))
        total = mass.sum(-1)
        scale = (a * c + np.log((high - low) / 2))[..., 0]
        return scale + np.log(total), (mass * np.cos(theta)).sum(-1) / total

    log_integral, mean = log_integral_and_mean(alpha, _check_dimension(d))
    log_sine, _ = log_integral_and_mean(np.zeros_like(alpha), _check_dimension(d))
    return np.log(check_length("n", n)) + log_integral - log_sine - alpha * mean


def _moments(alpha: Floats, d: Floats) -> tuple[Floats, Floats, Floats]:
    """Return ln E[e^{alpha cos θ}], A_d and KL, by the formula that is accurate at this alpha and d."""
    alpha, d = np.broadcast_arrays(alpha, d)
    small, large = alpha <= 4 * np.sqrt(2 * d), alpha >= 32 + 4 * d**2
    out = np.empty((3, *alpha.shape))
    for where, formula in ((small, _by_series), (large, _by_hankel), (~(small | large), _by_bessel)):
        if where.any():
            out[:, where] = formula(alpha[where], d[where])
    return out[0], out[1], out[2]


def _by_series(alpha: Floats, d: Floats) -> tuple[Floats, Floats, Floats]:
    """0F1(; b; z) = Σ z^k/((b)_k k!), b = d/2, z = alpha²/4; A = (alpha/d) 0F1(; b+1; z)/0F1(; b; z)."""
    b, z = d / 2, alpha**2 / 4
    term, tail, tail_up = np.ones_like(z), np.zeros_like(z), np.zeros_like(z)
    for k in range(1, 81):  # z/b <= 16 here, so the k-th term is at most 16^k/k!: 3e-23 at the last
        term = term * z / (k * (b + k - 1))
        tail += term
        tail_up += term * b / (b + k)
    log_mean, cosine = np.log1p(tail), alpha / d * (1 + tail_up) / (1 + tail)
    return log_mean, cosine, alpha * cosine - log_mean


def _by_bessel(alpha: Floats, d: Floats) -> tuple[Floats, Floats, Floats]:
    """Evaluate the closed form, with alpha taken out of the logarithm and of the mean."""
    rest, shift = bessel_moments(alpha, d)
    return alpha + rest, 1 + shift / alpha, shift - rest


def _by_hankel(alpha: Floats, d: Floats) -> tuple[Floats, Floats, Floats]:
    """I_{d/2-1}(alpha) ~ e^alpha P/√(2π alpha), P = Σ p_k; alpha (A - 1) = -(d-1)/2 - Σ k p_k / P.

    Bessel ratios lose A - 1 to rounding as alpha grows, and small d needs alpha = 1e11 for ln 1e6 nats.
    """
    p, total, slope = np.ones_like(alpha), np.ones_like(alpha), np.zeros_like(alpha)
    for k in range(1, 21):
        p = -p * ((d - 2) ** 2 - (2 * k - 1) ** 2) / (8 * k * alpha)
        total += p
        slope += k * p
    shift = -(d - 1) / 2 - slope / total
    rest = log_gamma(d / 2) - (d - 1) / 2 * np.log(alpha / 2) - np.log(4 * np.pi) / 2 + np.log(total)
    return alpha + rest, 1 + shift / alpha, shift - rest


def _t(alpha: ArrayLike, d: ArrayLike) -> Floats:
    return (_check_alpha(alpha) / _check_dimension(d)) ** 2


def _check_alpha(value: ArrayLike) -> Floats:
    return check_range("alpha", value)


def _check_dimension(value: ArrayLike, minimum: int = 2) -> Floats:
    if not np.issubdtype(np.asarray(value).dtype, np.integer):
        raise ValueError(f"d: expected an integer >= {minimum}, got {value!r}")
    return check_range("d", value, minimum, MAX_DIMENSION)
