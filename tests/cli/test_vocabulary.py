"""One vocabulary: the same names everywhere, old spellings with a notice, and JSON alone on stdout."""

from __future__ import annotations

import json
import sys
from io import BytesIO, TextIOWrapper
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from isentrope.cli import app
from isentrope.cli.lengths import resolve_lengths
from isentrope.cli.options import join_data, name_recipe, name_results, prefer_new
from isentrope.cli.output import Output
from isentrope.data.corpus import Document
from isentrope.data.partition import split_held_out
from isentrope.evaluation.texts import tokenize_documents
from isentrope.report.figures.frontier import choose_marker
from isentrope.report.load import find_result_folders
from isentrope.report.tables.numbers import format_perplexity
from isentrope.training.trainer import choose_interval
from tests.fixtures.commands import assert_one_line
from tests.fixtures.models import llama, tokens


def run(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def list_commands(group, path=()):
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from list_commands(command, (*path, name))
        else:
            yield (*path, name), command


COMMANDS = {" ".join(path): command for path, command in list_commands(typer.main.get_command(app))}
OLD_NAMES = {"--text", "--texts", "--longest", "--corpus", "--file", "--output"}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_prints_json_and_uses_the_shared_names(name):
    options = {option: param for param in COMMANDS[name].params for option in param.opts if option.startswith("--")}
    assert "--json" in options
    assert all(options[old].hidden for old in OLD_NAMES & set(options))
    if any(not options[old].hidden for old in ("--lengths", "--length") if old in options):
        assert "--longest" not in options or options["--longest"].hidden


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("vocabulary")
    llama().save_pretrained(path / "model")  # trained at 64
    (path / "rows.jsonl").write_text("\n".join(json.dumps({"input_ids": row}) for row in tokens(2, 300).tolist()))
    return path


def test_perplexity_follows_the_model_and_prints_json_alone(folder, monkeypatch):
    monkeypatch.chdir(folder)
    result = run("perplexity", "model", "--data", "rows.jsonl", "--recipe", "plain", "--device", "cpu", "--json")
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    assert printed["config"]["edges"] == [0, 32, 64, 128, 256] and printed["rows"][0]["recipe"] == "plain"
    assert Path(printed["files"][0]).parent == Path("results/perplexity") / f"{folder.name}-model-256"
    assert "cells" not in printed and Path(printed["files"][0]).is_file()


def test_texts_as_arguments_work_with_a_notice(folder):
    words = ("--recipe", "plain", "--length", "100", "--edges", "0,8")
    result = run("perplexity", folder / "model", folder / "rows.jsonl", *words)
    assert result.exit_code == 2 and "write --data" in result.stderr.splitlines()[0]
    assert "edges, length: expected one of them" in result.stderr
    result = run("perplexity", folder / "model", "--data", folder / "rows.jsonl", folder / "rows.jsonl", *words)
    assert_one_line(result, "edges, length")  # as a shell expands a glob, without a notice
    assert_one_line(
        run("perplexity", folder / "model", "--recipe", "plain"), "data: expected text, got none; add --data"
    )
    usage = run("perplexity", "--help").output
    assert "more_data" not in usage and "MORE_DATA" not in usage


def test_old_options_work_with_a_notice(tmp_path, capsys):
    assert prefer_new(None, 3, "--longest", "--length") == 3
    assert prefer_new(4, 3, "--longest", "--length") == 4
    assert join_data(None, ["book.txt"], "--text") == ["book.txt"]
    assert capsys.readouterr().err.splitlines() == [
        "isentrope: --longest: deprecated, and gone in the next release; write --length",
        "isentrope: --longest: deprecated, and gone in the next release; write --length",
        "isentrope: --text: deprecated, and gone in the next release; write --data",
    ]
    assert prefer_new(4, None, "--longest", "--length") == 4 and join_data(["a"], None) == ["a"]
    assert capsys.readouterr().err == ""
    result = run("laws", "--longest", "100", "--queries", "1", "--out", tmp_path)
    assert result.exit_code == 2 and "write --length" in result.stderr and "queries" in result.stderr


def test_lengths_are_tokens_or_multiples_of_the_training_length(folder):
    model = str(folder / "model")
    assert resolve_lengths("lengths", "100,1x,2.5x", model) == [100, 64, 160]
    assert resolve_lengths("lengths", "4×", model, trained=10) == [40]
    with pytest.raises(ValueError, match="lengths: expected tokens such as 8192, or 4x the training length, got '4y'"):
        resolve_lengths("lengths", "4y", model)


def test_default_folders_name_model_and_length(tmp_path):
    (tmp_path / "base" / "best").mkdir(parents=True)
    assert name_results("inspect", str(tmp_path / "base" / "best"), 512) == Path("results/inspect/base-best-512")
    assert name_results("inspect", "owner/name", 8, "q4.gguf") == Path("results/inspect/owner-name-q4-8")
    assert name_recipe("rerope:window=64+share") == "rerope-window-64-share"
    assert name_recipe("rope+power:gamma=-0.5") != name_recipe("rope+power:gamma=0.5")
    tables = [f"rope+power:gamma=({'0.25,' * 500}{last},)" for last in (0.5, 0.75)]
    assert len({name_recipe(table) for table in tables}) == 2 and len(name_recipe(tables[0])) < 100


def test_json_is_alone_on_stdout(capsys, monkeypatch):
    with Output(as_json=True) as output:
        print("a library's own line")
        output.print("a line for people")
        output.add(loss=float("nan"), rows=[1.5, float("inf")])
        output.add_files([Path("a.json")])
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {"loss": None, "rows": [1.5, None], "files": ["a.json"]}
    assert printed.err == "a library's own line\n"
    with Output(as_json=True):  # a process that helps another has no result of its own
        pass
    assert capsys.readouterr().out == ""
    latin = TextIOWrapper(BytesIO(), "cp1252")
    monkeypatch.setattr(sys, "stdout", latin)
    with Output(as_json=True) as output:
        output.add(model="GAU-α")
    monkeypatch.undo()
    latin.flush()
    assert json.loads(latin.buffer.getvalue()) == {"model": "GAU-α"}
    result = run("report", Path(__file__).parent, "--json")
    assert_one_line(result)
    assert result.stdout == ""  # an error leaves it empty


def test_perplexities_are_never_powers_of_ten_below_a_million():
    assert [format_perplexity(x) for x in (9.876, 123.4, 1690.2, 2.5e6)] == ["9.88", "123", "1,690", "2.5e6"]


def test_validation_takes_place_a_few_times_in_a_short_run():
    assert [choose_interval(steps) for steps in (1, 4, 60, 400, 1000, 4500)] == [1, 1, 15, 50, 50, 225]


def test_raw_text_is_prepared_elsewhere(tmp_path):
    (tmp_path / "book.txt").write_text("words")
    result = run("train", "--data", tmp_path, "--out", tmp_path / "run")
    assert_one_line(result, f"isentrope data prepare {tmp_path} --out {tmp_path}-prepared, then use")
    result = run("train", "--data", tmp_path / "book.txt", "--out", tmp_path / "run")
    assert_one_line(result, f"--out {tmp_path / 'book-prepared'}")
    assert_one_line(run("train", "--out", tmp_path / "run"), "data: expected a corpus, got none")


def test_short_texts_are_counted_in_tokens():
    def tokenize(text, **options):
        return {"input_ids": list(range(len(text) // 4))}

    documents = [Document("a", "x" * 400), Document("b", "x" * 40)]
    with pytest.raises(ValueError, match=r"8192 tokens or more, got none: the longest of 2 has 100 tokens; choose"):
        tokenize_documents(documents, lambda: tokenize, 8192, 2)


def test_a_number_of_test_documents_is_suggested():
    with pytest.raises(ValueError, match=r"6 documents held out.* got 10; try --test 2"):
        split_held_out(np.eye(6), range(6))


def test_markers_of_the_frontier_say_what_a_recipe_sees():
    row = {"ratio": 1.0, "forgets": False, "recipe": "rerope:window=64+retrieve:blocks=4"}
    assert choose_marker(row, 2) == "D" and choose_marker(row | {"recipe": "rerope:window=64"}, 2) == "o"
    assert choose_marker(row | {"forgets": True}, 2) == "s" and choose_marker(row | {"ratio": 3.0}, 2) == ">"


def test_results_are_looked_for_in_folders_below(tmp_path):
    for name in ("a/plan.json", "evaluate/b/plan.json", "checkpoints/c/plan.json"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    assert find_result_folders(tmp_path, "plan.json") == [tmp_path / "a", tmp_path / "evaluate" / "b"]
    assert find_result_folders(tmp_path / "a", "plan.json") == [tmp_path / "a"]
    assert find_result_folders(tmp_path / "none", "plan.json") == []
