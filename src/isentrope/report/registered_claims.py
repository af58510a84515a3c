"""Claims registered before a study is run, and decided together by one rule (`evaluation.decisions`).

    - {text: …, kind: superior, metric: acc, length: 4096, this: {method: …, variant: …}, than: {method: …, variant: …}}
    - {text: …, kind: equivalent, metric: ppl, length: 4096, this: …, than: …, margin: 0.01}

The margin is the difference that does not matter: 0.01 of accuracy, or 1 % of perplexity, unless a claim has another.
"""

from __future__ import annotations

from math import expm1, log1p
from typing import Any

from isentrope.evaluation.decisions import (
    EQUIVALENT,
    SUPERIOR,
    UNDECIDED,
    Decision,
    Effect,
    decide_claims,
    estimate_effect,
)
from isentrope.report.load import METRICS, Grid, Row
from isentrope.report.verdicts import FAILS, HOLDS, NOT_MEASURED, OPEN, Verdict

REGISTERED = {"superior": SUPERIOR, "equivalent": EQUIVALENT}
DEFAULT_MARGIN = 0.01


def decide_registered(grid: Grid, claims: list[dict[str, Any]]) -> list[Verdict]:
    """Decide the claims of a plan that were registered as superior or equivalent, all together.

    Claims that are not measured yet count in the correction, so that measuring them takes no verdict back.

    Args:
        grid: the measured numbers.
        claims: of the plan, each of a kind in `REGISTERED`.

    Returns:
        A verdict for each: "holds", "does not hold" (the contrary was shown), "undecided" or "not measured", with the
        effect, its interval, its standard deviations by what varies, and how much it rests on.

    Raises:
        ValueError: if a claim is malformed.
    """
    effects = [_estimate(grid, claim) for claim in claims]
    planned = len(grid.plan.metadata.get("seeds") or [0])
    # one seed of several says nothing of the others
    decidable = {i: effect for i, effect in enumerate(effects) if effect and (effect.seeds > 1 or planned == 1)}
    decisions = decide_claims(
        list(decidable.values()),
        [_log_margin(claims[index]) for index in decidable],
        [claims[index]["kind"] == "equivalent" for index in decidable],
        registered=len(claims),
    )
    decided = dict(zip(decidable, decisions, strict=True))
    return [
        _describe(grid, claim, effect, decided.get(index))
        for index, (claim, effect) in enumerate(zip(claims, effects, strict=True))
    ]


def _estimate(grid: Grid, claim: dict[str, Any]) -> Effect | None:
    path = grid.plan.folder / "plan.json"
    if claim.get("metric") not in METRICS:
        raise ValueError(f"{path}: claims: expected metric {' or '.join(METRICS)}, got {claim.get('metric')!r}")
    try:
        this, than = (Row(str(claim[key]["method"]), str(claim[key]["variant"])) for key in ("this", "than"))
        runs = grid.differences(than, this, claim["length"], claim["metric"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path}: claims: {claim.get('text')!r} of kind {claim['kind']}: {error!r}") from None
    return estimate_effect(runs) if sum(run.size for run in runs) > 1 else None


def _log_margin(claim: dict[str, Any]) -> float:
    """Return the margin on the scale of the differences: logarithms for perplexity."""
    margin = float(claim.get("margin", DEFAULT_MARGIN))
    return log1p(margin) if claim["metric"] == "ppl" else margin


def _describe(grid: Grid, claim: dict[str, Any], effect: Effect | None, decision: Decision | None) -> Verdict:
    head = {
        "text": str(claim.get("text", "")), "source": str(claim.get("source", "")), "kind": claim["kind"],
        "metric": claim["metric"], "protocol": grid.protocol, "paper": None, "numbers": [], "within_intervals": False,
    }  # fmt: skip
    if effect is None or decision is None:
        reason = "not measured" if effect is None else "one seed alone, which says nothing of the others"
        return head | {"verdict": NOT_MEASURED, "words": f"{METRICS[claim['metric']]} at {claim['length']}: {reason}"}
    holds = {REGISTERED[claim["kind"]]: HOLDS, UNDECIDED: OPEN}
    low, high = effect.interval()
    mean, low, high = (_to_metric(x, claim["metric"]) for x in (effect.mean, low, high))
    basis = {"pretrainings": effect.pretrainings, "seeds": effect.seeds, "documents": effect.documents}
    counts = ", ".join(f"{count} {name if count != 1 else name[:-1]}" for name, count in basis.items())
    unit = "%" if claim["metric"] == "ppl" else ""
    words = (
        f"{METRICS[claim['metric']]} at {claim['length']}: better by {mean:.3g}{unit}, 95 % interval {low:.3g} to "
        f"{high:.3g}{unit} over {counts}: {decision.verdict}"
    )
    numbers = {
        "difference": mean, "low": low, "high": high, "margin": claim.get("margin", DEFAULT_MARGIN),
        "p_different": decision.p_different, "p_not_equivalent": decision.p_not_equivalent,
        "components": effect.components, "length": claim["length"], "this": claim["this"], "than": claim["than"],
    }  # fmt: skip
    verdict = {"verdict": holds.get(decision.verdict, FAILS), "decision": decision.verdict, "words": words}
    return head | basis | verdict | {"numbers": [numbers]}


def _to_metric(difference: float, metric: str) -> float:
    """Return a difference of accuracy as it is, one of log perplexity as the per cent by which perplexity is lower."""
    return -100 * expm1(-difference) if metric == "ppl" else difference
