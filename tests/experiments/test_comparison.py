"""Comparisons of many recipes on one causal model: plan, runner, and the command that writes the leaderboard."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from isentrope.cli import app
from isentrope.evaluation import perplexity, timing
from isentrope.evaluation.frontier import build_board
from isentrope.evaluation.perplexity import measure_text
from isentrope.evaluation.recipe_texts import parse_recipe
from isentrope.experiments import comparison_runner
from isentrope.experiments.checkpoints import SHIPPED_MODELS
from isentrope.experiments.comparison_plan import load_comparison
from isentrope.experiments.comparison_runner import Outcome, run_comparison
from isentrope.hf.extension import find_extension
from tests.fixtures.commands import assert_one_line

pytestmark = pytest.mark.figures

ROOT = Path(__file__).parents[2]
LLAMA = str(SHIPPED_MODELS / "llama")
PLAN = """
title: A small one
dtype: float32
perplexity:
  edges: [0, 32, 64, 96]
  documents: 2
  texts: {modules: modules.jsonl, notes: notes.jsonl}
retrieval:
  tasks: [passkey]
  lengths: [440]
  ceiling: 430
  depths: [50]
  examples: 1
  texts: {modules: modules.jsonl, repetitive: null}
  recipes: ["rerope:window=16", "cosine:alpha=4"]
recipes: [plain, "rerope:window=16", "cosine:alpha=4", "window:size=32"]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("comparison")
    texts = [f"def {name}(x):\n    return x + 1  # and so on\n\n\n" * 20 for name in "abc"]
    (folder / "modules.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[:2]))
    (folder / "notes.jsonl").write_text(json.dumps({"text": texts[2]}))
    (folder / "small.yaml").write_text(PLAN)
    return folder


def invoke(folder, *more):
    command = ["compare", str(folder / "small.yaml"), "--model", LLAMA, "--data", str(folder), "--workers", "0"]
    return CliRunner().invoke(app, [*command, "--out", str(folder / "out"), *more])


@pytest.fixture(scope="module")
def run(folder):
    return invoke(folder)


def test_a_misspelt_recipe_is_refused_before_any_work(tmp_path):
    (tmp_path / "small.yaml").write_text(PLAN.replace("window:size=32", "windw:size=32"))
    assert_one_line(invoke(tmp_path), "unknown part 'windw'; did you mean 'window'?")
    assert not (tmp_path / "out").exists()


def test_a_comparison_from_the_command_line(folder, run):
    assert run.exit_code == 0, run.output
    assert re.search(r"LEFT OUT cosine:alpha=4: llama: was not trained with cosine.*\n", run.output)
    assert "complete" in run.output.splitlines()[-1] or "complete\n" in run.stderr
    out = folder / "out" / "small"
    board = json.loads((out / "leaderboard.json").read_text())
    rows = {row["recipe"]: row for row in board["rows"]}
    assert set(rows) == {"plain", "rerope:window=16", "window:size=32"} and board["train_length"] == 256
    assert board["texts"] == {"modules": 2, "notes": 1} and board["cells"] == {"modules": 1, "repetitive": 1}
    assert board["length"] == 440 and board["ceiling"]["length"] == 430
    assert board["ceiling"]["retrieved"]["count"] == 2 and rows["plain"]["retrieved"] is None
    assert rows["rerope:window=16"]["retrieved"]["count"] == 2 and rows["rerope:window=16"]["front"]
    assert rows["plain"]["time"] == 1 and rows["plain"]["passes"] == 3 and rows["plain"]["inside"] is None
    assert rows["window:size=32"]["forgets"] and rows["rerope:window=16"]["inside"] != 0
    assert "cosine:alpha=4" in board["left_out"]
    for name in ("leaderboard.md", "frontier.png", "frontier.svg", "notes/perplexity.png", "report.html"):
        assert (out / name).stat().st_size
    page = (out / "report.html").read_text()
    assert "cosine" in page and "430" in page and page.count("<tfoot>") == 1


def test_what_is_measured_is_kept(folder, run, monkeypatch):
    def fail(*given):
        raise AssertionError("measured again")

    monkeypatch.setattr(comparison_runner, "measure_perplexity", fail)
    monkeypatch.setattr(comparison_runner, "measure_retrieval", fail)
    lines = []
    plan = load_comparison(folder / "small.yaml")
    assert run_comparison(plan, LLAMA, folder, folder / "out", notify=lines.append) is Outcome.COMPLETE
    assert "complete" in lines[-1] and not any("FAILED" in line for line in lines)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ("model", "model or other buckets, or other texts .model differ."),
        ("config", "model differ"),
        ("edges", "edges differ"),
        ("examples", "examples differ"),
        ("modules.jsonl", "texts differ"),
        ("others.jsonl", "texts differ"),
    ],
)
def test_complete_results_of_something_else_are_refused(folder, run, tmp_path, changed, words):
    assert run.exit_code == 0, run.output
    for name in ("out", "small.yaml", "modules.jsonl", "notes.jsonl"):
        copy = shutil.copytree if (folder / name).is_dir() else shutil.copy
        copy(folder / name, tmp_path / name)
    model, plan = tmp_path / "llama", tmp_path / "small.yaml"
    shutil.copytree(LLAMA, model)
    if changed == "model":
        weights = load_file(model / "model.safetensors")
        save_file({key: 1.01 * x for key, x in weights.items()}, model / "model.safetensors", {"format": "pt"})
    elif changed == "config":
        config = json.loads((model / "config.json").read_text())
        config["rope_parameters"]["rope_theta"] = 40000.0
        (model / "config.json").write_text(json.dumps(config))
    elif changed.endswith(".jsonl"):
        (tmp_path / changed).write_text((tmp_path / "modules.jsonl").read_text().replace("so on", "no more"))
        plan.write_text(plan.read_text().replace("modules.jsonl", changed))
    else:
        old, new = {"edges": ("[0, 32, 64, 96]", "[0, 48, 96]"), "examples": ("examples: 1", "examples: 2")}[changed]
        plan.write_text(plan.read_text().replace(old, new))
    command = ["compare", str(plan), "--model", str(model), "--data", str(tmp_path), "--workers", "0"]
    result = CliRunner().invoke(app, [*command, "--out", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert re.search(f"holds another .*{words}.*; choose another folder$", result.stderr.strip())


def test_breadth_comes_first_and_the_time_is_kept(folder, tmp_path):
    plan = load_comparison(folder / "small.yaml").select("perplexity", without=["rerope", "cosine"])
    lines = []
    assert run_comparison(plan, LLAMA, folder, tmp_path, seconds=0, notify=lines.append) is Outcome.STOPPED
    assert "run again to resume" in lines[-1] and not (tmp_path / "small" / "modules").exists()
    lines.clear()
    assert run_comparison(plan, LLAMA, folder, tmp_path, notify=lines.append) is Outcome.COMPLETE
    order = [line.split("s  ", 1)[1].split(":")[0] for line in lines[1:-1]]
    firsts = ["modules 1 plain", "modules 1 window", "notes 1 plain", "notes 1 window"]
    assert order == [*firsts, "modules 2 plain", "modules 2 window"]


def test_a_kind_of_text_on_which_all_fail(folder, tmp_path, monkeypatch):
    def measure(model, recipe, text, edges):
        if kind in text.name:
            raise RuntimeError("no such kernel")
        return measure_text(model, recipe, text, edges)

    kind = "notes"
    monkeypatch.setattr(perplexity, "measure_text", measure)
    result = invoke(folder, "--only", "perplexity", "--out", str(tmp_path))
    assert result.exit_code == 1 and "no such kernel" in result.output and "window:size=32" in result.stdout
    assert not (tmp_path / "small" / "notes" / "perplexity.png").exists()
    kind = ""  # every one
    result = invoke(folder, "--only", "perplexity", "--out", str(tmp_path / "none"))
    assert result.exit_code == 1 and not result.stdout


def test_no_time_for_anything_is_no_mistake(folder, tmp_path):
    result = invoke(folder, "--only", "perplexity", "--seconds", "0", "--out", str(tmp_path), "--json")
    assert result.exit_code == 0 and json.loads(result.stdout) == {"outcome": "stopped"}


def test_kinds_of_text_may_be_folders_and_globs(folder, tmp_path):
    (tmp_path / "notes").mkdir()
    for name in "ab":
        (tmp_path / "notes" / f"{name}.txt").write_text(f"def {name}(x):\n    return x + 1\n\n\n" * 20)
    for texts in ("notes", "no*/*.txt"):
        (tmp_path / "small.yaml").write_text(
            f"{{perplexity: {{edges: [0, 64], documents: 9, texts: {{notes: {texts!r}}}}}, recipes: [plain]}}"
        )
        lines = []
        plan = load_comparison(tmp_path / "small.yaml")
        assert run_comparison(plan, LLAMA, tmp_path, tmp_path / texts[:3], notify=lines.append) is Outcome.COMPLETE
        assert sum("plain: " in line for line in lines) == 2


def test_a_recipe_that_fails_does_not_end_the_others(folder, tmp_path, monkeypatch):
    measure = comparison_runner.measure_perplexity

    def fail_for_windows(model, name, texts, config, out):
        if "window:size=32" in config.recipes:
            raise TypeError("no such\nthing")
        return measure(model, name, texts, config, out)

    monkeypatch.setattr(comparison_runner, "measure_perplexity", fail_for_windows)
    plan = load_comparison(folder / "small.yaml").select("perplexity")
    lines = []
    assert run_comparison(plan, LLAMA, folder, tmp_path, notify=lines.append) is Outcome.FAILED
    assert sum("TypeError: no such thing" in line for line in lines) >= 1
    assert sum("not tried again" in line for line in lines) == 1 and "failures above" in lines[-1]
    assert sum("rerope:window=16: " in line and "FAILED" not in line for line in lines) == 3


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("title:", "titel:", "unknown key 'titel'"),
        ("documents: 2", "documents: two", "documents"),
        ("ceiling:", "celing:", "unknown key 'celing'"),
        ("[passkey]", "[passkee]", "passkee"),
        ('recipes: ["rerope:window=16", "cosine:alpha=4"]', 'recipes: ["rerope:window=8"]', "some of the plan's"),
        ('"cosine:alpha=4", "window', 'plain, "window', "each once"),
    ],
)
def test_mistakes_in_a_plan(tmp_path, before, after, words):
    path = tmp_path / "small.yaml"
    assert before in PLAN
    path.write_text(PLAN.replace(before, after, 1))
    with pytest.raises(ValueError, match=re.escape(words)):
        load_comparison(path)


PLANS = sorted(path for folder in ("share", "frontier") for path in (ROOT / "docs" / "results" / folder).glob("*.yaml"))


@pytest.mark.parametrize("path", PLANS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_plans_of_the_documentation_load(path):
    plan = load_comparison(path)
    assert path.read_text().startswith(f"# isentrope compare {path.relative_to(ROOT)} --model ")
    for recipe in plan.recipes:
        parse_recipe(recipe, train_length=256)


def test_mistakes_end_in_one_line(folder):
    assert_one_line(invoke(folder, "--only", "speed"), "only: expected perplexity, retrieval or time")
    assert_one_line(invoke(folder, "--kinds", "repetitive", "--only", "perplexity"), "nothing is left to measure")
    assert_one_line(invoke(folder, "--kinds", "repetitive", "--only", "time"), "time is that of reading a text")
    words = "kinds: expected some of plan small's, modules, notes, repetitive, got 'poems'"
    assert_one_line(invoke(folder, "--kinds", "notes,poems"), words)
    assert_one_line(invoke(folder, "--without", "zzz"), "without: expected part of a recipe in plan small, got 'zzz'")


def time_recipes(folder, out, **more):
    lines = []
    plan = load_comparison(folder / "small.yaml").select("time", without=["cosine"])
    return run_comparison(plan, LLAMA, folder, out, notify=lines.append, **more), lines


def read_times(out):
    times = json.loads((out / "small" / "times.json").read_text())
    return times, {cell["recipe"]: cell for cell in times["cells"]}


def test_times_are_measured_in_a_run_of_their_own(folder, run, tmp_path):
    out = folder / "out" / "small"
    kept = {path: path.read_bytes() for path in out.rglob("*.json") if path.name != "leaderboard.json"}
    assert "times" not in {path.stem for path in kept}  # not by default
    assert "made for perplexity, while other programs may have shared" in (out / "leaderboard.md").read_text()
    timed = invoke(folder, "--only", "time")
    assert timed.exit_code == 0, timed.output
    assert {path: path.read_bytes() for path in kept} == kept
    times, cells = read_times(folder / "out")
    assert times["config"]["length"] == 96 and times["device"] in times["note"]
    assert (
        times["text"]["sha256"] == json.loads((out / "modules" / "perplexity.json").read_text())["texts"][0]["sha256"]
    )
    assert set(cells) == {"plain", "rerope:window=16", "window:size=32"}
    for cell in cells.values():
        assert len(cell["seconds"]) == 3 and cell["peak_bytes"] is None and cell["failed"] is None
        assert {"hardware", "commit", "torch", "transformers"} <= set(cell["run"])
    board = json.loads((out / "leaderboard.json").read_text())
    rows = {row["recipe"]: row for row in board["rows"]}
    assert rows["plain"]["time"] == 1 and rows["plain"]["passes"] == 3
    assert rows["window:size=32"]["seconds"] == sorted(cells["window:size=32"]["seconds"])[1]
    sentence = f"median of 3 passes over 96 tokens, one recipe after another on {times['device']}"
    assert sentence in (out / "leaderboard.md").read_text() and sentence in (out / "report.html").read_text()


def test_times_resume_and_failures_are_recorded(folder, tmp_path, monkeypatch):
    outcome, lines = time_recipes(folder, tmp_path, seconds=0)
    assert (
        outcome is Outcome.STOPPED
        and "run again to resume" in lines[-1]
        and not (tmp_path / "small" / "times.json").exists()
    )
    time_passes = timing.time_passes

    def fail_for_windows(model, tokens):
        if find_extension(model) is not None and "window:size=32" in str(find_extension(model).recipe):
            raise torch.OutOfMemoryError("no room\nfor it")
        return time_passes(model, tokens)

    monkeypatch.setattr(timing, "time_passes", fail_for_windows)
    outcome, lines = time_recipes(folder, tmp_path)
    assert outcome is Outcome.FAILED and "failures above" in lines[-1]
    assert sum("FAILED time window:size=32: out of memory: no room; not tried again" in line for line in lines) == 1
    _, first = read_times(tmp_path)
    assert first["window:size=32"]["failed"] == "out of memory: no room" and not first["window:size=32"]["seconds"]
    board = build_board(tmp_path / "small")  # of times alone
    assert {row["recipe"]: row["time"] is None for row in board["rows"]}["window:size=32"]
    monkeypatch.setattr(timing, "time_passes", time_passes)
    outcome, lines = time_recipes(folder, tmp_path)
    _, second = read_times(tmp_path)
    assert outcome is Outcome.COMPLETE and sum("time " in line and " s (" in line for line in lines) == 1
    assert second["plain"] == first["plain"] and second["window:size=32"]["failed"] is None
    path = tmp_path / "small" / "times.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"device": "another"}))
    with pytest.raises(ValueError, match="times of another model, text, length or device"):
        time_recipes(folder, tmp_path)


def test_a_slow_pass_is_timed_once(folder, tmp_path, monkeypatch):
    count, token_losses = 0, timing.token_losses

    def count_passes(model, tokens):
        nonlocal count
        count += 1
        return token_losses(model, tokens)

    monkeypatch.setattr(timing, "token_losses", count_passes)
    monkeypatch.setattr(timing, "SLOW_SECONDS", 0.0)
    assert time_recipes(folder, tmp_path)[0] is Outcome.COMPLETE
    assert count == 2 * 3  # one that warms up and one that counts, of each recipe
    assert all(len(cell["seconds"]) == 1 for cell in read_times(tmp_path)[1].values())
