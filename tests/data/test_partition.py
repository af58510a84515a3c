"""Near-duplicates and the partition: what may not be torn is not, and every draw is as announced."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from isentrope.data import duplicates, partition
from isentrope.data.duplicates import (
    PERMUTATIONS,
    choose_shingle_size,
    cluster_near_duplicates,
    compute_signature,
    connected_components,
)
from isentrope.data.partition import (
    allocate_proportionally,
    bigram_features,
    principal_components,
    select_held_out,
    spectral_clusters,
    split_held_out,
)
from tests.fixtures.recipes import examples


def tokens(length, vocabulary=5000, seed=0):
    return np.random.default_rng(seed).integers(0, vocabulary, length, dtype=np.int32)


def changed(document, every):
    """A copy in which every so many tokens one is another."""
    copy = document.copy()
    copy[::every] = 9999
    return copy


def jaccard(a, b, k):
    sets = [{tuple(x[i : i + k].tolist()) for i in range(len(x) - k + 1)} for x in (a, b)]
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


@pytest.mark.parametrize("every", [5, 12, 30, 200, 10**6])
def test_signatures_estimate_jaccard(every):
    a = tokens(6000)
    b = changed(a, every)
    exact = jaccard(a, b, 8)
    estimate = (compute_signature(a) == compute_signature(b)).mean()
    assert abs(estimate - exact) <= 4 * (exact * (1 - exact) / PERMUTATIONS) ** 0.5 + 1e-3


def test_near_duplicates_are_found_and_others_are_not():
    originals = [tokens(3000, seed=seed) for seed in range(40)]
    documents = [*originals, changed(originals[3], 60), changed(originals[3], 75), originals[7][:-200], originals[9]]
    actual = cluster_near_duplicates(np.stack([compute_signature(document) for document in documents]))
    expected = np.arange(44)
    expected[[40, 41, 42, 43]] = 3, 3, 7, 9
    assert actual.tolist() == expected.tolist()


def test_many_copies_cost_no_square_and_are_one_cluster():
    count = 600
    copies = np.tile(compute_signature(tokens(500)), (count, 1))
    assert not cluster_near_duplicates(copies).any()
    pairs = len(duplicates._candidate_pairs(copies))
    assert pairs <= count * duplicates.MAX_COMPARED < count * (count - 1) / 8


def test_signatures_of_short_documents_and_of_blocks(monkeypatch):
    assert (compute_signature(tokens(3)) == compute_signature(tokens(3))).all()
    assert (compute_signature(np.array([], np.int32)) == compute_signature(np.array([], np.int32))).all()
    whole = compute_signature(tokens(5000))
    monkeypatch.setattr(duplicates, "SHINGLES_PER_BLOCK", 7)
    assert np.array_equal(compute_signature(tokens(5000)), whole)


def test_shingles_are_longer_where_the_vocabulary_is_small():
    assert choose_shingle_size(np.full(12000, 3), 100_000) == 8
    assert choose_shingle_size(np.full(4, 10**6), 100_000) == 17
    assert choose_shingle_size(np.array([0, 5]), 100_000) == 64  # one token alone: no length is enough
    genomes = [tokens(20000, 4, seed) for seed in range(2)]
    k = choose_shingle_size(np.bincount(np.concatenate(genomes)), 20000)
    shares = [(compute_signature(genomes[0], size) == compute_signature(genomes[1], size)).mean() for size in (4, k)]
    assert shares[0] == 1 and shares[1] < 0.05


def test_links_reach_through_others():
    assert connected_components(6, [(4, 2), (5, 4), (1, 1)]).tolist() == [0, 1, 2, 3, 2, 2]
    with pytest.raises(ValueError, match="threshold: expected a share over 0"):
        cluster_near_duplicates(np.zeros((2, PERMUTATIONS), np.uint32), 0)


@examples(30)
@given(st.lists(st.integers(0, 30), min_size=30, max_size=80), st.integers(0, 99), st.data())
def test_nothing_that_belongs_together_is_torn(kinds, seed, data):
    groups = [None if kind > 20 else f"g{kind}" for kind in kinds]
    pairs = data.draw(st.lists(st.tuples(*[st.integers(0, len(kinds) - 1)] * 2), max_size=5))
    near = connected_components(len(kinds), pairs)
    assume(len(set(groups)) > 8)  # five pairs join six of them at most: something is left for either side
    held = set(select_held_out(near, groups, seed).tolist())
    for i, group in enumerate(groups):
        assert (i in held) == (int(near[i]) in held)
        if group is not None:
            assert len({j in held for j, other in enumerate(groups) if other == group}) == 1


def test_four_fifths_train_and_the_seed_says_which():
    near, groups = np.arange(1000), [None] * 1000
    held = select_held_out(near, groups, seed=3)
    assert len(held) == 200 and (np.diff(held) > 0).all()
    assert np.array_equal(held, select_held_out(near, groups, seed=3))
    assert not np.array_equal(held, select_held_out(near, groups, seed=4))
    assert len(select_held_out(near, groups, train_share=0.35)) == 650
    grouped = select_held_out(near, [f"g{i // 7}" for i in range(1000)])
    assert 200 <= len(grouped) < 207


def test_what_cannot_be_parted():
    for count, groups in ((1, [None]), (2, ["a", "a"]), (50, ["a"] * 50)):
        with pytest.raises(ValueError, match="expected some to train on and some to hold out"):
            select_held_out(np.arange(count), groups)
    with pytest.raises(ValueError, match="train_share"):
        select_held_out(np.arange(9), [None] * 9, train_share=1.0)


def blobs(sizes=(60, 30), apart=4.0):
    """Features of documents of two kinds, mixed."""
    rows = [np.random.default_rng(kind).normal(kind * apart, 1, (size, 24)) for kind, size in enumerate(sizes)]
    kinds = np.repeat(np.arange(len(sizes)), sizes)
    order = np.random.default_rng(9).permutation(sum(sizes))
    return np.concatenate(rows)[order], kinds[order]


def test_clusters_are_the_two_kinds_and_the_larger_is_first():
    for sizes in ((60, 30), (30, 60)):
        features, kinds = blobs(sizes)
        labels = spectral_clusters(principal_components(features))
        assert np.array_equal(labels, kinds if sizes[0] > sizes[1] else 1 - kinds)


def test_of_many_documents_the_others_take_the_label_of_the_nearest(monkeypatch):
    features, kinds = blobs((300, 100))
    monkeypatch.setattr(partition, "MAX_CLUSTERED_DOCUMENTS", 80)
    assert np.array_equal(spectral_clusters(principal_components(features)), kinds)


def test_the_draw_is_stratified_and_of_each_near_duplicate_at_most_one():
    features, kinds = blobs((60, 30))
    near = np.arange(90)
    near[10:40] = 10  # thirty copies
    for seed in range(20):
        drawn = split_held_out(features, near, seed, test=12)
        sets = np.array(drawn.sets)
        single = [len({near[i] for i in np.where(kinds == kind)[0]}) for kind in (0, 1)]
        counts = [int(((sets == "test") & (drawn.labels == label)).sum()) for label in (0, 1)]
        assert sum(counts) == 12
        assert all(abs(count - 12 * size / sum(single)) <= 1.5 for count, size in zip(counts, single, strict=True))
        copies = sets[10:40]
        assert (copies == "test").sum() <= 1
        assert set(copies) in ({"validation"}, {"test", "left out"})
        assert "left out" not in set(sets[:10]) | set(sets[40:])
    assert (
        split_held_out(features, near, 5).sets
        == split_held_out(features, near, 5).sets
        != split_held_out(features, near, 6).sets
    )


def test_every_document_is_as_likely_as_the_others_of_its_cluster():
    features, _ = blobs((20, 10))
    counts = sum(np.array(split_held_out(features, np.arange(30), seed, test=6).sets) == "test" for seed in range(40))
    assert counts.sum() == 240 and counts.min() >= 1 and counts.max() <= 20


@pytest.mark.parametrize(
    ("sizes", "total", "expected"),
    [((204, 140), 10, [6, 4]), ((50, 50), 5, [3, 2]), ((99, 1), 10, [9, 1]), ((1, 99), 10, [1, 9]),
     ((30, 0), 4, [4, 0]), ((5, 5), 1, [1, 0]), ((8, 3), 10, [7, 3])],
)  # fmt: skip
def test_places_by_largest_remainder(sizes, total, expected):
    assert allocate_proportionally(sizes, total) == expected


def test_draws_that_cannot_be():
    features, _ = blobs((6, 5))
    with pytest.raises(ValueError, match="test: expected fewer than the 11 documents held out"):
        split_held_out(features, np.arange(11), test=11)
    with pytest.raises(ValueError, match="near-duplicates counted once, got 10"):
        split_held_out(features, [0] * 11, test=10)
    with pytest.raises(ValueError, match="test: expected 1 or more"):
        split_held_out(features, np.arange(11), test=0)
    with pytest.raises(ValueError, match="features: expected finite"):
        split_held_out(np.full((4, 5), np.nan), np.arange(4), test=2)


def test_documents_that_are_all_alike_are_one_cluster():
    drawn = split_held_out(np.ones((8, 768)), np.arange(8), test=3)
    assert not drawn.labels.any() and not drawn.coordinates.any() and drawn.sets.count("test") == 3
    assert principal_components(np.array([[1.0], [2.0]])).tolist() in ([[-1, 0], [1, 0]], [[1, 0], [-1, 0]])


def test_components_are_centred_and_of_variance_one():
    features, _ = blobs()
    actual = principal_components(features)
    np.testing.assert_allclose(actual.mean(0), 0, atol=1e-9)
    np.testing.assert_allclose(actual.std(0), 1)


def test_bigrams_are_shares_of_pairs():
    document = np.array([1, 2, 1, 2, 3], np.int32)
    actual = bigram_features(document)
    assert actual.shape == (768,) and (actual**2).sum() == pytest.approx(1)
    assert sorted(np.round(actual[actual > 0] ** 2, 6)) == [0.25, 0.25, 0.5]
    assert not np.array_equal(actual, bigram_features(document[::-1]))
    assert not bigram_features(document[:1]).any()
