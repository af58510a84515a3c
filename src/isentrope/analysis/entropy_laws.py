"""Attention entropy under each temperature law as n grows: measured on random unit vectors, and in theory.

Queries and keys are uniform on the unit sphere in R^d, scores are α cos θ, and every query sees all n keys. Laws
are taken without their clamp, so that the bare formula shows at every length.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import expm1, log, sqrt
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from isentrope import theory
from isentrope.analysis.law_results import make_folder, write_law_results
from isentrope.functional import attention
from isentrope.recipe import Recipe
from isentrope.scores import Cosine
from isentrope.temperatures import (
    Constant,
    Fitted,
    InfoScale,
    InfoScaleExact,
    LogLength,
    LogN,
    SoftmaxPlus,
    Temperature,
    YaRNTemperature,
)
from isentrope.utils.progress import track_progress

RESULTS_FILE = "laws.json"
# that the queries are spread over, one in memory at a time
KEY_SETS = 2
# relative variance of the softmax sum below which the theory was within 0.2 nats of every measurement
MAX_SETTLED_VARIANCE = 0.1


@dataclass(frozen=True)
class EntropyLawsConfig:
    """What is measured.

    Args:
        train_length: the length where τ = 1, for the laws that depend on it, and the shortest one measured.
        head_dim: of queries and keys.
        alpha: the score is alpha cos θ.
        longest: the last length; they double up to there.
        queries: measured at each length.
        seed: of the random vectors.
    """

    train_length: int = 64
    head_dim: int = 128
    alpha: float = 16.0
    longest: int = 32768
    queries: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        _check_at_least("train_length", self.train_length, 4)
        _check_at_least("head_dim", self.head_dim, 3)
        _check_at_least("length", self.longest, self.train_length + 1, "more than train_length")
        _check_at_least("queries", self.queries, 2)
        _check_at_least("seed", self.seed, 0)
        if self.head_dim > theory.MAX_DIMENSION:
            raise ValueError(f"head_dim: expected at most {theory.MAX_DIMENSION}, got {self.head_dim}")
        # below 1 attention is uniform to within 1/d nats, and there is no focus to keep
        most = float(theory.concentration(log(self.train_length), self.head_dim))
        if not 1 <= self.alpha < most:
            raise ValueError(
                f"alpha: expected 1 ≤ alpha < {most:.4g}, from where on the theory's entropy over train_length="
                f"{self.train_length} keys is negative, got {self.alpha:g}"
            )

    @property
    def lengths(self) -> list[int]:
        doublings = [self.train_length]
        while doublings[-1] * 2 < self.longest:
            doublings.append(doublings[-1] * 2)
        return [*doublings, self.longest]

    @property
    def train_entropy(self) -> float:
        """ε: the exact entropy at the training length."""
        return float(theory.entropy(self.train_length, self.alpha, self.head_dim))


@dataclass(frozen=True)
class Law:
    key: str
    label: str
    temperature: Temperature


def build_laws(config: EntropyLawsConfig) -> tuple[Law, ...]:
    """Build the laws compared; the last has no closed form: it is the τ(n) under which the exact entropy stays."""
    n_tr, epsilon = config.train_length, config.train_entropy
    invariant = theory.invariant_scale(config.lengths, n_tr, config.alpha, config.head_dim)
    return (
        Law("constant", "Constant", Constant(clamp=False)),
        Law("loglength", "LogLength", LogLength(clamp=False)),
        Law("softmaxplus", "SoftmaxPlus", SoftmaxPlus(clamp=False)),
        Law("logn", "LogN", LogN(n_tr, clamp=False)),
        Law("yarn", "YaRN", YaRNTemperature(n_tr, clamp=False)),
        Law("infoscale", "InfoScale ε=0", InfoScale(n_tr, clamp=False)),
        Law("infoscale_matched", f"InfoScale ε={epsilon:.2f}", InfoScale(n_tr, epsilon, clamp=False)),
        Law("exact_matched", f"InfoScaleExact ε={epsilon:.2f}", InfoScaleExact(n_tr, epsilon, clamp=False)),
        Law("invariant", "theory's invariant τ", Fitted(tuple(config.lengths), tuple(invariant.tolist()), clamp=False)),
    )


def measure_laws(config: EntropyLawsConfig, out: Path) -> Path:
    """Measure every law at every length and write `laws.json`.

    Args:
        config: lengths, vectors and scores.
        out: the folder for the file.

    Returns:
        The path of the file.
    """
    make_folder(out)
    compared = build_laws(config)
    lengths = track_progress(config.lengths, lambda n: f"n = {n:>6}", weights=config.lengths)
    rows = [row for n in lengths for row in _measure_length(config, compared, n)]
    head = {
        "study": "laws",
        "config": asdict(config),
        "lengths": config.lengths,
        "train_entropy": config.train_entropy,
        "laws": [{"key": law.key, "label": law.label, "temperature": law.temperature.to_dict()} for law in compared],
    }
    return write_law_results(out / RESULTS_FILE, head, rows)


def _measure_length(config: EntropyLawsConfig, compared: tuple[Law, ...], n: int) -> Iterator[dict[str, Any]]:
    measured: dict[str, list[Tensor]] = {law.key: [] for law in compared}
    for q, k in _draw_vectors(config, n):
        for law in compared:
            recipe = Recipe(score=Cosine(config.alpha), temperature=law.temperature)
            _, aux = attention(q, k, k, recipe, return_entropy=True)
            measured[law.key].append(aux.entropy.flatten().double())
    for law in compared:
        entropy = torch.cat(measured[law.key])
        tau = law.temperature.scale(torch.tensor(n, dtype=torch.float64), config.head_dim).item()
        yield {
            "law": law.key,
            "n": n,
            "tau": tau,
            "entropy": entropy.mean().item(),
            "standard_error": entropy.std().item() / sqrt(len(entropy)),
            "theory": float(theory.entropy(n, tau * config.alpha, config.head_dim)),
            "settled": _relative_variance(n, tau * config.alpha, config.head_dim) < MAX_SETTLED_VARIANCE,
        }


def _draw_vectors(config: EntropyLawsConfig, n: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Draw queries and keys in random directions: Gaussian, since the cosine score normalises them.

    They are the same for every law, and at one length whatever the other lengths are.
    """
    stream = np.random.SeedSequence((config.seed, n)).generate_state(1, np.uint64)
    generator = torch.Generator().manual_seed(int(stream[0]))
    for head in range(KEY_SETS):
        queries = (config.queries + head) // KEY_SETS
        if queries:
            yield (
                torch.randn(1, 1, queries, config.head_dim, generator=generator),
                torch.randn(1, 1, n, config.head_dim, generator=generator),
            )


def _relative_variance(n: int, alpha: float, head_dim: int) -> float:
    """Compute Var Z / (E Z)² of a query's softmax sum Z = Σ_j e^{α cos θ_j}, at most e^300.

    The theory replaces Z by E Z (Assumption 1), so it holds where this is small.
    """
    once, twice = (float(theory.log_mean_exp(m * alpha, head_dim)) for m in (1, 2))
    return expm1(min(twice - 2 * once, 300)) / n


def _check_at_least(name: str, value: int, least: int, meaning: str = "") -> None:
    if value < least:
        raise ValueError(f"{name}: expected {meaning or 'at least'} {least - bool(meaning)}, got {value}")
