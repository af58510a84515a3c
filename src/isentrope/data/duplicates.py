"""Near-duplicates by MinHash: documents that share half of their shingles or more.

J(A, B) = |A ∩ B| / |A ∪ B| for the sets A, B of two documents' shingles, runs of k tokens. Under a random permutation
of all shingles P(min A = min B) = J: the share of equal entries in two signatures (one entry a permutation) estimates
it. Only documents that agree in some band of three entries are compared. A. Broder, "On the resemblance and containment
of documents", 1997.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil, log

import numpy as np
from numpy.typing import NDArray

PERMUTATIONS, BAND_ROWS = 128, 3  # 42 bands of 3: a pair with J = 0.5 shares one with probability 0.996
MIN_JACCARD = 0.5  # of near-duplicates
MIN_SHINGLE_TOKENS = 8
SHINGLES_PER_BLOCK = 2048  # permuted at once, so that they stay in the processor's cache
MAX_COMPARED = 32  # documents of the same band entry, so that large ones do not cost a square
BASE = np.uint64(0x9E3779B97F4A7C15)  # 2⁶⁴ / golden ratio
Hashes = NDArray[np.uint64]


def choose_shingle_size(counts: NDArray[np.int64], longest: int) -> int:
    """Return k = max(8, ⌈2 ln L / H⌉), long enough that shingles do not repeat by chance.

    Two unrelated sequences of L tokens share about L² e^{-kH} shingles: 8 nucleotides in a row occur everywhere.

    Args:
        counts: Occurrences of each token, whose entropy in nats is H.
        longest: L, tokens of the longest document.
    """
    share = counts[counts > 0] / counts.sum()
    entropy = float(-(share * np.log(share)).sum())
    return max(MIN_SHINGLE_TOKENS, min(64, ceil(2 * log(max(longest, 2)) / max(entropy, 1e-3))))


def compute_signature(tokens: NDArray[np.int32], k: int = MIN_SHINGLE_TOKENS) -> NDArray[np.uint32]:
    """Return the smallest permuted hash of a document's shingles, cut to 32 bits, (PERMUTATIONS,)."""
    shingles = np.unique(_hash_shingles(tokens, k))
    factors, summands = _permutations()
    smallest = np.full(PERMUTATIONS, np.iinfo(np.uint64).max, np.uint64)
    for at in range(0, len(shingles), SHINGLES_PER_BLOCK):
        permuted = np.multiply.outer(factors, shingles[at : at + SHINGLES_PER_BLOCK])
        permuted += summands[:, None]
        np.minimum(smallest, permuted.min(1), out=smallest)
    return (smallest >> np.uint64(32)).astype(np.uint32)


def cluster_near_duplicates(signatures: NDArray[np.uint32], threshold: float = MIN_JACCARD) -> NDArray[np.int64]:
    """Return the first document of each one's cluster, joined by pairs of estimated J ≥ threshold, (documents,)."""
    if not 0 < threshold <= 1:
        raise ValueError(f"threshold: expected a share over 0 and up to 1, got {threshold}")
    pairs = _candidate_pairs(signatures)
    if len(pairs):
        similar = [
            (signatures[part[:, 0]] == signatures[part[:, 1]]).mean(1) >= threshold
            for part in np.array_split(pairs, ceil(len(pairs) / 65536))
        ]
        pairs = pairs[np.concatenate(similar)]
    return connected_components(len(signatures), pairs.tolist())


def connected_components(count: int, pairs: Iterable[tuple[int, int]]) -> NDArray[np.int64]:
    """Return the first node of each node's connected component in the graph of `pairs`, (count,)."""
    parent = list(range(count))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = i = parent[parent[i]]
        return i

    for a, b in pairs:
        first, second = sorted((root(a), root(b)))
        parent[second] = first
    return np.array([root(i) for i in range(count)], np.int64)


def _candidate_pairs(signatures: NDArray[np.uint32]) -> NDArray[np.int64]:
    """Return the distinct pairs of documents that agree in a band, (pairs, 2)."""
    candidates, count = np.empty(0, np.int64), len(signatures)
    for band in range(PERMUTATIONS // BAND_ROWS):
        entries = signatures[:, band * BAND_ROWS : (band + 1) * BAND_ROWS].astype(np.uint64)
        keys = _mix((_mix(entries[:, 0]) + entries[:, 1]) * BASE + entries[:, 2])
        order = np.argsort(keys, kind="stable")
        keys, pairs = keys[order], [candidates]
        for step in range(1, min(MAX_COMPARED, len(keys) - 1) + 1):
            same = keys[step:] == keys[:-step]
            if not same.any():
                break
            pairs.append(order[:-step][same] * count + order[step:][same])  # the sort is stable: first < second
        candidates = np.unique(np.concatenate(pairs))
    return np.stack((candidates // max(count, 1), candidates % max(count, 1)), 1)


def _hash_shingles(tokens: NDArray[np.int32], k: int) -> Hashes:
    """Hash each run of k tokens, or all tokens if there are fewer: Σ t_i b^i, mixed."""
    ids = tokens.astype(np.uint64) + np.uint64(1)
    size = min(k, len(ids))
    total = np.zeros(len(ids) - size + 1, np.uint64)
    for i in range(size):
        total = total * BASE + ids[i : i + len(total)]
    return _mix(total)


def _mix(x: Hashes) -> Hashes:
    """Apply SplitMix64's finalizer, whose every output bit depends on all of x."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _permutations() -> tuple[Hashes, Hashes]:
    """Return a and b of the permutations a h + b mod 2⁶⁴ with odd a, the same in every run."""
    numbers = _mix(np.arange(1, 2 * PERMUTATIONS + 1, dtype=np.uint64) * BASE)
    return numbers[:PERMUTATIONS] | np.uint64(1), numbers[PERMUTATIONS:]
