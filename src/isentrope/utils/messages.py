"""Values in error messages, and suggestions for misspelt names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

MAX_VALUE_CHARACTERS = 120


def format_value(value: Any) -> str:
    """Format a value for an error message: `repr` on one line, truncated."""
    try:
        text = " ".join(repr(value).split())
    except (RecursionError, ValueError):  # nested too deeply, or an integer of thousands of digits
        return f"{type(value).__name__} too large to print"
    return truncate(text)


def truncate(text: str) -> str:
    """Cut a text to `MAX_VALUE_CHARACTERS` and append its full length."""
    if len(text) <= MAX_VALUE_CHARACTERS:
        return text
    return f"{text[:MAX_VALUE_CHARACTERS]}… ({len(text)} characters)"


def suggest(word: object, known: Iterable[str]) -> str:
    """Return the end of an error about an unknown name: the closest known name, or all of them."""
    names = list(known)
    matches = difflib.get_close_matches(word, names, 1) if isinstance(word, str) else []
    return f"; did you mean {matches[0]!r}?" if matches else f"; known are {', '.join(sorted(names))}"


def advise_unscaled(train_length: int | None, base: float | None = None) -> str:
    """Say how to load a model without the scaling of its frequencies: its length is then not the scaled one either."""
    theta, length = "<its own>" if base is None else f"{base:.15g}", train_length or "<that before scaling>"
    return (
        f"load the model with rope_parameters={{'rope_type': 'default', 'rope_theta': {theta}}} and "
        f"max_position_embeddings={length}"
    )
