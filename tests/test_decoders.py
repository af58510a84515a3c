"""Plans for causal models, and their recipes in order."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import escape
from io import StringIO
from math import exp
from pathlib import Path

import pytest
import torch
from isentrope.study.causal import perplexity
from isentrope.study.causal.plan import _edges, _tokens, load, single, usual
from isentrope.study.causal.plan import run as run_plan
from isentrope.study.run import SHIPPED
from rich.console import Console
from transformers import GPT2Config, GPT2LMHeadModel
from typer.testing import CliRunner

import isentrope as ise
from isentrope.cli import app
from isentrope.report import figures, leaderboard
from tests.hf.tiny import TRAINED, llama, tokens

PLAN = f"""
title: A small one
decoder: {{model: {SHIPPED / "llama"}}}
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
    found = {row["recipe"]: row for row in board["rows"]}
    assert found["plain"]["inside"] is None and found["plain"]["cost"] == 1
    assert abs(found["rerope:window=64"]["inside"]) < abs(found["rerope:window=16"]["inside"])
    assert found["plain"]["ratio"] == pytest.approx(1)
    assert found["plain"]["bits_per_byte"][2] > 0
    for name in ("leaderboard.md", "leaderboard.png", "leaderboard.svg", "perplexity.png", "report.html"):
        assert (folder / "out" / "small" / name).stat().st_size


def test_what_was_found_again_is_beside_it(run, tmp_path):
    folder, _ = run
    rows = [{"recipe": "plain", "task": "passkey", "length": 96, "share": 0.25, "likeliest": 0.5}]
    (tmp_path / "retrieval.json").write_text(json.dumps({"config": {"score": "both"}, "rows": rows}))
    results = folder / "out" / "small" / "perplexity.json"
    (tmp_path / "perplexity.json").write_text(results.read_text())
    shown = Console(width=140, file=StringIO())
    shown.print(leaderboard.table(tmp_path))
    assert "passkey 96" in shown.file.getvalue() and "25 %" in shown.file.getvalue()


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("title:", "titel:", "got 'titel'"),
        ("model:", "modl:", "got 'modl'"),
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
        load(tmp_path / "bad.yaml")


RESULTS = Path(__file__).parents[1] / "docs" / "results"


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*/*.yaml")), ids=lambda path: path.stem)
def test_plans_of_the_results_are_read(path, tmp_path, monkeypatch):
    (tmp_path / "texts.jsonl").write_text("")
    for name in ("SMOLLM2", "TINYLLAMA", "STORIES15M"):
        monkeypatch.setenv(name, str(tmp_path))
    for name in ("NOVELS", "PAIRS", "STORIES", "MODULES"):
        monkeypatch.setenv(name, str(tmp_path / "texts.jsonl"))
    plan = load(path)
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


def test_plans_of_another_kind_are_not_taken(tmp_path):
    (tmp_path / "other.yaml").write_text("title: x\nlengths: [64]\n")
    assert load(tmp_path / "other.yaml") is None


@pytest.mark.parametrize("others", [["demo"], ["--lengths", "64"], ["--data", "corpus"], ["--jobs", "2"]])
def test_decoders_do_not_mix(run, others):
    folder, _ = run
    result = CliRunner().invoke(app, ["study", "run", str(folder / "small.yaml"), *others])
    assert result.exit_code == 2 and "expected them alone" in result.stderr


def test_models_and_texts_are_named_by_the_environment_or_beside_the_plan(run, tmp_path, monkeypatch):
    folder, _ = run
    plan = PLAN.replace(str(SHIPPED / "llama"), "$MODEL").replace("*.txt", "$TEXTS")
    (tmp_path / "named.yaml").write_text(plan)
    with pytest.raises(ValueError, match=r"\$TEXTS: expected the environment"):
        load(tmp_path / "named.yaml")
    monkeypatch.setenv("TEXTS", str(folder / "*.txt"))
    monkeypatch.setenv("MODEL", "some/name")
    found = load(tmp_path / "named.yaml")
    assert found.decoder["model"] == "some/name" and [path.name for path in found.texts] == ["a.txt", "b.txt"]
    (tmp_path / "some" / "name").mkdir(parents=True)
    assert load(tmp_path / "named.yaml").decoder["model"] == str(tmp_path / "some" / "name")
    monkeypatch.setenv("MODEL", "./nowhere")
    with pytest.raises(ValueError, match="expected a folder with a model"):
        run_plan(load(tmp_path / "named.yaml"), tmp_path)


def test_retrieval_may_ask_for_some_of_the_recipes(run):
    folder, _ = run
    asked = "retrieval: {tasks: [passkey], lengths: [512], depths: [0, 50], recipes: [plain]}"
    (folder / "some.yaml").write_text(f"{PLAN}{asked}\n")
    plan = load(folder / "some.yaml")
    assert plan.retrieval.recipes == ("plain",) and len(plan.perplexity.recipes) == 3
    (folder / "some.yaml").write_text(f"{PLAN}{asked.replace('plain', 'infoscale')}\n")
    with pytest.raises(ValueError, match="expected some of the plan's, got 'infoscale'"):
        load(folder / "some.yaml")


def test_the_page_of_a_plan_for_a_causal_model(run):
    folder, result = run
    told = CliRunner().invoke(app, ["report", str(folder / "out"), "--json"])
    assert told.exit_code == 0, told.output
    written = json.loads(told.stdout)
    assert [plan["name"] for plan in written["plans"]] == ["small"]
    page = Path(written["report"]).read_text()
    best = next(line for line in result.stdout.splitlines() if line.startswith("best: "))
    assert page.count("data:image/svg") == 2 and "<h2" in page and "A small one" in page and escape(best) in page
    shown = CliRunner().invoke(app, ["report", str(folder / "out" / "small")])
    assert shown.exit_code == 0 and best in shown.stdout


@pytest.mark.parametrize(
    ("content", "words"), [("{", "expected JSON"), ('{"title": "t"}', "expected recipes, forgetful")]
)
def test_a_broken_description_of_a_plan(tmp_path, content, words):
    (tmp_path / "decoder.json").write_text(content)
    one_line(CliRunner().invoke(app, ["report", str(tmp_path)]), words)


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
    one_line(result, "tokens or more for passkey, got 64")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("edges", "512", "edges: expected a list of numbers, got 512"),
        ("edges", "[0, 128, x]", "edges: expected a list of numbers"),
        ("edges", "[0, 128.5, 256]", "edges: expected a list of numbers"),
        ("edges", "[0, 1, 256]", "edges: expected two tokens or more in the first bucket, got 1"),
        ("recipes", "plain", "recipes: expected a list of words, got 'plain'"),
        ("documents", "many", "documents: expected a whole number, got 'many'"),
        ("retrieval", "{tasks: [passkey], lengths: 512}", "retrieval: lengths: expected a list of numbers, got 512"),
        ("retrieval", "{tasks: [passkey], lengths: [512], examples: two}", "examples: expected a whole number"),
    ],
)
def test_mistakes_in_a_plan(run, key, value, words):
    plan = re.sub(f"^{key}: .*\n", "", PLAN, flags=re.MULTILINE) + f"{key}: {value}\n"
    (run[0] / "wrong.yaml").write_text(plan)
    with pytest.raises(ValueError, match=re.escape(words)):
        load(run[0] / "wrong.yaml")


def test_status_says_how_far_it_is(run, tmp_path):
    folder, _ = run
    words = ["study", "status", str(folder / "small.yaml"), "--out"]
    assert "6 of 6 cells done, 0 failed, 0 missing" in CliRunner().invoke(app, [*words, str(folder / "out")]).stdout
    asked = "retrieval: {tasks: [passkey, words], lengths: [512], depths: [0, 50]}"
    (folder / "asked.yaml").write_text(f"{PLAN}{asked}\n")
    words[2] = str(folder / "asked.yaml")
    assert "0 of 15 cells done, 0 failed, 15 missing" in CliRunner().invoke(app, [*words, str(tmp_path)]).stdout


def evaluate(*words):
    return CliRunner().invoke(app, ["evaluate", *map(str, words)])


def one_line(result, words):
    assert result.exit_code == 2, result.output
    assert words in result.stderr and len(result.stderr.strip().splitlines()) == 1, result.stderr


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluated")
    (folder / "texts").mkdir()
    for name in "ab":
        (folder / "texts" / f"{name}.txt").write_text(f"def {name}(x):\n    return x + 1  # and so on\n\n\n" * 9)
    words = (SHIPPED / "llama", "--data", folder / "texts", "--length", "1.25x", "--out", folder / "out")
    return folder, words, evaluate(*words, "--save", folder / "saved")


def test_one_command_finds_the_best_recipe_and_saves_it(evaluated):
    folder, _, result = evaluated
    assert result.exit_code == 0, result.output
    results = folder / "out" / "shipped-llama-320"
    board = json.loads((results / "leaderboard.json").read_text())
    assert board["edges"] == [0, 128, 256, 320] and board["texts"] == 2
    assert {row["recipe"] for row in board["rows"]} == {"plain", *usual(256, 320)}
    plain = next(row for row in board["rows"] if row["recipe"] == "plain")
    row = next(row for row in board["rows"] if row["inside"] is not None and row["inside"] <= 0.5)
    ratios = f"{row['perplexity'][-1] / plain['perplexity'][-1]:.3g} of plain's", f"{row['ratio']:.3f} of its"
    assert f"best: {row['recipe']}: " in result.stdout and all(words in result.stdout for words in ratios)
    assert any((other["inside"] or 0) > 0.5 for other in board["rows"])
    for other in board["rows"]:
        lost = f"{other['recipe']}: {other['inside'] or 0:+.2f} % of perplexity inside" in result.stdout
        assert lost == ((other["inside"] or 0) > 0.5)

    card = (folder / "saved" / "README.md").read_text()
    assert row["recipe"] in card and "| 256–320 |" in card and "Nothing was measured" not in card

    model = ise.load(folder / "saved", dtype=torch.float32)
    tokenizer = perplexity.load_tokenizer(str(folder / "saved"))
    texts = [tokenizer((folder / "texts" / f"{name}.txt").read_text())["input_ids"][:320] for name in "ab"]
    losses = [perplexity.token_losses(model, torch.tensor(text))[255:].double().mean() for text in texts]
    assert exp(sum(losses) / 2) == pytest.approx(row["perplexity"][-1], rel=1e-5)


def test_what_is_measured_is_kept_and_the_best_is_one_of_those_asked_for(evaluated, tmp_path, monkeypatch):
    _, words, _ = evaluated
    monkeypatch.setattr(perplexity, "cell", None)
    monkeypatch.setattr(leaderboard, "write", lambda folder: [])
    monkeypatch.setattr(figures, "perplexity", lambda results: [])
    again = evaluate(*words, "--recipe", "infoscale", "--recipe", "rerope:window=128", "--save", tmp_path / "saved")
    assert again.exit_code == 0 and "best: rerope:window=128: " in again.stdout, again.output
    assert "rerope:window=128" in str(ise.hf.observe.recipe_of(ise.load(tmp_path / "saved")))
    monkeypatch.undo()
    one_line(evaluate(tmp_path, *words[1:]), "expected a model, got no config.json")


def test_a_saved_model_is_measured_under_its_own_recipe(evaluated, tmp_path):
    folder = evaluated[0]
    board = json.loads((folder / "out" / "shipped-llama-320" / "leaderboard.json").read_text())
    row = next(row for row in board["rows"] if row["inside"] is not None and row["inside"] <= 0.5)
    saved, text = str(folder / "saved"), str(folder / "texts")
    asked = ["perplexity", saved, text, "--recipe", "plain", "--edges", "0,128,256,320", "--out", str(tmp_path)]
    assert CliRunner().invoke(app, asked).exit_code == 0
    data = json.loads((tmp_path / "perplexity.json").read_text())
    assert data["rows"][0]["perplexity"] == pytest.approx(row["perplexity"], rel=1e-5)
    one_line(CliRunner().invoke(app, [*asked[:4], "infoscale", *asked[5:]]), "already extended with")
    one_line(CliRunner().invoke(app, ["calibrate", saved, text, "--length", "320"]), "already extended with")


def test_all_columns_are_shown_in_a_narrow_terminal(evaluated, monkeypatch):
    words = evaluated[1]
    monkeypatch.setenv("COLUMNS", "60")
    result = evaluate(*words)
    assert result.exit_code == 0 and "cost" in result.stdout and re.search(r" 1\.00 *\n", result.stdout), result.stdout


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"--data": None}, "data: expected text"),
        ({"--data": "nowhere.txt"}, "nowhere.txt"),
        ({"--data": "no/where"}, "data: expected a file, a folder or a glob, got 'no/where'"),
        ({"--length": "256"}, "length: expected more than the training length of 256 tokens, got 256"),
        ({"--length": "far"}, "length: expected tokens such as 8192, or 4x"),
        ({"--length": "4x"}, "texts: expected documents of 1024 tokens or more, got none"),
        ({"--recipe": "rerop:window=8"}, "did you mean 'rerope'"),
        ({"--recipe": "cosine:alpha=4"}, "was not trained with cosine"),
        ({"--documents": "0"}, "documents: expected 1 or more"),
        ({"--device": "cpuu"}, "device: expected one that is there"),
        ({"--save": "."}, "save: expected a folder that is not there yet"),
        ({"--positions": "3"}, "--positions: not for a model of type llama"),
    ],
)
def test_mistakes_end_in_one_line(evaluated, tmp_path, given, words):
    asked = {"--data": evaluated[0] / "texts", "--length": "320", "--out": tmp_path} | given
    options = [word for pair in asked.items() if pair[1] is not None for word in pair]
    one_line(evaluate(SHIPPED / "llama", *options), words)
    assert not list(tmp_path.iterdir())


@pytest.fixture
def rows(tmp_path):
    """Texts in tokens, for models without a tokenizer."""
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"input_ids": row}) for row in tokens(2, 100).tolist()))
    return path


def test_usual_recipes_that_a_model_refuses_are_left_out(rows, tmp_path):
    dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    llama(rope_parameters=dynamic).save_pretrained(tmp_path / "model")
    name, config, said = str(tmp_path / "model"), llama().config, []
    folder, _ = run_plan(single(name, config, [str(rows)], [], "80", device="cpu"), tmp_path, said.append)
    assert any(words.startswith("left out rerope:window=32: ") for words in said), said
    data = json.loads((folder / "perplexity.json").read_text())
    assert {"plain", "infoscale"} <= set(data["config"]["recipes"]) < {"plain", *usual(TRAINED, 80)}
    with pytest.raises(ValueError, match="dynamic"):
        run_plan(single(name, config, [str(rows)], ["rerope:window=32"], "80", device="cpu"), tmp_path)


def test_learned_positions_end(rows, tmp_path):
    config = GPT2Config(vocab_size=97, n_positions=64, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "model")
    result = evaluate(tmp_path / "model", "--data", rows, "--length", 80, "--out", tmp_path)
    one_line(result, "gpt2: expected a model that can read 80 tokens, got 64 learned positions")


def test_usual_recipes_stay_well_within_angles_that_the_model_has_seen():
    assert "selfextend:window=4096,group=14" in usual(8192, 32768)
    assert "yarn:factor=1.5+yarntemperature:factor=1.5" in usual(64, 96)
    for trained, length in ((4, 5), (64, 65), (256, 4096), (1000, 3333)):
        position = ise.Recipe.parse(next(r for r in usual(trained, length) if r.startswith("selfextend"))).position
        query, key = position.far(torch.tensor(length - 1), torch.tensor(0), 1)
        assert query - key <= 3 * trained / 4
        perplexity.check_recipes(usual(trained, length))


def test_lengths_and_their_buckets(rows, tmp_path):
    assert [_tokens(text, 256) for text in ("4x", "4×train", "1.5x", "300")] == [1024, 1024, 384, 300]
    assert _edges(256, 1024) == (0, 128, 256, 512, 1024)
    assert _edges(256, 520) == (0, 128, 256, 520)  # eight tokens alone would say nothing
    plan = single(str(tmp_path), llama().config, [str(rows)], ["infoscale"], "2x", passkeys=True, dtype="float32")
    assert plan.retrieval.recipes == plan.perplexity.recipes == ("plain", "infoscale")
    assert plan.retrieval.tasks == ("passkey",) and plan.retrieval.lengths == (128,)
    assert plan.decoder == {"model": str(tmp_path), "dtype": "float32"} and not plan.usual


def test_the_verdict(tmp_path):
    """Perplexities at the end: plain 50; a window 10; all of the text seen 20; one that costs too much inside, 5."""
    last = {"plain": 50.0, "sink:size=8": 10.0, "rerope:window=8": 20.0, "yarn:factor=2": 5.0, "few": 1.0}
    cost = {"plain": None, "yarn:factor=2": 3.0}
    data = {
        "model": {"name": "m"},
        "train_length": 16,
        "config": {"edges": [0, 16, 32]},
        "texts": [{"sha256": "a"}, {"sha256": "b"}],
        "rows": [{"recipe": r, "texts": 2 - (r == "few"), "perplexity": [4.0, x]} for r, x in last.items()],
        "inside": [{"recipe": r, "percent": cost.get(r, 0.1)} for r in last if r != "plain"],
        "cells": [{"recipe": r, "text": "a", "seconds": 1.0} for r in last],
    }
    (tmp_path / "perplexity.json").write_text(json.dumps(data))
    assert leaderboard.best(tmp_path, last) == "sink:size=8"
    assert leaderboard.best(tmp_path, ["plain", "yarn:factor=2"]) is None
    told = leaderboard.verdict(tmp_path, last, ["sink:size=8"])
    assert "best: sink:size=8: perplexity 10.00 at 16–32, 0.2 of plain's 50.00" in told[0].plain
    assert "2.500 of its 4.00" in told[0].plain and "all of the text: rerope:window=8: " in told[1].plain
    assert [(line.plain[:21], line.style) for line in told[2:]] == [("yarn:factor=2: +3.00 ", "red")]
    assert "best: plain: no recipe" in leaderboard.verdict(tmp_path, ["plain", "yarn:factor=2"])[0].plain
    shown = Console(width=140, file=StringIO())
    shown.print(leaderboard.table(tmp_path))
    assert "few (1 of 2 texts)" in shown.file.getvalue()


def test_a_recipe_that_costs_far_more_than_others_leaves_them_to_be_seen():
    rows = [{"recipe": str(x), "perplexity": [4.0, 5.0], "inside": x} for x in (None, 0.2, 1218.0)]
    figure = leaderboard._figure({"rows": rows, "edges": [0, 16, 32], "model": {"name": "m"}})
    right = figure.axes[1]
    assert right.get_xlim()[1] < 20 and [text.get_text() for text in right.texts] == ["+1218 %"]
