"""Run plans of either kind, and count what is done."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from isentrope.experiments.causal_plan import CausalPlan
from isentrope.experiments.causal_runner import causal_plan_status, run_causal_plan
from isentrope.experiments.masked_plan import MaskedPlan
from isentrope.experiments.masked_runner import masked_plan_status, run_masked_plans


def run_plan(
    plan: MaskedPlan | CausalPlan,
    out: Path,
    corpus: str | Path | None = None,
    notify: Callable[[str], None] = print,
    compile: bool | None = None,
    is_helper: bool = False,
) -> dict[str, Any]:
    """Train and measure what is missing of a plan; the results go to `out`/NAME.

    Args:
        plan: The plan.
        out: The folder that plans share.
        corpus: A prepared corpus, for masked models; by default the plan's own.
        notify: Receives messages on trainings, recipes left out and failures.
        compile: Whether trainings are compiled; None compiles long ones on a GPU.
        is_helper: Skip what another process works on, and leave writing the results to it.

    Returns:
        The counts of `plan_status`.
    """
    if isinstance(plan, MaskedPlan):
        ((_, counts),) = run_masked_plans([plan], out, corpus, notify, compile, is_helper)
        return counts
    if corpus is not None or compile is not None or is_helper:
        raise ValueError(f"plan {plan.name}: corpus, compile and is_helper are for plans of masked models")
    return run_causal_plan(plan, out, notify)


def plan_status(plan: MaskedPlan | CausalPlan, out: Path) -> dict[str, Any]:
    """Count the cells of a plan, and those done and failed in the folder `out`."""
    return masked_plan_status(plan, out) if isinstance(plan, MaskedPlan) else causal_plan_status(plan, out)
