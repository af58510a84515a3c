"""The law for near and far keys that needs no text."""

from __future__ import annotations

from typing import Any, NamedTuple

from isentrope.share import Share


class BranchLaw(NamedTuple):
    """What a law does to the keys near and far: parts of a recipe.

    Attributes:
        share: of far keys.
        temperature: None, one, or a pair of them for near and far keys.
    """

    share: Share
    temperature: Any = None


def closed_law(train_length: int, window: int) -> BranchLaw:
    """Return the law recommended for a position method with far keys: a share law, and no temperature.

    Args:
        train_length: n_tr.
        window: of the position method, within which keys are near.
    """
    return BranchLaw(Share().resolve(train_length, window))
