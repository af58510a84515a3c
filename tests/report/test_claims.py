"""Claims: their verdicts, intervals and summary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from isentrope.report.claims import evaluate_claims, format_verdict
from isentrope.report.html import summary as words
from isentrope.report.load import Row
from tests.fixtures.study import ROWS, cell, claim, small


@pytest.mark.parametrize(
    ("this", "than", "metric", "verdict"),
    [
        ("I.S.", ["plain"], "acc", "holds"),
        ("I.S.", ["plain"], "ppl", "holds"),
        ("plain", ["I.S."], "acc", "does not hold"),
        ("I.S.", ["close"], "acc", "holds, within the intervals"),
        ("close", ["I.S."], "acc", "does not hold, within the intervals"),
        ("I.S.", ["I.S."], "acc", "does not hold, within the intervals"),
        ("I.S.", ["plain", "close"], "acc", "holds, within the intervals"),
        ("I.S.", ["plain", "failed"], "acc", "not measured"),
        ("plain", ["I.S.", "failed"], "acc", "does not hold"),
        ("close", ["I.S.", "best"], "acc", "does not hold"),  # lost to the second beyond doubt
        ("nowhere", ["plain"], "acc", "not measured"),
        ("failed", ["nowhere"], "acc", "not measured"),
    ],
)
def test_claims_of_better(tmp_path: Path, this: str, than: list[str], metric: str, verdict: str) -> None:
    losses = {"plain": 3.0, "I.S.": 1.0, "close": 1.01, "best": 0.2}
    results = [cell("A", variant, 128, loss) for variant, loss in losses.items()]
    results.append(cell("A", "failed", 128, failed="out of memory"))
    told = claim("…", ("A", this), *(("A", other) for other in than), metric=metric, length=128)
    rows = [("A", variant) for variant in (*losses, "failed")]
    judged = evaluate_claims(small(tmp_path, results, rows, claims=[told]))[0]
    assert format_verdict(judged) == verdict
    assert ("out of memory" in judged["words"]) == ("failed" in (this, *than))
    assert [number["variant"] for number in judged["numbers"]] == list(dict.fromkeys([this, *than]))


@pytest.mark.parametrize(
    ("best", "verdict"),
    [
        ([0, 1, 2], "holds"), ([0, 0, 2], "holds"), ([0, 2, 1], "does not hold"), ([1, 1, 1], "does not hold"),
        ([2, 1, 0], "does not hold"), ([0, None, 2], "not measured"),
    ],
)  # fmt: skip
def test_claims_of_growth(tmp_path: Path, best: list[int | None], verdict: str) -> None:
    lengths, methods = [128, 256, 512], ["8", "16", "32"]
    results = [
        cell(method, "C.S.", length, 1.0 if place == winner else 3.0)
        for length, winner in zip(lengths, best, strict=True) for place, method in enumerate(methods)
        if winner is not None
    ]  # fmt: skip
    grows = {
        "text": "…",
        "kind": "best_grows",
        "metric": "acc",
        "methods": methods,
        "variant": "C.S.",
        "lengths": lengths,
    }
    rows = [(method, "C.S.") for method in methods]
    assert (
        format_verdict(evaluate_claims(small(tmp_path, results, rows, claims=[grows], lengths=lengths))[0]) == verdict
    )


def test_a_shift_of_the_best_may_lie_within_the_intervals(tmp_path: Path) -> None:
    results = [
        cell("8", "C.S.", 128, 1.0), cell("16", "C.S.", 128, 3.0),
        cell("8", "C.S.", 256, 1.01), cell("16", "C.S.", 256, 1.0),
    ]  # fmt: skip
    grows = {"text": "…", "kind": "best_grows", "metric": "ppl", "methods": ["8", "16"], "variant": "C.S."}
    rows = [("8", "C.S."), ("16", "C.S.")]
    judged = evaluate_claims(small(tmp_path, results, rows, claims=[grows | {"lengths": [128, 256]}]))[0]
    assert (
        format_verdict(judged) == "holds, within the intervals"
        and judged["words"] == "best PPL: 8 at 128 (2.72), 16 at 256 (2.72)"
    )


def scored(variant: str, hits: list[int], seed: int = 0) -> dict[str, Any]:
    """A cell whose documents have so many hits of 100 each."""
    documents = [{"sha256": str(i), "count": 100, "loss": 100 - x, "hits": x} for i, x in enumerate(hits)]
    return cell("A", variant, 128, seed=seed) | {"documents": documents, "acc": sum(hits) / 100 / len(hits)}


def test_the_interval_of_a_difference_is_over_the_same_documents(tmp_path: Path) -> None:
    hits = list(range(10, 90, 8))  # documents differ more than the variants do
    better = [x + 4 + i % 2 for i, x in enumerate(hits)]
    first = small(tmp_path, [scored("plain", hits), scored("C.S.", better), cell("A", "I.S.", 128, failed="…")])
    plain, scaled, failed, absent = (Row(*row) for row in ROWS)
    low, high = first.difference(plain, scaled, 128, "acc")
    assert 0.04 <= low < 0.045 < high <= 0.05
    assert first.difference(scaled, plain, 128, "acc") == (pytest.approx(-high), pytest.approx(-low))
    assert first.difference(plain, scaled, 128, "ppl")[1] < 0
    assert first.difference(plain, failed, 128, "acc") is first.difference(absent, plain, 128, "acc") is None
    # seeds are averaged, and documents that one cell lacks are left out of all
    more = [scored("plain", hits), scored("C.S.", better), scored("C.S.", [x + 20 for x in hits][:1], seed=1)]
    assert small(tmp_path / "seeds", more).difference(plain, scaled, 128, "acc") == pytest.approx((0.12, 0.12))


def test_the_summary_says_what_the_numbers_say(tmp_path: Path) -> None:
    losses = {"A": (1.0, 2.0, 0.5, 1.0), "B": (3.0, 3.0, 4.0, 3.0)}  # plain, C.S., I.S., both
    variants = [variant for _, variant in ROWS]
    rows = [(method, variant) for method in losses for variant in variants]
    results = [
        cell(method, variant, length, loss)
        for method, values in losses.items() for variant, loss in zip(variants, values, strict=True)
        for length in (128, 256)
    ]  # fmt: skip
    first = small(tmp_path, results, rows, claims=[claim("…", ("A", "I.S."), ("A", "plain"), length=256)])
    told = words.summarize_grid(first, evaluate_claims(first))
    assert told[0].startswith("Best at 256 tokens, 4 times the training length, is A w/ I.S. with ACC 0.908 (")
    assert told[1].startswith(
        "InfoScale changes ACC at 256 tokens by −0.009 on average over 2 methods (better for 1 of 2"
    )
    assert "from −0.131 (B) to +0.113 (A)" in told[1] and "on top of CosScale by +0.108" in told[1]
    assert told[2].startswith("CosScale changes ACC")
    assert told[3].startswith(
        "8 of 8 rows keep nine tenths of their ACC from 128 to 256 tokens: A w/ I.S. (0.908), A ("
    )
    assert told[4] == "1 of 1 claim holds." and len(told) == 5
