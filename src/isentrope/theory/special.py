"""Special functions and a root finder in numpy alone, so that the theory needs no other package.

Every function broadcasts and is accurate to a few units in the last places of float64, which the tests check against
arithmetic at 50 digits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import numpy as np
from numpy.polynomial import Polynomial

from isentrope.theory.common import Floats

# Orders from which Debye's expansion with this many terms is exact to rounding, whatever the argument.
DEBYE_ORDER, DEBYE_TERMS = 40, 12
ZETA_TERMS = 16
MAX_ITERATIONS = 80

log_gamma = np.vectorize(math.lgamma, otypes=[np.float64])


def exprel(x: Floats) -> Floats:
    """(e^x - 1)/x, which is 1 at x = 0."""
    nonzero = np.where(x == 0, 1.0, x)
    return np.where(x == 0, 1.0, np.expm1(nonzero) / nonzero)


def inverse_squares(start: Floats) -> Floats:
    """Σ_{k >= 0} (start + k)^-2 for start >= 1: the first terms, the rest by Euler and Maclaurin."""
    start = np.asarray(start, dtype=np.float64)
    x = start + ZETA_TERMS
    head = sum((start + k) ** -2 for k in range(ZETA_TERMS))
    rest: Floats = 1 / x + 1 / (2 * x**2) + 1 / (6 * x**3) - 1 / (30 * x**5) + 1 / (42 * x**7) - 1 / (30 * x**9)
    return head + rest


def bessel_moments(alpha: Floats, d: Floats) -> tuple[Floats, Floats]:
    """ln 0F1(; d/2; alpha²/4) - alpha and alpha (A - 1), A = I_{d/2}(alpha)/I_{d/2-1}(alpha).

    Debye's expansion for orders d/2 - 1 >= 40; below, recurrences downwards from there, which are stable:

        A_d = 1/(d/alpha + A_{d+2}),    0F1(; b; z) = 0F1(; b+1; z) / (A_d d/alpha),    b = d/2

    Args:
        alpha: the argument, more than 0.
        d: the dimension, at least 2.
    """
    low = d / 2 - 1 < DEBYE_ORDER
    top = np.where(low, d + 2 * DEBYE_ORDER, d)
    log_mean, deficit = _debye(alpha, top)
    gap = -deficit / alpha  # 1 - A, kept apart since A tends to 1
    for _ in range(DEBYE_ORDER if low.any() else 0):
        top = top - 2
        ratio = top / alpha
        lower = (ratio - gap) / (1 + ratio - gap)
        gap = np.where(low, lower, gap)
        log_mean = np.where(low, log_mean - np.log(np.where(low, (1 - gap) * ratio, 1.0)), log_mean)
    return log_mean, -alpha * gap


def _debye(alpha: Floats, d: Floats) -> tuple[Floats, Floats]:
    """Evaluate `bessel_moments` for large orders, with alpha = ν z and p = 1/√(1 + z²).

    I_ν(νz) ~ e^{νη} p^½/√(2πν) Σ u_k(p)/ν^k,    I'_ν(νz) ~ e^{νη} p^{-½}/(z √(2πν)) Σ v_k(p)/ν^k

    The large terms of ν η, ln Γ(ν + 1) and ν ln(alpha/2) are cancelled by hand. Source: Debye (1909); DLMF 10.41.
    """
    order = d / 2 - 1
    z = alpha / order
    root = np.hypot(1, z)
    p = 1 / root
    series, difference = np.ones_like(p), np.zeros_like(p)
    for k, (u, v_minus_u) in enumerate(_debye_polynomials(), start=1):
        series = series + u(p) / order**k
        difference = difference + v_minus_u(p) / order**k
    stirling = 1 / (12 * order) - 1 / (360 * order**3) + 1 / (1260 * order**5) - 1 / (1680 * order**7)
    beyond = 1 / (root + z) - 1  # √(1 + z²) - z - 1
    log_mean = order * (beyond - np.log((1 + root) / 2)) - np.log(root) / 2 + stirling + np.log(series)
    return log_mean, order * (beyond + root * difference / series)


@cache
def _debye_polynomials() -> tuple[tuple[Polynomial, Polynomial], ...]:
    """Return u_k and v_k - u_k for k = 1 … DEBYE_TERMS."""
    p = Polynomial([0.0, 1.0])
    u, pairs = Polynomial([1.0]), []
    for _ in range(DEBYE_TERMS):
        slope = u.deriv()
        v_minus_u = -p * (1 - p**2) * (u / 2 + p * slope)
        u = p**2 * (1 - p**2) * slope / 2 + ((1 - 5 * p**2) * u).integ() / 8
        pairs.append((u, v_minus_u))
    return tuple(pairs)


def find_root(function: Callable[[Floats], Floats], low: Floats, high: Floats) -> Floats:
    """Return where increasing functions are 0, each between its `low` and `high`, by Ridders' method (1979)."""
    root = low
    at_low, at_high = function(low), function(high)
    for _ in range(MAX_ITERATIONS):
        middle = (low + high) / 2
        at_middle = function(middle)
        spread = np.sqrt(np.maximum(at_middle**2 - at_low * at_high, np.finfo(float).tiny))
        point = np.clip(middle - (middle - low) * at_middle / spread, low, high)
        at_point = function(point)
        if np.all(np.abs(point - root) <= 1e-15 * np.maximum(1, np.abs(point))):
            return point
        root = point
        for x, at_x in ((middle, at_middle), (point, at_point)):
            below, above = (at_x <= 0) & (x > low), (at_x > 0) & (x < high)
            low, at_low = np.where(below, x, low), np.where(below, at_x, at_low)
            high, at_high = np.where(above, x, high), np.where(above, at_x, at_high)
    return root
