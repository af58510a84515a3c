"""Sets of layers by their text: `3`, `0-2`, `3-` to the last, lists of these, and `*` for all the rest."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from isentrope.utils.messages import format_value

REST = "*"
_ITEM = re.compile(r"(\d{1,9})(?:\s*(-)\s*(\d{1,9})?)?", re.ASCII)


@dataclass(frozen=True)
class LayerSet:
    """Some layers of a model.

    Attributes:
        spans: first and last layer of each run, in order and apart from one another; the last of all may be infinite.
        rest: whether it stands for the layers that no other set has; it then has no spans.
    """

    spans: tuple[tuple[int, float], ...]
    rest: bool = False

    @classmethod
    def parse(cls, value: Any) -> LayerSet:
        """Read a set from its text, from one index, or from a list of indices.

        Raises:
            ValueError: it is none of these, or a layer is in it twice.
        """
        if isinstance(value, str) and value.strip() == REST:
            return cls((), rest=True)
        items = value if isinstance(value, (list, tuple)) else str(value).split(",")
        matches = [_ITEM.fullmatch(str(item).strip()) for item in items]
        spans = []
        for match in matches:
            first, dash, last = match.groups() if match else (None, None, None)
            if first is None or (last is not None and int(last) < int(first)):
                raise ValueError(
                    "layers: expected indices such as '3', '0-2', '3-' to the last, a list of these, or '*' for the "
                    f"rest, got {format_value(value)}"
                )
            spans.append((int(first), inf if dash and last is None else int(last or first)))
        if not spans:
            raise ValueError(f"layers: expected one index or more, got {format_value(value)}")
        if twice := find_overlaps(spans):
            raise ValueError(f"layers given twice: {format_spans(twice)} in {format_value(value)}; keep one")
        return cls(_join(spans))

    def __contains__(self, layer: int) -> bool:
        return any(first <= layer <= last for first, last in self.spans)

    def __str__(self) -> str:
        return REST if self.rest else format_spans(self.spans)


def find_overlaps(spans: Iterable[tuple[int, float]]) -> list[tuple[int, float]]:
    """List what two or more spans have in common."""
    common: list[tuple[int, float]] = []
    reached = -1.0
    for first, last in sorted(spans):
        if first <= reached:
            common.append((first, min(last, reached)))
        reached = max(reached, last)
    return list(_join(common))


def group_indices(indices: Iterable[int]) -> tuple[tuple[int, float], ...]:
    """Return the runs in a collection of indices."""
    return _join([(index, index) for index in set(indices)])


def _join(spans: Sequence[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    joined: list[tuple[int, float]] = []
    for first, last in sorted(spans):
        if joined and first <= joined[-1][1] + 1:
            joined[-1] = joined[-1][0], max(joined[-1][1], last)
        else:
            joined.append((first, last))
    return tuple(joined)


def format_spans(spans: Iterable[tuple[int, float]]) -> str:
    """Write spans as `LayerSet.parse` reads them."""
    return ",".join(
        f"{first}-" if last == inf else str(first) if last == first else f"{first}-{last}" for first, last in spans
    )
