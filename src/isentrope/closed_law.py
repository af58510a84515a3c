"""The law for near and far keys that needs no text."""

from __future__ import annotations

from typing import Any, NamedTuple

from isentrope.share import Share
from isentrope.temperatures import Power


class BranchLaw(NamedTuple):
    """What a law does to the keys near and far: parts of a recipe.

    Attributes:
        share: of far keys.
        temperature: None, one, or a pair of them for near and far keys.
    """

    share: Share
    temperature: Any = None


def closed_law(train_length: int, window: int) -> BranchLaw:
    """Return the law recommended for a position method with far keys: far logits (n / n_tr)^γ s - ln(n / n_tr).

    γ is that of `Power`. The bias takes back the weight that a growing number of far keys adds; the temperature lets
    one that stands out keep its own. With a window as long as the training no query was trained on far keys: there
    nothing is known to stand out, and the bias is all.

    Args:
        train_length: n_tr.
        window: of the position method, within which keys are near.
    """
    heat = Power(train_length, keys="far") if window < train_length and train_length > 1 else None
    return BranchLaw(Share().resolve(train_length, window), heat)
