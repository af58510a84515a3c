"""Metrics and their intervals, by hand: the draws of the bootstrap are fixed, since published numbers rest on them."""

from __future__ import annotations

from math import exp, inf, log

import numpy as np
import pytest

from isentrope.evaluation import metrics


def draws(documents: int, seed: int = 0):
    return np.random.default_rng(seed).integers(0, documents, (2000, documents))


@pytest.mark.parametrize("documents", [1, 2, 10])
@pytest.mark.parametrize("seed", [0, 3])
def test_the_bootstrap_resamples_documents(documents, seed):
    values = np.random.default_rng(1).standard_normal((documents, 3))
    low, high = np.percentile(values[draws(documents, seed)].mean(1), (2.5, 97.5), axis=0)
    actual = metrics.mean_interval(values, seed)
    assert all(np.array_equal(a, b) for a, b in zip(actual, (values.mean(0), low, high), strict=True))


def test_predictions_are_summed_before_they_are_divided():
    counts, losses, hits = [10, 30, 5], [12.0, 45.5, 11.0], [6, 9, 1]
    actual = metrics.summarize_predictions(counts, losses, hits, seed=2)
    picked = draws(3, 2)
    for name, values, scale in (("ppl", losses, exp), ("acc", hits, float)):
        ratios = np.array(values)[picked].sum(1) / np.array(counts)[picked].sum(1)
        low, high = np.percentile(ratios, (2.5, 97.5))
        assert actual[name] == scale(sum(values) / 45)
        assert (actual[f"{name}_low"], actual[f"{name}_high"]) == (scale(low), scale(high))


@pytest.mark.parametrize("metric", ["ppl", "acc"])
def test_a_difference_is_over_the_same_documents(metric):
    random = np.random.default_rng(4)

    def measured():
        rows = zip(random.integers(1, 9, 6), random.random(6), random.integers(0, 9, 6), strict=True)
        return [{"count": int(count), "loss": loss, "hits": int(hits)} for count, loss, hits in rows]

    before, after = [measured(), measured()], [measured(), measured()]

    def resampled(cell):
        total, count = (
            np.array([row[key] for row in cell])[draws(6)].sum(1)
            for key in ("loss" if metric == "ppl" else "hits", "count")
        )
        return np.exp(total / count) if metric == "ppl" else total / count

    change = np.mean([resampled(cell) for cell in after], 0) - np.mean([resampled(cell) for cell in before], 0)
    assert metrics.difference_interval(before, after, metric) == tuple(np.percentile(change, (2.5, 97.5)))
    assert metrics.difference_interval(before, before, metric) == (0, 0)


def test_perplexities_past_all_numbers():
    assert metrics.perplexity(2.0) == exp(2) and metrics.perplexity(1e4) == inf
    assert metrics.finite_perplexities(np.array([2.0, 1e4])) == [exp(2), pytest.approx(1e300)]


def test_bits_per_byte_and_per_cent():
    assert metrics.bits_per_byte(np.array([log(2) * 6, 1.0]), np.array([3, 0])) == [2.0, pytest.approx(1 / log(2))]
    assert metrics.percent_change(np.array([0.0, log(2)])) == [0.0, pytest.approx(100)]
