"""Regions: which keys a query sees, as a disjoint union of spans.

Every mask and every branch of a position method is a region, so that visible keys are counted, tiles are cut and block
masks are built from a few numbers per span, never from an n × n array.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf


@dataclass(frozen=True)
class Band:
    """Queries first … last - 1 against keys begin … end - 1, aligned at their ends: the last query with the last key.

    A query sees `left` keys before its own and `right` after it (inf: all of them), and at least one.
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
        """Whether this is a lower triangle with its diagonal."""
        return self.left == inf and self.right == 0 and self._square

    @property
    def anticausal(self) -> bool:
        """Whether this is an upper triangle with its diagonal."""
        return self.left == 0 and self.right == inf and self._square

    @property
    def _square(self) -> bool:
        return self.last - self.first == self.end - self.begin


@dataclass(frozen=True)
class Span:
    """Keys j of query i with `start ≤ j < stop` and `low ≤ j - i < high` (positions, not slots).

    With a `chunk` size L, positions also fall into chunks, and `chunk_low ≤ ⌊j/L⌋ - ⌊i/L⌋ < chunk_high`.
    """

    start: float = -inf
    stop: float = inf
    low: float = -inf
    high: float = inf
    chunk: int = 0
    chunk_low: float = -inf
    chunk_high: float = inf

    @property
    def empty(self) -> bool:
        if self.start >= self.stop or self.low >= self.high:
            return True
        low, high = self.chunk_distances
        return self.chunk_low >= self.chunk_high or self.low >= high or self.high <= low

    @property
    def depends_on_place(self) -> bool:
        """Whether it depends on where keys are in the row, and not on their distances from the query alone."""
        return self.start != -inf or self.stop != inf or self.chunk > 0

    @property
    def chunk_distances(self) -> tuple[float, float]:
        """Bounds low ≤ j - i < high that follow from those on chunks."""
        if not self.chunk:
            return -inf, inf
        return (self.chunk_low - 1) * self.chunk + 1, self.chunk_high * self.chunk

    def contains(self, query: int, key: int) -> bool:
        """Return whether the span has the pair of these positions."""
        chunks = key // self.chunk - query // self.chunk if self.chunk else 0
        inside = self.start <= key < self.stop and self.low <= key - query < self.high
        return inside and self.chunk_low <= chunks < self.chunk_high

    def __and__(self, other: Span) -> Span:
        if self.chunk and other.chunk and self.chunk != other.chunk:
            raise ValueError(
                f"regions: expected chunks of one size, got {self.chunk} and {other.chunk}; use parts with equal chunks"
            )
        return Span(
            max(self.start, other.start),
            min(self.stop, other.stop),
            max(self.low, other.low),
            min(self.high, other.high),
            self.chunk or other.chunk,
            max(self.chunk_low, other.chunk_low),
            min(self.chunk_high, other.chunk_high),
        )

    def __sub__(self, other: Span) -> tuple[Span, ...]:
        """Return the rest without `other`, cut along its edges into disjoint spans."""
        keys = Span(other.start, other.stop)
        distances = Span(other.start, other.stop, other.low, other.high)
        cuts = [
            Span(stop=other.start),
            Span(start=other.stop),
            keys & Span(high=other.low),
            keys & Span(low=other.high),
        ]
        if other.chunk:
            cuts.append(distances & Span(chunk=other.chunk, chunk_high=other.chunk_low))
            cuts.append(distances & Span(chunk=other.chunk, chunk_low=other.chunk_high))
        spans = [self & cut for cut in cuts]
        return tuple(span for span in spans if not span.empty)

    def simplify(self, queries: int, keys: int) -> Span:
        """Drop the bounds that never bind for queries at the last `queries` of positions 0 … keys - 1."""
        lowest, highest = self.chunk_distances
        low = -inf if self.low <= max(1 - keys, lowest) else self.low
        high = inf if self.high >= min(queries, highest) else self.high
        span = Span(
            -inf if self.start <= 0 else self.start,
            inf if self.stop >= keys else self.stop,
            low,
            high,
        )
        if not self.chunk:
            return span
        first, last = self._chunk_differences(queries, keys)
        # keys from i + low on are in no chunk before ⌊low / L⌋, those before i + high in none after ⌈(high - 1) / L⌉
        first = first if low == -inf else max(first, int(low) // self.chunk)
        last = last if high == inf else min(last, -(-(int(high) - 1) // self.chunk))
        chunk_low = -inf if self.chunk_low <= first else self.chunk_low
        chunk_high = inf if self.chunk_high > last else self.chunk_high
        if chunk_low == -inf and chunk_high == inf:
            return span
        return replace(span, chunk=self.chunk, chunk_low=chunk_low, chunk_high=chunk_high)

    def _chunk_differences(self, queries: int, keys: int) -> tuple[int, int]:
        """Return bounds of ⌊j/L⌋ - ⌊i/L⌋ of queries at the last positions of a row of `keys` or, padded, fewer."""
        newest = (keys - 1) // self.chunk
        return -newest, min(newest, -(-(queries - 1) // self.chunk))  # j - i is at most queries - 1

    def to_band(self, queries: int, keys: int) -> Band | None:
        """Return the same pairs as a band of slots, queries being the last of the keys.

        None if there are no pairs, or if bounds on chunks make their edge a staircase.
        """
        if self.chunk:
            return None
        first, last, begin, end = 0, queries, int(max(0, self.start)), int(min(keys, self.stop))
        shift = keys - end  # from the key at a query's position to the key it is aligned with
        left, right = -(self.low + shift), self.high - 1 + shift
        if right < 0:  # no query sees the last keys
            end, left, right = end + int(right), left + right, 0
        if left < 0:  # the last queries see no key
            last, left, right = last + int(left), 0, right + left
        ahead = (end - begin) - (last - first)
        if ahead + right < 0:  # the first queries see no key
            first -= int(ahead + right)
        ahead = (end - begin) - (last - first)
        if ahead - left > 0:  # no query sees the first keys
            begin += int(ahead - left)
        if first >= last or begin >= end:
            return None
        rows, columns = last - first, end - begin
        return Band(first, last, begin, end, inf if left >= columns - 1 else left, inf if right >= rows - 1 else right)

    def is_empty_within(self, queries: int, keys: int) -> bool:
        """Return whether the span has no pair of queries and keys at those positions."""
        outside = self.start >= keys or self.stop <= 0 or self.low >= queries or self.high <= 1 - keys
        if self.chunk and not outside:
            first, last = self._chunk_differences(queries, keys)
            outside = self.chunk_low > last or self.chunk_high <= first
        return self.empty or outside


@dataclass(frozen=True)
class Region:
    """A union of spans that do not overlap."""

    spans: tuple[Span, ...]

    @property
    def depends_on_place(self) -> bool:
        """Whether it depends on where keys are in the row, and not on their distances from the query alone."""
        return any(span.depends_on_place for span in self.spans)

    def __and__(self, other: Region) -> Region:
        pairs = (a & b for a in self.spans for b in other.spans)
        return Region(tuple(span for span in pairs if not span.empty))

    def __or__(self, other: Region) -> Region:
        return Region(self.spans + (other - self).spans)

    def __sub__(self, other: Region) -> Region:
        remaining = self.spans
        for cut in other.spans:
            remaining = tuple(rest for span in remaining for rest in span - cut)
        return Region(remaining)

    def simplify(self, queries: int, keys: int) -> Region:
        """Drop spans and bounds that do not matter for queries at the last `queries` of positions 0 … keys - 1."""
        spans = (span for span in self.spans if not span.is_empty_within(queries, keys))
        return Region(tuple(span.simplify(queries, keys) for span in spans))


EVERYTHING = Region((Span(),))
CAUSAL = Region((Span(high=1),))


def band(low: float, high: float) -> Region:
    """Return the region of keys with low ≤ j - i < high."""
    return Region((Span(low=low, high=high),))


def first_keys(count: int) -> Region:
    """Return the region of the first `count` keys."""
    return Region((Span(stop=count),))


def chunks(size: int, low: float, high: float) -> Region:
    """Return the region of keys whose chunk of `size` positions is low … high - 1 chunks after the query's."""
    return Region((Span(chunk=size, chunk_low=low, chunk_high=high),))
