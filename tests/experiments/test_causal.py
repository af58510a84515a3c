"""Plans for causal models."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from isentrope.cli import app
from isentrope.experiments.causal_plan import CausalPlan
from isentrope.experiments.checkpoints import SHIPPED_MODELS
from isentrope.experiments.masked_plan import MaskedPlan
from isentrope.experiments.plan import load_plan
from isentrope.experiments.runner import run_plan
from isentrope.report.tables import leaderboard
from tests.fixtures.commands import assert_one_line

pytestmark = pytest.mark.figures

PLAN = f"""
title: A small one
decoder: {{model: {SHIPPED_MODELS / "llama"}}}
texts: "*.txt"
documents: 2
edges: [0, 32, 64, 96]
recipes: [plain, "rerope:window=16", "rerope:window=64"]
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("decoders")
    for name in "ab":
        (folder / f"{name}.txt").write_text(f"def {name}(x):\n    return x + 1  # and so on\n\n\n" * 9)
    (folder / "small.yaml").write_text(PLAN)
    return folder, CliRunner().invoke(app, ["study", "run", str(folder / "small.yaml"), "--out", str(folder / "out")])


def test_a_plan_from_the_command_line(run):
    folder, result = run
    assert result.exit_code == 0, result.output
    board = json.loads((folder / "out" / "small" / "leaderboard.json").read_text())
    assert board["train_length"] == 256 and len(board["rows"]) == 3
    last = [row["perplexity"][-1] for row in board["rows"]]
    assert last == sorted(last)
    actual = {row["recipe"]: row for row in board["rows"]}
    assert actual["plain"]["inside"] is None and actual["plain"]["cost"] == 1
    assert abs(actual["rerope:window=64"]["inside"]) < abs(actual["rerope:window=16"]["inside"])
    assert actual["plain"]["ratio"] == pytest.approx(1)
    assert actual["plain"]["bits_per_byte"][2] > 0
    for name in ("leaderboard.md", "leaderboard.png", "leaderboard.svg", "perplexity.png", "report.html"):
        assert (folder / "out" / "small" / name).stat().st_size


def test_what_was_found_again_is_beside_it(run, tmp_path):
    folder, _ = run
    rows = [{"recipe": "plain", "task": "passkey", "length": 96, "share": 0.25, "likeliest": 0.5}]
    (tmp_path / "retrieval.json").write_text(json.dumps({"config": {"score": "both"}, "rows": rows}))
    results = folder / "out" / "small" / "perplexity.json"
    (tmp_path / "perplexity.json").write_text(results.read_text())
    shown = Console(width=140, file=StringIO())
    shown.print(leaderboard.build_leaderboard_table(tmp_path))
    assert "passkey 96" in shown.file.getvalue() and "25 %" in shown.file.getvalue()


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("title:", "titel:", "unknown key 'titel'; did you mean 'title'"),
        ("model:", "modl:", "unknown key 'modl'; did you mean 'model'"),
        ('"*.txt"', '"*.text"', "got none like \\*.text"),
        ("[0, 32, 64, 96]", "[0, 64, 32]", "edges"),
        ("rerope:window=16", "reroop:window=16", "reroop"),
        ("documents: 2", "retrieval: {tasks: [passkee], lengths: [64]}", "passkee"),
        ("documents: 2", "retrieval: {tasks: [passkey]}", "missing lengths"),
    ],
)
def test_mistakes_are_answered_before_anything_is_loaded(run, tmp_path, before, after, words):
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "bad.yaml").write_text(PLAN.replace(before, after))
    with pytest.raises(ValueError, match=words):
        load_plan(tmp_path / "bad.yaml")


RESULTS = Path(__file__).parents[2] / "docs" / "results"


@pytest.mark.parametrize(
    "path",
    sorted(path for path in RESULTS.glob("*/*.yaml") if path.parent.name not in ("share", "frontier")),
    ids=lambda path: path.stem,
)
def test_plans_of_the_results_are_read(path, tmp_path, monkeypatch):
    (tmp_path / "texts.jsonl").write_text("")
    for name in ("SMOLLM2", "TINYLLAMA", "STORIES15M"):
        monkeypatch.setenv(name, str(tmp_path))
    for name in ("NOVELS", "PAIRS", "STORIES", "MODULES"):
        monkeypatch.setenv(name, str(tmp_path / "texts.jsonl"))
    plan = load_plan(path)
    assert plan.perplexity.recipes[0] == "plain" and plan.texts == (tmp_path / "texts.jsonl",)
    if plan.retrieval is not None:
        assert max(plan.retrieval.lengths) == plan.perplexity.length


def test_the_script_of_the_results():
    script = RESULTS / "long.sh"
    subprocess.run(["bash", "-n", script], check=True)
    steps = re.search(r"steps=\(([^$)]*)\)", script.read_text())[1].split()
    assert {step for step in steps if not step.startswith("calibrate-")} == {
        path.stem for name in ("smollm2", "tinyllama") for path in (RESULTS / name).glob("*.yaml")
    }


def test_plans_of_both_kinds_are_told_apart(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "causal.yaml").write_text(PLAN)
    rows = "rows: [{method: a, checkpoint: a, recipe: rope}]"
    (tmp_path / "masked.yaml").write_text(f"title: x\nlengths: [64]\ncheckpoints: {{a: {{shipped: dot}}}}\n{rows}\n")
    assert isinstance(load_plan(tmp_path / "causal.yaml"), CausalPlan)
    assert isinstance(load_plan(tmp_path / "masked.yaml"), MaskedPlan)


@pytest.mark.parametrize("others", [["demo"], ["--lengths", "64"], ["--data", "corpus"], ["--jobs", "2"]])
def test_decoders_do_not_mix(run, others):
    folder, _ = run
    result = CliRunner().invoke(app, ["study", "run", str(folder / "small.yaml"), *others])
    assert result.exit_code == 2 and "expected no other plans" in result.stderr


def test_models_and_texts_are_named_by_the_environment_or_beside_the_plan(run, tmp_path, monkeypatch):
    folder, _ = run
    plan = PLAN.replace(str(SHIPPED_MODELS / "llama"), "$MODEL").replace("*.txt", "$TEXTS")
    (tmp_path / "named.yaml").write_text(plan)
    with pytest.raises(ValueError, match=r"\$TEXTS: environment variable not set"):
        load_plan(tmp_path / "named.yaml")
    monkeypatch.setenv("TEXTS", str(folder / "*.txt"))
    monkeypatch.setenv("MODEL", "some/name")
    actual = load_plan(tmp_path / "named.yaml")
    assert actual.decoder["model"] == "some/name" and [path.name for path in actual.texts] == ["a.txt", "b.txt"]
    (tmp_path / "some" / "name").mkdir(parents=True)
    assert load_plan(tmp_path / "named.yaml").decoder["model"] == str(tmp_path / "some" / "name")
    monkeypatch.setenv("MODEL", "./nowhere")
    with pytest.raises(ValueError, match="expected a folder with a model"):
        run_plan(load_plan(tmp_path / "named.yaml"), tmp_path)


def test_retrieval_may_ask_for_some_of_the_recipes(run):
    folder, _ = run
    asked = "retrieval: {tasks: [passkey], lengths: [512], depths: [0, 50], recipes: [plain]}"
    (folder / "some.yaml").write_text(f"{PLAN}{asked}\n")
    plan = load_plan(folder / "some.yaml")
    assert plan.retrieval.recipes == ("plain",) and len(plan.perplexity.recipes) == 3
    (folder / "some.yaml").write_text(f"{PLAN}{asked.replace('plain', 'infoscale')}\n")
    with pytest.raises(ValueError, match="expected some of the plan's, got 'infoscale'"):
        load_plan(folder / "some.yaml")


def test_the_page_of_a_plan_for_a_causal_model(run):
    folder, result = run
    told = CliRunner().invoke(app, ["report", str(folder / "out"), "--json"])
    assert told.exit_code == 0, told.output
    written = json.loads(told.stdout)
    assert [plan["name"] for plan in written["plans"]] == ["small"]
    page = Path(written["report"]).read_text().replace("<wbr>", "")
    best = next(line for line in result.stdout.splitlines() if line.startswith(("best: ", "chosen: ")))
    assert page.count("data:image/svg") == 2 and "<h2" in page and "A small one" in page and best in unescape(page)
    shown = CliRunner().invoke(app, ["report", str(folder / "out" / "small")])
    assert shown.exit_code == 0 and best in shown.stdout


@pytest.mark.parametrize(
    ("content", "words"), [("{", "expected JSON"), ('{"title": "t"}', "expected recipes, forgetful")]
)
def test_a_broken_description_of_a_plan(tmp_path, content, words):
    (tmp_path / "decoder.json").write_text(content)
    assert_one_line(CliRunner().invoke(app, ["report", str(tmp_path)]), words)


def test_other_texts_in_a_folder_do_not_count(run, tmp_path):
    """The plan is changed, its folder is not: means are over the texts asked for, and both runs' cells stay."""
    folder, _ = run
    for name in "ab":
        shutil.copy(folder / f"{name}.txt", tmp_path)
    boards = []
    (tmp_path / "b").mkdir()
    (tmp_path / "b.txt").rename(tmp_path / "b" / "b.txt")
    for texts, recipes in (("a.txt", '[plain, "rerope:window=16"]'), ("b", '[plain, "rerope:window=64"]')):
        (tmp_path / "small.yaml").write_text(re.sub("recipes: .*", f"recipes: {recipes}", PLAN).replace("*.txt", texts))
        words = ["study", "run", str(tmp_path / "small.yaml"), "--out", str(tmp_path)]
        assert CliRunner().invoke(app, words).exit_code == 0
        boards.append(json.loads((tmp_path / "small" / "leaderboard.json").read_text()))
    assert all(board["texts"] == 1 and len(board["rows"]) == 2 for board in boards)
    assert {row["texts"] for board in boards for row in board["rows"]} == {1}
    assert len(json.loads((tmp_path / "small" / "perplexity.json").read_text())["cells"]) == 4
    words[1] = "status"
    assert "2 of 2 cells done, 0 failed, 0 missing" in CliRunner().invoke(app, words).stdout


def test_nothing_is_measured_before_what_cannot_be_asked_is_refused(run, tmp_path):
    folder, _ = run
    (folder / "short.yaml").write_text(f"{PLAN}retrieval: {{tasks: [passkey], lengths: [64]}}\n")
    result = CliRunner().invoke(app, ["study", "run", str(folder / "short.yaml"), "--out", str(tmp_path)])
    assert_one_line(result, "tokens or more for passkey, got 64")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("edges", "512", "edges: expected a list, got 512"),
        ("edges", "[0, 128, x]", "edges: item 3: expected a whole number, got 'x'"),
        ("edges", "[0, 128.5, 256]", "edges: item 2: expected a whole number, got 128.5"),
        ("edges", "[0, 1, 256]", "edges: expected two tokens or more in the first bucket, got 1"),
        ("recipes", "plain", "recipes: expected a list, got 'plain'"),
        ("documents", "many", "documents: expected a whole number, got 'many'"),
        ("retrieval", "{tasks: [passkey], lengths: 512}", "plan wrong: retrieval: lengths: expected a list, got 512"),
        ("texts", "5", "plan wrong: texts: expected a list, got 5"),
        ("title", "5", "plan wrong: title: expected a string, got 5"),
        ("retrieval", "{tasks: [passkey], lengths: [512], examples: two}", "examples: expected a whole number"),
    ],
)
def test_mistakes_in_a_plan(run, key, value, words):
    plan = re.sub(f"^{key}: .*\n", "", PLAN, flags=re.MULTILINE) + f"{key}: {value}\n"
    (run[0] / "wrong.yaml").write_text(plan)
    with pytest.raises(ValueError, match=re.escape(words)):
        load_plan(run[0] / "wrong.yaml")


def test_status_says_how_far_it_is(run, tmp_path):
    folder, _ = run
    words = ["study", "status", str(folder / "small.yaml"), "--out"]
    assert "6 of 6 cells done, 0 failed, 0 missing" in CliRunner().invoke(app, [*words, str(folder / "out")]).stdout
    asked = "retrieval: {tasks: [passkey, words], lengths: [512], depths: [0, 50]}"
    (folder / "asked.yaml").write_text(f"{PLAN}{asked}\n")
    words[2] = str(folder / "asked.yaml")
    assert "0 of 15 cells done, 0 failed, 15 missing" in CliRunner().invoke(app, [*words, str(tmp_path)]).stdout
