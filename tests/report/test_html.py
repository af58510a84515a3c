"""The page, its figures, the command, and how it fails."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from isentrope.cli import app
from isentrope.recipe import KINDS
from isentrope.report.figures import plan_curves
from isentrope.report.figures.perplexity import SHARE, TEMPERATURES, _split_recipe
from isentrope.report.figures.plan_curves import draw_curves
from isentrope.report.html import fragments, page
from tests.fixtures.commands import assert_one_line
from tests.fixtures.study import cell, cells, claim, plan, small, study, write

pytestmark = pytest.mark.figures


class Wellformed(HTMLParser):
    """Every element that must be closed is, in order; what a page would fetch is collected."""

    EMPTY = frozenset({"meta", "input", "img", "br", "wbr", "line"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.ids += [attributes["id"] or ""] if "id" in attributes else []
        self.fetched += [v or "" for k, v in attrs if k in ("src", "href") and not (v or "").startswith(("data:", "#"))]
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def made(results: Path) -> Path:
    page.write_report(results)
    return results


def test_the_page_is_wellformed_and_fetches_nothing(made: Path) -> None:
    text = page.write_page(made).read_text(encoding="utf-8")
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
    monkeypatch.setattr(fragments, "MAX_SVG_BYTES", 10)
    text = page.write_page(tmp_path).read_text(encoding="utf-8")
    assert text.count("data:image/png") == 2 and "ACC against length" in text


@pytest.mark.parametrize(("methods", "labels"), [("A", ["plain", "I.S."]), ("ABCDE", ["plain", "I.S.", "C.S."])])
def test_figures_have_one_legend_outside_their_panels_and_lengths_under_every_column(
    tmp_path: Path, methods: str, labels: list[str]
) -> None:
    """Only the last method has C.S., and the last two of five panels stand in a line of three."""
    rows = [(method, variant) for method in methods for variant in labels[: 3 if method == "E" else 2]]
    made = [cell(*row, length, 1.0) | {"entropy": None} for row in rows for length in (128, 256)]
    small(tmp_path, made, rows)
    draw_curves(tmp_path)
    for name in ("acc", "ppl"):
        text = (tmp_path / "figures" / f"{name}.svg").read_text(encoding="utf-8")
        assert [text.count(f"<!-- {label} -->") for label in labels] == [1] * len(labels)
        assert text.count("<!-- tokens -->") == text.count("<!-- 256 -->") == min(3, len(methods))
        figure = ElementTree.fromstring(text).find("{*}g")
        assert figure is not None and [part.get("id") for part in figure][-1] == "legend_1"


def test_rows_that_hold_have_a_figure_without_plain(tmp_path: Path) -> None:
    rows = [("A", "plain"), ("B", "plain"), ("B", "I.S."), ("C", "plain")]
    small(folder := tmp_path, [cell(*row, 128, 1.0) for row in rows], rows)
    data = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    for row, recipe in zip(data["rows"], ("rope", "rerope", "rerope+infoscale", "window"), strict=True):
        row["recipe"] = recipe
    (folder / "plan.json").write_text(json.dumps(data), encoding="utf-8")
    assert folder / "figures" / "ppl_stable.svg" in draw_curves(folder)
    text = (folder / "figures" / "ppl_stable.svg").read_text(encoding="utf-8")
    assert "<!-- B, I.S. -->" in text and "<!-- A, plain -->" not in text


def test_pages_are_titled_by_study_model_and_texts(made: Path, tmp_path: Path) -> None:
    text = page.write_page(made).read_text(encoding="utf-8")
    assert "<h1>2 studies of length extrapolation</h1>" in text or "<h1>3 studies" in text
    text = page.write_page(write(tmp_path / "one", plan(), cells((0,)))).read_text(encoding="utf-8")
    assert "<h1>Nine methods with and without CosScale and InfoScale</h1>" in text
    heading = re.search(r"<title>(.*)</title>", text)
    assert heading and "GAU-α trained at" in heading[1] and "中文法律" in heading[1]


def test_many_claims_are_folded_by_verdict(tmp_path: Path) -> None:
    told = [claim(f"claim {i}", ("Windowed", "both"), ("PI", "plain")) for i in range(9)]
    write(tmp_path, plan(claims=told), cells((0,)))
    text = page.write_page(tmp_path).read_text(encoding="utf-8")
    assert "<summary>9 of 9: holds</summary>" in text


def run(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


def keep_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the figures that are drawn already: they take most of the time of a report."""
    monkeypatch.setattr(plan_curves, "draw_comparison", lambda comparison, out: [])


def test_the_command(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_figures(monkeypatch)
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
    with pytest.MonkeyPatch.context() as patch:
        keep_figures(patch)  # drawn when the report was made
        page.write_report(made)
    files = ("report.html", "main/table.md", "main/table.tex", "main/claims.json", "main/beside.md", "main/beside.svg")
    before = [(made / name).read_bytes() for name in files]
    page.write_report(made)
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
        (change(claims=[{"kind": "worse"}]), "better or best_grows or superior or equivalent, got 'worse'"),
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


def test_folders_that_are_not_there_and_broken_captions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    remedy = "name the folder that was --out of study run, evaluate or compare"
    assert_one_line(run(tmp_path / "nowhere"), f"got no folder; {remedy}")
    assert_one_line(run(tmp_path / "empty"), f"got none; {remedy}")
    (tmp_path / "empty").rmdir()
    keep_figures(monkeypatch)
    study(tmp_path)
    (tmp_path / "main" / "figures" / "figures.json").write_text("[]")
    assert "expected captions by file name, got list" in run(tmp_path).output


def test_the_figure_of_perplexity_knows_every_temperature() -> None:
    """It may not import torch, and so keeps their names itself."""
    assert sorted(TEMPERATURES) == sorted(part.name() for part in KINDS["temperature"])
    assert [part.name() for part in KINDS["share"]] == [SHARE]


def test_the_figure_of_perplexity_groups_by_laws() -> None:
    texts = {
        "rerope:window=8": ("rerope:window=8", "no law"),
        "infoscale:train_length=4": ("plain", "+ infoscale"),
        "rerope:window=8+logn:train_length=4,keys=far+share:beta=0.5,reference=3": (
            "rerope:window=8", "+ logn far + share 0.5",
        ),
        "rerope:window=8+share:beta=(1,0.5,)+causal": ("rerope:window=8+causal", "+ share"),
    }  # fmt: skip
    assert {text: _split_recipe(text) for text in texts} == texts
