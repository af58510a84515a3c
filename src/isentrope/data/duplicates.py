"""Near-duplicates: documents that share half of their shingles or more, found by MinHash.

J(A, B) = |A ∩ B| / |A ∪ B|, A and B the sets of two documents' shingles, runs of k tokens. In a random order of all
shingles P(the first of A is the first of B) = J: the share of equal entries in two signatures, one entry an order,
estimates it. Only documents that agree in some band, three neighbouring entries, are compared. A. Broder, "On the
resemblance and containment of documents", 1997.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil, log

import numpy as np
from numpy.typing import NDArray

ORDERS, ROWS = 128, 3  # 42 bands of 3: a pair with J = 0.5 meets in one of them with probability 0.996
ALIKE = 0.5  # J of near-duplicates, or more
SHINGLE = 8  # tokens, or more where the vocabulary is small
AT_ONCE = 2048  # shingles under all orders, so that they stay in the processor's cache
NEIGHBOURS = 32  # a document is compared with so many others of the same band entry: large ones cost no square
BASE = np.uint64(0x9E3779B97F4A7C15)  # 2⁶⁴ over the golden ratio
Hashes = NDArray[np.uint64]


def shingle_size(counts: NDArray[np.int64], longest: int) -> int:
    """k = max(8, ⌈2 ln L / H⌉): so long that chance alone does not repeat a shingle.

    counts: how often each token occurs. H: their entropy in nats. L: tokens of the longest document. Two unrelated
    sequences of L tokens share about L² e^{-kH} shingles: of four nucleotides, 8 tokens in a row occur everywhere.
    """
    share = counts[counts > 0] / counts.sum()
    entropy = float(-(share * np.log(share)).sum())
    return max(SHINGLE, min(64, ceil(2 * log(max(longest, 2)) / max(entropy, 1e-3))))


def signature(tokens: NDArray[np.int32], k: int = SHINGLE) -> NDArray[np.uint32]:
    """The least of a document's shingles under each order, (ORDERS,): its place, cut to 32 bits."""
    shingles = np.unique(_shingles(tokens, k))
    factors, summands = _orders()
    least = np.full(ORDERS, np.iinfo(np.uint64).max, np.uint64)
    for at in range(0, len(shingles), AT_ONCE):
        places = np.multiply.outer(factors, shingles[at : at + AT_ONCE])
        places += summands[:, None]
        np.minimum(least, places.min(1), out=least)
    return (least >> np.uint64(32)).astype(np.uint32)


def clusters(signatures: NDArray[np.uint32], threshold: float = ALIKE) -> NDArray[np.int64]:
    """For each document the first of those it is linked with by pairs of an estimated J ≥ threshold, (documents,)."""
    if not 0 < threshold <= 1:
        raise ValueError(f"threshold: expected a share over 0 and up to 1, got {threshold}")
    pairs = _candidates(signatures)
    if len(pairs):
        alike = [
            (signatures[part[:, 0]] == signatures[part[:, 1]]).mean(1) >= threshold
            for part in np.array_split(pairs, ceil(len(pairs) / 65536))
        ]
        pairs = pairs[np.concatenate(alike)]
    return linked(len(signatures), pairs.tolist())


def linked(count: int, pairs: Iterable[tuple[int, int]]) -> NDArray[np.int64]:
    """For each of `count` things the first of those that pairs join it with, directly or through others."""
    parent = list(range(count))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = i = parent[parent[i]]
        return i

    for a, b in pairs:
        first, second = sorted((root(a), root(b)))
        parent[second] = first
    return np.array([root(i) for i in range(count)], np.int64)


def _candidates(signatures: NDArray[np.uint32]) -> NDArray[np.int64]:
    """Pairs of documents whose entries agree in a band, (pairs, 2), each once."""
    found, count = np.empty(0, np.int64), len(signatures)
    for band in range(ORDERS // ROWS):
        entries = signatures[:, band * ROWS : (band + 1) * ROWS].astype(np.uint64)
        keys = _mixed((_mixed(entries[:, 0]) + entries[:, 1]) * BASE + entries[:, 2])
        order = np.argsort(keys, kind="stable")
        keys, pairs = keys[order], [found]
        for step in range(1, min(NEIGHBOURS, len(keys) - 1) + 1):
            same = keys[step:] == keys[:-step]
            if not same.any():
                break
            pairs.append(order[:-step][same] * count + order[step:][same])  # the sort is stable: first < second
        found = np.unique(np.concatenate(pairs))
    return np.stack((found // max(count, 1), found % max(count, 1)), 1)


def _shingles(tokens: NDArray[np.int32], k: int) -> Hashes:
    """A hash of each run of k tokens: Σ t_i b^i, mixed; of all tokens where there are fewer."""
    ids = tokens.astype(np.uint64) + np.uint64(1)
    size = min(k, len(ids))
    total = np.zeros(len(ids) - size + 1, np.uint64)
    for i in range(size):
        total = total * BASE + ids[i : i + len(total)]
    return _mixed(total)


def _mixed(x: Hashes) -> Hashes:
    """SplitMix64's finalizer: each bit of the result hangs on all of x."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _orders() -> tuple[Hashes, Hashes]:
    """Orders of the shingles: a h + b mod 2⁶⁴ with odd a, the same in every run."""
    numbers = _mixed(np.arange(1, 2 * ORDERS + 1, dtype=np.uint64) * BASE)
    return numbers[:ORDERS] | np.uint64(1), numbers[ORDERS:]
