"""Leaderboards of comparisons: numbers from stored files, the front, the figure's labels and the page."""

from __future__ import annotations

import json
import math
import runpy
import shutil
import sys
from itertools import combinations
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from typer.testing import CliRunner

from isentrope.cli import app
from isentrope.evaluation.frontier import build_board, count_retrieved, mark_front
from isentrope.report.figures import frontier
from isentrope.report.html.comparison import write_comparison
from isentrope.report.html.page import write_page
from isentrope.report.tables.comparison import explain_columns
from tests.fixtures.commands import assert_one_line
from tests.report.test_page import BROWSER, opened

pytestmark = pytest.mark.figures

ROOT = Path(__file__).parents[2]
MODEL = {"name": "small", "type": "llama", "dtype": "float32"}
EDGES = [0, 10, 20, 40]
# mean loss in each bucket, by kind, recipe and document
LOSSES = {
    "novels": {
        "plain": {"a": [2.0, 1.0, 5.0], "b": [2.0, 1.0, 5.0]},
        "rerope": {"a": [2.0, 1.1, 1.5], "b": [2.0, 1.1, 1.7], "c": [9.0, 9.0, 9.0]},
        "window:size=8": {"a": [2.0, 1.2, 1.3], "b": [2.0, 1.2, 1.3]},
    },
    "manuals": {
        "plain": {"d": [3.0, 2.0, 6.0]},
        "rerope": {"d": [3.0, 2.0, 2.4]},
        "window:size=8": {"d": [3.0, 2.0, 2.1]},
    },
}
SECONDS = {"plain": 1.0, "rerope": 2.0, "window:size=8": 0.5}


def write(folder: Path, file: str, **content: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / file).write_text(json.dumps(content))


def make_answer(recipe: str, length: int, depth: int, found: bool) -> dict:
    example = {"answer": 4, "likeliest": 4 if found else 1, "logprob": -1.0, "tokens": length}
    return {"recipe": recipe, "task": "passkey", "length": length, "depth": depth, "failed": None,
            "examples": [example]}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "small-4x"
    recipes = list(SECONDS)
    left_out = {"later:size=3": "unknown part"}
    head = {"recipes": [*recipes, "later:size=3"], "forgetful": ["window:size=8"], "left_out": left_out, "ceiling": 20}
    write(folder, "comparison.json", title="Small at four times", **head)
    for kind, by_recipe in LOSSES.items():
        counts = [9, 10, 20]
        cells = [
            {"recipe": recipe, "text": text, "loss": [x * n for x, n in zip(losses, counts, strict=True)],
             "seconds": SECONDS[recipe] * (3 if text in "ad" else 1), "peak_bytes": 100 if recipe == "plain" else 150}
            for recipe, texts in by_recipe.items() for text, losses in texts.items()
        ]  # fmt: skip
        texts = [{"name": text, "sha256": text} for text in "abcd"]
        config = {"edges": EDGES, "seed": 0}
        write(folder / kind, "perplexity.json", model=MODEL, config=config, texts=texts, cells=cells, train_length=20)
    for kind in ("novels", "plain"):
        cells = [make_answer("plain", 20, depth, True) for depth in (0, 50)]
        cells += [make_answer("rerope", 40, depth, depth != 50 or kind == "novels") for depth in (0, 50, 100)]
        cells += [make_answer("window:size=8", 40, depth, False) for depth in (0, 50)]
        config = {"lengths": [20, 40], "score": "forced"}
        write(folder / f"{kind}-filler", "retrieval.json", model=MODEL, config=config, cells=cells)
    return folder


def test_recipes_are_compared_on_what_all_of_them_have(folder):
    board = build_board(folder)
    assert [row["recipe"] for row in board["rows"]] == ["rerope", "window:size=8", "plain"]
    assert [row["number"] for row in board["rows"]] == [1, 2, 3]
    rerope, window, plain = board["rows"]
    assert board["texts"] == {"manuals": 1, "novels": 2}  # not the third, which one recipe alone has read
    assert rerope["perplexity"]["novels"][-1] == pytest.approx(math.exp(1.6))
    assert rerope["ratio"] == pytest.approx(math.exp(((1.6 - 1.0) + (2.4 - 2.0)) / 2))
    assert window["ratio"] == pytest.approx(math.exp((0.3 + 0.1) / 2))
    assert rerope["inside"] == pytest.approx(100 * (math.exp(0.1 * 10 / 19 / 2) - 1)) and plain["inside"] is None
    assert rerope["inside_by_kind"]["manuals"] == pytest.approx(0)
    assert board["cells"] == {"novels": 2, "plain": 2} and board["length"] == 40  # places that both have
    assert (rerope["retrieved"]["hits"], rerope["retrieved"]["count"]) == (3, 4) and window["retrieved"]["hits"] == 0
    assert rerope["fillers"]["plain"]["share"] == 0.5 and plain["retrieved"] is None
    assert rerope["retrieved"]["low"] is None  # two fillers at two depths are too few to claim an interval
    assert rerope["fillers"]["plain"]["low"] < 0.5 < rerope["fillers"]["plain"]["high"]
    assert rerope["tasks"]["passkey"]["hits"] == 3


def test_six_documents_carry_an_interval_of_the_ratio(tmp_path):
    write(tmp_path, "comparison.json", title="t", recipes=["plain", "rerope"], forgetful=[])
    logs = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]  # of each document's ratio
    for count, claimed in ((5, False), (6, True)):
        losses = {"plain": [[1.0, 5.0]] * count, "rerope": [[1.0, 1.0 + x] for x in logs[:count]]}
        cells = [
            {"recipe": recipe, "text": str(i), "loss": [19 * a, 20 * b], "seconds": 1.0}
            for recipe, rows in losses.items() for i, (a, b) in enumerate(rows)
        ]  # fmt: skip
        config = {"edges": [0, 20, 40], "seed": 0}
        write(
            tmp_path / "novels", "perplexity.json", model=MODEL, config=config, texts=[], cells=cells, train_length=20
        )
        row = build_board(tmp_path)["rows"][0]
        assert row["recipe"] == "rerope" and (row["ratio_low"] is not None) == claimed
    error = np.std(logs, ddof=1) / math.sqrt(6) * 2.5706  # t of 5 degrees of freedom
    ends = [math.log(row["ratio_low"]), math.log(row["ratio_high"])]
    assert ends == pytest.approx([0.35 - error, 0.35 + error], rel=1e-4)
    write_comparison(tmp_path)
    assert f"1.419 ({row['ratio_low']:.3f}–{row['ratio_high']:.3f})" in (tmp_path / "leaderboard.md").read_text()


def test_intervals_are_clustered_by_filler_and_depth():
    cells = {kind: [make_answer("rerope", 40, depth, kind == "a") for depth in (0, 50, 100)] for kind in "ab"}
    cells["a"][0]["examples"][0]["recalled"] = 0.5  # of two answers
    both, one = count_retrieved(cells), count_retrieved({"a": cells["a"]})
    assert both["hits"] == one["hits"] == 2.5 and both["share"] == pytest.approx(2.5 / 6)
    assert both["low"] == 0 and both["high"] == 1  # all of one filler and nothing of the other says little
    assert 0.3 < one["low"] < one["share"] < one["high"]


def test_costs_and_the_ceiling(folder):
    board = build_board(folder)
    rerope, window, plain = board["rows"]
    assert (rerope["seconds"], rerope["time"], rerope["memory"]) == (2.0, 2.0, 1.5)  # of the fastest pass
    assert window["time"] == 0.5 and plain["passes"] == 3
    ceiling = board["ceiling"]
    assert ceiling["length"] == 20 and ceiling["retrieved"]["hits"] == ceiling["retrieved"]["count"] == 4
    assert ceiling["perplexity"]["novels"] == pytest.approx(math.e)


def test_passes_that_were_timed_replace_those_of_perplexity(folder):
    fastest = "Time and memory: of the fastest forward pass of 40 tokens that was made for perplexity"
    assert fastest in explain_columns(build_board(folder))
    timed = {"plain": [2.0, 4.0, 3.0], "rerope": [6.0], "window:size=8": []}
    cells = [
        {"recipe": recipe, "seconds": seconds, "peak_bytes": 200 if seconds else None,
         "failed": None if seconds else "out of memory"}
        for recipe, seconds in timed.items()
    ]  # fmt: skip
    config = {"length": 40, "passes": 3, "slow_seconds": 5.0}
    write(folder, "times.json", model=MODEL, config=config, device="H200", cells=cells)
    board = build_board(folder)
    rows = {row["recipe"]: row for row in board["rows"]}
    assert (rows["plain"]["seconds"], rows["plain"]["time"], rows["plain"]["passes"]) == (3.0, 1.0, 3)
    assert (rows["rerope"]["time"], rows["rerope"]["memory"], rows["rerope"]["passes"]) == (2.0, 1.0, 1)
    failed = rows["window:size=8"]
    assert (failed["seconds"], failed["time"], failed["memory"], failed["passes"]) == (None, None, None, 0)
    sentence = (
        "Time and memory: median of 3 passes over 40 tokens (one where it takes over 5 s), one recipe after another "
        "on H200, in a run meant to have it alone; plain 3.00 s"
    )
    assert sentence in explain_columns(board)
    for cell, commit in zip(cells, "abb", strict=True):
        cell |= {"chunks": 4 if cell["recipe"] == "plain" else 1, "run": {"torch": "2.11", "commit": commit}}
    write(folder, "times.json", model=MODEL, config=config, device="H200", cells=cells)
    ending = (
        "alone, under PyTorch and commits 2.11 at a, 2.11 at b; plain in 4 chunks, as its mask would take gigabytes"
    )
    assert ending in explain_columns(build_board(folder))
    write_comparison(folder)
    window = next(line for line in (folder / "leaderboard.md").read_text().splitlines() if "window:size=8" in line)
    assert window.endswith("| – | – |")


def test_the_front():
    def row(ratio, share):
        return {"ratio": ratio, "retrieved": None if share is None else {"share": share}, "front": False}

    rows = [row(1.0, 0.5), row(1.1, 0.5), row(1.2, 0.9), row(1.2, 0.9), row(0.9, 0.1), row(0.8, None), row(None, 1.0)]
    mark_front(rows)
    assert [row["front"] for row in rows] == [True, False, True, True, True, False, False]


def test_files_of_a_comparison(folder):
    paths = write_comparison(folder)
    assert [path.name for path in paths] == ["leaderboard.json", "leaderboard.md", "frontier.png", "frontier.svg"]
    table = (folder / "leaderboard.md").read_text().splitlines()
    assert table[0].count("|") == table[1].count("|") == table[3].count("|")
    assert "plain, inside its training length of 20" in table[2] and "4 / 4" in table[2]
    assert table[3].startswith("| 1 | **`rerope`** | 3 / 4 |") and "2.00 ×" in table[3]
    assert "left out: `later:size=3`: unknown part" in table[-1]
    first = (folder / "frontier.svg").read_bytes()
    write_comparison(folder)
    assert (folder / "frontier.svg").read_bytes() == first


def test_without_retrieval_perplexity_sorts_and_nothing_is_drawn(folder):
    for kind in ("novels", "plain"):
        shutil.rmtree(folder / f"{kind}-filler")
    assert [path.name for path in write_comparison(folder)] == ["leaderboard.json", "leaderboard.md"]
    assert [row["recipe"] for row in build_board(folder)["rows"]] == ["window:size=8", "rerope", "plain"]
    assert "retrieval is not measured" in (folder / "leaderboard.md").read_text()


def test_the_report_has_a_section_for_each_comparison(folder):
    shutil.copytree(folder, folder.with_name("another"))
    result = CliRunner().invoke(app, ["report", str(folder.parent)])
    assert result.exit_code == 0, result.output
    page = (folder.parent / "report.html").read_text()
    assert page.count('<section class="plan"') == 2 and page.count("data:image/svg+xml") == 2
    assert page.count('href="#comparison-') == 2 and "later:size=3" in page
    assert page.count("<td>4.95</td>") == 2  # e^1.6, rerope in novels at the end


def test_the_tables_of_a_readme_are_written_from_the_files(folder, monkeypatch):
    readme = folder.with_name("README.md")
    readme.write_text(
        "# A\n<!-- summary -->\nold\n<!-- end -->\n\n<!-- small-4x -->\n<!-- end -->\n<!-- b -->\n<!-- end -->\n"
    )
    monkeypatch.setattr(sys, "argv", ["tables.py", "--folder", str(folder.parent)])
    runpy.run_path(str(ROOT / "docs" / "results" / "frontier" / "tables.py"), run_name="__main__")
    text = readme.read_text()
    assert "old" not in text and text.count("Not measured yet.") == 1 and "(small-4x/frontier.png)" in text
    assert "| `rerope` | **3 of 4 · 1.65** |" in text and "| *plain inside its length* | 4 of 4 · 1 |" in text


PHONE = """
const inside = document.querySelector("iframe").contentWindow;
const page = inside.document;
told.scroll = [page.documentElement.scrollWidth, inside.innerWidth];
const shown = (cell) => cell.getBoundingClientRect().right <= inside.innerWidth;
const cells = [...page.querySelectorAll(".sheet tbody tr:first-child > *")];
told.visible = cells.filter(shown).map((cell) => cell.innerText.trim());
const head = page.querySelectorAll(".sheet thead tr:last-child button")[2];
head.click();
told.sorted = [...page.querySelectorAll(".sheet tbody tr")].map((row) => row.cells[0].dataset.v);
told.image = page.images[0].getBoundingClientRect().width;
"""


@pytest.mark.skipif(BROWSER is None, reason="no browser found")
def test_a_phone_shows_retrieval_beside_perplexity(folder):
    write_comparison(folder)
    frame = '<iframe src="report.html" style="width:375px;height:800px;border:0"></iframe>'
    told = opened(write_page(folder), PHONE, around=frame)
    assert told["errors"] == [] and told["scroll"][0] <= told["scroll"][1] == 375
    assert [text.split()[0] for text in told["visible"][:3]] == ["1.", "3", "1.649"]
    assert told["sorted"] == ["2. window:size=8", "1. rerope", "3. plain"]
    assert 300 < told["image"] <= 375


def test_an_empty_comparison_ends_in_one_line(tmp_path):
    write(tmp_path, "comparison.json", title="none", recipes=["plain"], forgetful=[])
    assert_one_line(CliRunner().invoke(app, ["report", str(tmp_path)]), "expected results of isentrope compare")


def test_numbers_of_crowded_points_do_not_overlap():
    with matplotlib.rc_context({"font.size": 9}):
        figure = Figure(figsize=(4.2, 3.7))
        FigureCanvasAgg(figure)
        axes = figure.add_axes((0.15, 0.15, 0.8, 0.8))
        axes.set_xlim(0.9, 1.6)
        axes.set_ylim(-0.06, 1.06)
        points = [(1.0 + 0.004 * i, 0.0) for i in range(8)] + [(1.2, 0.5)] * 6 + [(1.5, 1.0), (0.95, 1.0)]
        rows = [{"number": i + 1, "front": i % 5 == 0} for i in range(len(points))]
        boxes = frontier.place_numbers(axes, points, rows)
    frame = axes.get_window_extent()
    assert len(boxes) == len(points)
    assert not any(frontier._overlap(a, b) for a, b in combinations(boxes, 2))
    assert all(frame.x0 <= box[0] and box[2] <= frame.x1 and frame.y0 <= box[1] and box[3] <= frame.y1 for box in boxes)
