"""`isentrope evaluate`: recipes of a causal model in order, the best one saved."""

from __future__ import annotations

import json
import re
from io import StringIO
from math import exp, log

import pytest
import torch
from rich.console import Console
from transformers import GPT2Config, GPT2LMHeadModel
from typer.testing import CliRunner

import isentrope as ise
from isentrope.cli import app
from isentrope.evaluation import perplexity
from isentrope.evaluation.evaluate import choose_edges, parse_longer_length, usual_recipes
from isentrope.evaluation.loading import load_tokenizer
from isentrope.evaluation.ranking import choose_best, finds_fewer, forgets, rank_recipes
from isentrope.evaluation.recipe_texts import check_recipes
from isentrope.experiments.causal_plan import plan_causal_evaluation
from isentrope.experiments.checkpoints import SHIPPED_MODELS
from isentrope.experiments.runner import run_plan
from isentrope.report.figures.leaderboard import draw_board
from isentrope.report.html import recipes
from isentrope.report.tables import leaderboard
from isentrope.report.tables.numbers import format_perplexity
from tests.fixtures.commands import assert_one_line
from tests.fixtures.models import TRAINED, llama, tokens


def evaluate(*words):
    return CliRunner().invoke(app, ["evaluate", *map(str, words)])


def chosen(board):
    """The first row that does no harm and sees all of the text."""
    harmless = (row for row in board["rows"] if row["inside"] is not None and row["inside"] <= 0.5)
    return next(row for row in harmless if not forgets(row["recipe"]))


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluated")
    (folder / "texts").mkdir()
    for name in "ab":
        (folder / "texts" / f"{name}.txt").write_text(f"def {name}(x):\n    return x + 1  # and so on\n\n\n" * 9)
    words = (SHIPPED_MODELS / "llama", "--data", folder / "texts", "--length", "1.25x", "--out", folder / "out")
    words += ("--no-retrieval",)
    return folder, words, evaluate(*words, "--save", folder / "saved")


def test_one_command_finds_the_best_recipe_and_saves_it(evaluated):
    folder, _, result = evaluated
    assert result.exit_code == 0, result.output
    results = folder / "out" / "shipped-llama-320"
    board = json.loads((results / "leaderboard.json").read_text())
    assert board["edges"] == [0, 128, 256, 320] and board["texts"] == 2
    assert {row["recipe"] for row in board["rows"]} == {"plain", *usual_recipes(256, 320)}
    plain = next(row for row in board["rows"] if row["recipe"] == "plain")
    row = chosen(board)
    there = f"where plain has {format_perplexity(plain['perplexity'][-1])}"
    assert f": {row['recipe']}: perplexity" in result.stdout and there in result.stdout
    assert f"estimate: {2 * len(board['rows'])} passes of 320 tokens, about" in result.stderr
    assert board["rows"][0]["difference"] is None and board["rows"][1]["difference"]["low"] is not None
    assert any((other["inside"] or 0) > 0.5 for other in board["rows"])
    for other in board["rows"]:
        why = f"left out, its perplexity inside the training length is {other['inside'] or 0:.2f} % higher"
        lost = f"{other['recipe']}: {why}" in result.stdout
        assert lost == ((other["inside"] or 0) > 0.5)

    card = (folder / "saved" / "README.md").read_text()
    assert row["recipe"] in card and "| 256–320 |" in card and "Nothing was measured" not in card

    model = ise.load(folder / "saved", dtype=torch.float32)
    tokenizer = load_tokenizer(str(folder / "saved"))
    texts = [tokenizer((folder / "texts" / f"{name}.txt").read_text())["input_ids"][:320] for name in "ab"]
    losses = [perplexity.token_losses(model, torch.tensor(text))[255:].double().mean() for text in texts]
    assert exp(sum(losses) / 2) == pytest.approx(row["perplexity"][-1], rel=1e-5)


def test_what_is_measured_is_kept_and_the_best_is_one_of_those_asked_for(evaluated, tmp_path, monkeypatch):
    _, words, _ = evaluated
    monkeypatch.setattr(perplexity, "measure_text", None)
    monkeypatch.setattr(recipes, "write_leaderboard", lambda folder: [])
    monkeypatch.setattr(recipes, "draw_perplexity", lambda results: [])
    again = evaluate(*words, "--recipe", "infoscale", "--recipe", "rerope:window=128", "--save", tmp_path / "saved")
    assert again.exit_code == 0 and "saving with rerope:window=128" in again.stderr, again.output
    assert "estimate: 0 passes" in again.stderr
    assert "rerope:window=128" in str(ise.hf.capture.get_recipe(ise.load(tmp_path / "saved")))
    monkeypatch.undo()
    assert_one_line(evaluate(tmp_path, *words[1:]), "expected a model, got no config.json")
    (tmp_path / "small.gguf").touch()
    assert_one_line(evaluate(tmp_path, *words[1:]), "got no config.json; add --gguf-file small.gguf")
    assert_one_line(evaluate(tmp_path, *words[1:], "--gguf-file", "smal.gguf"), "did you mean 'small.gguf'")


def test_a_saved_model_is_measured_under_its_own_recipe(evaluated, tmp_path):
    folder = evaluated[0]
    board = json.loads((folder / "out" / "shipped-llama-320" / "leaderboard.json").read_text())
    row = chosen(board)
    saved, text = str(folder / "saved"), str(folder / "texts")
    words = f"perplexity {saved} --data {text} --edges 0,128,256,320 --out {tmp_path} --recipe"
    assert CliRunner().invoke(app, [*words.split(), "plain"]).exit_code == 0
    data = json.loads((tmp_path / "perplexity.json").read_text())
    assert data["rows"][0]["perplexity"] == pytest.approx(row["perplexity"], rel=1e-5)
    original = ("already extended with", "; evaluate the original folder llama")
    assert_one_line(CliRunner().invoke(app, [*words.split(), "infoscale"]), *original)
    assert_one_line(CliRunner().invoke(app, ["calibrate", saved, "--data", text, "--length", "320"]), *original)
    assert_one_line(evaluate(saved, "--data", text, "--length", "320"), *original)
    retrieval = ["retrieval", saved, "--recipe", "infoscale", "--lengths", "320"]
    assert_one_line(CliRunner().invoke(app, retrieval), *original)


def test_passkeys_are_hidden_in_the_text_by_default(evaluated, tmp_path):
    text = evaluated[0] / "texts" / "a.txt"
    words = (SHIPPED_MODELS / "llama", "--data", text, "--recipe", "auto", "--out", tmp_path)
    result = evaluate(*words, "--length", "320")
    assert result.exit_code == 0 and "estimate: 14 passes of 320 tokens" in result.stderr, result.output
    data = json.loads((tmp_path / "shipped-llama-320" / "retrieval.json").read_text())
    assert data["config"]["recipes"] == ["plain", "rerope:window=128+share"] and len(data["cells"]) == 12
    assert re.search(r"\d / 6 \(", result.stdout)
    short = evaluate(*words, "--length", "270")
    assert "passkeys left out: lengths: expected" in short.stderr and "/ 6" not in short.stdout, short.output
    assert_one_line(evaluate(*words, "--length", "270", "--retrieval"), "lengths: expected")


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
    assert_one_line(evaluate(SHIPPED_MODELS / "llama", *options), words)
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
    config, said = llama().config, []
    decoder = {"model": str(tmp_path / "model"), "device": "cpu"}
    plan = plan_causal_evaluation(decoder, config, [str(rows)], [], "80")
    run_plan(plan, tmp_path, notify=said.append)
    assert any(words.startswith("left out rerope:window=32: ") for words in said), said
    data = json.loads((tmp_path / plan.name / "perplexity.json").read_text())
    assert {"plain", "infoscale"} <= set(data["config"]["recipes"]) < {"plain", *usual_recipes(TRAINED, 80)}
    with pytest.raises(ValueError, match="dynamic"):
        run_plan(plan_causal_evaluation(decoder, config, [str(rows)], ["rerope:window=32"], "80"), tmp_path)


def test_learned_positions_end(rows, tmp_path):
    config = GPT2Config(vocab_size=97, n_positions=64, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "model")
    result = evaluate(tmp_path / "model", "--data", rows, "--length", 80, "--out", tmp_path, "--no-retrieval")
    assert_one_line(result, "gpt2: expected a model that can read 80 tokens, got 64 learned positions")


def test_usual_recipes_stay_well_within_angles_that_the_model_has_seen():
    assert "selfextend:window=4096,group=14" in usual_recipes(8192, 32768)
    assert "yarn:factor=1.5+yarntemperature:factor=1.5" in usual_recipes(64, 96)
    for trained, length in ((4, 5), (64, 65), (256, 4096), (1000, 3333)):
        position = ise.Recipe.parse(
            next(r for r in usual_recipes(trained, length) if r.startswith("selfextend"))
        ).position
        query, key = position.far(torch.tensor(length - 1), torch.tensor(0), 1, (length, length))
        assert query - key <= 3 * trained / 4
        check_recipes(usual_recipes(trained, length))


def test_lengths_and_their_buckets(rows, tmp_path):
    assert [parse_longer_length(text, 256) for text in ("4x", "4×train", "1.5x", "300")] == [1024, 1024, 384, 300]
    assert choose_edges(256, 1024) == (0, 128, 256, 512, 1024)
    assert choose_edges(256, 520) == (0, 128, 256, 520)  # eight tokens alone would say nothing
    decoder = {"model": str(tmp_path), "dtype": "float32", "gguf_file": None}
    plan = plan_causal_evaluation(decoder, llama().config, [str(rows)], ["infoscale"], "2x", passkeys=True)
    assert plan.retrieval.recipes == plan.perplexity.recipes == ("plain", "infoscale")
    assert plan.retrieval.tasks == ("passkey",) and plan.retrieval.lengths == (128,) and not plan.optional_retrieval
    assert plan.fillers == {plan.retrieval.fillers[0]: (rows,)}
    assert plan_causal_evaluation(decoder, llama().config, [str(rows)], [], "2x").optional_retrieval
    assert plan_causal_evaluation(decoder, llama().config, [str(rows)], [], "2x", passkeys=False).retrieval is None
    plan_for_auto = plan_causal_evaluation(decoder, llama().config, [str(rows)], ["auto"], "2x")
    assert plan_for_auto.perplexity.recipes == ("plain", "rerope:window=32+share")
    assert plan.decoder == {"model": str(tmp_path), "dtype": "float32"} and not plan.skip_unsupported


def losses(last):
    """Sums over two buckets of 15 and 16 tokens, whose perplexity in the second is `last`."""
    return [15 * log(4.0), 16 * log(last)]


def test_the_verdict(tmp_path):
    """Perplexities at the end: plain 50; a window 10; all of the text seen 20; one that costs too much inside, 5."""
    last = {"plain": 50.0, "sink:size=8": 10.0, "rerope:window=8": 20.0, "yarn:factor=2": 5.0, "few": 1.0, "rerope": 21}
    cost = {"plain": None, "yarn:factor=2": 3.0}
    spread = {"a": 1.0, "b": 1.5}  # of texts, the same for all recipes but the last
    data = {
        "model": {"name": "m"},
        "train_length": 16,
        "config": {"edges": [0, 16, 32]},
        "texts": [{"sha256": "a"}, {"sha256": "b"}],
        "rows": [{"recipe": r, "texts": 2 - (r == "few"), "perplexity": [4.0, x]} for r, x in last.items()],
        "inside": [{"recipe": r, "percent": cost.get(r, 0.1)} for r in last if r != "plain"],
        "cells": [
            {"recipe": r, "text": text, "seconds": 1.0, "loss": losses(x if r == "rerope" else x * factor)}
            for r, x in last.items()
            for text, factor in spread.items()
        ],
    }
    (tmp_path / "perplexity.json").write_text(json.dumps(data))
    board, window = rank_recipes(tmp_path), ["sink:size=8"]
    assert choose_best(board, last).recipe == "sink:size=8"
    assert choose_best(board, last, window) == ("rerope:window=8", ("rerope",), ())
    assert choose_best(board, ["plain", "rerope:window=8"]) == ("rerope:window=8", (), ())
    assert choose_best(board, ["plain", "yarn:factor=2"]) is None
    differences = {row["recipe"]: row["difference"] for row in board["rows"]}
    assert differences["plain"]["low"] == pytest.approx(4900) and differences["plain"]["high"] == pytest.approx(4900)
    said = leaderboard.summarize_ranking(tmp_path, last, window)
    assert said[0].plain.startswith("chosen: rerope:window=8: perplexity 20.00 at 16–32, where plain has 50.00;")
    assert said[1].plain == "may be as good (by a 95 % interval over 2 texts): rerope"
    assert said[2].plain.startswith("sink:size=8: perplexity 10.00, lower, but it forgets")
    assert [(line.plain[:23], line.style) for line in said[3:]] == [("yarn:factor=2: left out", "red")]
    alone = leaderboard.summarize_ranking(tmp_path, ["plain", "rerope:window=8"])
    assert alone[0].plain.startswith("best: rerope:window=8: ") and alone[0].plain.endswith("length +0.10 %")
    assert "chosen: plain: no recipe" in leaderboard.summarize_ranking(tmp_path, ["plain", "yarn:factor=2"])[0].plain
    shown = Console(width=140, file=StringIO())
    shown.print(leaderboard.build_leaderboard_table(tmp_path))
    assert "few (1 of 2 texts)" in shown.file.getvalue()


def test_passkeys_decide_where_they_differ(tmp_path):
    found = {"rerope:window=8": [0, 0, 0, 0, 0, 1], "selfextend:window=8": [1, 1, 1, 1, 0, 1], "plain": [0] * 6}
    last = {"rerope:window=8": 9.0, "selfextend:window=8": 10.0, "plain": 50.0}
    data = {
        "model": {"name": "m"},
        "train_length": 16,
        "config": {"edges": [0, 16, 32]},
        "texts": [{"sha256": "a"}],
        "rows": [{"recipe": r, "texts": 1, "perplexity": [4.0, x]} for r, x in last.items()],
        "inside": [{"recipe": r, "percent": 0.1} for r in last if r != "plain"],
        "cells": [{"recipe": r, "text": "a", "seconds": 1.0, "loss": losses(x)} for r, x in last.items()],
    }
    (tmp_path / "perplexity.json").write_text(json.dumps(data))
    cells = [
        {"recipe": r, "task": "passkey", "length": 32, "depth": depth, "filler": "text", "examples": [{"recalled": x}]}
        for r, scores in found.items()
        for depth, x in enumerate(scores)
    ]
    rows = [
        {"recipe": r, "task": "passkey", "length": 32, "recalled": sum(x) / 6, "likeliest": 0} for r, x in found.items()
    ]
    config = {"score": "forced", "lengths": [32]}
    (tmp_path / "retrieval.json").write_text(json.dumps({"config": config, "rows": rows, "cells": cells}))
    board = rank_recipes(tmp_path)
    assert choose_best(board, last) == ("selfextend:window=8", (), ("rerope:window=8",))
    ranked = {row["recipe"]: row for row in board["rows"]}
    assert not finds_fewer(ranked["selfextend:window=8"], ranked["rerope:window=8"])
    assert not finds_fewer(ranked["plain"], ranked["rerope:window=8"])  # one more may be chance
    heads, lines = leaderboard.format_rows(board)
    assert dict(zip(heads, lines[1], strict=True))["passkey 32"] == "5 / 6 (44–97 %)"
    assert dict(zip(heads, lines[1], strict=True))["above"] == "+11.1 %"  # no interval of one text
    said = [line.plain for line in leaderboard.summarize_ranking(tmp_path, last)]
    assert "left out, fewer passkeys found: rerope:window=8" in said


def test_a_recipe_that_costs_far_more_than_others_leaves_them_to_be_seen():
    rows = [{"recipe": str(x), "perplexity": [4.0, 5.0], "inside": x} for x in (None, 0.2, 1218.0)]
    figure = draw_board({"rows": rows, "edges": [0, 16, 32], "model": {"name": "m"}})
    right = figure.axes[1]
    assert right.get_xlim()[1] < 20 and [text.get_text() for text in right.texts] == ["+1218 %"]
