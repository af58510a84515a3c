"""Intervals of scores that are free to vary in two ways at once: with the filler, and with the depth.

Examples in one filler, or at one depth, succeed and fail together, so that counting them as independent claims too
much. The standard error is that of a bootstrap that draws fillers and depths, each with replacement and independently
(P. McCullagh, 2000; A. B. Owen, 2007); the interval is the mean ± t · √(m / (m - 1)) · that error, t of m - 1 degrees
of freedom, m the smaller number of levels. It is never narrower than Wilson's for independent examples.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import lru_cache
from typing import NamedTuple, TypedDict

import numpy as np

from isentrope.evaluation.metrics import BOOTSTRAP_DRAWS, Z_95, Array, wilson_interval

MIN_CLUSTERS = 6  # with fewer no interval is claimed
# 97.5th percentiles of Student's t for 1, 2, … degrees of freedom
T_95 = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281)


class ScoredExample(NamedTuple):
    """A score between 0 and 1, and the filler, depth and weight of its example."""

    score: float
    filler: Hashable
    depth: Hashable
    weight: float = 1.0


class ClusteredInterval(TypedDict):
    """A 95 % interval, and over what: pairs of filler and depth, and how many there are of each."""

    low: float | None
    high: float | None
    clusters: int
    fillers: int
    depths: int


def clustered_interval(examples: Sequence[ScoredExample], seed: int = 0) -> ClusteredInterval:
    """95 % interval of the weighted mean score, over fillers and depths; without ends for fewer than MIN_CLUSTERS.

    A factor of one level was not free to vary, and the interval says nothing about others.

    Args:
        examples: scores with their filler and depth.
        seed: of the bootstrap.
    """
    fillers = {level: i for i, level in enumerate(dict.fromkeys(example.filler for example in examples))}
    depths = {level: i for i, level in enumerate(dict.fromkeys(example.depth for example in examples))}
    clusters = len({(example.filler, example.depth) for example in examples})
    result = ClusteredInterval(low=None, high=None, clusters=clusters, fillers=len(fillers), depths=len(depths))
    if clusters < MIN_CLUSTERS:
        return result
    totals, weights = (np.zeros((len(fillers), len(depths))) for _ in range(2))
    for score, filler, depth, weight in examples:
        totals[fillers[filler], depths[depth]] += score * weight
        weights[fillers[filler], depths[depth]] += weight
    mean = totals.sum() / weights.sum()
    by_filler, by_depth = (_draw_levels(seed, factor, n) for factor, n in enumerate(totals.shape))
    drawn, sizes = ((by_filler @ cells * by_depth).sum(1) for cells in (totals, weights))
    resampled = drawn[sizes > 0] / sizes[sizes > 0]
    levels = min(n for n in totals.shape if n > 1)
    reach = student_t(levels - 1) * float(resampled.std()) * np.sqrt(levels / (levels - 1))
    low, high = wilson_interval(mean * len(examples), len(examples))
    result["low"] = float(max(0.0, min(low, mean - reach)))
    result["high"] = float(min(1.0, max(high, mean + reach)))
    return result


@lru_cache(64)
def _draw_levels(seed: int, factor: int, levels: int) -> Array:
    """Draw how often each level of a factor is in each resample, (draws, levels)."""
    random = np.random.default_rng((seed, factor))
    return random.multinomial(levels, np.full(levels, 1 / levels), BOOTSTRAP_DRAWS).astype(np.float64)


def student_t(freedom: int) -> float:
    """97.5th percentile of Student's t: from a table, then Cornish and Fisher's expansion."""
    if freedom <= len(T_95):
        return T_95[freedom - 1]
    z = Z_95
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
