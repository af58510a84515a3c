"""Which keys a query sees, written as a formula: a region is a disjoint union of spans.

Every mask and every branch of every position method in this package is such a region, so visible keys
are counted, tiles are cut and block masks are built from four numbers a span, never from an n × n array.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf


@dataclass(frozen=True)
class Span:
    """Keys j of query i with `start ≤ j < stop` and `low ≤ j - i < high` (positions, not slots)."""

    start: float = -inf
    stop: float = inf
    low: float = -inf
    high: float = inf

    @property
    def empty(self) -> bool:
        return self.start >= self.stop or self.low >= self.high

    def __and__(self, other: Span) -> Span:
        return Span(
            max(self.start, other.start),
            min(self.stop, other.stop),
            max(self.low, other.low),
            min(self.high, other.high),
        )

    def __sub__(self, other: Span) -> tuple[Span, ...]:
        """What is left without `other`, cut along its four edges into disjoint spans."""
        keys = Span(other.start, other.stop)
        cuts = (
            Span(stop=other.start),
            Span(start=other.stop),
            keys & Span(high=other.low),
            keys & Span(low=other.high),
        )
        pieces = [self & cut for cut in cuts]
        return tuple(piece for piece in pieces if not piece.empty)

    def within(self, queries: int, keys: int) -> Span:
        """The same keys with bounds dropped that cannot bind for the last `queries` of positions 0 … keys - 1."""
        return Span(
            -inf if self.start <= 0 else self.start,
            inf if self.stop >= keys else self.stop,
            -inf if self.low <= 1 - keys else self.low,
            inf if self.high >= queries else self.high,
        )

    def vanishes(self, queries: int, keys: int) -> bool:
        """Whether no pair of such positions lies in the span."""
        outside = self.start >= keys or self.stop <= 0 or self.low >= queries or self.high <= 1 - keys
        return self.empty or outside


@dataclass(frozen=True)
class Region:
    """A union of spans that do not overlap."""

    spans: tuple[Span, ...]

    def __and__(self, other: Region) -> Region:
        pairs = (a & b for a in self.spans for b in other.spans)
        return Region(tuple(span for span in pairs if not span.empty))

    def __or__(self, other: Region) -> Region:
        return Region(self.spans + (other - self).spans)

    def __sub__(self, other: Region) -> Region:
        left = self.spans
        for cut in other.spans:
            left = tuple(piece for span in left for piece in span - cut)
        return Region(left)

    def within(self, queries: int, keys: int) -> Region:
        """The region in its simplest form for queries at the last `queries` of positions 0 … keys - 1."""
        return Region(tuple(span.within(queries, keys) for span in self.spans if not span.vanishes(queries, keys)))


EVERYTHING = Region((Span(),))
CAUSAL = Region((Span(high=1),))


def band(low: float, high: float) -> Region:
    """Keys with low ≤ j - i < high."""
    return Region((Span(low=low, high=high),))


def first(count: int) -> Region:
    """The first `count` keys."""
    return Region((Span(stop=count),))
