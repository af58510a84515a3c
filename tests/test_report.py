"""`isentrope report`: reading a study, its tables, its claims, and how it fails."""

from __future__ import annotations

import csv
import io
import json
import re
from html.parser import HTMLParser
from math import exp, inf, nan
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from isentrope.report.curves import curves
from isentrope.report.numbers import number
from isentrope.report.published import beside, step, tables
from isentrope.report.study import Row, read
from isentrope.study.plan import load, names
from rich.console import Console
from typer.testing import CliRunner

from isentrope.cli import app
from isentrope.report import grid, page, pieces, words
from isentrope.report.claims import judge, said
from tests.made_study import cell, cells, claim, plan, study, write

ROWS = [("A", "plain"), ("A", "C.S."), ("A", "I.S."), ("A", "both")]


def small(folder: Path, found: list[dict[str, Any]], rows: list[tuple[str, str]] = ROWS, **changes: Any) -> Any:
    """The first grid of a plan with lengths 128 and 256."""
    told = [{"method": method, "variant": variant, "recipe": "rope", "checkpoint": "dot"} for method, variant in rows]
    defaults = {"rows": told, "lengths": [128, 256], "claims": [], "notes": []}
    return read(write(folder, plan(**defaults | changes), found))[0].grids[0]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = study(tmp_path_factory.mktemp("study"))
    page.report(folder)
    return folder


def test_plans_are_found_in_a_folder_and_in_its_subfolders(made: Path) -> None:
    assert [found.name for found in read(made)] == ["cosscale-sweep", "main"]
    assert [found.name for found in read(made / "main")] == ["main"]


def test_protocols_never_meet(tmp_path: Path) -> None:
    found = [cell("A", "plain", 128, 1.0), cell("A", "plain", 128, 3.0, protocol="random")]
    write(tmp_path, plan(rows=[{"method": "A", "variant": "plain"}], lengths=[128]), found)
    single, at_once = read(tmp_path)[0].grids
    assert single.value(Row("A", "plain"), 128, "ppl").mean == pytest.approx(exp(1))
    assert at_once.value(Row("A", "plain"), 128, "ppl").mean == pytest.approx(exp(3))
    assert "one token masked at a time" in grid.caption(single) and "15 % masked at once" in grid.caption(at_once)
    texts = grid.markdown(grid.sheet(single)), grid.markdown(grid.sheet(at_once))
    assert "2.72" in texts[0] and "20.09" not in texts[0] and "2.72" not in texts[1]


def test_seeds_are_averaged_and_failures_left_out(tmp_path: Path) -> None:
    found = [
        cell("A", "plain", 128, 1.0), cell("A", "plain", 128, 2.0, seed=1), cell("A", "plain", 256, 1.0),
        cell("A", "plain", 256, seed=1, failed="out of memory: 80 GiB"), cell("A", "C.S.", 128, failed="diverged"),
        cell("A", "I.S.", 128, 1.0),
    ]  # fmt: skip
    first = small(tmp_path, found)
    value = first.value(Row("A", "plain"), 128, "ppl")
    assert (value.mean, value.seeds) == (pytest.approx((exp(1) + exp(2)) / 2), 2)
    assert (value.least, value.most) == (pytest.approx(exp(1)), pytest.approx(exp(2)))
    assert (value.low, value.high) == (pytest.approx(exp(0.94)), pytest.approx(exp(2.12)))
    assert first.value(Row("A", "plain"), 256, "acc").seeds == 1
    assert first.value(Row("A", "C.S."), 128, "ppl") is None
    sheet = grid.sheet(first)
    assert sheet.entries[Row("A", "C.S."), 128, "ppl"].text == grid.FAILED
    assert sheet.entries[Row("A", "both"), 128, "ppl"].text == grid.ABSENT
    assert sheet.notes == [
        "– A at 256, seed 1 alone: failed, out of memory: 80 GiB",
        "– A w/ C.S. at 128, seed 0 alone: failed, diverged",
        "Fewer seeds: A w/ I.S. at 128 (1 of 2).",
        "Empty: not measured yet (4 of 8 cells).",
    ]
    assert "mean over 2 training seeds, which differ by at most a factor of 2.72 in PPL" in sheet.caption


def test_the_later_line_of_a_cell_counts_and_strays_are_named(tmp_path: Path) -> None:
    found = [cell("A", "plain", 128, failed="killed"), cell("A", "plain", 128, 1.0), cell("B", "plain", 128, 1.0)]
    first = small(tmp_path, found)
    assert first.value(Row("A", "plain"), 128, "ppl").mean == pytest.approx(exp(1))
    assert any("1 measured cells belong to no row" in note for note in grid.notes(first))
    assert len(grid.comma_separated(first.plan).splitlines()) == 4


def test_best_and_second_by_measured_numbers_with_ties(tmp_path: Path) -> None:
    losses = {"plain": 1.0, "C.S.": 1.0 + 1e-15, "I.S.": 1.001, "both": 2.0}
    first = small(tmp_path, [cell("A", variant, 128, loss) for variant, loss in losses.items()])
    for metric in ("ppl", "acc"):
        ranks = [first.ranks(128, metric).get(Row(*row), 0) for row in ROWS]
        assert ranks == [1, 1, 2, 0]
    lone = small(tmp_path / "lone", [cell("A", "plain", 128, 1.0)])
    assert lone.ranks(128, "ppl") == {}  # nothing to be better than


@pytest.mark.parametrize(
    ("x", "metric", "plain", "capped"),
    [
        (2.166, "ppl", "2.17", "2.17"), (488.474, "ppl", "488.47", "488.47"), (500.0, "ppl", "500.00", "500.00"),
        (731.0, "ppl", "731.00", ">500"), (14488.7, "ppl", "14489", ">500"), (1.23e12, "ppl", "1.2e12", ">500"),
        (inf, "ppl", "∞", ">500"), (0.844, "acc", "0.84", "0.84"), (0.1, "acc", "0.10", "0.10"),
        (0.04, "acc", "0.04", "<0.1"),
    ],
)  # fmt: skip
def test_numbers(x: float, metric: str, plain: str, capped: str) -> None:
    assert number(x, metric) == plain and number(x, metric, cap=True) == capped


def test_beyond_the_cap_none_is_singled_out(tmp_path: Path) -> None:
    first = small(tmp_path, [cell("A", "plain", 128, 7.0), cell("A", "C.S.", 128, 8.0)])
    assert {entry.rank for entry in grid.sheet(first, cap=True).entries.values()} == {0}
    assert {entry.rank for entry in grid.sheet(first).entries.values()} == {0, 1, 2}


def test_markdown_and_latex_as_the_paper_prints(made: Path) -> None:
    main = read(made / "main")[0].grids[0]
    text = grid.markdown(grid.sheet(main, cap=True))
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + 36 and {line.count("|") for line in lines} == {14}
    assert "| ReRoPE w/ C.S., I.S. |" in text and "&gt;500" in text and "**" in text and "<u>" in text
    tex = grid.latex(grid.sheet(main, cap=True))
    assert tex.count(r"\midrule") == 9 and r"\label{table 4.2.3}" in tex and "$>$500" in tex and r"GAU-$\alpha$" in tex
    body = tex[tex.index(r"\midrule") : tex.index(r"\bottomrule")]
    assert {line.count("&") for line in body.splitlines() if line != r"\midrule"} == {12}
    assert tex.count("{") == tex.count("}") and r"\cmidrule(lr){12-13}" in tex
    for metric in range(2):
        columns = [line.split("|")[2 + metric :: 2][:6] for line in lines[2:]]
        for column in zip(*columns, strict=True):
            assert sum("**" in text for text in column) == sum("<u>" in text for text in column) == 1


def test_rows_that_share_a_variant_are_named_by_their_method(made: Path) -> None:
    sheet = grid.sheet(read(made / "cosscale-sweep")[0].grids[0])
    assert list(sheet.labels.values()) == ["8", "16", "32", "64", "128", "256"]
    assert sheet.caption.endswith("All with C.S.") and r"\midrule" in grid.latex(sheet)


def test_the_csv_holds_every_number_as_measured(made: Path) -> None:
    found = read(made / "main")[0]
    rows = list(csv.DictReader(io.StringIO(grid.comma_separated(found))))
    assert len(rows) == len(found.cells) and tuple(rows[0]) == grid.COLUMNS
    for row, told in zip(rows, found.cells, strict=True):
        assert row["ppl"] == ("" if told["ppl"] is None else repr(told["ppl"]))
        assert row["protocol"] == told["protocol"] and row["seconds"] == "1.5"
    assert json.loads(rows[0]["entropy"])[0] == 2.1 and rows[0]["predictions"] == "2560"


def test_names_with_markup_survive_every_format(tmp_path: Path) -> None:
    name = "<b>R&D_1|x</b> [bold]é漢{50%}$"
    first = small(tmp_path, [cell(name, "plain", 128, 1.0)], [(name, "plain"), (name, "<i>")], title=name)
    sheet = grid.sheet(first)
    assert "&lt;b&gt;R&amp;D\\_1\\|x&lt;/b&gt;" in grid.markdown(sheet)
    assert r"$<$b$>$R\&D\_1|x$<$/b$>$ [bold]é漢\{50\%\}\$" in grid.latex(sheet)
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(grid.terminal(tmp_path))
    assert f"{name}: PPL" in console.export_text()
    assert next(csv.DictReader(io.StringIO(grid.comma_separated(first.plan))))["method"] == name
    text = page.page(tmp_path).read_text(encoding="utf-8")
    assert "<b>R&D" not in text and "<i>" not in text and "&lt;b&gt;R&amp;D_1|x&lt;/b&gt;" in text


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
    found = [cell("A", variant, 128, loss) for variant, loss in losses.items()]
    found.append(cell("A", "failed", 128, failed="out of memory"))
    told = claim("…", ("A", this), *(("A", other) for other in than), metric=metric, length=128)
    rows = [("A", variant) for variant in (*losses, "failed")]
    judged = judge(small(tmp_path, found, rows, claims=[told]))[0]
    assert said(judged) == verdict
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
    found = [
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
    assert said(judge(small(tmp_path, found, rows, claims=[grows], lengths=lengths))[0]) == verdict


def test_a_shift_of_the_best_may_lie_within_the_intervals(tmp_path: Path) -> None:
    found = [
        cell("8", "C.S.", 128, 1.0), cell("16", "C.S.", 128, 3.0),
        cell("8", "C.S.", 256, 1.01), cell("16", "C.S.", 256, 1.0),
    ]  # fmt: skip
    grows = {"text": "…", "kind": "best_grows", "metric": "ppl", "methods": ["8", "16"], "variant": "C.S."}
    rows = [("8", "C.S."), ("16", "C.S.")]
    judged = judge(small(tmp_path, found, rows, claims=[grows | {"lengths": [128, 256]}]))[0]
    assert (
        said(judged) == "holds, within the intervals"
        and judged["words"] == "best PPL: 8 at 128 (2.72), 16 at 256 (2.72)"
    )


def test_the_papers_tables_are_complete_under_the_names_of_the_plans() -> None:
    sizes = {
        "table 4.2.3": 36, "table 4.2.1": 18, "table 4.2.2": 18, "table 9.7": 9, "table 4.5": 4, "table 4.2.4-1": 2,
        "table 4.2.4-2": 2, "table 4.3.2": 8,
    }  # fmt: skip
    assert {label: len(table.values) for label, table in tables().items()} == {
        label: rows * 6 * 2 for label, rows in sizes.items()
    }
    plans = {found.label: found for found in map(load, names()) if found.label}
    assert plans.keys() == sizes.keys()
    for label, table in tables().items():
        rows, lengths, _ = (set(found) for found in zip(*table.values, strict=True))
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
    values = tables()[label].values
    assert (values[Row(*row), length, "ppl"], values[Row(*row), length, "acc"]) == (ppl, acc)


@pytest.mark.parametrize(
    ("before", "after", "way"),
    [(0.4, 0.5, 1), (0.5, 0.4, -1), (0.4, 0.4, None), ("<0.1", 0.1, 1), (0.1, "<0.1", -1), ("<0.1", "<0.1", None),
     (499.79, ">500", 1), (">500", 499.79, -1), (">500", ">500", None)],
)  # fmt: skip
def test_which_way_a_printed_number_goes(before: float | str, after: float | str, way: int | None) -> None:
    assert step(before, after) == way


def ablation(folder: Path, **changes: Any) -> Any:
    """GAU-α at 2048 and 4096, where InfoScale harms and CosScale helps; 64 is no length of the paper."""
    losses = {"plain": 2.0, "C.S.": 1.0, "I.S.": 3.0}
    found = [cell("GAU-α", variant, n, loss) for variant, loss in losses.items() for n in (64, 2048, 4096)]
    rows = [("GAU-α", variant) for variant in (*losses, "both", "ours alone")]
    return small(folder, found, rows, **{"label": "table 4.5", "lengths": [64, 2048, 4096]} | changes)


def test_numbers_beside_the_paper(tmp_path: Path) -> None:
    first = ablation(tmp_path, title="A | B")
    found = beside(first)
    assert found is not None and found.lengths == [2048, 4096] and len(found.rows) == 4
    labels = grid.sheet(first).labels
    assert found.numbers("acc", labels)[1:] == [
        ["GAU-α", "0.10 / 0.58", "<0.1 / 0.58"], ["GAU-α w/ C.S.", "0.43 / 0.79", "0.32 / 0.79"],
        ["GAU-α w/ I.S.", "0.23 / 0.40", "<0.1 / 0.40"], ["GAU-α w/ C.S., I.S.", "0.44 / –", "0.34 / –"],
    ]  # fmt: skip
    # what is not measured here and what the paper's digits do not show is not counted
    for metric in ("acc", "ppl"):
        assert found.counts(metric)[1:] == [
            ["methods, C.S. against plain", "1 of 1", "1 of 1"], ["methods, I.S. against plain", "0 of 1", ""],
            ["methods, both against plain", "", ""],
        ]  # fmt: skip
    said_of = "ACC at 4096 tokens goes the same way as in the paper's table 4.5 for 1 of 1 methods, C.S. against plain."
    assert found.sentence() == said_of
    text = grid.beside_markdown(found, labels)
    assert r"## A \| B, beside the paper" in text and said_of in text and text.count("|:--|--:|--:|") == 4
    assert "| GAU-α | &lt;0.1 / " not in text and "| GAU-α | 0.10 / 0.58 | &lt;0.1 / 0.58 |" in text
    written = {path.name for path in grid.write(tmp_path)}
    assert {"beside.md", "beside.png", "beside.svg"} <= written
    assert "](beside.png)" in (tmp_path / "beside.md").read_text(encoding="utf-8")
    shown = page.page(tmp_path).read_text(encoding="utf-8")
    assert "<h3>Beside the paper</h3>" in shown and shown.count("<img") == 1 and "<td>0.43 / 0.79</td>" in shown
    assert "An open marker at 0.05 stands for the paper&#x27;s &lt;0.1." in shown


def test_methods_are_compared_with_each_other_where_each_has_one_row(made: Path) -> None:
    found = beside(read(made / "cosscale-sweep")[0].grids[0])
    assert found is not None and found.counts("acc")[1] == [
        "pairs of methods", "9 of 14", "9 of 12", "12 of 14", "15 of 15", "12 of 12", "11 of 12",
    ]  # fmt: skip


def test_a_plan_that_is_no_table_of_the_paper_has_nothing_beside_it(tmp_path: Path) -> None:
    assert beside(ablation(tmp_path / "unlabelled", label="")) is None
    assert beside(ablation(tmp_path / "other", label="table 4.2.3")) is None
    assert beside(ablation(tmp_path / "short", lengths=[64])) is None
    page.report(tmp_path)
    assert not list(tmp_path.rglob("beside.*"))
    assert "Beside the paper" not in (tmp_path / "report.html").read_text(encoding="utf-8")


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
    found = judge(ablation(tmp_path, claims=[text]))[0]
    paper = found["paper"]
    assert (paper["source"], paper["verdict"]) == ("table 4.5", verdict) and paper["words"].startswith(told)
    assert ("interval of the difference" in found["words"]) == ("here" in told)
    assert [number["variant"] for number in paper["numbers"]] == [*than, this]
    assert told.replace(">", "&gt;").replace("<", "&lt;") in page.page(tmp_path).read_text(encoding="utf-8")


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


def test_claims_find_the_table_they_name_or_none(tmp_path: Path) -> None:
    named = claim("…", ("GAU-α", "C.S."), ("GAU-α", "plain")) | {"source": "table 4.5"}
    without = claim("…", ("GAU-α", "C.S."), ("GAU-α", "plain"), length=64) | {"source": "table 4.5"}
    found = judge(ablation(tmp_path, label="", claims=[named, without, named | {"source": ""}]))
    assert found[0]["paper"]["source"] == "table 4.5" and [told["paper"] for told in found[1:]] == [None, None]


def test_the_best_that_grows_in_the_paper(made: Path) -> None:
    judged = judge(read(made / "cosscale-sweep")[0].grids[0])[0]
    assert judged["verdict"] == "holds" and judged["paper"]["verdict"] == "does not hold"
    assert judged["paper"]["words"] == (
        "paper, table 4.3.2: best ACC 32 at 128 (0.84), 256 at 1024 (0.69), 128 at 4096 (0.32) (does not hold)"
    )
    assert len(judged["paper"]["numbers"]) == 18


def test_the_summary_says_what_the_numbers_say(tmp_path: Path) -> None:
    losses = {"A": (1.0, 2.0, 0.5, 1.0), "B": (3.0, 3.0, 4.0, 3.0)}  # plain, C.S., I.S., both
    variants = [variant for _, variant in ROWS]
    rows = [(method, variant) for method in losses for variant in variants]
    found = [
        cell(method, variant, length, loss)
        for method, values in losses.items() for variant, loss in zip(variants, values, strict=True)
        for length in (128, 256)
    ]  # fmt: skip
    first = small(tmp_path, found, rows, claims=[claim("…", ("A", "I.S."), ("A", "plain"), length=256)])
    told = words.summary(first, judge(first))
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


def test_a_plan_of_which_nothing_is_measured(tmp_path: Path) -> None:
    write(tmp_path, plan(), [])
    (tmp_path / "results.jsonl").unlink()
    first = read(tmp_path)[0].grids[0]
    assert words.summary(first, judge(first))[:2] == [
        "Nothing is measured yet.",
        "0 of 4 claims hold, 4 are not measured.",
    ]
    assert page.report(tmp_path)["plans"][0]["claims"][0]["verdict"] == "not measured"


def test_numbers_that_are_none_and_bare_plans(tmp_path: Path) -> None:
    broken = cell("A", "plain", 128, 1.0) | {"ppl": nan, "acc": nan}
    first = small(tmp_path, [broken, cell("A", "C.S.", 128, 1.0) | {"ppl": inf, "ppl_low": None, "ppl_high": None}])
    assert first.failed(Row("A", "plain"), 128) == {0: "not a number"}
    assert grid.sheet(first).entries[Row("A", "C.S."), 128, "ppl"].text == "∞"
    page.report(tmp_path)
    bare = {"name": "dataset", "lengths": [], "protocol": "single", "rows": []}
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "plan.json").write_text(json.dumps(bare))
    assert "dataset" in page.page(tmp_path / "bare").read_text(encoding="utf-8")


class Wellformed(HTMLParser):
    """Every element that must be closed is, in order; what a page would fetch is collected."""

    EMPTY = frozenset({"meta", "input", "img", "br", "line"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.ids += [found["id"] or ""] if "id" in found else []
        self.fetched += [v or "" for k, v in attrs if k in ("src", "href") and not (v or "").startswith(("data:", "#"))]
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_wellformed_and_fetches_nothing(made: Path) -> None:
    text = page.page(made).read_text(encoding="utf-8")
    parser = Wellformed()
    parser.feed(text)
    assert parser.open == [] and parser.fetched == [] and len(parser.ids) == len(set(parser.ids))
    assert not re.search(r"https?://|@import|url\(", re.sub(r"base64,[^\"]*", "", text))
    assert text.count("<img") == 2 + 2 and "image/svg+xml" in text and "image/png" not in text  # two beside the paper
    assert "&lt;b&gt;three&lt;/b&gt; methods &amp; their intervals" in text and "a GPU &lt;&amp;&gt; 16 cores" in text
    assert "中文法律" in text and "15 % masked at once" in text
    assert not list(made.rglob(".*"))


def test_heavy_figures_are_shown_as_png(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study(tmp_path)
    monkeypatch.setattr(pieces, "HEAVY", 10)
    text = page.page(tmp_path).read_text(encoding="utf-8")
    assert text.count("data:image/png") == 2 and "ACC against length" in text


@pytest.mark.parametrize(("methods", "labels"), [("A", ["plain", "I.S."]), ("ABCDE", ["plain", "I.S.", "C.S."])])
def test_figures_have_one_legend_outside_their_panels_and_lengths_under_every_column(
    tmp_path: Path, methods: str, labels: list[str]
) -> None:
    """Only the last method has C.S., and the last two of five panels stand in a line of three."""
    rows = [(method, variant) for method in methods for variant in labels[: 3 if method == "E" else 2]]
    small(tmp_path, [cell(*row, length, 1.0) for row in rows for length in (128, 256)], rows)
    curves(tmp_path)
    for name in ("acc", "ppl"):
        text = (tmp_path / "figures" / f"{name}.svg").read_text(encoding="utf-8")
        assert [text.count(f"<!-- {label} -->") for label in labels] == [1] * len(labels)
        assert text.count("<!-- tokens -->") == text.count("<!-- 256 -->") == min(3, len(methods))
        figure = ElementTree.fromstring(text).find("{*}g")
        assert figure is not None and [part.get("id") for part in figure][-1] == "legend_1"


def test_many_claims_are_folded_by_verdict(tmp_path: Path) -> None:
    told = [claim(f"claim {i}", ("Windowed", "both"), ("PI", "plain")) for i in range(9)]
    write(tmp_path, plan(claims=told), cells((0,)))
    text = page.page(tmp_path).read_text(encoding="utf-8")
    assert "<summary>9 of 9: holds</summary>" in text


def run(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


def test_the_command(made: Path) -> None:
    done = run(made, "--cap")
    assert done.exit_code == 0, done.output
    flat = " ".join(done.output.split())
    assert "holds: InfoScale improves ACC at 4096 for ReRoPE" in flat and ">500" in flat
    for name in ("main/table.md", "main/table.tex", "main/table.csv", "main/claims.json", "report.html"):
        assert (made / name).is_file() and name.split("/")[-1] in flat
    as_json = json.loads(run(made, "--json").output)
    assert as_json["report"] == str(made / "report.html")
    assert as_json["plans"][1]["claims"] == json.loads((made / "main" / "claims.json").read_text(encoding="utf-8"))
    helped = CliRunner().invoke(app, ["report", "--help"])
    assert "isentrope report results" in helped.output


def test_the_same_results_give_the_same_files(made: Path) -> None:
    page.report(made)
    files = ("report.html", "main/table.md", "main/table.tex", "main/claims.json", "main/beside.md", "main/beside.svg")
    before = [(made / name).read_bytes() for name in files]
    page.report(made)
    assert [(made / name).read_bytes() for name in files] == before


def break_line(folder: Path) -> None:
    path = folder / "results.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join([*lines[:2], lines[2][:40]]), encoding="utf-8")


def change(**changes: Any) -> Any:
    return lambda folder: write(folder, plan(**changes), cells((0,)))


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda folder: (folder / "plan.json").unlink(), "expected plan.json or decoder.json in it or in its sub"),
        (lambda folder: (folder / "plan.json").write_text("{"), r"plan.json: expected JSON"),
        (lambda folder: (folder / "plan.json").write_text("[]"), r"expected 'name', a str"),
        (break_line, r"results.jsonl, line 3: expected JSON"),
        (lambda folder: (folder / "results.jsonl").write_text("{}"), r"line 1: expected 'method', a str, got None"),
        (lambda folder: (folder / "results.jsonl").write_bytes(b"\n\xff\n"), r"line 2: expected JSON"),
        (change(rows=[{"method": "A"}]), "expected 'method' and 'variant'"),
        (change(metrics=["bleu"]), "metrics: expected some of ppl, acc, got 'bleu'"),
        (change(claims=[{"kind": "worse"}]), "expected kind better or best_grows, got 'worse'"),
        (change(claims=[{"kind": "better", "metric": "x"}]), "expected metric ppl or acc, got 'x'"),
        (change(claims=[{"kind": "better", "metric": "acc", "text": "t"}]), "'t' of kind better: KeyError"),
        (change(claims=[{"kind": "best_grows", "metric": "acc", "methods": ["8"], "variant": "", "lengths": [1]}]),
         "two methods and two lengths"),
    ],
)  # fmt: skip
def test_mistakes_are_told_in_one_line(tmp_path: Path, harm: Any, message: str) -> None:
    folder = write(tmp_path / "main", plan(), cells((0,)))
    harm(folder)
    done = run(tmp_path)
    assert done.exit_code == 2 and re.search(message, done.output), done.output
    assert done.output.count("\n") == 1 and not (tmp_path / "report.html").exists()


def test_folders_that_are_not_there_and_broken_captions(tmp_path: Path) -> None:
    assert "got no folder" in run(tmp_path / "nowhere").output
    study(tmp_path)
    (tmp_path / "main" / "figures" / "figures.json").write_text("[]")
    assert "expected captions by file name, got list" in run(tmp_path).output
