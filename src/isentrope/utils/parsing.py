"""Parse numbers and lengths given as text."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

from isentrope.utils.messages import format_value

Number = TypeVar("Number", int, float)
MULTIPLE = re.compile(r"(\d+(?:\.\d+)?)[xX×](?:train)?", re.ASCII)
NUMBER = re.compile(r"\d+(?:_\d+)*", re.ASCII)


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


def is_multiple(length: int | str) -> bool:
    """Return whether a length is one such as "4x", for which the training length must be known."""
    return isinstance(length, str) and MULTIPLE.fullmatch(length.strip()) is not None


def parse_length(length: int | str, train_length: int | None, name: str = "length") -> int:
    """Return a number of tokens, also from its text or from one such as "4x", times the training length.

    Args:
        length: such as 8192, "8192" or "4x".
        train_length: None where it is not known.
        name: what the length is, for the error message.

    Raises:
        ValueError: it is none of these or not positive, or a multiple of a length that is not known.
    """
    text = "" if isinstance(length, bool) or not isinstance(length, (int, str)) else str(length).strip()
    match = MULTIPLE.fullmatch(text)
    if match and train_length is None:
        raise ValueError(f"{name}: expected tokens, since the model states no training length, got {length!r}")
    tokens = int(float(match[1]) * (train_length or 0)) if match else int(text) if NUMBER.fullmatch(text) else 0
    if tokens < 1:
        raise ValueError(f"{name}: expected tokens such as 8192, or 4x the training length, got {format_value(length)}")
    return tokens
