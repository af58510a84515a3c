"""Metrics from per-document losses and hits, and their intervals: a bootstrap over documents, Wilson's for shares."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import exp, inf, log, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
BOOTSTRAP_DRAWS = 2000
MAX_EXPONENT = 700.0  # e^x overflows a double a little above
LARGEST_PERPLEXITY = 1e300
Z_95 = 1.959964


def bootstrap_interval(statistic: Callable[[NDArray[np.int64]], Array], documents: int, seed: int = 0) -> Array:
    """95 % percentile interval of a statistic, by resampling documents with replacement.

    Args:
        statistic: takes the indices of the documents drawn, (draws, documents), and returns its value for each draw,
            (draws, …).
        documents: how many there are.
        seed: the same seed and number of documents give the same draws.

    Returns:
        The 2.5th and the 97.5th percentile, (2, …).
    """
    draws = np.random.default_rng(seed).integers(0, documents, (BOOTSTRAP_DRAWS, documents))
    return np.asarray(np.percentile(statistic(draws), (2.5, 97.5), axis=0))


def mean_interval(values: Array, seed: int = 0) -> tuple[Any, Any, Any]:
    """Mean over documents, the first axis, and the ends of its 95 % interval."""
    low, high = bootstrap_interval(lambda draws: values[draws].mean(1), len(values), seed)
    return values.mean(0), low, high


def difference_interval(
    before: Sequence[Sequence[Mapping[str, float]]], after: Sequence[Sequence[Mapping[str, float]]], metric: str
) -> tuple[float, float]:
    """95 % interval of the change of a metric between two sets of cells measured on the same documents.

    Args:
        before: for each cell (a training seed) its documents, all in one order, each with `count`, `loss` and `hits`
            summed over its predictions. The metric is averaged over cells.
        after: the same, of the other set.
        metric: "ppl" or "acc".
    """

    def change(draws: NDArray[np.int64]) -> Array:
        start, end = (
            np.mean([_resample_metric(cell, draws, metric) for cell in cells], 0) for cells in (before, after)
        )
        return np.asarray(end - start)

    low, high = bootstrap_interval(change, len(before[0]))
    return float(low), float(high)


def _resample_metric(documents: Sequence[Mapping[str, float]], draws: NDArray[np.int64], metric: str) -> Array:
    total, count = (
        np.array([float(document[key]) for document in documents])[draws].sum(1)
        for key in ("loss" if metric == "ppl" else "hits", "count")
    )
    return np.asarray(np.exp(np.minimum(total / count, MAX_EXPONENT)) if metric == "ppl" else total / count)


def summarize_predictions(
    counts: Sequence[int], losses: Sequence[float], hits: Sequence[int], seed: int = 0
) -> dict[str, float]:
    """Perplexity exp(Σ loss / Σ count) and accuracy Σ hits / Σ count with 95 % intervals over documents.

    Args:
        counts: predictions of each document.
        losses: the sum of their cross-entropies.
        hits: how many of them are exact.
        seed: of the bootstrap.

    Returns:
        `ppl`, `acc`, and the ends of their intervals `ppl_low`, `ppl_high`, `acc_low`, `acc_high`.
    """
    count = np.array(counts)
    summary: dict[str, float] = {}
    for name, values in (("ppl", np.array(losses)), ("acc", np.array(hits))):

        def resample(draws: NDArray[np.int64], values: Any = values) -> Array:
            return np.asarray(values[draws].sum(1) / count[draws].sum(1))

        low, high = bootstrap_interval(resample, len(count), seed)
        for key, value in ((name, values.sum() / count.sum()), (f"{name}_low", low), (f"{name}_high", high)):
            summary[key] = perplexity(float(value)) if name == "ppl" else float(value)
    return summary


def perplexity(loss: float) -> float:
    """exp(loss), infinite where a double cannot hold it."""
    return exp(loss) if loss < MAX_EXPONENT else inf


def finite_perplexities(losses: Array) -> list[float]:
    """exp of each loss, at most LARGEST_PERPLEXITY: JSON has no infinity."""
    return [exp(min(loss, log(LARGEST_PERPLEXITY))) for loss in losses.tolist()]


def percent_change(log_ratio: Any) -> Any:
    """100 (e^x - 1): the change of a perplexity in per cent from that of its logarithm."""
    return (100 * np.expm1(log_ratio)).tolist()


def bits_per_byte(losses: Array, sizes: NDArray[np.int64]) -> list[float]:
    """Σ loss / (ln 2 · bytes) from losses in nats and the bytes of the text that they are of."""
    return [float(x) for x in losses / log(2) / np.maximum(sizes, 1)]


def wilson_interval(hits: float, count: int) -> tuple[float, float]:
    """(p + z²/2n ± z √(p(1-p)/n + z²/4n²)) / (1 + z²/n), p = hits / n, z = 1.96. E. B. Wilson, 1927."""
    p, each = hits / count, Z_95 * Z_95 / count
    middle, reach = p + each / 2, Z_95 * sqrt(p * (1 - p) / count + each / (4 * count))
    return max(0.0, (middle - reach) / (1 + each)), min(1.0, (middle + reach) / (1 + each))
