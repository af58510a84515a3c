"""How numbers are printed."""

from __future__ import annotations

import re

from isentrope.report.load import Value

PPL_CAP, ACC_CAP = 500, 0.1  # the paper prints >500 and <0.1 beyond these


def number(x: float, metric: str, cap: bool = False) -> str:
    """In a table: two decimals, as in the paper; large perplexities in whole numbers or powers of ten."""
    if metric == "acc":
        return f"<{ACC_CAP}" if cap and x < ACC_CAP else f"{x:.2f}"
    if cap and x > PPL_CAP:
        return f">{PPL_CAP}"
    if x < 1000:
        return f"{x:.2f}"
    return f"{x:.0f}" if x < 1e5 else re.sub(r"e\+?0*", "e", f"{x:.1e}").replace("inf", "∞")


def precise(x: float, metric: str) -> str:
    """In a sentence: an accuracy with one digit more."""
    return f"{x:.3f}" if metric == "acc" else number(x, metric)


def with_interval(value: Value, metric: str) -> str:
    return f"{precise(value.mean, metric)} ({precise(value.low, metric)}–{precise(value.high, metric)})"


def signed(x: float, metric: str = "acc") -> str:
    if metric != "acc":
        return f"{'−' if x < 0 else '+'}{number(abs(x), metric)}"
    return f"{round(x, 3) + 0.0:+.3f}".replace("-", "−")  # + 0.0 makes -0.0 a plain zero
