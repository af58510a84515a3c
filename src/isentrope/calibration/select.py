"""Select the law to keep, by held-out texts."""

from __future__ import annotations

import hashlib
from collections.abc import Container, Sequence

from isentrope.evaluation.metrics import Array, mean_interval
from isentrope.evaluation.texts import Text

LAWS = ("none", "infoscale", "logn", "power", "closed", "given")  # in closed form, the simplest first
DEFAULTS = ("infoscale", "closed", "given")  # the last that was measured is used where no text decides
LEVELS = ("scalar", "layer", "head", "near")  # fitted; the last is the best before it, with near keys fitted too
LABELS = {
    "none": "no law", "infoscale": "InfoScale", "logn": "LogN", "power": "Power",
    "closed": "the closed law", "given": "the law given",
}  # fmt: skip
MAX_TIE_NATS = 1e-3  # a token: laws that are closer tie, however certain the difference
MIN_INTERVAL_TEXTS = 6  # held out; the bootstrap of fewer is narrower than it should be


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


def carries_interval(texts: int) -> bool:
    """Return whether so many held-out texts carry a 95 % interval."""
    return texts >= MIN_INTERVAL_TEXTS


def describe_missing_interval(texts: int) -> str:
    """Say why there is no interval, and how many texts it takes."""
    return (
        f"{texts} held-out text{'s' * (texts > 1)} cannot carry a 95 % interval: {MIN_INTERVAL_TEXTS} are needed, "
        f"that is {2 * MIN_INTERVAL_TEXTS - 1} documents"
    )


def select_law(losses: dict[str, Array], seed: int = 0) -> tuple[str, str]:
    """Select the simplest law that is not clearly worse than the best, nor worse than any of DEFAULTS.

    Clearly worse: by more than MAX_TIE_NATS, and with a 95 % interval above nothing over draws of as many texts (paired
    bootstrap). Fewer texts than MIN_INTERVAL_TEXTS make nothing clear: the default is kept unless another of DEFAULTS
    or a fitted law is better on every text.

    Args:
        losses: the objective of each law on each held-out text, in nats a token.
        seed: of the bootstrap.

    Returns:
        Its name, and why.
    """
    default = get_default(losses)
    if not carries_interval(len(losses[default])):
        return _select_by_every_text(losses, default)
    means = {name: float(values.mean()) for name, values in losses.items()}
    best = min(means, key=lambda name: means[name])
    limit = min(means[name] for name in DEFAULTS if name in means)

    chosen = next(
        name
        for name in (*LAWS, *LEVELS)
        if name in losses and means[name] <= limit and not is_clearly_worse(losses[name] - losses[best], seed)
    )
    if chosen in LEVELS:
        why = "the best" if chosen == best else f"the simplest that is not clearly worse than the best ({best})"
        return chosen, f"{chosen} is {why} on held-out text, {_format_gain(losses, chosen, default)}"
    fitted = any(level in losses for level in LEVELS)
    why = f"no fitted law is clearly better than {LABELS[chosen]} on held-out text" if fitted else "no law was fitted"
    return chosen, f"{why}: {LABELS[chosen]} is kept"


def is_clearly_worse(rises: Array, seed: int = 0) -> bool:
    """Return whether losses of texts rise by more than MAX_TIE_NATS, with a 95 % interval above nothing."""
    mean, low, _ = mean_interval(rises, seed)
    return bool(mean > MAX_TIE_NATS and low > 0)


def get_default(losses: Container[str]) -> str:
    """Return the law to use where no text decides, of those that were measured."""
    return next(name for name in reversed(DEFAULTS) if name in losses)


def _select_by_every_text(losses: dict[str, Array], default: str) -> tuple[str, str]:
    """Go from the default to the others and the fitted laws, and on to each that is better on every text."""
    chosen = default
    for name in (*reversed(DEFAULTS), *LEVELS):
        if name in losses:
            gains = losses[chosen] - losses[name]
            chosen = name if gains.min() > 0 and gains.mean() > MAX_TIE_NATS else chosen
    texts = len(losses[default])
    missing = describe_missing_interval(texts)
    if chosen not in LEVELS:
        return chosen, f"{missing}; no fitted law is better than {LABELS[chosen]} on every one: it is kept"
    return chosen, f"{missing}; {chosen} is better on every one, {_format_gain(losses, chosen, default)}"


def _format_gain(losses: dict[str, Array], chosen: str, default: str) -> str:
    return f"{losses[chosen].mean() - losses[default].mean():+.4f} nats a token against {LABELS[default]}"
