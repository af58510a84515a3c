"""Intervals clustered by filler and depth: they cover what was free to vary, and claim nothing from a few clusters."""

from __future__ import annotations

import numpy as np
import pytest

from isentrope.evaluation.clusters import MIN_CLUSTERS, ScoredExample, clustered_interval, student_t
from isentrope.evaluation.metrics import wilson_interval


def draw(random, fillers, depths, spread, base=0.5, each=4):
    """Examples whose chance of success depends on the filler and on the depth."""
    logits = base + spread * (random.normal(size=(fillers, 1)) + random.normal(size=(1, depths)))
    chances = 1 / (1 + np.exp(-logits))
    return [
        ScoredExample(float(random.random() < chances[f, d]), f, d)
        for f in range(fillers)
        for d in range(depths)
        for _ in range(each)
    ]


def covered(fillers, depths, spread, base=0.5, runs=60):
    """How often the clustered interval, and Wilson's of independent examples, contain the mean of all fillers."""
    random = np.random.default_rng(0)
    logits = base + spread * (random.normal(size=(500, 1)) + random.normal(size=(1, 500)))
    mean = (1 / (1 + np.exp(-logits))).mean()
    clustered = independent = 0
    for run in range(runs):
        examples = draw(random, fillers, depths, spread, base)
        interval = clustered_interval(examples, seed=run)
        clustered += interval["low"] <= mean <= interval["high"]
        low, high = wilson_interval(sum(example.score for example in examples), len(examples))
        independent += low <= mean <= high
    return clustered / runs, independent / runs


@pytest.mark.parametrize(("fillers", "depths", "base"), [(4, 5, 0.5), (4, 5, -3), (6, 6, 0.5)])
def test_the_interval_covers_the_mean_where_fillers_and_depths_differ(fillers, depths, base):
    clustered, independent = covered(fillers, depths, spread=1.2, base=base)
    assert clustered >= 0.9  # 95 % less three standard errors of 60 runs, about
    assert independent < 0.8  # what counting examples as independent would have claimed


def test_without_any_difference_it_is_wider_than_it_had_to_be():
    assert covered(4, 5, spread=0, runs=30)[0] >= 0.95


@pytest.mark.parametrize(("fillers", "depths", "claimed"), [(1, 5, False), (5, 1, False), (1, 6, True), (2, 3, True)])
def test_few_clusters_claim_nothing(fillers, depths, claimed):
    interval = clustered_interval(draw(np.random.default_rng(1), fillers, depths, 1.0))
    assert interval["clusters"] == fillers * depths and (interval["fillers"], interval["depths"]) == (fillers, depths)
    assert (interval["low"] is not None) == (interval["high"] is not None) == claimed
    assert claimed == (fillers * depths >= MIN_CLUSTERS)


def test_two_fillers_say_little_about_others():
    one = clustered_interval([ScoredExample(float(d < 5), 0, d) for d in range(10)])
    two = clustered_interval([ScoredExample(float(f), f, d) for f in range(2) for d in range(5)])
    assert 0.1 < one["low"] < one["high"] < 0.9
    assert (two["low"], two["high"]) == (0, 1)


@pytest.mark.parametrize("score", [0.0, 1.0])
def test_all_or_nothing_is_no_certainty(score):
    examples = [ScoredExample(score, f, d) for f in range(4) for d in range(5)]
    interval = clustered_interval(examples)
    assert (interval["low"], interval["high"]) == pytest.approx(wilson_interval(20 * score, 20))


def test_weights_and_seeds():
    halves = [ScoredExample(float(f % 2), f, d, weight=3.0 if f % 2 else 1.0) for f in range(6) for d in range(6)]
    interval = clustered_interval(halves, seed=1)
    assert interval["low"] < 0.75 < interval["high"] and interval == clustered_interval(halves, seed=1)
    # an empty pair of filler and depth is left out
    assert clustered_interval(halves[:-3])["clusters"] == 33


@pytest.mark.parametrize(("freedom", "expected"), [(1, 12.706), (5, 2.571), (10, 2.228), (11, 2.201), (30, 2.042)])
def test_student_t(freedom, expected):
    assert student_t(freedom) == pytest.approx(expected, abs=3e-3)
