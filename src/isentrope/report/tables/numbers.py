"""Format numbers for tables and sentences."""

from __future__ import annotations

import re

from isentrope.report.load import Value

PPL_CAP, ACC_CAP = 500, 0.1  # the paper prints >500 and <0.1 beyond these


def format_number(x: float, metric: str, cap: bool = False) -> str:
    """Format a number of a table: two decimals, as in the paper; large perplexities as integers or powers of ten."""
    if metric == "acc":
        return f"<{ACC_CAP}" if cap and x < ACC_CAP else f"{x:.2f}"
    if cap and x > PPL_CAP:
        return f">{PPL_CAP}"
    if x < 1000:
        return f"{x:.2f}"
    return f"{x:.0f}" if x < 1e5 else re.sub(r"e\+?0*", "e", f"{x:.1e}").replace("inf", "∞")


def format_precise(x: float, metric: str) -> str:
    """Format a number of a sentence, where an accuracy has three decimals."""
    return f"{x:.3f}" if metric == "acc" else format_number(x, metric)


def format_with_interval(value: Value, metric: str) -> str:
    mean, low, high = (format_precise(x, metric) for x in (value.mean, value.low, value.high))
    return f"{mean} ({low}–{high})"


def format_change(x: float, metric: str = "acc") -> str:
    if metric != "acc":
        return f"{'−' if x < 0 else '+'}{format_number(abs(x), metric)}"
    return f"{round(x, 3) + 0.0:+.3f}".replace("-", "−")  # + 0.0 makes -0.0 a plain zero


def format_perplexity(x: float) -> str:
    """Format a perplexity: 12.34, 1,690, and from a million on 2.5e6."""
    if x < 100:
        return f"{x:.2f}"
    return f"{x:,.0f}" if x < 1e6 else format_number(x, "ppl")


def format_length(n: int) -> str:
    """Format a number of tokens: 4096 as 4k."""
    return f"{n // 1024}k" if n and n % 1024 == 0 else str(n)


def format_bucket(low: int, high: int) -> str:
    """Format a range of positions: 4k–8k."""
    return f"{format_length(low)}–{format_length(high)}"
