"""Shares, log-sum-exp and entropy of sets of keys against quadrature at high precision, samples and limits."""

import math

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isentrope import theory
from isentrope.theory import KeySet
from tests.fixtures.recipes import examples

# From one key to a few thousand, on both sides of σ² = 2 ln m, where the largest key takes over.
SETS = [(1, 2.0), (2, 1.0), (3, 6.0), (64, 0.5), (64, 3.0), (1000, 2.0), (1000, 5.0)]


def sample(keys: KeySet, queries: int, seed: int = 0) -> np.ndarray:
    deviates = np.random.default_rng(seed).standard_normal((queries, int(keys.count)))
    return keys.mean + keys.sigma * deviates


def log_sum_exp(logits: np.ndarray) -> np.ndarray:
    largest = logits.max(-1)
    return largest + np.log(np.exp(logits - largest[..., None]).sum(-1))


@pytest.mark.parametrize("sigma", [0.3, 1.0, 3.0])
def test_two_keys_agree_with_quadrature_at_25_digits(sigma):
    # The difference of two logits is Gaussian with deviation √2 σ, so E ln Z = E ln(2 cosh(√2 σ z / 2)).
    with mpmath.workdps(25):
        scale = sigma / mpmath.sqrt(2)
        expected = mpmath.quad(lambda z: mpmath.npdf(z) * mpmath.log(2 * mpmath.cosh(scale * z)), [-12, -4, 0, 4, 12])
    # Measured: 3e-15.
    assert float(theory.log_sum(KeySet(2, 0.0, sigma))) == pytest.approx(float(expected), abs=1e-13)


@pytest.mark.parametrize(("count", "sigma"), SETS)
def test_agrees_with_samples(count, sigma):
    keys = KeySet(count, 0.3, sigma)
    logits = sample(keys, 4_000)
    log_z = log_sum_exp(logits)
    weights = np.exp(logits - log_z[:, None])
    entropy = log_z - (weights * logits).sum(1)
    # Five standard errors: a chance of 6e-7 each, and the seed is fixed.
    assert abs(log_z.mean() - theory.log_sum(keys)) < 5 * log_z.std() / math.sqrt(len(log_z))
    assert abs(entropy.mean() - theory.entropy_within(keys)) < 5 * entropy.std() / math.sqrt(len(log_z)) + 1e-12
    assert log_z.std() == pytest.approx(float(theory.log_sum_deviation(keys)), rel=0.1)


def test_shares_of_three_sets_agree_with_samples():
    sets = KeySet(32, 1.0, 1.5), KeySet(200, -0.5, 2.0), KeySet(1, 6.0, 0.0)
    log_z = np.stack([log_sum_exp(sample(keys, 20_000, seed)) for seed, keys in enumerate(sets)])
    sampled = np.exp(log_z - log_sum_exp(log_z.T))
    error = sampled.std(1) / math.sqrt(sampled.shape[1])
    np.testing.assert_array_less(np.abs(sampled.mean(1) - theory.shares(*sets)), 5 * error)


def test_one_key_has_its_own_logit():
    keys = KeySet(1, -3.0, [0.0, 0.5, 8.0])
    np.testing.assert_allclose(theory.log_sum(keys), -3.0, atol=1e-13)
    np.testing.assert_allclose(theory.log_sum_deviation(keys), keys.sigma, atol=1e-6)  # a root of rounding at 0
    np.testing.assert_allclose(theory.entropy_within(keys), 0.0, atol=1e-13)


def test_equal_logits_have_shares_by_number():
    near, far = KeySet(48, 0.7, 0.0), KeySet(16, 0.7, 0.0)
    np.testing.assert_allclose(theory.shares(near, far), [0.75, 0.25], atol=1e-14)
    assert theory.entropy_within(near) == pytest.approx(math.log(48), abs=1e-13)
    # Exchangeable keys have shares by number whatever their distribution.
    np.testing.assert_allclose(theory.shares(KeySet(48, 0, 5.0), KeySet(16, 0, 5.0)), [0.75, 0.25], atol=1e-13)


@given(st.floats(1, 1e6), st.floats(0, 6), st.floats(-20, 20), st.floats(-20, 20))
@examples(12)
def test_shares_add_up_and_ignore_a_common_shift(count, sigma, mean, shift):
    def shares(offset):
        return theory.shares(KeySet(100, offset, 1.0), KeySet(count, mean + offset, sigma))

    assert shares(0.0).sum() == pytest.approx(1, abs=1e-12)
    np.testing.assert_allclose(shares(shift), shares(0.0), atol=1e-12)


def test_noise_grows_at_least_like_the_number_of_keys():
    """E ln Z - ln m never falls: the mean of m numbers is the mean of means of m - 1, and ln is concave.

    So noise alone never asks for β < 1.
    """
    count, sigma = 2.0 ** np.arange(0, 17)[:, None], np.array([0.5, 1.0, 2.0, 4.0, 8.0])
    per_key = theory.log_sum(KeySet(count, 0.0, sigma)) - np.log(count)
    assert np.all(np.diff(per_key, axis=0) > -1e-12)
    assert np.all(per_key <= sigma**2 / 2 + 1e-12)


def test_gaussian_form_holds_below_the_transition_and_the_limit_beyond():
    count = 4096
    critical = math.sqrt(2 * math.log(count))  # 4.08
    for fraction, most in ((0.25, 4e-4), (0.5, 8e-3), (0.75, 0.2)):
        keys = KeySet(count, 0.0, fraction * critical)
        assert 0 < theory.log_sum_gaussian(keys) - theory.log_sum(keys) < most
    frozen = KeySet(count, 0.0, 3 * critical)
    exact = theory.log_sum(frozen)
    # Beyond it the closed Gaussian form is off by half as much as ln Z itself, the limit by the ln ln m of the maximum.
    assert theory.log_sum_gaussian(frozen) - exact > 25
    assert theory.log_sum_limit(frozen) / exact == pytest.approx(1, abs=0.15)
    assert theory.log_sum_limit(KeySet(count, 0.0, 1.0)) == theory.log_sum_gaussian(KeySet(count, 0.0, 1.0))


def test_broadcasts_and_answers_scalars_with_scalars():
    keys = KeySet(np.array([[10], [100]]), 0.0, np.array([0.5, 1.0, 2.0]))
    table = theory.log_sum(keys)
    assert table.shape == (2, 3) and theory.shares(keys, KeySet(5)).shape == (2, 2, 3)
    assert table[1, 2] == theory.log_sum(KeySet(100, 0.0, 2.0))
    for f in (theory.log_sum, theory.log_sum_deviation, theory.entropy_within, theory.log_sum_limit):
        assert isinstance(f(KeySet(8)), float)


def test_empty_set_takes_no_share():
    np.testing.assert_allclose(theory.shares(KeySet(8), KeySet(0, 100.0)), [1, 0], atol=1e-14)


@pytest.mark.parametrize(
    ("argument", "call"),
    [
        ("count", lambda: KeySet(-1)),
        ("count", lambda: theory.shares(KeySet(0), KeySet(0))),
        ("count", lambda: theory.log_sum(KeySet(0.5))),
        ("mean", lambda: KeySet(1, math.nan)),
        ("sigma", lambda: KeySet(1, 0, -1)),
        ("sigma", lambda: KeySet(1, 0, 100)),
        ("tau", lambda: KeySet(1).transform(-1)),
    ],
)
def test_bad_input_names_the_argument(argument, call):
    with pytest.raises(ValueError, match=rf"^{argument}: expected .*, got "):
        call()
