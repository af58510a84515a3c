"""Decide claims about differences that vary with the training run and with the document, by a rule fixed beforehand.

A difference is measured for each pre-training p, each seed s trained from it, and each document d that all runs share:

    Δ_psd = μ + a_p + b_ps + c_d + e_psd

An interval of μ covers all three: what another pre-training, another seed and other documents would have given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

Array = NDArray[np.float64]
BOOTSTRAP_DRAWS = 4000
SUPERIOR, INFERIOR, EQUIVALENT, UNDECIDED = "superior", "inferior", "equivalent", "undecided"


@dataclass(frozen=True)
class Effect:
    """A mean difference, and how sure it is.

    Attributes:
        mean: μ, estimated.
        error: its standard error over pre-trainings, seeds and documents.
        freedom: degrees of freedom of the t distribution that its interval is taken from.
        pretrainings, seeds, documents: how many it rests on, `seeds` in all.
        components: standard deviations of a (pre-training), c (document) and the rest, each of one observation.
    """

    mean: float
    error: float
    freedom: int
    pretrainings: int
    seeds: int
    documents: int
    components: dict[str, float]

    @property
    def covers(self) -> tuple[str, ...]:
        """What was free to vary, and is in the interval."""
        counts = {"pre-trainings": self.pretrainings, "seeds": self.seeds, "documents": self.documents}
        return tuple(name for name, count in counts.items() if count > 1)

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        """Return the ends of the interval with this level, mean ± t · error."""
        reach = float(stats.t.ppf((1 + level) / 2, self.freedom)) * self.error
        return self.mean - reach, self.mean + reach

    def p_different(self) -> float:
        """Return the p-value of μ = 0, two-sided."""
        return _p_below(-abs(self.mean), self.error, self.freedom) * 2

    def p_not_equivalent(self, margin: float) -> float:
        """Return the p-value of |μ| ≥ margin, by two one-sided tests (Schuirmann, 1987)."""
        return _p_below(abs(self.mean) - margin, self.error, self.freedom)


def estimate_effect(differences: Sequence[Array], seed: int = 0) -> Effect:
    """Estimate a mean difference by a crossed bootstrap over pre-trainings, seeds within them, and documents.

    Runs share the documents, so that documents are drawn once for all runs of a draw (Owen, 2007, calls it the
    pigeonhole bootstrap; it counts the interaction of run and document up to three times, which errs on the safe side).
    The interval is a t interval with as many degrees of freedom as pre-trainings, less one: percentiles of so few are
    too narrow. With one pre-training the interval says nothing of others, and the more of documents and seeds count.

    Args:
        differences: for each pre-training an array (seeds, documents), the documents in one order.
        seed: of the draws.

    Raises:
        ValueError: there is nothing to estimate from, the documents differ, or a difference is not finite.
    """
    runs = [np.atleast_2d(np.asarray(x, dtype=np.float64)) for x in differences]
    if not runs or any(x.ndim != 2 or 0 in x.shape or x.shape[1] != runs[0].shape[1] for x in runs):
        raise ValueError(
            "differences: expected for each pre-training an array (seeds, documents) of the same documents, got shapes "
            f"{[x.shape for x in runs]}"
        )
    if not all(np.isfinite(x).all() for x in runs):
        raise ValueError("differences: expected finite numbers, got some that are not; leave failed runs out of both")
    pretrainings, seeds, documents = len(runs), sum(len(x) for x in runs), runs[0].shape[1]
    if seeds == documents == 1:
        raise ValueError("differences: expected two documents, seeds or pre-trainings or more, got one of each")
    freedom = next(count - 1 for count in (pretrainings, max(seeds, documents)) if count > 1)
    means = np.array([x.mean() for x in runs])
    return Effect(
        mean=float(means.mean()),
        error=_bootstrap_error(runs, seed),
        freedom=freedom,
        pretrainings=pretrainings,
        seeds=seeds,
        documents=documents,
        components=estimate_components(runs),
    )


def _bootstrap_error(runs: Sequence[Array], seed: int) -> float:
    """Return the standard deviation of the mean under the crossed bootstrap."""
    generator = np.random.default_rng(seed)
    documents, pretrainings = runs[0].shape[1], len(runs)
    weights = _draw_weights(generator, documents)  # of each document in each draw, (draws, documents)
    drawn = np.zeros((BOOTSTRAP_DRAWS, pretrainings))
    for p, run in enumerate(runs):
        by_seed = weights @ run.T  # the mean of each seed under the draw's documents
        drawn[:, p] = (by_seed * _draw_weights(generator, len(run))).sum(1)
    return float((drawn * _draw_weights(generator, pretrainings)).sum(1).std(ddof=1))


def _draw_weights(generator: np.random.Generator, count: int) -> Array:
    """Return the weights of drawing `count` things with replacement, spread so that a mean keeps its whole variance.

    A plain draw of n things has (n - 1) / n of the variance that their mean has: deviations from 1 / n are stretched by
    √(n / (n - 1)).
    """
    if count == 1:
        return np.ones((BOOTSTRAP_DRAWS, 1))
    counts = generator.multinomial(count, np.full(count, 1 / count), BOOTSTRAP_DRAWS)
    return np.asarray(1 / count + (counts / count - 1 / count) * np.sqrt(count / (count - 1)))


def estimate_components(runs: Sequence[Array]) -> dict[str, float]:
    """Estimate the standard deviations of pre-trainings, documents and the rest from the means over seeds.

    The usual estimates of a two-way layout without repeats, from its mean squares; one that would be negative is 0.
    Seeds are within what is said of pre-trainings and of the rest.
    """
    table = np.array([x.mean(0) for x in runs])
    rows, columns = table.shape
    if rows < 2 or columns < 2:
        spread = float(table.std(ddof=1)) if table.size > 1 else 0.0
        return {"pre-training": spread if rows > 1 else 0.0, "document": spread if columns > 1 else 0.0, "rest": 0.0}
    by_row, by_column = table.mean(1, keepdims=True), table.mean(0, keepdims=True)
    rest = ((table - by_row - by_column + table.mean()) ** 2).sum() / ((rows - 1) * (columns - 1))
    row = columns * float(by_row.var(ddof=1)) - rest
    column = rows * float(by_column.var(ddof=1)) - rest
    squares = {"pre-training": row / columns, "document": column / rows, "rest": rest}
    return {name: float(np.sqrt(max(0.0, square))) for name, square in squares.items()}


def _p_below(value: float, error: float, freedom: int) -> float:
    """P(T ≤ value / error); without any error 0 below 0 and 1 from there on."""
    if error == 0:
        return 0.0 if value < 0 else 1.0
    return float(stats.t.cdf(value / error, freedom))


@dataclass(frozen=True)
class Decision:
    """What was decided about one claim.

    Attributes:
        verdict: "superior", "inferior", "equivalent" or "undecided".
        p_different: p-value of no difference, corrected for the number of claims.
        p_not_equivalent: p-value of a difference beyond the margin, corrected for the number of claims.
    """

    verdict: str
    p_different: float
    p_not_equivalent: float


def decide_claims(
    effects: Sequence[Effect],
    margins: Sequence[float],
    equivalences: Sequence[bool],
    alpha: float = 0.05,
    registered: int | None = None,
) -> list[Decision]:
    """Decide registered claims together.

    A difference is superior, or inferior, where the p-value of μ = 0 is at most alpha after Holm's correction over all
    claims, and equivalent where that of |μ| ≥ margin is, by two one-sided tests. The probability that any difference is
    called wrongly is at most alpha, and so is the probability that any equivalence is. Both can be right, for a small
    difference that is known well: what the claim says then decides.

    Args:
        effects: differences, positive where the claim says so.
        margins: for each claim, the largest difference that does not matter.
        equivalences: for each claim, whether it says that there is no difference that matters.
        alpha: probability of any wrong verdict of one kind.
        registered: how many claims were registered, where some are not measured yet; by default as many as `effects`.
    """
    different = correct_p_values([effect.p_different() for effect in effects], registered)
    distinct = [e.p_not_equivalent(margin) for e, margin in zip(effects, margins, strict=True)]
    distinct = correct_p_values(distinct, registered)
    decisions = []
    for effect, p, q, claims_equivalence in zip(effects, different, distinct, equivalences, strict=True):
        verdict = UNDECIDED
        if q <= alpha and (claims_equivalence or p > alpha):
            verdict = EQUIVALENT
        elif p <= alpha:
            verdict = SUPERIOR if effect.mean > 0 else INFERIOR
        decisions.append(Decision(verdict, p, q))
    return decisions


def correct_p_values(values: Sequence[float], count: int | None = None) -> list[float]:
    """Correct p-values for their number: max over smaller ones of (n - rank) p, at most 1 (Holm, 1979).

    Args:
        values: p-values.
        count: n, where more tests were registered than have a p-value; as if the others had 1.
    """
    corrected, largest = [0.0] * len(values), 0.0
    count = len(values) if count is None else count
    for rank, index in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        largest = max(largest, min(1.0, (count - rank) * values[index]))
        corrected[index] = largest
    return corrected
