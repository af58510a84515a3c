"""Region algebra against sets of pairs."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from isentrope.core.region import CAUSAL, EVERYTHING, Region, Span
from tests.fixtures.recipes import examples
from tests.fixtures.regions import N, inside, joined, layers, regions, spans


@examples(50)
@given(st.lists(spans, max_size=3), st.lists(spans, max_size=3))
def test_region_algebra_is_that_of_sets(first, second):
    # queries and keys beyond every edge above
    i, j = torch.arange(-4, N + 5)[:, None], torch.arange(-4, N + 5)
    a, b = joined(first), joined(second)
    dense = [
        torch.stack([inside(s, i, j) for s in parts]).any(0) if parts else torch.zeros(len(i), len(i), dtype=torch.bool)
        for parts in (first, second)
    ]
    results = {
        "a": (a, dense[0]),
        "a | b": (a | b, dense[0] | dense[1]),
        "a & b": (a & b, dense[0] & dense[1]),
        "a - b": (a - b, dense[0] & ~dense[1]),
    }
    for name, (region, expected) in results.items():
        times = layers(region, i, j)
        assert bool((times <= 1).all()), f"{name} overlaps"
        assert torch.equal(times > 0, expected), name


@examples(50)
@given(regions, st.integers(1, N + 4), st.integers(1, N + 4))
def test_within_keeps_the_pairs_and_only_drops_bounds(region, keys, queries):
    queries = min(queries, keys)
    i, j = torch.arange(keys - queries, keys)[:, None], torch.arange(keys)
    simple = region.simplify(queries, keys)
    assert torch.equal(layers(simple, i, j), layers(region, i, j))
    assert len(simple.spans) <= len(region.spans)
    for span in simple.spans:
        assert span.start == -math.inf or 0 < span.start < keys
        assert span.stop == math.inf or 0 < span.stop < keys
        assert span.low == -math.inf or -keys < span.low < queries
        assert span.high == math.inf or -keys < span.high < queries
        assert bool(span.chunk) == ((span.chunk_low, span.chunk_high) != (-math.inf, math.inf))


def test_within_recognises_everything():
    assert Region((Span(-5, N, -N, N),)).simplify(N, N) == EVERYTHING
    assert Region((Span(low=N),)).simplify(N, N) == Region(())
    assert CAUSAL.simplify(1, N) == EVERYTHING  # one query at the end sees all
    assert CAUSAL.simplify(2, N) == CAUSAL
