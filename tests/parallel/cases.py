"""The contract matrix for several processes: every part, with rows, masks, layouts and exchanges in turn."""

from __future__ import annotations

from itertools import product

from tests.contract.matrix import FAR_LAWS, FAR_POSITIONS, MASKS, POSITIONS, RETRIEVES, SCORES, TEMPERATURES
from tests.parallel.workers import Case

ROWS = ("", "left", "right", "packed", "jumping")
LAYOUTS = ("zigzag", "contiguous")
LENGTHS = (61, 48, 70)


def takes_rows(position, rows):
    """Whether one process computes it: a tail of LaMPE is that of rows of one length."""
    return "tail=4" not in position or "length=" in position or rows in ("", "jumping")


def takes_ring(case):
    return not case.retrieve and "adaptive" not in case.law and case.rows != "jumping"


def list_matrix(exchange="gather", every=1):
    """Every position with every temperature, far law and choice of far keys; `every` leaves one in so many."""
    cases = []
    pairs = [(a, b, "") for a, b in product(POSITIONS, TEMPERATURES)]
    pairs += [(a, b, "") for a, b in product(FAR_POSITIONS, FAR_LAWS)]
    choosing = [text for text in FAR_POSITIONS if "chunk" not in text and "tail=4" not in text]
    pairs += [(a, "", c) for a, c in product(choosing, RETRIEVES)]
    pairs += [
        (FAR_POSITIONS[0], law, RETRIEVES[n % 3])
        for n, law in enumerate(FAR_LAWS)
        if "scaleinvariant" not in law and "sinks=" not in law  # which retrieve refuses
    ]
    for turn, (position, law, retrieve) in enumerate(pairs):
        if turn % every:
            continue
        n = turn // every
        rows = ROWS[n % len(ROWS)]
        if not takes_rows(position, rows) or (retrieve and rows == "jumping"):
            rows = ""
        mask = "" if retrieve else MASKS[(n // 2) % len(MASKS)]
        causal = bool(retrieve) or n % 4 != 3
        score = SCORES[n % 7 == 0]
        layout, length = LAYOUTS[n % 2], LENGTHS[n % len(LENGTHS)]
        case = Case(position, law, mask, score, retrieve, rows, causal, length, layout, exchange)
        if causal and mask == "causal":
            case = Case(position, law, "", score, retrieve, rows, causal, length, layout, exchange)
        if exchange == "gather" or takes_ring(case):
            cases.append(case)
    return cases


def list_ulysses(size, every=1):
    """The matrix but for choices with heads that would be in several processes; the matrix has two key heads."""
    cases = list_matrix("gather", every)
    return [case for case in cases if not case.retrieve or (size == 2 and "heads=all" not in case.retrieve)]
