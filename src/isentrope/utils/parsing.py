"""Parse values given on a command line."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Number = TypeVar("Number", int, float)


def parse_numbers(
    name: str, text: str, kind: Callable[[str], Number] = int, example: str = "512,1024"
) -> tuple[Number, ...]:
    """Parse a comma-separated list of numbers.

    Args:
        name: what the numbers are, for the error message.
        text: the list, such as "512,1024".
        kind: `int` or `float`.
        example: a valid list for the error message.

    Raises:
        ValueError: an entry is not a number of that kind.
    """
    try:
        return tuple(kind(word) for word in text.split(","))
    except ValueError:
        raise ValueError(f"{name}: expected numbers separated by commas such as {example}, got {text!r}") from None
