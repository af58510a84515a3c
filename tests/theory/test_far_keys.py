"""The laws for far keys: each condition they are derived from, against exact values."""

import math
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.integrate import quad

from isentrope import theory
from isentrope.theory import KeySet
from tests.fixtures.recipes import examples

ratios, sigmas = st.floats(1, 1e4), st.floats(0, 4)


def test_share_without_a_law_tends_to_one():
    n = np.array([8192, 32768, 131072, 4194304])
    np.testing.assert_allclose(theory.far_share(n, 4096, 4096, sigma=1.5), 1 - 4096 / n, atol=1e-12)
    assert theory.far_share(4000, 4096, 4096) == pytest.approx(0, abs=1e-14)


def test_beta_one_keeps_the_share_of_training():
    n = np.array([8192, 32768, 131072])
    # Measured: 5e-4 at σ = 1.5. The expectation of a share is not the share of expectations, by Var ln Z / 8.
    np.testing.assert_allclose(theory.far_share(n, 4096, 4096, beta=1, sigma=1.5), 0.5, atol=1e-3)
    np.testing.assert_allclose(theory.far_share_gaussian(n, 4096, 4096, beta=1, sigma=1.5), 0.5, atol=1e-14)


@pytest.mark.parametrize("tau", [1.0, 1.3])
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("sigma", [0.5, 1.0, 2.0])
def test_closed_forms_hold_for_moderate_scores(beta, tau, sigma):
    arguments = 32768, 4096, 4096, beta, tau, sigma, 1.5
    # Errors are of the order of v = (e^{τ²σ²} - 1)/m, at most 0.03 here; measured: 2e-3 and 0.06.
    assert theory.far_share_gaussian(*arguments) == pytest.approx(theory.far_share(*arguments), abs=5e-3)
    closed, exact = (f(32768, 4096, tau, sigma) for f in (theory.far_entropy_gaussian, theory.far_entropy))
    assert closed == pytest.approx(exact, abs=0.1)


def test_closed_forms_fail_where_one_key_has_the_weight():
    # τ²σ² = 81 is beyond 2 ln m = 20.5: the expectation of Z is made by keys that no sample of this size contains.
    exact, closed = (f(32768, 4096, 4096, 0, 1.5, 6.0, 15.0) for f in (theory.far_share, theory.far_share_gaussian))
    assert closed > 0.99 and exact < 0.8
    assert theory.far_entropy_gaussian(32768, 4096, 1.0, 6.0) == 0 < theory.far_entropy(32768, 4096, 1.0, 6.0) < 3


@given(ratios, st.floats(0, 3), sigmas, st.floats(-5, 5))
@examples(20)
def test_noise_bias_keeps_the_expected_sum(ratio, tau, sigma, mean):
    trained = KeySet(64.0, mean, sigma)
    longer = KeySet(64.0 * ratio, mean, sigma).transform(tau, theory.noise_bias(ratio, tau, sigma, mean))
    assert theory.log_sum_gaussian(longer) == pytest.approx(theory.log_sum_gaussian(trained), abs=1e-9)


@given(ratios, st.floats(0.1, 100), sigmas)
@examples(20)
def test_needle_tau_meets_both_conditions_or_none_does(ratio, strength, sigma):
    tau = theory.needle_tau(ratio, strength, sigma)
    if np.isnan(tau):
        assert abs(strength - sigma**2) < sigma * math.sqrt(2 * math.log(ratio)) + 1e-9
        # The odds under `noise_bias` are a parabola in τ with its top at s*/σ², which is still below those of training.
        best = strength / sigma**2
        assert best * strength - theory.noise_bias(ratio, best, sigma) < strength + 1e-6
    else:
        kept = tau * strength - theory.noise_bias(ratio, tau, sigma)
        assert kept == pytest.approx(strength, rel=1e-9, abs=1e-9)
        assert tau >= 1 or strength < sigma**2


def test_needle_of_training_strength_is_logn_on_far_keys():
    far, reference = np.array([4096, 32768, 126976]), 4096
    tau = theory.needle_tau(far / reference, math.log(reference), sigma=0.0)
    np.testing.assert_allclose(tau, np.log(far) / math.log(reference), rtol=1e-14)


def test_both_conditions_hold_exactly_where_keys_are_many():
    strength, sigma, ratio = 12.0, 2.0, 16.0
    tau = theory.needle_tau(ratio, strength, sigma)
    law = tau, theory.noise_bias(ratio, tau, sigma)
    near, noise, needle = KeySet(4096, 0.0, sigma), KeySet(4096, 0.0, sigma), KeySet(1, strength, 0.0)
    longer = KeySet(4096 * ratio, 0.0, sigma)
    before = theory.shares(near, noise, needle)
    after = theory.shares(near, longer.transform(*law), needle.transform(*law))
    # v = (e^{τ²σ²} - 1)/m is 0.03 with heat: the noise of the far set is that far from its expectation.
    np.testing.assert_allclose(after, before, atol=2e-3)
    assert theory.shares(near, longer, needle)[2] < before[2] / 2  # without a law
    unheated = 1.0, theory.noise_bias(ratio, 1.0, sigma)
    assert theory.shares(near, longer.transform(*unheated), needle.transform(*unheated))[2] < before[2] / 4


@pytest.mark.parametrize("kappa", [0.0, 0.5, 1.0, 1.5, 2.0, 3.0])
def test_prior_bias_is_the_mean_density_by_quadrature(kappa):
    def density(n):
        return quad(lambda x: x**-kappa, 100, n, epsabs=0, epsrel=1e-12)[0] / (n - 100)

    n = np.array([50.0, 300.0, 1000.0, 10000.0])
    expected = [math.log(density(300) / density(max(length, 300))) for length in n]
    np.testing.assert_allclose(theory.prior_bias(n, 100, 300, kappa), expected, atol=1e-9)


def test_prior_bias_of_inverse_squares_is_the_length():
    n, window = np.array([256, 1000, 4096, 65536]), np.array([[1], [64], [200], [256]])
    expected = np.broadcast_to(np.log(n / 256), (4, 4))
    np.testing.assert_allclose(theory.prior_bias(n, window, 256), expected, atol=1e-12)


@pytest.mark.parametrize("kappa", [0.25, 0.5, 0.75])
def test_prior_of_slow_decay_is_a_share_law(kappa):
    """Useful mass that grows like m^ρ, ρ = 1 - κ, asks for β = 1 - ρ."""
    n = np.array([1e8, 1e10])
    slope = np.diff(theory.prior_bias(n, 64, 256, kappa)) / np.diff(np.log(n))
    assert slope == pytest.approx(kappa, abs=0.03)  # the window's edge fades like (W/n)^(1-κ): 0.02 at κ = 0.75


def test_effective_beta_rises_from_half_to_one():
    """With half of the training length near, ln(n/n_tr) = ln((1 + r)/2) is a share law whose β grows with r."""
    ratio = np.array([1 + 1e-6, 2, 6, 22, 1e9])
    beta = theory.prior_bias(4096 * (1 + ratio), 4096, 8192) / np.log(ratio)
    np.testing.assert_allclose(beta, np.log((1 + ratio) / 2) / np.log(ratio), atol=1e-8)
    assert beta[0] == pytest.approx(0.5, abs=1e-4) and np.all(np.diff(beta) > 0) and 0.96 < beta[-1] < 1


@pytest.mark.parametrize("count", [4, 64])
def test_log_loss_is_least_at_the_prior_without_heat(count):
    """The answer is far with probability π, its logit a log-likelihood ratio: N(σ²/2, σ²) against N(-σ²/2, σ²).

    The loss -ln a(answer) of attention over a near key with logit 0 and far keys with τ s - b then has no slope in τ
    and b at τ = 1, b = ln m - ln(π/(1 - π)), for any m: a longer text moves the prior, never the temperature.
    """
    rng, sigma, chance, queries = np.random.default_rng(0), 2.0, 0.3, 40_000
    scores = -(sigma**2) / 2 + sigma * rng.standard_normal((queries, count))
    is_far = rng.random(queries) < chance
    scores[is_far, 0] += sigma**2  # any key will do, they are exchangeable
    bias = math.log(count) - math.log(chance / (1 - chance))
    weights = np.exp(scores - bias)
    weights /= 1 + weights.sum(1, keepdims=True)
    slope_in_bias = is_far - weights.sum(1)
    slope_in_tau = (weights * scores).sum(1) - is_far * scores[:, 0]
    for slope in (slope_in_bias, slope_in_tau):
        assert abs(slope.mean()) < 4 * slope.std() / math.sqrt(queries)  # four standard errors, the seed is fixed


def test_derivation_compares_every_step():
    steps = {step.name: step for step in theory.far_derivation(32768, 4096, 8192, 12.0, 2.0)}
    assert len(steps) == 10
    # Each bound is about twice the error measured, which is of the order of v = (e^4 - 1)/28672 = 0.002 but for τ:
    # there the noise that heat adds is left out, the step that LogN takes.
    bounds = (2e-3, 1e-4, 3e-3, 0.02, 1e-13, 6e-4, 2e-3, 2e-4, 0.2, 1e-4)
    for step, bound in zip(steps.values(), bounds, strict=True):
        assert abs(step.error) < bound, step
    assert abs(steps["τ ≅ 1 + ln r / s*"].error) > 0.05
    table = theory.far_derivation(np.array([[16384], [32768]]), 4096, 8192, 12.0, np.array([0.5, 1.0, 2.0]))
    assert all(np.shape(step.error) in ((2, 3), (2, 1)) for step in table)


def test_page_runs(capsys):
    page = (Path(__file__).parents[2] / "docs" / "laws.md").read_text(encoding="utf-8")
    (block,) = [x for x in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "far_derivation" in x]
    exec(compile(block, "docs/laws.md", "exec"), {})
    assert "ln(n/n_tr)" in capsys.readouterr().out


def test_broadcasts_and_answers_scalars_with_scalars():
    table = theory.far_share([8192, 32768], 4096, 4096, np.array([[0.0], [0.5], [1.0]]))
    assert table.shape == (3, 2) and table[1, 1] == theory.far_share(32768, 4096, 4096, 0.5)
    scalars = (
        theory.far_share(99, 9, 9), theory.far_entropy(99, 9), theory.prior_bias(99, 9, 19), theory.needle_tau(2, 9),
        theory.needle_limit(2), theory.noise_bias(2), theory.share_bias(99, 9, 9, 1),
    )  # fmt: skip
    assert all(isinstance(scalar, float) for scalar in scalars)


@pytest.mark.parametrize(
    ("argument", "call"),
    [
        ("n", lambda: theory.far_share(0, 8, 8)),
        ("n", lambda: theory.far_entropy(8, 8)),
        ("window", lambda: theory.far_share(8, 0, 8)),
        ("window", lambda: theory.prior_bias(99, 20, 19)),
        ("reference", lambda: theory.far_share(99, 8, 0)),
        ("tau", lambda: theory.far_share(99, 8, 8, 1, -1)),
        ("sigma", lambda: theory.far_share(99, 8, 8, 1, 1, -1)),
        ("ratio", lambda: theory.noise_bias(0.5)),
        ("ratio", lambda: theory.needle_limit(0.5)),
        ("strength", lambda: theory.needle_tau(2, -1)),
        ("kappa", lambda: theory.prior_bias(99, 9, 19, -1)),
        ("train_length", lambda: theory.prior_bias(99, 9, 0)),
    ],
)
def test_bad_input_names_the_argument(argument, call):
    with pytest.raises(ValueError, match=rf"^{argument}: expected .*, got "):
        call()
