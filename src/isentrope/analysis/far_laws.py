"""Share of far keys, entropy within them and share of a relevant far key as n grows, under each law.

A query sees `window` near keys and n - window far ones. Scores are Gaussian with one standard deviation, those of near
keys have a larger mean. One relevant far key has the score at which it takes half of the attention at the training
length, by the closed form. Exact values are `isentrope.theory`'s; beside them the same quantities of sampled scores.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from math import isnan, sqrt
from pathlib import Path
from typing import Any

import numpy as np
import torch

from isentrope import theory
from isentrope.analysis.law_results import make_folder, write_law_results
from isentrope.temperatures import InfoScale, LogN, Temperature
from isentrope.utils.progress import track_progress

RESULTS_FILE = "far_laws.json"
QUANTITIES = ("far_share", "far_entropy", "needle_share")


@dataclass(frozen=True)
class FarLawsConfig:
    """What is computed.

    Args:
        train_length: the length up to which every law leaves attention alone, and the shortest one computed.
        window: number of near keys.
        head_dim: for InfoScale.
        sigma: standard deviation of scores.
        near_mean: mean score of near keys; that of far keys is 0.
        longest: the last length; they double up to there.
        queries: sampled at each length.
    """

    train_length: int = 8192
    window: int = 4096
    head_dim: int = 64
    sigma: float = 2.0
    near_mean: float = 1.5
    longest: int = 131072
    queries: int = 64

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"window: expected at least 1, got {self.window}")
        if self.train_length <= self.window:
            raise ValueError(f"train_length: expected more than window={self.window}, got {self.train_length}")
        if self.longest <= self.train_length:
            raise ValueError(f"length: expected more than train_length={self.train_length}, got {self.longest}")
        if self.head_dim < 1:
            raise ValueError(f"head_dim: expected at least 1, got {self.head_dim}")
        if self.queries < 2:
            raise ValueError(f"queries: expected at least 2, got {self.queries}")
        if not 0 <= self.sigma <= theory.MAX_SIGMA / 2:  # heated scores must stay within the limit of the theory
            raise ValueError(f"sigma: expected 0 ≤ sigma ≤ {theory.MAX_SIGMA / 2:g}, got {self.sigma:g}")
        if not -100 <= self.near_mean <= 100:
            raise ValueError(f"near_mean: expected a number from -100 to 100, got {self.near_mean:g}")

    @property
    def lengths(self) -> list[int]:
        doublings = [self.train_length]
        while doublings[-1] * 2 < self.longest:
            doublings.append(doublings[-1] * 2)
        return [*doublings, self.longest]

    @property
    def needle_score(self) -> float:
        """The score of the relevant far key."""
        near = theory.KeySet(self.window, self.near_mean, self.sigma)
        far = theory.KeySet(self.train_length - self.window, 0.0, self.sigma)
        return float(np.logaddexp(theory.log_sum_gaussian(near), theory.log_sum_gaussian(far)))


@dataclass(frozen=True)
class FarLaw:
    """τ of near and of far keys, and what is subtracted from far logits, at a length n."""

    key: str
    label: str
    near_tau: Callable[[int], float]
    far_tau: Callable[[int], float]
    bias: Callable[[int], float]


def build_far_laws(config: FarLawsConfig) -> tuple[FarLaw, ...]:
    """Build the laws compared."""
    n_tr, window = config.train_length, config.window
    infoscale = _evaluate_temperature(InfoScale(n_tr), config.head_dim)
    logn = _evaluate_temperature(LogN(n_tr), config.head_dim)

    def one(n: int) -> float:
        return 1.0

    def share(beta: float) -> Callable[[int], float]:
        return lambda n: float(theory.share_bias(n, window, n_tr - window, beta))

    def prior(n: int) -> float:
        return float(theory.prior_bias(n, window, n_tr))

    def needle_tau(n: int) -> float:
        ratio = (n - window) / (n_tr - window)
        tau = float(theory.needle_tau(ratio, config.needle_score, config.sigma))
        return 1.0 if isnan(tau) else tau

    def noise(n: int) -> float:
        return float(theory.noise_bias((n - window) / (n_tr - window), needle_tau(n), config.sigma))

    return (
        FarLaw("constant", "none", one, one, share(0.0)),
        FarLaw("infoscale", "InfoScale, all keys", infoscale, infoscale, share(0.0)),
        FarLaw("logn", "LogN, all keys", logn, logn, share(0.0)),
        FarLaw("share_050", "share β = 0.5", one, one, share(0.5)),
        FarLaw("share_075", "share β = 0.75", one, one, share(0.75)),
        FarLaw("share_100", "share β = 1", one, one, share(1.0)),
        FarLaw("prior", "prior, ln(n / n_tr)", one, one, prior),
        FarLaw("logn_far", "LogN far + share β = 1", one, logn, share(1.0)),
        FarLaw("both", "both, σ known", one, needle_tau, noise),
    )


def compute_far_laws(config: FarLawsConfig, out: Path) -> Path:
    """Compute every law at every length, exactly and on sampled scores, and write `far_laws.json`.

    Args:
        config: lengths and scores.
        out: the folder for the file.

    Returns:
        The path of the file.
    """
    make_folder(out)
    laws = build_far_laws(config)
    lengths = track_progress(config.lengths, lambda n: f"n = {n:>6}", weights=config.lengths)
    rows = [row for n in lengths for row in _compute_length(config, laws, n)]
    head = {
        "study": "far_laws",
        "config": asdict(config),
        "lengths": config.lengths,
        "needle_score": config.needle_score,
        "laws": [{"key": law.key, "label": law.label} for law in laws],
    }
    return write_law_results(out / RESULTS_FILE, head, rows)


def _evaluate_temperature(temperature: Temperature, head_dim: int) -> Callable[[int], float]:
    return lambda n: temperature.scale(torch.tensor(n, dtype=torch.float64), head_dim).item()


def _compute_length(config: FarLawsConfig, laws: tuple[FarLaw, ...], n: int) -> list[dict[str, Any]]:
    settings = [(law.near_tau(n), law.far_tau(n), law.bias(n)) for law in laws]
    near_tau, far_tau, bias = (np.array(values) for values in zip(*settings, strict=True))
    near = theory.KeySet(config.window, config.near_mean, config.sigma).transform(near_tau)
    far = theory.KeySet(n - config.window, 0.0, config.sigma).transform(far_tau, bias)
    needle = theory.KeySet(1, config.needle_score, 0.0).transform(far_tau, bias)
    exact = (theory.shares(near, far)[1], theory.entropy_within(far), theory.shares(near, far, needle)[2])
    sampled = _sample_length(config, settings, n)
    return [
        {
            "law": law.key,
            "n": n,
            "near_tau": settings[i][0],
            "far_tau": settings[i][1],
            "bias": settings[i][2],
            **{name: float(values[i]) for name, values in zip(QUANTITIES, exact, strict=True)},
            "sampled": {
                name: {"mean": float(values.mean()), "standard_error": float(values.std(ddof=1)) / sqrt(len(values))}
                for name, values in zip(QUANTITIES, sampled[i], strict=True)
            },
        }
        for i, law in enumerate(laws)
    ]


def _sample_length(config: FarLawsConfig, settings: list[tuple[float, float, float]], n: int) -> Any:
    """Sample the quantities: (laws, quantities, queries). All laws see the same scores."""
    generator = np.random.default_rng((n, config.queries))
    sampled = np.empty((len(settings), len(QUANTITIES), config.queries))
    for query in range(config.queries):
        near = config.near_mean + config.sigma * generator.standard_normal(config.window)
        far = config.sigma * generator.standard_normal(n - config.window)
        for i, (near_tau, far_tau, bias) in enumerate(settings):
            log_near = _log_sum(near_tau * near)
            logits = far_tau * far - bias
            log_far = _log_sum(logits)
            log_needle = far_tau * config.needle_score - bias
            both = np.logaddexp(log_near, log_far)
            entropy = log_far - np.exp(logits - log_far) @ logits
            sampled[i, :, query] = (
                np.exp(log_far - both),
                entropy,
                np.exp(log_needle - np.logaddexp(both, log_needle)),
            )
    return sampled


def _log_sum(logits: Any) -> float:
    largest = logits.max()
    return float(largest + np.log(np.exp(logits - largest).sum()))
