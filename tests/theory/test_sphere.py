"""theory.sphere against arithmetic at 50 digits, quadrature, random keys and the numbers of the paper."""

import math

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.optimize import minimize_scalar

from isentrope import theory
from tests.fixtures.recipes import examples

DIMENSIONS = (2, 3, 4, 8, 64, 81, 82, 127, 128, 256)
ALPHAS = (1e-3, 1e-2, 0.1, 1.0, 3.0, 8.0, 16.0, 31.0, 32.0, 64.0, 90.0, 91.0, 128.0, 512.0, 1e3, 4e3, 1e4)

dimensions = st.integers(2, 256)
alphas = st.floats(1e-3, 1e4)


def at_50_digits(alpha: float, d: int) -> dict[str, mpmath.mpf]:
    with mpmath.workdps(50):
        b, x = mpmath.mpf(d) / 2, mpmath.mpf(alpha)
        log_mean = mpmath.log(mpmath.hyp0f1(b, x**2 / 4))
        cosine = mpmath.besseli(b, x) / mpmath.besseli(b - 1, x)
        return {"log_mean_exp": log_mean, "mean_cosine": cosine, "kl_from_uniform": x * cosine - log_mean}


@pytest.mark.parametrize("d", DIMENSIONS)
def test_agrees_with_arithmetic_at_50_digits(d):
    # Measured: 7e-15, 1e-15 and 8e-15 up to d = 1024.
    for alpha in ALPHAS:
        for name, expected in at_50_digits(alpha, d).items():
            value = float(getattr(theory, name)(alpha, d))
            assert abs(value / expected - 1) < 2e-14, (name, alpha, d)


@pytest.mark.parametrize("alpha", [47.9, 48.1, 1e6, 4.3e11])
def test_small_d_needs_large_alpha(alpha):
    for d in (2, 3):
        for name, expected in at_50_digits(alpha, d).items():
            assert abs(float(getattr(theory, name)(alpha, d)) / expected - 1) < 1e-14, (name, alpha, d)


@pytest.mark.parametrize("d", [2, 3, 8, 128])
@pytest.mark.parametrize("alpha", [0.0, 0.5, 16.0, 128.0])
def test_entropy_is_equation_9_by_quadrature(alpha, d):
    def integral(f):
        return quad(lambda x: f(x) * math.sin(x) ** (d - 2), 0, math.pi, epsabs=0, epsrel=1e-12, limit=200)[0]

    def weight(x):
        return math.exp(alpha * math.cos(x) - alpha)

    mean = integral(weight)
    focus = integral(lambda x: alpha * math.cos(x) * weight(x)) / mean
    expected = math.log(1024) + math.log(mean / integral(lambda x: 1.0)) + alpha - focus
    assert theory.entropy(1024, alpha, d) == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize("d", [2, 128])
def test_alpha_zero_is_uniform_attention(d):
    assert theory.log_mean_exp(0, d) == theory.mean_cosine(0, d) == theory.kl_from_uniform(0, d) == 0
    assert theory.concentration(0, d) == 0
    laws = (theory.entropy, theory.entropy_laplace, theory.entropy_eq10, theory.entropy_eq12)
    for law in laws:
        assert law(64, 0, d) == math.log(64)


def test_kl_keeps_its_digits_for_small_alpha():
    alpha, d = np.logspace(-8, -3, 20), 128
    np.testing.assert_allclose(theory.kl_from_uniform(alpha, d), alpha**2 / (2 * d), rtol=1e-9)


@given(alphas, dimensions)
@examples(20)
def test_mean_cosine_is_the_slope_of_log_mean_exp(alpha, d):
    step = 1e-4 * alpha
    slope = (theory.log_mean_exp(alpha + step, d) - theory.log_mean_exp(alpha - step, d)) / (2 * step)
    assert theory.mean_cosine(alpha, d) == pytest.approx(slope, rel=1e-7)


@given(alphas, dimensions, st.floats(1.001, 10))
@examples(20)
def test_monotone_in_alpha(alpha, d, factor):
    for f in (theory.log_mean_exp, theory.mean_cosine, theory.kl_from_uniform):
        assert f(alpha, d) < f(alpha * factor, d)
    assert theory.peak_cosine(alpha, d + 2) < theory.peak_cosine(alpha * factor, d + 2) < 1


@given(alphas, st.integers(2, 255))
@examples(20)
def test_monotone_in_d_and_bounded(alpha, d):
    assert theory.kl_from_uniform(alpha, d) <= alpha**2 / (2 * d) * (1 + 1e-12)
    assert 0 < theory.mean_cosine(alpha, d + 1) < theory.mean_cosine(alpha, d) < 1


def test_broadcasts_and_answers_scalars_with_scalars():
    alpha, d = np.array(ALPHAS)[:, None], np.array(DIMENSIONS)
    table = theory.entropy(64, alpha, d)
    assert table.shape == (len(ALPHAS), len(DIMENSIONS)) and table.dtype == np.float64
    assert table[7, 3] == theory.entropy(64, ALPHAS[7], DIMENSIONS[3])
    for scalar in (
        theory.kl_from_uniform(1, 2),
        theory.concentration(1, 2),
        theory.invariant_scale(9, 3, 1, 2),
    ):
        assert isinstance(scalar, float)


@pytest.mark.parametrize("alpha", [8, 16, 32, 64, 96, 128, 256])
def test_equation_18_is_the_peak_of_the_integrand(alpha):
    d = 128
    peak = minimize_scalar(
        lambda eta: -(alpha * eta + (d - 3) / 2 * math.log1p(-(eta**2))),
        bounds=(0, 1 - 1e-12),
        method="bounded",
        options={"xatol": 1e-12},
    ).x
    assert theory.peak_cosine(alpha, d) == pytest.approx(peak, abs=1e-7)


def test_equation_18_numbers():
    alpha, d = (8, 16, 32, 64, 96, 128, 256), 128
    with mpmath.workdps(50):
        expected = [float((-(d - 3) + mpmath.sqrt((d - 3) ** 2 + 4 * a**2)) / (2 * mpmath.mpf(a))) for a in alpha]
    np.testing.assert_allclose(theory.peak_cosine(alpha, d), expected, rtol=1e-15)
    tiny = theory.peak_cosine(1e-9, 128)  # (-(d-3) + √…)/2 alpha would be 0 here
    assert tiny == pytest.approx(1e-9 / 125, rel=1e-14)


def test_equation_18_at_the_smallest_dimensions():
    assert theory.peak_cosine(5, 3) == 1
    assert np.isnan(theory.peak_cosine(0, 3))
    with pytest.raises(ValueError, match=r"d: expected .*3.*got 2"):
        theory.peak_cosine(5, 2)


@given(st.floats(math.log(1e-8), math.log(math.log(1e7))).map(math.exp), dimensions)
@examples(20)
def test_concentration_inverts_kl(kl, d):
    assert theory.kl_from_uniform(theory.concentration(kl, d), d) == pytest.approx(kl, rel=1e-11)


def test_concentration_inverts_kl_over_a_grid():
    alpha, d = np.array(ALPHAS)[:, None], np.array(DIMENSIONS)
    back = theory.concentration(theory.kl_from_uniform(alpha, d), d)
    np.testing.assert_allclose(back, np.broadcast_to(alpha, back.shape), rtol=5e-12)  # measured 1e-12


@given(st.floats(1, 1e6), st.floats(1, 1e3), st.floats(0.1, 200), st.integers(2, 256))
@examples(20)
def test_invariant_scale_keeps_the_entropy(train_length, longer, alpha, d):
    n = train_length * longer
    tau = theory.invariant_scale(n, train_length, alpha, d)
    assert tau >= 1 - 1e-9
    expected = theory.entropy(train_length, alpha, d)
    assert theory.entropy(n, tau * alpha, d) == pytest.approx(expected, abs=1e-10 * (1 + alpha))


def sampled_entropy(n: int, alpha: float, d: int, queries: int = 128) -> float:
    """Mean entropy of softmax attention of random unit queries over n random unit keys."""
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((queries, d)), rng.standard_normal((n, d))
    q, k = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (q, k))
    log_p = alpha * q @ k.T
    log_p -= np.log(np.exp(log_p).sum(1, keepdims=True))
    return float(-(np.exp(log_p) * log_p).sum(1).mean())


def test_random_keys_have_this_entropy():
    assert abs(sampled_entropy(8192, 16, 128) - theory.entropy(8192, 16, 128)) < 0.02


def test_assumption_1_fails_where_the_entropy_runs_out():
    # ε = 0 at n = 64 asks for KL = ln 64; 64 keys are too few for the law of large numbers there.
    alpha = theory.concentration(math.log(64), 128)
    assert abs(theory.entropy(64, alpha, 128)) < 1e-12
    assert sampled_entropy(64, alpha, 128) > 1.5


def test_laplace_improves_with_d():
    n, alpha, d = 8192, 16, np.array([16, 32, 64, 128, 256, 512, 1024])
    exact = theory.entropy(n, alpha, d)
    for law in (theory.entropy_laplace, theory.entropy_eq10):
        error = np.abs(law(n, alpha, d) - exact)
        assert np.all(np.diff(error) < 0) and error[-1] < 1e-3
    # At fixed t = alpha²/d² the error settles at a constant instead, while KL grows with d.
    error = np.abs(theory.entropy_laplace(n, d / 4, d) - theory.entropy(n, d / 4, d))
    assert np.all(np.diff(error / theory.kl_from_uniform(d / 4, d)) < 0)


def test_equation_10_beats_the_laplace_line_it_came_from():
    # Dropping ½ ln √(4t+1) undoes most of what d for d - 2 and cos θ* for the mean cosine did.
    n, alpha, d = 8192, np.array([8, 16, 32, 64, 128]), 128
    exact = theory.entropy(n, alpha, d)
    eq10, laplace = (np.abs(law(n, alpha, d) - exact) for law in (theory.entropy_eq10, theory.entropy_laplace))
    assert np.all(eq10 < laplace / 4)
    assert eq10[1] == pytest.approx(3.3e-4, abs=1e-5) and laplace[1] == pytest.approx(1.48e-2, abs=1e-4)


def test_equation_12_ends_at_t_1():
    h = theory.entropy_eq12(64, [127.0, 128.0, 256.0], 128)
    assert np.isfinite(h[0]) and np.isnan(h[1:]).all()


@given(st.floats(1e-3, 100), dimensions)
@examples(20)
def test_approximate_concentrations_invert_their_equations(kl, d):
    alpha = theory.concentration_eq10(kl, d)
    assert -theory.entropy_eq10(1, alpha, d) == pytest.approx(kl, rel=1e-9)
    if kl < 5 * d:
        alpha = theory.concentration_eq12(kl, d)
        assert -theory.entropy_eq12(1, alpha, d) == pytest.approx(kl, rel=1e-9, abs=1e-15 * d * math.exp(2 * kl / d))


def test_infoscale_numbers():
    """64 → 4096 at d = 128, ε = 0: InfoScale 1.392, without the Taylor step 1.485, exactly 1.4845."""
    n, train_length, d = 4096, 64, 128

    def scale(inverse, epsilon=0.0):
        return inverse(math.log(n) - epsilon, d) / inverse(math.log(train_length) - epsilon, d)

    def closed_form(epsilon):
        y, y_tr = (math.exp(2 * epsilon / d) * m ** (-2 / d) for m in (n, train_length))
        return math.sqrt((1 - y) / (1 - y_tr)), math.sqrt((1 - y) / (1 - y_tr)) * y_tr / y

    assert scale(theory.concentration_eq12) == pytest.approx(1.392, abs=5e-4)
    assert scale(theory.concentration_eq10) == pytest.approx(1.485, abs=5e-4)
    assert scale(theory.concentration) == pytest.approx(1.4845, abs=5e-5)
    for epsilon in (0.0, 1.5, -2.0):
        eq12, eq10 = closed_form(epsilon)
        assert scale(theory.concentration_eq12, epsilon) == pytest.approx(eq12, rel=1e-12)
        assert scale(theory.concentration_eq10, epsilon) == pytest.approx(eq10, rel=1e-12)


@pytest.mark.parametrize(("alpha", "d"), [(0.0, 2), (1.0, 3), (16.0, 128), (64.0, 128), (1e4, 2), (1e4, 256)])
def test_derivation_says_what_each_step_costs(alpha, d):
    steps = theory.derivation(8192, alpha, d)
    assert [s.name.split(" ≅ ")[-1] for s in steps] == [
        "Bessel functions",
        "ln √(2π/d)",
        "Laplace",
        "alpha cos θ*",
        "Laplace with its prefactor",
        "Eq. 10",
        "Eq. 12",
        "Eq. 10 inverted",
        "Eq. 12 inverted (InfoScale)",
    ]
    bessel, sine, integral, cosine, laplace, *_ = steps
    assert abs(bessel.error) < 1e-12 * (1 + alpha)
    # The Laplace line is its three integrals put together, so its error is theirs put together.
    assert laplace.error == pytest.approx(integral.error - sine.error - cosine.error, abs=1e-12 * (1 + alpha))
    for step in steps:
        np.testing.assert_equal(step.error, step.approximate - step.exact)


def test_derivation_broadcasts():
    steps = theory.derivation(8192, np.array([[1.0], [16.0], [64.0]]), np.array([64, 128]))
    for step in steps[2:]:
        assert np.shape(step.error) == (3, 2) or step.name.startswith("alpha")
    eq12 = steps[6].error[:, 1]
    assert abs(eq12[0]) < 1e-6 and eq12[2] == pytest.approx(-6.337, abs=1e-3)


@pytest.mark.parametrize(
    ("argument", "call"),
    [
        ("alpha", lambda: theory.log_mean_exp(-1, 8)),
        ("alpha", lambda: theory.mean_cosine([1, math.nan], 8)),
        ("alpha", lambda: theory.entropy(8, math.inf, 8)),
        ("alpha", lambda: theory.entropy_eq10(8, -1, 8)),
        ("alpha", lambda: theory.invariant_scale(8, 4, 0, 8)),
        ("d", lambda: theory.kl_from_uniform(1, 1)),
        ("d", lambda: theory.kl_from_uniform(1, 2.0)),
        ("d", lambda: theory.kl_from_uniform(1, True)),
        ("d", lambda: theory.kl_from_uniform(1, 4096)),
        ("n", lambda: theory.entropy(0, 1, 8)),
        ("n", lambda: theory.entropy_eq12(math.inf, 1, 8)),
        ("n", lambda: theory.invariant_scale(2, 64, 1, 8)),
        ("train_length", lambda: theory.invariant_scale(64, 0.5, 1, 8)),
        ("kl", lambda: theory.concentration(-1e-9, 8)),
        ("kl", lambda: theory.concentration([1.0, 1e5], 8)),
        ("kl", lambda: theory.concentration_eq12(-1, 8)),
    ],
)
def test_bad_input_names_the_argument(argument, call):
    with pytest.raises(ValueError, match=rf"^{argument}: expected .*, got "):
        call()
