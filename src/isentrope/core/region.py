"""Which keys a query sees, written as a formula: a region is a disjoint union of spans.

Every mask and every branch of every position method in this package is such a region, so visible keys
are counted, tiles are cut and block masks are built from four numbers a span, never from an n × n array.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf


@dataclass(frozen=True)
class Band:
    """Queries first … last - 1 against keys begin … end - 1, the last query facing the last key and so on backwards.

    A query sees `left` keys before the one it faces and `right` after it (inf: all of them), and at least one.
    """

    first: int
    last: int
    begin: int
    end: int
    left: float
    right: float

    @property
    def full(self) -> bool:
        return self.left == self.right == inf

    @property
    def causal(self) -> bool:
        """A lower triangle with its diagonal."""
        return self.left == inf and self.right == 0 and self.last - self.first == self.end - self.begin


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

    def band(self, queries: int, keys: int) -> Band | None:
        """The same pairs as a band of slots, queries being the last of the keys; None where there are none."""
        first, last, begin, end = 0, queries, int(max(0, self.start)), int(min(keys, self.stop))
        shift = keys - end  # of the key that a query faces, from the one at its position
        left, right = -(self.low + shift), self.high - 1 + shift
        if right < 0:  # nobody sees the last keys
            end, left, right = end + int(right), left + right, 0
        if left < 0:  # the last queries see nobody
            last, left, right = last + int(left), 0, right + left
        ahead = (end - begin) - (last - first)
        if ahead + right < 0:  # nor do the first queries
            first -= int(ahead + right)
        ahead = (end - begin) - (last - first)
        if ahead - left > 0:  # and nobody sees the first keys
            begin += int(ahead - left)
        if first >= last or begin >= end:
            return None
        rows, columns = last - first, end - begin
        return Band(first, last, begin, end, inf if left >= columns - 1 else left, inf if right >= rows - 1 else right)

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
