"""A summary of a grid in sentences."""

from __future__ import annotations

from isentrope.report.load import METRICS, Grid, Row
from isentrope.report.tables.numbers import format_change, format_precise, format_with_interval
from isentrope.report.verdicts import FAILS, HOLDS, NOT_MEASURED, OPEN, Verdict

MIN_KEPT_ACCURACY = 0.9  # at the longest length, as a share of that at the shortest
MAX_NAMED_ROWS = 4
# variants of a method without and with each scale
SCALES = {"InfoScale": (("plain", "I.S."), ("C.S.", "both")), "CosScale": (("plain", "C.S."), ("I.S.", "both"))}
OTHER_SCALE = {"InfoScale": "CosScale", "CosScale": "InfoScale"}


def summarize_grid(grid: Grid, verdicts: list[Verdict]) -> list[str]:
    """Summarize the best rows at the longest length, the effect of each scale, which rows hold, claims and gaps."""
    effects = (_summarize_scale(grid, scale) for scale in SCALES)
    sentences = [
        _summarize_best(grid),
        *effects,
        _summarize_stable(grid),
        count_verdicts(verdicts),
        _summarize_gaps(grid),
    ]
    return [sentence for sentence in sentences if sentence]


def count_verdicts(verdicts: list[Verdict]) -> str:
    """Say how many claims hold, do not hold, are undecided, and are not measured."""
    if not verdicts:
        return ""
    count = {name: sum(v["verdict"] == name for v in verdicts) for name in (HOLDS, FAILS, OPEN, NOT_MEASURED)}
    within = sum(v["within_intervals"] for v in verdicts)
    parts = [f"{count[HOLDS]} of {_count_noun(len(verdicts), 'claim')} {'holds' if count[HOLDS] == 1 else 'hold'}"]
    parts += [f"{count[FAILS]} {'does' if count[FAILS] == 1 else 'do'} not"] if count[FAILS] else []
    parts += [f"{count[OPEN]} {'is' if count[OPEN] == 1 else 'are'} undecided"] if count[OPEN] else []
    parts += (
        [f"{count[NOT_MEASURED]} {'is' if count[NOT_MEASURED] == 1 else 'are'} not measured"]
        if count[NOT_MEASURED]
        else []
    )
    if not within:
        return ", ".join(parts) + "."
    rest = "verdict rests" if within == 1 else "verdicts rest"
    return f"{', '.join(parts)}. {within} {rest} on a difference within the intervals over documents."


def _summarize_best(grid: Grid) -> str:
    plan = grid.plan
    length = _longest_measured(grid)
    if length is None:
        return "Nothing is measured yet."
    trained = plan.metadata.get("train_length")
    times = f", {length / trained:g} times the training length," if trained else ""
    leaders: dict[Row, list[str]] = {}
    for metric in reversed(plan.metrics):
        for row, rank in grid.ranks(length, metric).items():
            value = grid.value(row, length, metric)
            if rank == 1 and value:
                leaders.setdefault(row, []).append(f"{METRICS[metric]} {format_with_interval(value, metric)}")
    if not leaders:
        return ""
    clauses = [f"{row.label} with {' and '.join(numbers)}" for row, numbers in leaders.items()]
    more = f"; and {len(clauses) - MAX_NAMED_ROWS} more" if len(clauses) > MAX_NAMED_ROWS else ""
    names = "; ".join(clauses[:MAX_NAMED_ROWS]) + more
    return f"Best at {length} tokens{times} {'is' if len(clauses) == 1 else 'are'} {names}."


def _summarize_scale(grid: Grid, scale: str) -> str:
    length, metric = _longest_measured(grid), "acc"
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
        clause = f"by {format_change(mean)} on average over {_count_noun(len(changes), 'method')}"
        if on_top:
            clause = f"on top of {OTHER_SCALE[scale]} {clause}"
        if len(changes) > 1:
            most = f"from {format_change(changes[low])} ({low}) to {format_change(changes[high])} ({high})"
            clause += f" (better for {better} of {len(changes)}; {most})"
        clauses.append(clause)
    return f"{scale} changes ACC at {length} tokens {', and '.join(clauses)}." if clauses else ""


def _summarize_stable(grid: Grid) -> str:
    """Name the rows that keep most of their accuracy from the shortest length to the longest, best first."""
    plan, last = grid.plan, _longest_measured(grid)
    if last is None or last == min(plan.lengths) or "acc" not in plan.metrics:
        return ""
    first = min(plan.lengths)
    kept: dict[Row, float] = {}
    measured = 0
    for row in plan.rows:
        start, end = grid.value(row, first, "acc"), grid.value(row, last, "acc")
        if start and end and start.mean > 0:
            measured += 1
            if end.mean >= MIN_KEPT_ACCURACY * start.mean:
                kept[row] = end.mean
    if not measured:
        return ""
    order = sorted(kept, key=lambda row: -kept[row])
    names = ", ".join(f"{row.label} ({format_precise(kept[row], 'acc')})" for row in order[:MAX_NAMED_ROWS])
    more = f" and {len(order) - MAX_NAMED_ROWS} more" if len(order) > MAX_NAMED_ROWS else ""
    count = f"{len(order)} of {measured}" if order else f"None of {measured}"
    keeps = "keeps" if len(order) == 1 else "keep"
    sentence = f"{count} rows {keeps} nine tenths of their ACC from {first} to {last} tokens"
    return f"{sentence}: {names}{more}." if order else f"{sentence}."


def _summarize_gaps(grid: Grid) -> str:
    total = len(grid.plan.rows) * len(grid.plan.lengths)
    keys = [(row, length) for row in grid.plan.rows for length in grid.plan.lengths]
    failed = [len(grid.failures(*key)) == len(grid.cells_by_seed[key]) for key in keys if grid.failures(*key)]
    missing = sum(key not in grid.cells_by_seed for key in keys)
    parts = [f"{sum(failed)} failed"] if any(failed) else []
    parts += [f"{failed.count(False)} failed for some of the seeds"] if not all(failed) else []
    parts += [f"{missing} {'is' if missing == 1 else 'are'} not measured yet"] if missing else []
    return f"Of {total} cells {', '.join(parts)}." if parts else ""


def _longest_measured(grid: Grid) -> int | None:
    """Return the longest length with a measured cell."""
    measured = [
        length for length in grid.plan.lengths
        if any(grid.value(row, length, metric) for row in grid.plan.rows for metric in grid.plan.metrics)
    ]  # fmt: skip
    return max(measured, default=None)


def _count_noun(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
