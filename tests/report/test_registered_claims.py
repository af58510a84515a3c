"""Claims registered before a study: decided over pre-trainings, seeds and documents, all together."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from isentrope.report.claims import evaluate_claims
from isentrope.report.html.summary import count_verdicts
from tests.fixtures.study import cell, claim, small

ROWS = [("A", "plain"), ("A", "better"), ("A", "same"), ("A", "mixed")]


def measure(pretrainings: int = 6, seeds: int = 1) -> list[dict[str, Any]]:
    """Cells of four rows: one better in every pre-training, one the same, one better in half of them."""
    noise, cells = random.Random(0), []
    for p in range(pretrainings):
        base = 1 + noise.gauss(0, 0.2)
        gains = {"plain": 0.0, "better": 0.2, "same": 0.0, "mixed": 0.3 if p % 2 else -0.3}
        for s in range(seeds):
            for variant, gain in gains.items():
                drift = noise.gauss(0, 0.002)
                made = cell("A", variant, 128, base - gain + drift, seed=p * seeds + s)
                for index, document in enumerate(made["documents"]):
                    document["loss"] += 256 * 0.001 * index * noise.gauss(0, 1)
                cells.append(made | {"pretraining": f"run {p}"})
    return cells


def register(kind: str, this: str, than: str = "plain", **options: Any) -> dict[str, Any]:
    return claim(f"{this} is {kind}", ("A", this), ("A", than), metric="ppl", length=128) | {"kind": kind} | options


def test_verdicts_with_what_they_rest_on(tmp_path: Path) -> None:
    claims = [
        register("superior", "better"), register("equivalent", "same"), register("superior", "mixed"),
        register("superior", "plain", "better"), register("equivalent", "better"), register("superior", "absent"),
    ]  # fmt: skip
    verdicts = evaluate_claims(small(tmp_path, measure(), ROWS, claims=claims))
    assert [verdict["verdict"] for verdict in verdicts] == [
        "holds", "holds", "undecided", "does not hold", "does not hold", "not measured",
    ]  # fmt: skip
    first = verdicts[0]
    assert (first["pretrainings"], first["seeds"], first["documents"]) == (6, 6, 10)
    assert first["numbers"][0]["difference"] == pytest.approx(18.1, abs=0.5)  # 1 - e^-0.2, in per cent
    assert first["numbers"][0]["low"] > 17
    assert "over 6 pretrainings, 6 seeds, 10 documents: superior" in first["words"]
    assert verdicts[2]["numbers"][0]["components"]["pre-training"] == pytest.approx(0.33, abs=0.05)
    assert "2 of 6 claims hold, 2 do not, 1 is undecided, 1 is not measured." in count_verdicts(verdicts)


def test_seeds_of_one_pretraining_are_not_pretrainings(tmp_path: Path) -> None:
    claims = [register("superior", "mixed")]
    verdict = evaluate_claims(small(tmp_path, measure(2, 3), ROWS, claims=claims))[0]
    assert (verdict["pretrainings"], verdict["seeds"]) == (2, 6)
    assert verdict["verdict"] == "undecided"


def test_one_seed_of_several_decides_nothing(tmp_path: Path) -> None:
    """Nor does a verdict depend on which claims were measured first: those that are not count in the correction."""
    measured = [x for x in measure() if x["variant"] != "same" or x["seed"] == 0]
    claims = [register("superior", "better"), register("equivalent", "same"), *[register("superior", "absent")] * 9]
    better, same, *absent = evaluate_claims(small(tmp_path, measured, ROWS, claims=claims, seeds=list(range(6))))
    assert (same["verdict"], same["words"]) == (
        "not measured",
        "PPL at 128: one seed alone, which says nothing of the others",
    )
    assert {verdict["verdict"] for verdict in absent} == {"not measured"}
    alone = evaluate_claims(small(tmp_path / "alone", measured, ROWS, claims=claims[:1]))[0]
    assert better["numbers"][0]["p_different"] == pytest.approx(11 * alone["numbers"][0]["p_different"])


def test_a_wide_margin_makes_small_differences_equivalent(tmp_path: Path) -> None:
    claims = [register("equivalent", "better", margin=0.5)]
    assert evaluate_claims(small(tmp_path, measure(), ROWS, claims=claims))[0]["verdict"] == "holds"


def test_malformed(tmp_path: Path) -> None:
    broken = register("superior", "better")
    del broken["than"]
    with pytest.raises(ValueError, match=r"plan\.json: claims: 'better is superior' of kind superior: KeyError"):
        evaluate_claims(small(tmp_path, measure(2), ROWS, claims=[broken]))
