"""Several fillers in one file, and the plain model inside its training length beside every row."""

from __future__ import annotations

import json
import re

import pytest
import torch
from typer.testing import CliRunner

from isentrope.cli import app
from isentrope.data.tasks import Haystack, load_filler
from isentrope.data.tasks.vocabulary import FILLER
from isentrope.evaluation.prompts import PromptFormat
from isentrope.evaluation.results import list_failures
from isentrope.evaluation.retrieval import RetrievalConfig, measure_retrieval
from isentrope.evaluation.retrieval_summary import summarize_examples, summarize_retrieval
from isentrope.models.tokenizer import build_character_tokenizer, make_causal_tokenizer
from isentrope.report.figures.retrieval import draw_heatmaps
from isentrope.report.tables.retrieval import build_retrieval_table, format_retrieval, read_retrieval
from tests.fixtures.commands import assert_one_line
from tests.fixtures.models import llama

HAYSTACKS = {"sentences": Haystack.from_texts(), "book": Haystack.from_texts(["It rained. Nobody came. " * 9])}


@pytest.fixture(scope="module")
def letters():
    return make_causal_tokenizer(build_character_tokenizer([FILLER + "".join(map(chr, range(32, 127)))]))


def knowing(letters, knows):
    """A model that is right where `knows(prompt)` says so."""
    model = llama(vocab_size=len(letters))

    def forward(input_ids, logits_to_keep, **options):
        logits = torch.zeros(1, logits_to_keep, len(letters))
        text = letters.decode(input_ids[0])
        if knows(text, len(text)):
            known = letters(text[-logits_to_keep + 1 :] + right(text)[-1])["input_ids"]
            logits[0, torch.arange(logits_to_keep), torch.tensor(known)] = 9
        return type("Output", (), {"logits": logits})

    model.forward = forward
    return model


def right(text):
    """The number hidden in the text, whose last digit the model is not given."""
    return re.search(r"(?:pass key|code for the [\w ]+) is the number (\d+)\.", text)[1]


def config(**others):
    settings = {"lengths": (900,), "depths": (0, 50, 100), "examples": 1, "score": "forced"}
    return RetrievalConfig(("plain", "infoscale:train_length=64"), ("passkey",), **(settings | others))


def measure(model, letters, wanted, out, haystacks=HAYSTACKS):
    path = measure_retrieval(model, "tiny", PromptFormat.from_tokenizer(letters), haystacks, wanted, out)
    return path, json.loads(path.read_text())


@pytest.mark.figures
def test_fillers_and_the_ceiling(letters, tmp_path):
    model = knowing(letters, lambda text, length: length < 700 or "Nobody came" in text)
    path, data = measure(model, letters, config(fillers=("sentences", "book"), ceiling=600), tmp_path)
    assert len(data["cells"]) == 2 * 3 * 2 + 3 * 2 and data["config"]["ceiling"] == 600
    assert set(data["fillers"]) == set(data["texts"]) == {"sentences", "book"}
    # the ceiling's length has no row of its own, and no recipe but the plain model
    assert {row["length"] for row in data["rows"]} == {900} and len(data["rows"]) == len(data["totals"]) == 2
    for row in (*data["rows"], *data["totals"]):
        assert row["score"] == 0.5 and row["interval"]["clusters"] == 6 and row["interval"]["low"] == 0
        assert row["ceiling"]["score"] == 1 and row["ceiling"]["length"] == 600
    by_filler = {(row["recipe"], row["filler"]): row for row in data["filler_rows"]}
    assert [by_filler["plain", filler]["recalled"] for filler in ("sentences", "book")] == [0, 1]
    assert by_filler["plain", "book"]["interval"]["low"] is None  # three clusters
    table = build_retrieval_table(path)
    assert [column.header for column in table.columns] == ["task", "recipe", "900", "plain at 600"]
    _, rows = format_retrieval(*read_retrieval(path))
    assert rows[0] == ["passkey", "plain", "50 [0–100]", "100 [61–100]"]
    assert "clustered by filler and depth" in table.caption and "inside its training length" in table.caption
    drawn = draw_heatmaps(path)
    assert "(plain at 600: 100)" in next(p for p in drawn if p.suffix == ".svg").read_text().replace("&#x", "")


def test_more_fillers_are_added_and_what_is_there_stays(letters, tmp_path):
    model = knowing(letters, lambda text, length: True)
    one, _ = measure(model, letters, config(ceiling=600), tmp_path, HAYSTACKS["sentences"])
    before = json.loads(one.read_text())["cells"]
    path, data = measure(model, letters, config(fillers=("book", "noise")), tmp_path)
    assert data["cells"][: len(before)] == before and data["config"]["fillers"] == ["sentences", "book", "noise"]
    assert data["config"]["ceiling"] == 600  # of the earlier run
    # not all fillers were measured at the ceiling
    assert data["rows"][0]["ceiling"] is None and data["rows"][0]["interval"]["fillers"] == 3
    assert list_failures(path, config().recipes, config(fillers=("book",)).cells) == []
    other = {"sentences": HAYSTACKS["book"]}
    with pytest.raises(ValueError, match="other examples"):
        measure(model, letters, config(), tmp_path, other)
    with pytest.raises(ValueError, match="a text for each of sentences, book, got one alone"):
        measure(model, letters, config(fillers=("sentences", "book")), tmp_path / "new", HAYSTACKS["book"])


def test_a_ceiling_too_short_for_a_task_is_left_out(letters, tmp_path):
    model = knowing(letters, lambda text, length: True)
    wanted = RetrievalConfig(("plain",), ("passkey", "niah_multikey_1"), (900,), (50,), 1, score="forced", ceiling=400)
    _, data = measure(model, letters, wanted, tmp_path, HAYSTACKS["sentences"])
    ceilings = {row["task"]: row["ceiling"] for row in data["rows"]}
    assert ceilings["passkey"]["score"] == 1 and ceilings["niah_multikey_1"] is None
    assert data["totals"][0]["ceiling"] is None and data["totals"][0]["tasks"] == 2


def test_tasks_with_their_own_text_are_measured_once(letters):
    wanted = config(fillers=("sentences", "book"))
    cells = RetrievalConfig(wanted.recipes, ("passkey", "vt", "cwe"), (4000,), (0,), fillers=wanted.fillers).cells
    assert cells == [
        ("passkey", 4000, 0, "sentences"), ("passkey", 4000, 0, "book"),
        ("vt", 4000, None, "noise"), ("cwe", 4000, None, "list"),
    ]  # fmt: skip


def test_answers_are_counted_one_by_one():
    examples = [
        {"answer": 9, "likeliest": 7, "recalled": 0.5, "logprob": -2.0, "tokens": 90},
        {"answer": 9, "likeliest": 8, "recalled": 0.25, "logprob": -1.0, "tokens": 91},
    ]
    four = summarize_examples(examples, "fourneedles")
    assert four["recalled"] == 0.375 and four["passed"] == 1 and four["forced"] == 0  # passed with two of four
    assert summarize_examples(examples, "niah_multiquery")["passed"] == 0
    # files of earlier versions have no numbers of single answers
    old = [{key: value for key, value in example.items() if key != "recalled"} for example in examples]
    assert summarize_examples(old, "multivalue")["recalled"] == 0


def test_tasks_have_the_same_weight_in_totals():
    def cell(task, scores, depth=None):
        examples = [{"answer": 1, "likeliest": 1, "recalled": s, "logprob": 0.0, "tokens": 9} for s in scores]
        keys = {"recipe": "plain", "task": task, "length": 64, "depth": depth, "filler": "noise", "failed": None}
        return keys | {"examples": examples}

    cells = [cell("passkey", [1, 1], 0), cell("passkey", [1, 1], 50), cell("vt", [0])]
    total = summarize_retrieval({"config": {"score": "forced", "lengths": [64]}, "cells": cells})["totals"][0]
    assert total["score"] == 0.5 and total["tasks"] == 2 and total["interval"]["low"] is None


def test_the_command(letters, tmp_path, monkeypatch):
    folder, out = tmp_path / "model", tmp_path / "out"
    llama(vocab_size=len(letters), max_position_embeddings=450).save_pretrained(folder)
    letters.save_pretrained(folder)
    (tmp_path / "book.txt").write_text("It rained. Nobody came. " * 20)
    words = f"retrieval {folder} --recipe plain --lengths 800 --depths 50 --examples 1 --score forced --out {out}"
    words += f" --tasks facts1,niah_single_2 --filler noise --filler book={tmp_path / 'book.txt'}"
    done = CliRunner().invoke(app, words.split())
    assert done.exit_code == 0, done.output
    assert "plain at 450" in done.output and "No interval is claimed" in done.output and "all tasks" in done.output
    data = json.loads((out / "retrieval.json").read_text())
    assert data["texts"]["noise"] == load_filler("noise").sha256
    ceilings = {cell["task"] for cell in data["cells"] if cell["length"] == 450}
    assert ceilings == {"niah_single_2"}  # facts need more
    monkeypatch.setattr("isentrope.report.figures.retrieval.draw_heatmaps", lambda path: [])
    skipped = CliRunner().invoke(app, [*words.split(), "--out", str(tmp_path / "skipped"), "--no-ceiling"])
    assert skipped.exit_code == 0 and "plain at" not in skipped.output
    assert_one_line(CliRunner().invoke(app, [*words.split(), "--filler", "essays"]), "filler: expected one of")
    assert_one_line(
        CliRunner().invoke(app, [*words.split(), "--tasks", "rules"]), "unknown 'rules'; did you mean 'ruler'?"
    )
