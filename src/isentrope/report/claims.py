"""The statements a plan sets out to test, judged by what was measured."""

from __future__ import annotations

from itertools import pairwise
from math import isfinite
from typing import Any

from isentrope.report.load import LOWER_IS_BETTER, METRICS, Grid, Row, Value
from isentrope.report.tables.numbers import number, precise, signed, with_interval
from isentrope.report.tables.published import Printed, bound, printed, step, tables

HOLDS, FAILS, OPEN = "holds", "does not hold", "not measured"
UNTOLD = "not told by the digits printed"  # of the paper's own numbers alone
Verdict = dict[str, Any]
Place = tuple[Row, int]


def judge(grid: Grid) -> list[Verdict]:
    """A verdict for each claim of the grid's plan, with the numbers it rests on."""
    kinds = {"better": (_better, _better_in_paper), "best_grows": (_best_grows, _best_grows_in_paper)}
    verdicts = []
    for claim in grid.plan.told.get("claims") or []:
        kind, path = claim.get("kind"), grid.plan.folder / "plan.json"
        if kind not in kinds:
            raise ValueError(f"{path}: claims: expected kind {' or '.join(kinds)}, got {kind!r}")
        if claim.get("metric") not in METRICS:
            raise ValueError(f"{path}: claims: expected metric {' or '.join(METRICS)}, got {claim.get('metric')!r}")
        try:
            here, in_paper = kinds[kind]
            told, paper = here(grid, claim), in_paper(grid, claim)
        except (KeyError, TypeError, IndexError) as error:
            raise ValueError(f"{path}: claims: {claim.get('text')!r} of kind {kind}: {error!r}") from None
        head = {"text": str(claim.get("text", "")), "source": str(claim.get("source", "")), "kind": kind}
        verdicts.append(head | {"metric": claim["metric"], "protocol": grid.protocol} | told | {"paper": paper})
    return verdicts


def said(verdict: Verdict) -> str:
    """`holds`, `does not hold`, `not measured`, and whether that lies within the intervals."""
    return verdict["verdict"] + (", within the intervals" if verdict["within_intervals"] else "")


def _better(grid: Grid, claim: dict[str, Any]) -> Verdict:
    metric, length = claim["metric"], claim["length"]
    this, others = _compared(claim)
    values = {row: grid.value(row, length, metric) for row in (this, *others)}
    numbers = [_told(grid, row, length, metric, value) for row, value in values.items()]
    mine = values[this]
    beaten = [None if (o := values[other]) is None or mine is None else _beats(mine, o, metric) for other in others]
    verdict = FAILS if False in beaten else OPEN if None in beaten else HOLDS
    # the comparisons that decide: those lost where one is lost, else all
    deciding = [other for other, won in zip(others, beaten, strict=True) if verdict == HOLDS or won is False]
    # one comparison in doubt makes a win doubtful; a loss only where each that is lost may be none
    doubt = any if verdict == HOLDS else all
    within = verdict != OPEN and doubt(_within(grid, this, other, length, metric) for other in deciding)
    against = ", ".join(f"{_words(grid, row, length, metric, values[row])}" for row in others)
    words = (
        f"{METRICS[metric]} at {length}: {_words(grid, this, length, metric, mine)} against {against}"
        if mine is not None or any(values.values())
        else f"{METRICS[metric]} at {length}: {_words(grid, this, length, metric, None)}, nor what it is compared with"
    )
    changes = [grid.difference(other, this, length, metric) for other in others]
    ends = [" to ".join(signed(end, metric) for end in change) for change in changes if change]
    words += f"; 95 % interval of the difference {' and '.join(ends)}" if ends else ""
    return {"verdict": verdict, "within_intervals": within, "words": words, "numbers": numbers}


def _within(grid: Grid, this: Row, other: Row, length: int, metric: str) -> bool:
    """Whether the difference may be none: document by document, or where they share too few by their intervals."""
    change = grid.difference(other, this, length, metric)
    if change is not None:
        return change[0] <= 0 <= change[1]
    mine, theirs = grid.value(this, length, metric), grid.value(other, length, metric)
    return mine is not None and theirs is not None and mine.overlaps(theirs)


def _best_grows(grid: Grid, claim: dict[str, Any]) -> Verdict:
    """The best method's place in the order never falls from length to length, and is higher at the last than first."""
    metric, lengths = claim["metric"], list(claim["lengths"])
    rows = _ordered(claim)
    if len(lengths) < 2 or len(rows) < 2:
        raise ValueError(f"{claim.get('text')!r}: expected two methods and two lengths or more")
    values = {(row, length): grid.value(row, length, metric) for length in lengths for row in rows}
    numbers = [_told(grid, row, length, metric, value) for (row, length), value in values.items()]
    lacking = [f"{row.method} at {length}" for (row, length), value in values.items() if value is None]
    if lacking:
        more = f" and {len(lacking) - 3} more" if len(lacking) > 3 else ""
        words = f"{METRICS[metric]} is not measured for {', '.join(lacking[:3])}{more}"
        return {"verdict": OPEN, "within_intervals": False, "words": words, "numbers": numbers}
    best = [min(rows, key=lambda row: _cost(values[row, length], metric)) for length in lengths]
    grows = _grow([rows.index(row) for row in best])
    # at either end the method that is best there may lie within the interval of the one best at the other end
    first, last = best[0], best[-1]
    within = first != last and any(
        (a := values[first, length]) is not None and (b := values[last, length]) is not None and a.overlaps(b)
        for length in (lengths[0], lengths[-1])
    )
    shown = ", ".join(
        f"{row.method} at {length} ({_precise(values[row, length], metric)})"
        for row, length in zip(best, lengths, strict=True)
    )
    words = f"best {METRICS[metric]}: {shown}"
    return {"verdict": HOLDS if grows else FAILS, "within_intervals": within, "words": words, "numbers": numbers}


def _better_in_paper(grid: Grid, claim: dict[str, Any]) -> Verdict | None:
    """The same by the paper's numbers, with ours after them; None where it does not print them all."""
    metric, length = claim["metric"], claim["length"]
    this, others = _compared(claim)
    places = [(row, length) for row in (*others, this)]
    label, values = _printed(grid, claim, places)
    if not values:
        return None
    *before, after = values
    steps = [step(*((x, after) if metric not in LOWER_IS_BETTER else (after, x))) for x in before]
    verdict = FAILS if -1 in steps else UNTOLD if None in steps else HOLDS
    told = _told_by_paper(label, verdict, _arrow([printed(x, metric) for x in values]), metric, places, values)
    ours = [grid.value(*place, metric) for place in places]
    if all(ours):
        told["words"] += f"; here {_arrow([number(value.mean, metric) for value in ours if value])}"
    return told


def _best_grows_in_paper(grid: Grid, claim: dict[str, Any]) -> Verdict | None:
    metric, rows, lengths = claim["metric"], _ordered(claim), claim["lengths"]
    places = [(row, length) for length in lengths for row in rows]
    label, values = _printed(grid, claim, places)
    if not values:
        return None
    at = dict(zip(places, values, strict=True))
    choose = min if metric in LOWER_IS_BETTER else max
    best = [choose((at[row, length] for row in rows), key=bound) for length in lengths]
    leaders = [[row for row in rows if at[row, n] == x] for n, x in zip(lengths, best, strict=True)]
    grows = _grow([rows.index(found[0]) for found in leaders])
    verdict = UNTOLD if any(len(found) > 1 for found in leaders) else HOLDS if grows else FAILS
    shown = ", ".join(
        f"{' or '.join(row.method for row in found)} at {length} ({printed(x, metric)})"
        for found, length, x in zip(leaders, lengths, best, strict=True)
    )
    return _told_by_paper(label, verdict, f"best {METRICS[metric]} {shown}", metric, places, values)


def _printed(grid: Grid, claim: dict[str, Any], places: list[Place]) -> tuple[str, list[Printed]]:
    """The paper's numbers at these places, from the table a claim names or else its plan's; none unless all."""
    labels = [str(told.get(key)) for told, key in ((claim, "source"), (grid.plan.told, "label"))]
    for table in (tables()[label] for label in labels if label in tables()):
        if all((*place, claim["metric"]) in table.values for place in places):
            return table.label, [table.values[*place, claim["metric"]] for place in places]
    return "", []


def _told_by_paper(
    label: str, verdict: str, words: str, metric: str, places: list[Place], values: list[Printed]
) -> Verdict:
    numbers = [
        {"method": row.method, "variant": row.variant, "length": length, "metric": metric, "value": value}
        for (row, length), value in zip(places, values, strict=True)
    ]
    words = f"paper, {label}: {words}" + ("" if verdict == HOLDS else f" ({verdict})")
    return {"source": label, "verdict": verdict, "words": words, "numbers": numbers}


def _arrow(texts: list[str]) -> str:
    return f"{', '.join(texts[:-1])} → {texts[-1]}"


def _compared(claim: dict[str, Any]) -> tuple[Row, list[Row]]:
    """What is said to be better, and than what."""
    than = claim["than"] if isinstance(claim["than"], list) else [claim["than"]]
    return _row(claim["this"]), [_row(other) for other in than]


def _ordered(claim: dict[str, Any]) -> list[Row]:
    return [Row(str(method), str(claim["variant"])) for method in claim["methods"]]


def _grow(places: list[int]) -> bool:
    return all(a <= b for a, b in pairwise(places)) and places[-1] > places[0]


def _row(told: dict[str, Any]) -> Row:
    return Row(str(told["method"]), str(told["variant"]))


def _cost(value: Value | None, metric: str) -> float:
    assert value is not None  # the caller has looked
    return value.mean if metric in LOWER_IS_BETTER else -value.mean


def _beats(this: Value, other: Value, metric: str) -> bool:
    return _cost(this, metric) < _cost(other, metric)


def _precise(value: Value | None, metric: str) -> str:
    return "" if value is None else precise(value.mean, metric)


def _words(grid: Grid, row: Row, length: int, metric: str, value: Value | None) -> str:
    if value is not None:
        return f"{row.label} {with_interval(value, metric)}"
    reasons = list(grid.failed(row, length).values())
    return f"{row.label} failed ({reasons[0]})" if reasons else f"{row.label} is not measured"


def _told(grid: Grid, row: Row, length: int, metric: str, value: Value | None) -> dict[str, Any]:
    numbers: dict[str, Any] = {}
    if value is not None:
        numbers = {key: _finite(getattr(value, key)) for key in ("mean", "low", "high", "least", "most")}
        numbers["seeds"] = value.seeds
    failed = list(grid.failed(row, length).values())
    told = {"method": row.method, "variant": row.variant, "length": length, "metric": metric}
    return told | numbers | ({"failed": failed} if failed else {})


def _finite(value: float) -> float | None:
    return value if isfinite(value) else None  # JSON has no infinity
