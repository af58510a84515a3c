"""Which documents train, validate and test: the paper's appendix A.1, made safe against leaks.

80 % of the documents train, drawn at random. The features of the others are reduced to two by principal components and
parted into two by spectral clustering; the test documents are drawn from both clusters, by their sizes; the rest
validates. Near-duplicates and documents of one group are on the same side of the first cut; of near-duplicates at most
one is tested on, and the others then leave validation.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isentrope.data.duplicates import linked

TRAIN, VALIDATION, TEST, LEFT_OUT = "train", "validation", "test", "left out"
SETS = (TRAIN, VALIDATION, TEST, LEFT_OUT)
CLUSTERED = 4096  # documents; of more, the others take the label of the nearest
NEAREST = 10  # neighbours in the graph that is cut
BUCKETS = 768  # as many features as a hidden state of the paper's model has
Integers = NDArray[np.int64]
Features = NDArray[np.float64]


@dataclass(frozen=True)
class Drawn:
    """Of the documents held out: two coordinates each, the spectral cluster, 0 for the larger one, and the set."""

    coordinates: Features
    labels: Integers
    sets: list[str]


def held_out(
    near_duplicates: Sequence[int] | Integers,
    groups: Sequence[str | None],
    seed: int = 0,
    train_share: float = 0.8,
) -> Integers:
    """Indices of the documents that do not train.

    near_duplicates: for each document the first that it is a near-duplicate of, itself where there is none. What must
    stay together is dealt out in random order; a unit that no longer fits into the training set is held out.
    """
    if not 0 < train_share < 1:
        raise ValueError(f"train_share: expected a share between 0 and 1, got {train_share}")
    count = len(near_duplicates)
    first: dict[str, int] = {}
    pairs = [(i, int(other)) for i, other in enumerate(near_duplicates)]
    pairs += [(i, first.setdefault(group, i)) for i, group in enumerate(groups) if group is not None]
    units: dict[int, list[int]] = {}
    for i, unit in enumerate(linked(count, pairs).tolist()):
        units.setdefault(unit, []).append(i)
    dealt = list(units.values())
    room, rest = round(train_share * count), list[list[int]]()
    for index in np.random.default_rng(seed).permutation(len(dealt)):
        unit = dealt[index]
        if len(unit) <= room:
            room -= len(unit)
        else:
            rest.append(unit)
    if not rest or len(rest) == len(dealt):
        raise ValueError(
            f"documents: expected some to train on and some to hold out, got {count} in {len(dealt)} "
            f"group{'s' if len(dealt) != 1 else ''} that may not be torn"
        )
    return np.array(sorted(i for unit in rest for i in unit), np.int64)


def draw(features: Features, near_duplicates: Sequence[int] | Integers, seed: int = 0, test: int = 10) -> Drawn:
    """Which of the documents held out are tested on: drawn from both clusters in proportion to their sizes.

    features: (documents, features). Near-duplicates count as one document.
    """
    if test < 1:
        raise ValueError(f"test: expected 1 or more, got {test}")
    random = np.random.default_rng([seed, 1])  # not the stream that chose what to hold out
    copies = np.unique(np.asarray(near_duplicates), return_inverse=True)[1]
    shuffled = random.permutation(len(copies))
    # one of each set of near-duplicates, at random: the first in a shuffled order
    single = shuffled[np.unique(copies[shuffled], return_index=True)[1]]
    if len(single) <= test:
        raise ValueError(
            f"test: expected fewer than the {len(single)} documents held out, near-duplicates counted once, got {test}"
        )
    coordinates = principal(features)
    labels = spectral(coordinates, seed)
    chosen = list[int]()
    strata = [np.sort(single[labels[single] == label]) for label in (0, 1)]
    for stratum, size in zip(strata, allotted([len(stratum) for stratum in strata], test), strict=True):
        chosen += random.choice(stratum, size, replace=False).tolist()
    sets = np.where(np.isin(copies, copies[chosen]), LEFT_OUT, VALIDATION).astype(object)
    sets[chosen] = TEST
    return Drawn(coordinates, labels, sets.tolist())


def allotted(sizes: Sequence[int], total: int) -> list[int]:
    """`total` places in proportion to sizes by largest remainder, one at least for each that is not empty."""
    exact = [total * size / sum(sizes) for size in sizes]
    places = [int(share) for share in exact]
    by_remainder = sorted(range(len(sizes)), key=lambda i: (places[i] - exact[i], -sizes[i], i))
    for i in by_remainder[: total - sum(places)]:
        places[i] += 1
    for i, size in enumerate(sizes):
        if size and not places[i] and max(places) > 1:
            places[places.index(max(places))] -= 1
            places[i] = 1
    return places


def principal(features: Features) -> Features:
    """The first two principal components, each with variance one, (documents, 2)."""
    from sklearn.decomposition import PCA

    if not np.isfinite(features).all():
        raise ValueError("features: expected finite numbers, got NaN or infinity")
    components = min(2, *features.shape)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # documents that are all alike have no variance to explain
        found = PCA(components, svd_solver="covariance_eigh").fit_transform(features)
    found = np.pad(found, ((0, 0), (0, 2 - components)))
    spread = found.std(0)
    return found / np.where(spread > 1e-9, spread, 1)


def spectral(coordinates: Features, seed: int = 0) -> Integers:
    """Two clusters by the normalised cut of the graph of nearest neighbours, the larger one first, (documents,)."""
    from sklearn.cluster import SpectralClustering
    from sklearn.neighbors import KNeighborsClassifier

    count = len(coordinates)
    if len(np.unique(coordinates, axis=0)) < 3:
        return np.zeros(count, np.int64)
    shown = np.arange(count)
    if count > CLUSTERED:
        shown = np.sort(np.random.default_rng([seed, 2]).choice(count, CLUSTERED, replace=False))
    neighbours = min(NEAREST, len(shown) - 1)
    cut: Any = SpectralClustering(2, affinity="nearest_neighbors", n_neighbors=neighbours, random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a graph in several parts is cut between them
        found = cut.fit_predict(coordinates[shown])
        labels = KNeighborsClassifier(1).fit(coordinates[shown], found).predict(coordinates)
    labels[shown] = found  # where several documents have the same coordinates
    return np.asarray(labels != np.bincount(labels, minlength=2).argmax()).astype(np.int64)


def bigrams(tokens: NDArray[np.int32]) -> Features:
    """√(share of a document's pairs of tokens in each of 768 buckets): features that need no model, (768,)."""
    pairs = tokens[:-1].astype(np.uint64) << np.uint64(32) | tokens[1:].astype(np.uint64)
    hashes = (pairs * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(32)
    counts = np.bincount((hashes % np.uint64(BUCKETS)).astype(np.int64), minlength=BUCKETS)
    return np.sqrt(counts / max(1, len(pairs)))
