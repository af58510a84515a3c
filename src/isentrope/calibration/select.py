"""Select the temperature law to keep, by held-out texts."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from isentrope.evaluation.metrics import Array, mean_interval
from isentrope.evaluation.texts import Text

LAWS, LEVELS = ("none", "infoscale", "logn"), ("scalar", "layer", "head")  # from the simplest on
MAX_TIE_NATS = 1e-3  # a token: laws that are closer tie, however certain the difference


def split_texts(texts: Sequence[Text], length: int, seed: int = 0) -> tuple[list[Text], list[Text]]:
    """Split texts into those to fit to and those held out.

    By hash: the same text always falls the same way, and copies count once.
    """
    long = {text.sha256: text for text in texts if len(text.tokens) >= length}

    def hash_text(text: Text) -> str:
        return hashlib.sha256(f"{seed} {text.sha256}".encode()).hexdigest()

    ordered = sorted(long.values(), key=hash_text)
    if len(ordered) < 2:
        raise ValueError(
            f"texts: expected 2 or more different documents of {length} tokens, "
            f"to fit to and to hold out, got {len(ordered)}"
        )
    return ordered[: len(ordered) // 2], ordered[len(ordered) // 2 :]


def select_law(losses: dict[str, Array], seed: int = 0) -> tuple[str, str]:
    """Select the simplest law that is not clearly worse than the best and not worse than InfoScale.

    Clearly worse: by more than MAX_TIE_NATS, and by more than nothing in 95 % of draws of as many texts (paired
    bootstrap); one text alone decides by its value.

    Args:
        losses: of each law on each held-out text, in nats a token.
        seed: of the bootstrap.

    Returns:
        Its name, and why.
    """
    means = {name: float(values.mean()) for name, values in losses.items()}
    best = min(means, key=lambda name: means[name])

    def clearly_worse(name: str) -> bool:
        mean, low, _ = mean_interval(losses[name] - losses[best], seed)
        return bool(mean > MAX_TIE_NATS and low > 0)

    chosen = next(
        name
        for name in (*LAWS, *LEVELS)
        if name in losses and means[name] <= means["infoscale"] and not clearly_worse(name)
    )
    gain = 100 * float(np.expm1(means[chosen] - means["infoscale"]))
    if chosen in LEVELS:
        why = "the best" if chosen == best else f"the simplest that is not clearly worse than the best ({best})"
        return chosen, f"{chosen} is {why} on held-out text, {gain:+.2f} % perplexity against InfoScale"
    label = {"none": "no temperature", "infoscale": "InfoScale", "logn": "LogN"}[chosen]
    fitted = any(level in losses for level in LEVELS)
    why = f"no fitted law is clearly better than {label} on held-out text" if fitted else "no law was fitted"
    return chosen, f"{why}: {label} is kept"
