"""Scales of DPE, found group by group."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isnan

from isentrope.positions import DPE

MULTIPLES = (1 / 16, 1 / 4, 1 / 2, 1.0, 2.0, 4.0, 16.0)  # of the scale that the search starts from
EXTENSION_MARGIN = 2  # the start is twice the extension, which keeps far distances in the trained half


@dataclass(frozen=True)
class ScaleSearch:
    """The result of `search_scales`.

    Attributes:
        position: DPE with the best scale of each group.
        scores: of all combinations that were scored, by their scales; that of `position` is only among them where it
            was one of these.
    """

    position: DPE
    scores: Mapping[tuple[int, ...], float]


def search_scales(
    score: Callable[[str], float],
    window: int,
    length: int,
    train_length: int,
    *,
    groups: int = 8,
    rest: str = "",
    multiples: tuple[float, ...] = MULTIPLES,
) -> ScaleSearch:
    """Find the scale of each group of frequencies for `DPE`, one group at a time (Lu et al., 2025).

    All groups start at twice the extension, length / train_length. The scale of one group is then varied while the
    others stay at the start, and the one with the best score is kept for it; where scores are equal, the one nearest to
    the start. That is 1 + groups · (multiples - 1) evaluations at most.

    Args:
        score: maps the text of a recipe to a number, higher for better: the share of needles that a model finds under
            that recipe at `length`, several to a text, in the paper.
        window: DPE's window.
        length: the length to extend to.
        train_length: the length that the model was trained at.
        groups: number of groups of frequencies.
        rest: further parts of the recipe, such as "infoscale".
        multiples: the scales to try, as multiples of the start.

    Returns:
        The method with the scales that were found, and all scores.

    Raises:
        ValueError: a length, the number of groups or a multiple is not positive, or a score is not a number.
    """
    sizes = {"length": length, "train_length": train_length, "groups": groups, "multiples": min(multiples, default=0)}
    for name, value in sizes.items():
        if value <= 0:
            raise ValueError(f"search_scales({name}=…): expected a positive number, got {value}")
    start = max(1, round(EXTENSION_MARGIN * length / train_length))
    candidates = sorted(
        {max(1, round(start * multiple)) for multiple in multiples} - {start}, key=lambda s: abs(s - start)
    )
    scores: dict[tuple[int, ...], float] = {}

    def evaluate(scales: tuple[int, ...]) -> float:
        if scales not in scores:
            text = str(DPE(window, scales)) + (f"+{rest}" if rest else "")
            scores[scales] = float(score(text))
            if isnan(scores[scales]):
                raise ValueError(f"search_scales(score=…): expected a number for {text!r}, got nan")
        return scores[scales]

    best = []
    for group in range(groups):
        trials = {
            scale: (start,) * group + (scale,) + (start,) * (groups - group - 1) for scale in (start, *candidates)
        }
        best.append(max(trials, key=lambda scale: evaluate(trials[scale])))
    return ScaleSearch(DPE(window, tuple(best)), scores)
