"""`evaluate`: recipes of a model compared on texts, from Python."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoConfig

from isentrope.data.tasks import SENTENCES, load_filler
from isentrope.evaluation.evaluate import evaluate, plan_comparison, prepare_inputs
from isentrope.evaluation.texts import collect_texts, iterate_documents
from isentrope.models.tokenizer import build_character_tokenizer, make_causal_tokenizer
from isentrope.recipe import Recipe
from tests.fixtures.models import TRAINED, llama, tokens

RECIPES = ["rerope:window=16", "sink:sinks=4,size=40"]


def test_recipes_of_a_loaded_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, texts = llama(), tokens(2, 120).tolist()
    actual = evaluate(model, texts, RECIPES, 100)
    assert not list(tmp_path.iterdir()) and actual.path is None and actual.failures == ()
    assert {row["recipe"] for row in actual.rows} == {"plain", *RECIPES}
    last = [row["perplexity"][-1] for row in actual.rows]
    assert last == sorted(last) and actual.leaderboard["train_length"] == TRAINED
    kept = evaluate(model, texts, RECIPES, 100, out=tmp_path / "out")
    assert kept.path == tmp_path / "out" and kept.recipe == actual.recipe
    assert [row["perplexity"] for row in kept.rows] == [row["perplexity"] for row in actual.rows]
    told = json.loads((tmp_path / "out" / "decoder.json").read_text())
    assert told["forgetful"] == [RECIPES[1]] and told["recipes"] == ["plain", *RECIPES]


@pytest.mark.parametrize("recipes", [RECIPES[0], Recipe.parse(RECIPES[0]), [Recipe.parse(RECIPES[0])]])
def test_one_recipe_and_recipes_that_are_no_text(recipes):
    assert {row["recipe"] for row in evaluate(llama(), tokens(2, 120).tolist(), recipes, 100).rows} == {
        "plain",
        RECIPES[0],
    }


def test_a_model_by_name_reads_files_and_strings(tmp_path):
    letters = "It rained. Nobody came. " * 8
    llama().save_pretrained(tmp_path / "model")
    tokenizer = make_causal_tokenizer(build_character_tokenizer([letters], 97))
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "a.txt").write_text(letters)
    model = str(tmp_path / "model")
    by_file = evaluate(model, tmp_path / "a.txt", ["infoscale"], "2x")
    by_text = evaluate(model, letters, ["infoscale"], "2x")
    assert [row["perplexity"] for row in by_file.rows] == [row["perplexity"] for row in by_text.rows]
    assert by_file.leaderboard["edges"] == [0, 32, 64, 128]
    wanted = plan_comparison(AutoConfig.from_pretrained(model), "model", ["infoscale"], "2x", passkeys=True)
    haystacks = {"text-1": load_filler(SENTENCES)}
    wanted, inputs = prepare_inputs(wanted, (), lambda: tokenizer, lambda: haystacks)
    assert wanted.retrieval.fillers == tuple(inputs.haystacks) == ("text-1",)  # asked for, they are hidden in it too


def test_passkeys_in_other_texts_are_kept_but_not_counted(tmp_path):
    """A folder keeps what was measured before; a leaderboard is about the texts of its own run."""
    letters, others = "It rained. Nobody came. " * 30, "Nobody came. It was a dry day in May. " * 20
    llama().save_pretrained(tmp_path / "model")
    make_causal_tokenizer(build_character_tokenizer([letters, others, "0123456789"], 97)).save_pretrained(
        tmp_path / "model"
    )
    model, out = str(tmp_path / "model"), tmp_path / "out"
    evaluate(model, letters, ["infoscale"], "8x", retrieval=True, out=out)
    board = evaluate(model, others, ["rerope:window=16"], "8x", retrieval=True, out=out)
    answers = {row["recipe"]: row["answers"] for row in board.rows}
    assert set(answers) == {"plain", "rerope:window=16"}
    assert len(answers["plain"]) == 6 and answers["plain"].keys() == answers["rerope:window=16"].keys()
    alone = evaluate(model, others, ["rerope:window=16"], "8x", retrieval=True)
    for row, expected in zip(board.rows, alone.rows, strict=True):
        assert row["answers"] == expected["answers"] and row["retrieval"] == expected["retrieval"]
    again = evaluate(model, letters, ["infoscale"], "8x", retrieval=True, out=out)  # nothing is measured anew
    assert len(again.rows[0]["answers"]) == 6


def test_what_texts_may_be(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.txt").write_text("two")
    names = [document.text for document in iterate_documents([str(tmp_path / "*.txt"), "some words", tmp_path])]
    assert names == ["one", "two", "some words", "one", "two"]
    (tmp_path / "two words").mkdir()
    (tmp_path / "two words" / "c.txt").write_text("three")
    assert [document.text for document in iterate_documents(str(tmp_path / "two words" / "*.txt"))] == ["three"]
    assert [document.text for document in iterate_documents(["Who came?", "a\nb"])] == ["Who came?", "a\nb"]
    assert [document.tokens for document in iterate_documents([1, 2, 3])] == [(1, 2, 3)]
    assert [document.tokens for document in iterate_documents([[1, 2], [3]])] == [(1, 2), (3,)]
    assert [document.tokens for document in iterate_documents(torch.tensor([1, 2]))] == [(1, 2)]
    for wrong in (None, [None], [[0.5]]):
        with pytest.raises(ValueError, match="text 1: expected a string, a path or a list of token ids, got"):
            list(iterate_documents(wrong))
    with pytest.raises(ValueError, match=r"expected a file, a folder or a glob, got 'nowhere\.txt'"):
        list(iterate_documents("nowhere.txt"))
    with pytest.raises(ValueError, match="texts: expected token ids for a model that does not name its folder"):
        collect_texts("some words", "", 4, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((["infoscale"], 64), "length: expected more than the training length of 64"),
        ((["rerop:window=3"], 100), "did you mean"),
        ((["infoscale"], 200), "texts: expected documents of 200 tokens or more"),
    ],
)
def test_what_cannot_be_compared(arguments, message):
    with pytest.raises(ValueError, match=message):
        evaluate(llama(), tokens(2, 120).tolist(), *arguments)


def test_tokens_that_a_model_does_not_have_are_refused():
    with pytest.raises(ValueError, match=r"text 2: expected tokens 0 … .*, got 5 … 5000; take the model's own"):
        evaluate(llama(), [[1] * 100, [5, 5000] * 50], "infoscale", 100)


def test_a_text_given_twice_counts_once():
    """Twice, it would narrow intervals, and recipes would seem to have failed on one of the two."""
    rows = [[1, 2, 3, 4], [5, 6, 7, 8], [1, 2, 3, 4], [9, 9, 9, 9]]
    with pytest.warns(UserWarning, match="is left out: the same text as"):
        actual = collect_texts(rows, "", 4, 3)
    assert [text.tokens[0] for text in actual] == [1, 5, 9]
