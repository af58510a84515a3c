"""Split documents into training, validation and test sets: the paper's appendix A.1, made safe against leaks.

80 % of the documents train, drawn at random. The features of the others are reduced to two principal components and
split by spectral clustering; test documents are drawn from both clusters in proportion to their sizes; the rest
validates. Near-duplicates and documents of one group never straddle training and the rest; of near-duplicates at most
one is a test document, and the others then leave validation.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isentrope.data.duplicates import connected_components

TRAIN, VALIDATION, TEST, LEFT_OUT = "train", "validation", "test", "left out"
SETS = (TRAIN, VALIDATION, TEST, LEFT_OUT)
MAX_CLUSTERED_DOCUMENTS = 4096  # the others take the label of their nearest neighbour
GRAPH_NEIGHBOURS = 10
BIGRAM_BUCKETS = 768  # the hidden size of the paper's model
Integers = NDArray[np.int64]
Features = NDArray[np.float64]


@dataclass(frozen=True)
class HeldOutSplit:
    """Two coordinates, the spectral cluster (0 is the larger) and the set of each held-out document."""

    coordinates: Features
    labels: Integers
    sets: list[str]


def select_held_out(
    near_duplicates: Sequence[int] | Integers,
    groups: Sequence[str | None],
    seed: int = 0,
    train_share: float = 0.8,
) -> Integers:
    """Return the indices of the documents that do not train.

    Units of documents that must stay together are assigned in random order; one that no longer fits into the training
    set is held out.

    Args:
        near_duplicates: For each document the first of its near-duplicates, or itself.
        groups: For each document its group, if any.
        seed: Seed of the order.
        train_share: Share of the documents to train on.
    """
    if not 0 < train_share < 1:
        raise ValueError(f"train_share: expected a share between 0 and 1, got {train_share}")
    count = len(near_duplicates)
    first: dict[str, int] = {}
    pairs = [(i, int(other)) for i, other in enumerate(near_duplicates)]
    pairs += [(i, first.setdefault(group, i)) for i, group in enumerate(groups) if group is not None]
    units: dict[int, list[int]] = {}
    for i, unit in enumerate(connected_components(count, pairs).tolist()):
        units.setdefault(unit, []).append(i)
    blocks = list(units.values())
    remaining, held_out = round(train_share * count), list[list[int]]()
    for index in np.random.default_rng(seed).permutation(len(blocks)):
        unit = blocks[index]
        if len(unit) <= remaining:
            remaining -= len(unit)
        else:
            held_out.append(unit)
    if not held_out or len(held_out) == len(blocks):
        raise ValueError(
            f"documents: expected some to train on and some to hold out, got {count} in {len(blocks)} "
            f"group{'s' if len(blocks) != 1 else ''} of near-duplicates, which stay together; add documents that differ"
        )
    return np.array(sorted(i for unit in held_out for i in unit), np.int64)


def split_held_out(
    features: Features, near_duplicates: Sequence[int] | Integers, seed: int = 0, test: int = 10
) -> HeldOutSplit:
    """Draw test documents from both clusters of the held-out ones in proportion to their sizes.

    Args:
        features: Of the held-out documents, (documents, features).
        near_duplicates: As in `select_held_out`; near-duplicates count as one document.
        seed: Seed of the draw.
        test: Number of test documents.
    """
    if test < 1:
        raise ValueError(f"test: expected 1 or more, got {test}")
    random = np.random.default_rng([seed, 1])  # another stream than that of select_held_out
    cluster = np.unique(np.asarray(near_duplicates), return_inverse=True)[1]
    shuffled = random.permutation(len(cluster))
    # the first in shuffled order is a random one of each set of near-duplicates
    distinct = shuffled[np.unique(cluster[shuffled], return_index=True)[1]]
    if len(distinct) <= test:
        distinct_documents = f"{len(distinct)} documents held out, near-duplicates counted once"
        remedy = f"try --test {len(distinct) // 3 or 1}" if len(distinct) > 1 else "prepare more documents"
        raise ValueError(f"test: expected fewer than the {distinct_documents}, got {test}; {remedy}")
    coordinates = principal_components(features)
    labels = spectral_clusters(coordinates, seed)
    chosen = list[int]()
    strata = [np.sort(distinct[labels[distinct] == label]) for label in (0, 1)]
    for stratum, size in zip(strata, allocate_proportionally([len(stratum) for stratum in strata], test), strict=True):
        chosen += random.choice(stratum, size, replace=False).tolist()
    sets = np.where(np.isin(cluster, cluster[chosen]), LEFT_OUT, VALIDATION).astype(object)
    sets[chosen] = TEST
    return HeldOutSplit(coordinates, labels, sets.tolist())


def allocate_proportionally(sizes: Sequence[int], total: int) -> list[int]:
    """Split `total` in proportion to sizes by largest remainder, with at least one for each nonzero size."""
    exact = [total * size / sum(sizes) for size in sizes]
    shares = [int(amount) for amount in exact]
    by_remainder = sorted(range(len(sizes)), key=lambda i: (shares[i] - exact[i], -sizes[i], i))
    for i in by_remainder[: total - sum(shares)]:
        shares[i] += 1
    for i, size in enumerate(sizes):
        if size and not shares[i] and max(shares) > 1:
            shares[shares.index(max(shares))] -= 1
            shares[i] = 1
    return shares


def principal_components(features: Features) -> Features:
    """Return the first two principal components, scaled to unit variance, (documents, 2)."""
    from sklearn.decomposition import PCA

    if not np.isfinite(features).all():
        raise ValueError("features: expected finite numbers, got NaN or infinity")
    components = min(2, *features.shape)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # identical documents have no variance to explain
        projected = PCA(components, svd_solver="covariance_eigh").fit_transform(features)
    projected = np.pad(projected, ((0, 0), (0, 2 - components)))
    deviation = projected.std(0)
    return projected / np.where(deviation > 1e-9, deviation, 1)


def spectral_clusters(coordinates: Features, seed: int = 0) -> Integers:
    """Label two clusters by the normalised cut of the nearest-neighbour graph, 0 for the larger, (documents,)."""
    from sklearn.cluster import SpectralClustering
    from sklearn.neighbors import KNeighborsClassifier

    count = len(coordinates)
    if len(np.unique(coordinates, axis=0)) < 3:
        return np.zeros(count, np.int64)
    sample = np.arange(count)
    if count > MAX_CLUSTERED_DOCUMENTS:
        sample = np.sort(np.random.default_rng([seed, 2]).choice(count, MAX_CLUSTERED_DOCUMENTS, replace=False))
    neighbours = min(GRAPH_NEIGHBOURS, len(sample) - 1)
    clustering: Any = SpectralClustering(2, affinity="nearest_neighbors", n_neighbors=neighbours, random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a disconnected graph is cut between its parts
        sample_labels = clustering.fit_predict(coordinates[sample])
        labels = KNeighborsClassifier(1).fit(coordinates[sample], sample_labels).predict(coordinates)
    labels[sample] = sample_labels  # documents with equal coordinates may have got another's label
    return np.asarray(labels != np.bincount(labels, minlength=2).argmax()).astype(np.int64)


def bigram_features(tokens: NDArray[np.int32]) -> Features:
    """Return √(share of a document's token pairs hashed to each bucket), features that need no model, (768,)."""
    pairs = tokens[:-1].astype(np.uint64) << np.uint64(32) | tokens[1:].astype(np.uint64)
    hashes = (pairs * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(32)
    counts = np.bincount((hashes % np.uint64(BIGRAM_BUCKETS)).astype(np.int64), minlength=BIGRAM_BUCKETS)
    return np.sqrt(counts / max(1, len(pairs)))
