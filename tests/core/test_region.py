"""A span of positions as a band of slots, against every pair looked at one by one."""

from __future__ import annotations

from itertools import product
from math import inf

from isentrope.core.region import Span


def pairs(span, queries, keys):
    """Slots of queries and keys that see each other; queries are the last of the keys."""
    inside = set()
    for i, j in product(range(queries), range(keys)):
        distance = j - (keys - queries + i)
        if span.start <= j < span.stop and span.low <= distance < span.high:
            inside.add((i, j))
    return inside


def test_a_span_is_a_band():
    sizes = ((7, 7), (3, 7), (1, 5))
    spans = [
        Span(start, stop, low, high)
        for start, stop in ((-inf, inf), (-inf, 3), (2, inf), (1, 5), (-inf, 9))
        for low in (-inf, -6, -3, 0, 1, 3)
        for high in (inf, 5, 1, 0, -2, -5)
    ]
    for (queries, keys), span in product(sizes, (span for span in spans if not span.empty)):
        truth = pairs(span, queries, keys)
        band = span.to_band(queries, keys)
        if band is None:
            assert not truth, span
            continue
        ahead = (band.end - band.begin) - (band.last - band.first)
        inside = {
            (band.first + r, band.begin + c)
            for r, c in product(range(band.last - band.first), range(band.end - band.begin))
            if -band.left <= c - (r + ahead) <= band.right
        }
        assert inside == truth, (span, queries, keys)
        assert {i for i, _ in truth} == set(range(band.first, band.last)), "every query of a band sees a key"
        assert band.full == (len(truth) == (band.last - band.first) * (band.end - band.begin))
