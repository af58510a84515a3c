"""`isentrope report`: reading a study, and its tables."""

from __future__ import annotations

import csv
import io
import json
from math import exp, inf, nan
from pathlib import Path

import pytest
from rich.console import Console

from isentrope.report.claims import evaluate_claims
from isentrope.report.html import page
from isentrope.report.html import summary as words
from isentrope.report.load import Row, load_plans
from isentrope.report.tables import plan_tables as tables
from isentrope.report.tables.numbers import format_number
from tests.fixtures.study import ROWS, cell, plan, small, write


def test_plans_are_found_in_a_folder_and_in_its_subfolders(results: Path) -> None:
    assert [each.name for each in load_plans(results)] == ["cosscale-sweep", "main"]
    assert [each.name for each in load_plans(results / "main")] == ["main"]


def test_protocols_never_meet(tmp_path: Path) -> None:
    results = [cell("A", "plain", 128, 1.0), cell("A", "plain", 128, 3.0, protocol="random")]
    write(tmp_path, plan(rows=[{"method": "A", "variant": "plain"}], lengths=[128]), results)
    single, at_once = load_plans(tmp_path)[0].grids
    assert single.value(Row("A", "plain"), 128, "ppl").mean == pytest.approx(exp(1))
    assert at_once.value(Row("A", "plain"), 128, "ppl").mean == pytest.approx(exp(3))
    assert "one token masked at a time" in tables.write_caption(single)
    assert "15 % masked at once" in tables.write_caption(at_once)
    texts = tables.render_markdown(tables.format_grid(single)), tables.render_markdown(tables.format_grid(at_once))
    assert "2.72" in texts[0] and "20.09" not in texts[0] and "2.72" not in texts[1]


def test_seeds_are_averaged_and_failures_left_out(tmp_path: Path) -> None:
    results = [
        cell("A", "plain", 128, 1.0), cell("A", "plain", 128, 2.0, seed=1), cell("A", "plain", 256, 1.0),
        cell("A", "plain", 256, seed=1, failed="out of memory: 80 GiB"), cell("A", "C.S.", 128, failed="diverged"),
        cell("A", "I.S.", 128, 1.0),
    ]  # fmt: skip
    first = small(tmp_path, results)
    value = first.value(Row("A", "plain"), 128, "ppl")
    assert (value.mean, value.seeds) == (pytest.approx((exp(1) + exp(2)) / 2), 2)
    assert (value.least, value.most) == (pytest.approx(exp(1)), pytest.approx(exp(2)))
    assert (value.low, value.high) == (pytest.approx(exp(0.94)), pytest.approx(exp(2.12)))
    assert first.value(Row("A", "plain"), 256, "acc").seeds == 1
    assert first.value(Row("A", "C.S."), 128, "ppl") is None
    sheet = tables.format_grid(first)
    assert sheet.cells[Row("A", "C.S."), 128, "ppl"].text == tables.FAILED_TEXT
    assert sheet.cells[Row("A", "both"), 128, "ppl"].text == tables.MISSING_TEXT
    assert sheet.notes == [
        "– A at 256, seed 1 alone: failed, out of memory: 80 GiB",
        "– A w/ C.S. at 128, seed 0 alone: failed, diverged",
        "1 of 2 seeds, and so neither bold nor underlined: A w/ I.S. at 128",
        "Empty: not measured yet (4 of 8 cells).",
    ]
    assert "mean over 2 training seeds, which differ by at most a factor of 2.72 in PPL" in sheet.caption


def test_the_later_line_of_a_cell_counts_and_strays_are_named(tmp_path: Path) -> None:
    results = [cell("A", "plain", 128, failed="killed"), cell("A", "plain", 128, 1.0), cell("B", "plain", 128, 1.0)]
    first = small(tmp_path, results)
    assert first.value(Row("A", "plain"), 128, "ppl").mean == pytest.approx(exp(1))
    assert any("1 measured cells belong to no row" in note for note in tables.list_notes(first))
    assert len(tables.render_csv(first.plan).splitlines()) == 4


def test_best_and_second_by_measured_numbers_with_ties(tmp_path: Path) -> None:
    losses = {"plain": 1.0, "C.S.": 1.0 + 1e-15, "I.S.": 1.001, "both": 2.0}
    first = small(tmp_path, [cell("A", variant, 128, loss) for variant, loss in losses.items()])
    for metric in ("ppl", "acc"):
        ranks = [first.ranks(128, metric).get(Row(*row), 0) for row in ROWS]
        assert ranks == [1, 1, 2, 0]
    lone = small(tmp_path / "lone", [cell("A", "plain", 128, 1.0)])
    assert lone.ranks(128, "ppl") == {}  # nothing to be better than
    both = [cell("A", variant, 128, losses[variant], seed=seed) for variant in ("I.S.", "both") for seed in (0, 1)]
    fewer = small(tmp_path / "fewer", [*both, cell("A", "plain", 128, 1.0)])
    assert fewer.ranks(128, "ppl") == {Row("A", "I.S."): 1, Row("A", "both"): 2}  # one seed says little of the mean
    assert "1 of 2 seeds, and so neither bold nor underlined: A at 128" in tables.list_notes(fewer)
    others = [cell("A", variant, 256, losses[variant]) for variant in ("I.S.", "both")]
    broken = cell("A", "plain", 128, seed=1, failed="out of memory")
    fewer = small(tmp_path / "broken", [*both, *others, cell("A", "plain", 128, 1.0), broken])
    assert set(fewer.ranks(256, "ppl").values()) == {1, 2}  # all of them have one seed there
    notes = tables.list_notes(fewer)
    assert "1 of 2 seeds: A w/ I.S.; A w/ C.S., I.S. at 256" in notes
    assert "1 of 2 seeds, and so neither bold nor underlined: A at 128" in notes


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
    assert format_number(x, metric) == plain and format_number(x, metric, cap=True) == capped


def test_beyond_the_cap_none_is_singled_out(tmp_path: Path) -> None:
    first = small(tmp_path, [cell("A", "plain", 128, 7.0), cell("A", "C.S.", 128, 8.0)])
    assert {entry.rank for entry in tables.format_grid(first, cap=True).cells.values()} == {0}
    assert {entry.rank for entry in tables.format_grid(first).cells.values()} == {0, 1, 2}


def test_markdown_and_latex_as_the_paper_prints(results: Path) -> None:
    main = load_plans(results / "main")[0].grids[0]
    text = tables.render_markdown(tables.format_grid(main, cap=True))
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + 36 and {line.count("|") for line in lines} == {14}
    assert "| ReRoPE w/ C.S., I.S. |" in text and "&gt;500" in text and "**" in text and "<u>" in text
    tex = tables.render_latex(tables.format_grid(main, cap=True))
    assert tex.count(r"\midrule") == 9 and r"\label{table 4.2.3}" in tex and "$>$500" in tex and r"GAU-$\alpha$" in tex
    body = tex[tex.index(r"\midrule") : tex.index(r"\bottomrule")]
    assert {line.count("&") for line in body.splitlines() if line != r"\midrule"} == {12}
    assert tex.count("{") == tex.count("}") and r"\cmidrule(lr){12-13}" in tex
    for metric in range(2):
        columns = [line.split("|")[2 + metric :: 2][:6] for line in lines[2:]]
        for column in zip(*columns, strict=True):
            assert sum("**" in text for text in column) == sum("<u>" in text for text in column) == 1


def test_rows_that_share_a_variant_are_named_by_their_method(results: Path) -> None:
    sheet = tables.format_grid(load_plans(results / "cosscale-sweep")[0].grids[0])
    assert list(sheet.labels.values()) == ["8", "16", "32", "64", "128", "256"]
    assert sheet.caption.endswith("All with C.S.") and r"\midrule" in tables.render_latex(sheet)


def test_the_csv_holds_every_number_as_measured(results: Path) -> None:
    actual = load_plans(results / "main")[0]
    rows = list(csv.DictReader(io.StringIO(tables.render_csv(actual))))
    assert len(rows) == len(actual.cells) and tuple(rows[0]) == tables.CSV_COLUMNS
    for row, told in zip(rows, actual.cells, strict=True):
        assert row["ppl"] == ("" if told["ppl"] is None else repr(told["ppl"]))
        assert row["protocol"] == told["protocol"] and row["seconds"] == "1.5"
    assert json.loads(rows[0]["entropy"])[0] == 2.1 and rows[0]["predictions"] == "2560"


def test_names_with_markup_survive_every_format(tmp_path: Path) -> None:
    name = "<b>R&D_1|x</b> [bold]é漢{50%}$"
    first = small(tmp_path, [cell(name, "plain", 128, 1.0)], [(name, "plain"), (name, "<i>")], title=name)
    sheet = tables.format_grid(first)
    assert "&lt;b&gt;R&amp;D\\_1\\|x&lt;/b&gt;" in tables.render_markdown(sheet)
    assert r"$<$b$>$R\&D\_1|x$<$/b$>$ [bold]é漢\{50\%\}\$" in tables.render_latex(sheet)
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(tables.render_terminal(tmp_path))
    assert f"{name}: PPL" in console.export_text()
    assert next(csv.DictReader(io.StringIO(tables.render_csv(first.plan))))["method"] == name
    text = page.write_page(tmp_path).read_text(encoding="utf-8")
    assert "<b>R&D" not in text and "<i>" not in text and "&lt;b&gt;R&amp;D_1|x&lt;/b&gt;" in text


def test_a_plan_of_which_nothing_is_measured(tmp_path: Path) -> None:
    write(tmp_path, plan(), [])
    (tmp_path / "results.jsonl").unlink()
    first = load_plans(tmp_path)[0].grids[0]
    assert words.summarize_grid(first, evaluate_claims(first))[:2] == [
        "Nothing is measured yet.",
        "0 of 4 claims hold, 4 are not measured.",
    ]
    assert page.write_report(tmp_path)["plans"][0]["claims"][0]["verdict"] == "not measured"


def test_numbers_that_are_none_and_bare_plans(tmp_path: Path) -> None:
    broken = cell("A", "plain", 128, 1.0) | {"ppl": nan, "acc": nan}
    first = small(tmp_path, [broken, cell("A", "C.S.", 128, 1.0) | {"ppl": inf, "ppl_low": None, "ppl_high": None}])
    assert first.failures(Row("A", "plain"), 128) == {0: "not a number"}
    assert tables.format_grid(first).cells[Row("A", "C.S."), 128, "ppl"].text == "∞"
    page.write_report(tmp_path)
    bare = {"name": "dataset", "lengths": [], "protocol": "single", "rows": []}
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "plan.json").write_text(json.dumps(bare))
    assert "dataset" in page.write_page(tmp_path / "bare").read_text(encoding="utf-8")
