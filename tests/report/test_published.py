"""Numbers beside those of the paper."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from isentrope.experiments.plan import load_plan, plan_names
from isentrope.report.claims import evaluate_claims
from isentrope.report.html import page
from isentrope.report.load import Row, load_plans
from isentrope.report.tables import plan_tables as tables
from isentrope.report.tables.published import compare_with_paper, direction_of_change, load_published_tables
from tests.fixtures.study import cell, claim, small


def test_the_papers_tables_are_complete_under_the_names_of_the_plans() -> None:
    sizes = {
        "table 4.2.3": 36, "table 4.2.1": 18, "table 4.2.2": 18, "table 9.7": 9, "table 4.5": 4, "table 4.2.4-1": 2,
        "table 4.2.4-2": 2, "table 4.3.2": 8,
    }  # fmt: skip
    assert {label: len(table.values) for label, table in load_published_tables().items()} == {
        label: rows * 6 * 2 for label, rows in sizes.items()
    }
    plans = {each.label: each for each in map(load_plan, plan_names()) if each.label}
    assert plans.keys() == sizes.keys()
    for label, table in load_published_tables().items():
        rows, lengths, _ = (set(each) for each in zip(*table.values, strict=True))
        assert rows <= {Row(row.method, row.variant) for row in plans[label].rows}
        assert lengths == {*plans[label].lengths}


@pytest.mark.parametrize(
    ("label", "row", "length", "ppl", "acc"),
    [
        ("table 4.2.3", ("ReRoPE", "both"), 4096, 5.41, 0.67), ("table 4.2.3", ("ALiBi", "both"), 128, 147.23, 0.11),
        ("table 4.2.3", ("Windowed", "C.S."), 256, 2.67, 0.79), ("table 4.2.1", ("PoSE", "I.S."), 4096, 354.5, "<0.1"),
        ("table 4.2.2", ("YaRN (s = 32)", "C.S."), 512, 3.4, 0.73),
        ("table 4.2.2", ("PoSE", "plain"), 2048, 240.25, 0.1),
        ("table 9.7", ("PoSE", "plain"), 2048, 240.25, "<0.1"), ("table 9.7", ("PI", "plain"), 512, ">500", "<0.1"),
        ("table 4.5", ("GAU-α", "plain"), 1024, 17.12, 0.46), ("table 4.2.4-1", ("GAU-α", "both"), 2048, 23.24, 0.44),
        ("table 4.2.4-1", ("GAU-α", "C.S. softmax+"), 1024, 4.96, 0.68),
        ("table 4.2.4-2", ("GAU-α", "softmax+"), 2048, 145.16, 0.19),
        ("table 4.3.2", ("600", "C.S."), 2048, 13.63, 0.53),
    ],
)  # fmt: skip
def test_the_papers_numbers(label: str, row: tuple[str, str], length: int, ppl: float | str, acc: float | str) -> None:
    values = load_published_tables()[label].values
    assert (values[Row(*row), length, "ppl"], values[Row(*row), length, "acc"]) == (ppl, acc)


@pytest.mark.parametrize(
    ("before", "after", "way"),
    [(0.4, 0.5, 1), (0.5, 0.4, -1), (0.4, 0.4, None), ("<0.1", 0.1, 1), (0.1, "<0.1", -1), ("<0.1", "<0.1", None),
     (499.79, ">500", 1), (">500", 499.79, -1), (">500", ">500", None)],
)  # fmt: skip
def test_which_way_a_printed_number_goes(before: float | str, after: float | str, way: int | None) -> None:
    assert direction_of_change(before, after) == way


def ablation(folder: Path, **changes: Any) -> Any:
    """GAU-α at 2048 and 4096, where InfoScale harms and CosScale helps; 64 is no length of the paper."""
    losses = {"plain": 2.0, "C.S.": 1.0, "I.S.": 3.0}
    results = [cell("GAU-α", variant, n, loss) for variant, loss in losses.items() for n in (64, 2048, 4096)]
    rows = [("GAU-α", variant) for variant in (*losses, "both", "ours alone")]
    return small(folder, results, rows, **{"label": "table 4.5", "lengths": [64, 2048, 4096]} | changes)


def test_numbers_beside_the_paper(tmp_path: Path) -> None:
    first = ablation(tmp_path, title="A | B")
    actual = compare_with_paper(first)
    assert actual is not None and actual.lengths == [2048, 4096] and len(actual.rows) == 4
    labels = tables.format_grid(first).labels
    assert actual.number_rows("acc", labels)[1:] == [
        ["GAU-α", "0.10 / 0.58", "<0.1 / 0.58"], ["GAU-α w/ C.S.", "0.43 / 0.79", "0.32 / 0.79"],
        ["GAU-α w/ I.S.", "0.23 / 0.40", "<0.1 / 0.40"], ["GAU-α w/ C.S., I.S.", "0.44 / –", "0.34 / –"],
    ]  # fmt: skip
    # what is not measured here and what the paper's digits do not show is not counted
    for metric in ("acc", "ppl"):
        assert actual.agreement_rows(metric)[1:] == [
            ["methods, C.S. against plain", "1 of 1", "1 of 1"], ["methods, I.S. against plain", "0 of 1", ""],
            ["methods, both against plain", "", ""],
        ]  # fmt: skip
    said_of = "ACC at 4096 tokens changes as in the paper's table 4.5 for 1 of 1 methods, C.S. against plain."
    assert actual.summarize() == said_of
    text = tables.render_comparison(actual, labels)
    assert r"## A \| B: comparison with the paper" in text and said_of in text and text.count("|:--|--:|--:|") == 4
    assert "| GAU-α | &lt;0.1 / " not in text and "| GAU-α | 0.10 / 0.58 | &lt;0.1 / 0.58 |" in text
    written = {path.name for path in tables.write_tables(tmp_path)}
    assert {"beside.md", "beside.png", "beside.svg"} <= written
    assert "](beside.png)" in (tmp_path / "beside.md").read_text(encoding="utf-8")
    shown = page.write_page(tmp_path).read_text(encoding="utf-8")
    assert (
        "<h3>Comparison with the paper</h3>" in shown and shown.count("<img") == 1 and "<td>0.43 / 0.79</td>" in shown
    )
    assert "An open marker at 0.05 stands for the paper&#39;s &lt;0.1." in shown


def test_methods_are_compared_with_each_other_where_each_has_one_row(results: Path) -> None:
    actual = compare_with_paper(load_plans(results / "cosscale-sweep")[0].grids[0])
    assert actual is not None and actual.agreement_rows("acc")[1] == [
        "pairs of methods", "9 of 14", "9 of 12", "12 of 14", "15 of 15", "12 of 12", "11 of 12",
    ]  # fmt: skip


def test_a_plan_that_is_no_table_of_the_paper_has_nothing_beside_it(tmp_path: Path) -> None:
    assert compare_with_paper(ablation(tmp_path / "unlabelled", label="")) is None
    assert compare_with_paper(ablation(tmp_path / "other", label="table 4.2.3")) is None
    assert compare_with_paper(ablation(tmp_path / "short", lengths=[64])) is None
    page.write_report(tmp_path)
    assert not list(tmp_path.rglob("beside.*"))
    assert "Comparison with the paper" not in (tmp_path / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("this", "than", "metric", "source", "verdict", "told"),
    [
        ("C.S.", ["plain"], "acc", "table 4.5", "holds", "paper, table 4.5: <0.1 → 0.32; here 0.58 → 0.79"),
        ("C.S.", ["plain"], "ppl", "section 4", "holds", "paper, table 4.5: >500 → 49.45; here 7.39 → 2.72"),
        ("I.S.", ["plain"], "acc", "table 4.5", "not told by the digits printed",
         "paper, table 4.5: <0.1 → <0.1 (not told by the digits printed); here 0.58 → 0.40"),
        ("both", ["C.S.", "I.S."], "acc", "table 4.5", "holds", "paper, table 4.5: 0.32, <0.1 → 0.34"),
        ("plain", ["C.S."], "acc", "table 9.7", "does not hold",
         "paper, table 4.5: 0.32 → <0.1 (does not hold); here 0.79 → 0.58"),
    ],
)  # fmt: skip
def test_claims_have_the_papers_numbers_beside_them(
    tmp_path: Path, this: str, than: list[str], metric: str, source: str, verdict: str, told: str
) -> None:
    text = claim("…", ("GAU-α", this), *(("GAU-α", other) for other in than), metric=metric) | {"source": source}
    actual = evaluate_claims(ablation(tmp_path, claims=[text]))[0]
    paper = actual["paper"]
    assert (paper["source"], paper["verdict"]) == ("table 4.5", verdict) and paper["words"].startswith(told)
    assert ("interval of the difference" in actual["words"]) == ("here" in told)
    assert [number["variant"] for number in paper["numbers"]] == [*than, this]
    assert told.replace(">", "&gt;").replace("<", "&lt;") in page.write_page(tmp_path).read_text(encoding="utf-8")


def test_claims_find_the_table_they_name_or_none(tmp_path: Path) -> None:
    named = claim("…", ("GAU-α", "C.S."), ("GAU-α", "plain")) | {"source": "table 4.5"}
    without = claim("…", ("GAU-α", "C.S."), ("GAU-α", "plain"), length=64) | {"source": "table 4.5"}
    actual = evaluate_claims(ablation(tmp_path, label="", claims=[named, without, named | {"source": ""}]))
    assert actual[0]["paper"]["source"] == "table 4.5" and [told["paper"] for told in actual[1:]] == [None, None]


def test_the_best_that_grows_in_the_paper(results: Path) -> None:
    judged = evaluate_claims(load_plans(results / "cosscale-sweep")[0].grids[0])[0]
    assert judged["verdict"] == "holds" and judged["paper"]["verdict"] == "does not hold"
    assert judged["paper"]["words"] == (
        "paper, table 4.3.2: best ACC 32 at 128 (0.84), 256 at 1024 (0.69), 128 at 4096 (0.32) (does not hold)"
    )
    assert len(judged["paper"]["numbers"]) == 18
