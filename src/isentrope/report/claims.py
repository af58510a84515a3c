"""Verdicts on the claims that a plan tests, from its measured numbers."""

from __future__ import annotations

from itertools import pairwise
from math import isfinite
from typing import Any

from isentrope.report.load import LOWER_IS_BETTER, METRICS, Grid, Row, Value
from isentrope.report.registered_claims import REGISTERED, decide_registered
from isentrope.report.tables.numbers import format_change, format_number, format_precise, format_with_interval
from isentrope.report.tables.published import (
    PublishedValue,
    direction_of_change,
    format_published,
    load_published_tables,
    to_comparable,
)
from isentrope.report.verdicts import FAILS, HOLDS, NOT_MEASURED, Verdict

UNDECIDED = "not told by the digits printed"  # only for the paper's own numbers, which are rounded
CellKey = tuple[Row, int]


def evaluate_claims(grid: Grid) -> list[Verdict]:
    """Return a verdict for each claim of the grid's plan, with the numbers that decide it.

    Raises:
        ValueError: if a claim in `plan.json` is malformed.
    """
    kinds = {
        "better": (_decide_better, _decide_better_in_paper),
        "best_grows": (_decide_best_grows, _decide_best_grows_in_paper),
    }
    verdicts = []
    claims, path = grid.plan.metadata.get("claims") or [], grid.plan.folder / "plan.json"
    registered = [claim for claim in claims if claim.get("kind") in REGISTERED]
    decided = dict(zip(map(id, registered), decide_registered(grid, registered), strict=True))
    for claim in claims:
        kind = claim.get("kind")
        if id(claim) in decided:
            verdicts.append(decided[id(claim)])
            continue
        if kind not in kinds:
            raise ValueError(f"{path}: claims: expected kind {' or '.join((*kinds, *REGISTERED))}, got {kind!r}")
        if claim.get("metric") not in METRICS:
            raise ValueError(f"{path}: claims: expected metric {' or '.join(METRICS)}, got {claim.get('metric')!r}")
        try:
            evaluate, evaluate_in_paper = kinds[kind]
            verdict, paper = evaluate(grid, claim), evaluate_in_paper(grid, claim)
        except (KeyError, TypeError, IndexError) as error:
            raise ValueError(f"{path}: claims: {claim.get('text')!r} of kind {kind}: {error!r}") from None
        head = {"text": str(claim.get("text", "")), "source": str(claim.get("source", "")), "kind": kind}
        verdicts.append(head | {"metric": claim["metric"], "protocol": grid.protocol} | verdict | {"paper": paper})
    return verdicts


def format_verdict(verdict: Verdict) -> str:
    """Format a verdict, with a note if the difference lies within the intervals."""
    return verdict["verdict"] + (", within the intervals" if verdict["within_intervals"] else "")


def _decide_better(grid: Grid, claim: dict[str, Any]) -> Verdict:
    metric, length = claim["metric"], claim["length"]
    this, others = _compared_rows(claim)
    values = {row: grid.value(row, length, metric) for row in (this, *others)}
    numbers = [_describe_value(grid, row, length, metric, value) for row, value in values.items()]
    own = values[this]
    beaten = [None if (o := values[other]) is None or own is None else _beats(own, o, metric) for other in others]
    verdict = FAILS if False in beaten else NOT_MEASURED if None in beaten else HOLDS
    # lost comparisons decide if there are any, otherwise all do
    deciding = [other for other, won in zip(others, beaten, strict=True) if verdict == HOLDS or won is False]
    # a win is in doubt if one comparison is, a loss only if every lost comparison is
    quantifier = any if verdict == HOLDS else all
    doubtful = (_is_within_intervals(grid, this, other, length, metric) for other in deciding)
    within = verdict != NOT_MEASURED and quantifier(doubtful)
    texts = [_format_row(grid, row, length, metric, values[row]) for row in (this, *others)]
    rest = f" against {', '.join(texts[1:])}" if any(values.values()) else ", nor what it is compared with"
    words = f"{METRICS[metric]} at {length}: {texts[0]}{rest}"
    changes = [grid.difference(other, this, length, metric) for other in others]
    intervals = [" to ".join(format_change(end, metric) for end in change) for change in changes if change]
    words += f"; 95 % interval of the difference {' and '.join(intervals)}" if intervals else ""
    return {"verdict": verdict, "within_intervals": within, "words": words, "numbers": numbers}


def _is_within_intervals(grid: Grid, this: Row, other: Row, length: int, metric: str) -> bool:
    """Whether zero lies in the interval of the difference, or without shared documents the two intervals overlap."""
    change = grid.difference(other, this, length, metric)
    if change is not None:
        return change[0] <= 0 <= change[1]
    own, theirs = grid.value(this, length, metric), grid.value(other, length, metric)
    return own is not None and theirs is not None and own.overlaps(theirs)


def _decide_best_grows(grid: Grid, claim: dict[str, Any]) -> Verdict:
    """Decide whether the best method's index never falls with length, and is higher at the last than at the first."""
    metric, lengths = claim["metric"], list(claim["lengths"])
    rows = _claim_rows(claim)
    if len(lengths) < 2 or len(rows) < 2:
        raise ValueError(f"{claim.get('text')!r}: expected two methods and two lengths or more")
    values = {(row, length): grid.value(row, length, metric) for length in lengths for row in rows}
    numbers = [_describe_value(grid, row, length, metric, value) for (row, length), value in values.items()]
    missing = [f"{row.method} at {length}" for (row, length), value in values.items() if value is None]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        words = f"{METRICS[metric]} is not measured for {', '.join(missing[:3])}{more}"
        return {"verdict": NOT_MEASURED, "within_intervals": False, "words": words, "numbers": numbers}
    best = [min(rows, key=lambda row: _cost(values[row, length], metric)) for length in lengths]
    grows = _is_growing([rows.index(row) for row in best])
    # the best methods of both ends may be indistinguishable at one of them
    first, last = best[0], best[-1]
    within = first != last and any(
        (a := values[first, length]) is not None and (b := values[last, length]) is not None and a.overlaps(b)
        for length in (lengths[0], lengths[-1])
    )
    winners = ", ".join(
        f"{row.method} at {length} ({_format_optional(values[row, length], metric)})"
        for row, length in zip(best, lengths, strict=True)
    )
    words = f"best {METRICS[metric]}: {winners}"
    return {"verdict": HOLDS if grows else FAILS, "within_intervals": within, "words": words, "numbers": numbers}


def _decide_better_in_paper(grid: Grid, claim: dict[str, Any]) -> Verdict | None:
    """Decide the claim by the paper's numbers, with ours after them; None if the paper does not print them all."""
    metric, length = claim["metric"], claim["length"]
    this, others = _compared_rows(claim)
    keys = [(row, length) for row in (*others, this)]
    label, values = _published_values(grid, claim, keys)
    if not values:
        return None
    *before, after = values
    directions = [direction_of_change(*((x, after) if metric not in LOWER_IS_BETTER else (after, x))) for x in before]
    verdict = FAILS if -1 in directions else UNDECIDED if None in directions else HOLDS
    statement = _format_arrow([format_published(x, metric) for x in values])
    paper = _paper_verdict(label, verdict, statement, _describe_published(keys, values, metric))
    ours = [grid.value(*key, metric) for key in keys]
    if all(ours):
        paper["words"] += f"; here {_format_arrow([format_number(value.mean, metric) for value in ours if value])}"
    return paper


def _decide_best_grows_in_paper(grid: Grid, claim: dict[str, Any]) -> Verdict | None:
    metric, rows, lengths = claim["metric"], _claim_rows(claim), claim["lengths"]
    keys = [(row, length) for length in lengths for row in rows]
    label, values = _published_values(grid, claim, keys)
    if not values:
        return None
    by_key = dict(zip(keys, values, strict=True))
    choose = min if metric in LOWER_IS_BETTER else max
    best = [choose((by_key[row, length] for row in rows), key=to_comparable) for length in lengths]
    leaders = [[row for row in rows if by_key[row, n] == x] for n, x in zip(lengths, best, strict=True)]
    grows = _is_growing([rows.index(tied[0]) for tied in leaders])
    verdict = UNDECIDED if any(len(tied) > 1 for tied in leaders) else HOLDS if grows else FAILS
    winners = ", ".join(
        f"{' or '.join(row.method for row in tied)} at {length} ({format_published(x, metric)})"
        for tied, length, x in zip(leaders, lengths, best, strict=True)
    )
    statement = f"best {METRICS[metric]} {winners}"
    return _paper_verdict(label, verdict, statement, _describe_published(keys, values, metric))


def _published_values(grid: Grid, claim: dict[str, Any], keys: list[CellKey]) -> tuple[str, list[PublishedValue]]:
    """Return the paper's numbers from the table that the claim or else its plan names; none unless it has all."""
    labels = [str(source.get(key)) for source, key in ((claim, "source"), (grid.plan.metadata, "label"))]
    published = load_published_tables()
    for table in (published[label] for label in labels if label in published):
        if all((*key, claim["metric"]) in table.values for key in keys):
            return table.label, [table.values[*key, claim["metric"]] for key in keys]
    return "", []


def _describe_published(keys: list[CellKey], values: list[PublishedValue], metric: str) -> list[dict[str, Any]]:
    return [
        {"method": row.method, "variant": row.variant, "length": length, "metric": metric, "value": value}
        for (row, length), value in zip(keys, values, strict=True)
    ]


def _paper_verdict(label: str, verdict: str, statement: str, numbers: list[dict[str, Any]]) -> Verdict:
    words = f"paper, {label}: {statement}" + ("" if verdict == HOLDS else f" ({verdict})")
    return {"source": label, "verdict": verdict, "words": words, "numbers": numbers}


def _format_arrow(texts: list[str]) -> str:
    return f"{', '.join(texts[:-1])} → {texts[-1]}"


def _compared_rows(claim: dict[str, Any]) -> tuple[Row, list[Row]]:
    """Return the row that should be better, and the rows it is compared with."""
    than = claim["than"] if isinstance(claim["than"], list) else [claim["than"]]
    return _to_row(claim["this"]), [_to_row(other) for other in than]


def _claim_rows(claim: dict[str, Any]) -> list[Row]:
    return [Row(str(method), str(claim["variant"])) for method in claim["methods"]]


def _is_growing(indices: list[int]) -> bool:
    return all(a <= b for a, b in pairwise(indices)) and indices[-1] > indices[0]


def _to_row(fields: dict[str, Any]) -> Row:
    return Row(str(fields["method"]), str(fields["variant"]))


def _cost(value: Value | None, metric: str) -> float:
    assert value is not None  # checked by the caller
    return value.mean if metric in LOWER_IS_BETTER else -value.mean


def _beats(this: Value, other: Value, metric: str) -> bool:
    return _cost(this, metric) < _cost(other, metric)


def _format_optional(value: Value | None, metric: str) -> str:
    return "" if value is None else format_precise(value.mean, metric)


def _format_row(grid: Grid, row: Row, length: int, metric: str, value: Value | None) -> str:
    if value is not None:
        return f"{row.label} {format_with_interval(value, metric)}"
    reasons = list(grid.failures(row, length).values())
    return f"{row.label} failed ({reasons[0]})" if reasons else f"{row.label} is not measured"


def _describe_value(grid: Grid, row: Row, length: int, metric: str, value: Value | None) -> dict[str, Any]:
    numbers: dict[str, Any] = {}
    if value is not None:
        numbers = {key: _finite(getattr(value, key)) for key in ("mean", "low", "high", "least", "most")}
        numbers["seeds"] = value.seeds
    reasons = list(grid.failures(row, length).values())
    key = {"method": row.method, "variant": row.variant, "length": length, "metric": metric}
    return key | numbers | ({"failed": reasons} if reasons else {})


def _finite(value: float) -> float | None:
    return value if isfinite(value) else None  # JSON has no infinity
