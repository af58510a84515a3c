"""Which temperature law to keep, and by which texts that is decided."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from isentrope.evaluation.metrics import Array, mean_interval
from isentrope.evaluation.texts import Text

LAWS, LEVELS = ("none", "infoscale", "logn"), ("scalar", "layer", "head")  # from the simplest on
TIE = 1e-3  # nats a token: what is closer is a tie, however sure


def halves(texts: Sequence[Text], length: int, seed: int = 0) -> tuple[list[Text], list[Text]]:
    """Texts to fit to and texts held out, by hash: the same ones always fall the same way, and copies count once."""
    long = {text.sha256: text for text in texts if len(text.tokens) >= length}

    def drawn(text: Text) -> str:
        return hashlib.sha256(f"{seed} {text.sha256}".encode()).hexdigest()

    found = sorted(long.values(), key=drawn)
    if len(found) < 2:
        raise ValueError(
            f"texts: expected 2 or more different documents of {length} tokens, "
            f"to fit to and to hold out, got {len(found)}"
        )
    return found[: len(found) // 2], found[len(found) // 2 :]


def choose(losses: dict[str, Array], seed: int = 0) -> tuple[str, str]:
    """The simplest law that is not clearly worse than the best and not worse than InfoScale, and why.

    losses: of each law on each held-out text, in nats a token. Clearly: by more than TIE, and by more than nothing in
    95 % of draws of as many texts (paired bootstrap); one text alone decides by its value.
    """
    means = {name: float(values.mean()) for name, values in losses.items()}
    best = min(means, key=lambda name: means[name])

    def clearly_worse(name: str) -> bool:
        mean, low, _ = mean_interval(losses[name] - losses[best], seed)
        return bool(mean > TIE and low > 0)

    chosen = next(
        name
        for name in (*LAWS, *LEVELS)
        if name in losses and means[name] <= means["infoscale"] and not clearly_worse(name)
    )
    gain = 100 * float(np.expm1(means[chosen] - means["infoscale"]))
    if chosen in LEVELS:
        why = "the best" if chosen == best else f"the simplest that is not clearly worse than the best ({best})"
        return chosen, f"{chosen} is {why} on held-out text, {gain:+.2f} % perplexity against InfoScale"
    known = {"none": "no temperature", "infoscale": "InfoScale", "logn": "LogN"}[chosen]
    fitted = any(level in losses for level in LEVELS)
    why = f"no fitted law is clearly better than {known} on held-out text" if fitted else "no law was fitted"
    return chosen, f"{why}: {known} is kept"
