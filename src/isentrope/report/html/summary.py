"""What a grid of numbers says, in sentences."""

from __future__ import annotations

from isentrope.report.claims import FAILS, HOLDS, OPEN, Verdict
from isentrope.report.load import METRICS, Grid, Row
from isentrope.report.tables.numbers import precise, signed, with_interval

KEPT = 0.9  # share of its accuracy at the shortest length that a row keeps at the longest, to be said to hold
NAMED = 4  # rows that a sentence names
# what a scale is compared with: the same method without it
SCALES = {"InfoScale": (("plain", "I.S."), ("C.S.", "both")), "CosScale": (("plain", "C.S."), ("I.S.", "both"))}
OTHER = {"InfoScale": "CosScale", "CosScale": "InfoScale"}


def summary(grid: Grid, verdicts: list[Verdict]) -> list[str]:
    """The best at the longest length, what each scale changes there, what holds, and how the claims fare."""
    sentences = [_best(grid), *(_change(grid, scale) for scale in SCALES), _holding(grid), tally(verdicts), _gaps(grid)]
    return [sentence for sentence in sentences if sentence]


def tally(verdicts: list[Verdict]) -> str:
    """How many claims hold, do not, and are open."""
    if not verdicts:
        return ""
    count = {name: sum(v["verdict"] == name for v in verdicts) for name in (HOLDS, FAILS, OPEN)}
    within = sum(v["within_intervals"] for v in verdicts)
    parts = [f"{count[HOLDS]} of {_many(len(verdicts), 'claim')} {'holds' if count[HOLDS] == 1 else 'hold'}"]
    parts += [f"{count[FAILS]} {'does' if count[FAILS] == 1 else 'do'} not"] if count[FAILS] else []
    parts += [f"{count[OPEN]} {'is' if count[OPEN] == 1 else 'are'} not measured"] if count[OPEN] else []
    if not within:
        return ", ".join(parts) + "."
    rest = "verdict rests" if within == 1 else "verdicts rest"
    return f"{', '.join(parts)}. {within} {rest} on a difference within the intervals over documents."


def _best(grid: Grid) -> str:
    plan = grid.plan
    length = longest(grid)
    if length is None:
        return "Nothing is measured yet."
    trained = plan.told.get("train_length")
    times = f", {length / trained:g} times the training length," if trained else ""
    leaders: dict[Row, list[str]] = {}
    for metric in reversed(plan.metrics):
        for row, rank in grid.ranks(length, metric).items():
            value = grid.value(row, length, metric)
            if rank == 1 and value:
                leaders.setdefault(row, []).append(f"{METRICS[metric]} {with_interval(value, metric)}")
    if not leaders:
        return ""
    told = [f"{row.label} with {' and '.join(numbers)}" for row, numbers in leaders.items()]
    names = "; ".join(told[:NAMED]) + (f"; and {len(told) - NAMED} more" if len(told) > NAMED else "")
    return f"Best at {length} tokens{times} {'is' if len(told) == 1 else 'are'} {names}."


def _change(grid: Grid, scale: str) -> str:
    length, metric = longest(grid), "acc"
    if length is None or metric not in grid.plan.metrics:
        return ""
    clauses = []
    for (without, having), on_top in zip(SCALES[scale], (False, True), strict=True):
        changes = {}
        for method in dict.fromkeys(row.method for row in grid.plan.rows):
            before, after = (grid.value(Row(method, variant), length, metric) for variant in (without, having))
            if before and after:
                changes[method] = after.mean - before.mean
        if not changes:
            continue
        mean = sum(changes.values()) / len(changes)
        better = sum(change > 0 for change in changes.values())
        low, high = min(changes, key=lambda m: changes[m]), max(changes, key=lambda m: changes[m])
        clause = f"by {signed(mean)} on average over {_many(len(changes), 'method')}"
        if on_top:
            clause = f"on top of {OTHER[scale]} {clause}"
        if len(changes) > 1:
            most = f"from {signed(changes[low])} ({low}) to {signed(changes[high])} ({high})"
            clause += f" (better for {better} of {len(changes)}; {most})"
        clauses.append(clause)
    return f"{scale} changes ACC at {length} tokens {', and '.join(clauses)}." if clauses else ""


def _holding(grid: Grid) -> str:
    """Rows that keep most of their accuracy from the shortest length to the longest, best first."""
    plan, last = grid.plan, longest(grid)
    if last is None or last == min(plan.lengths) or "acc" not in plan.metrics:
        return ""
    first = min(plan.lengths)
    kept: dict[Row, float] = {}
    measured = 0
    for row in plan.rows:
        start, end = grid.value(row, first, "acc"), grid.value(row, last, "acc")
        if start and end and start.mean > 0:
            measured += 1
            if end.mean >= KEPT * start.mean:
                kept[row] = end.mean
    if not measured:
        return ""
    order = sorted(kept, key=lambda row: -kept[row])
    names = ", ".join(f"{row.label} ({precise(kept[row], 'acc')})" for row in order[:NAMED])
    more = f" and {len(order) - NAMED} more" if len(order) > NAMED else ""
    count = f"{len(order)} of {measured}" if order else f"None of {measured}"
    keeps = "keeps" if len(order) == 1 else "keep"
    told = f"{count} rows {keeps} nine tenths of their ACC from {first} to {last} tokens"
    return f"{told}: {names}{more}." if order else f"{told}."


def _gaps(grid: Grid) -> str:
    total = len(grid.plan.rows) * len(grid.plan.lengths)
    places = [(row, length) for row in grid.plan.rows for length in grid.plan.lengths]
    failed = [len(grid.failed(*place)) == len(grid.placed[place]) for place in places if grid.failed(*place)]
    missing = sum(place not in grid.placed for place in places)
    parts = [f"{sum(failed)} failed"] if any(failed) else []
    parts += [f"{failed.count(False)} failed for some of the seeds"] if not all(failed) else []
    parts += [f"{missing} {'is' if missing == 1 else 'are'} not measured yet"] if missing else []
    return f"Of {total} cells {', '.join(parts)}." if parts else ""


def longest(grid: Grid) -> int | None:
    """The longest length at which anything is measured."""
    measured = [
        length for length in grid.plan.lengths
        if any(grid.value(row, length, metric) for row in grid.plan.rows for metric in grid.plan.metrics)
    ]  # fmt: skip
    return max(measured, default=None)


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
