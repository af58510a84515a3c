"""The rule behind the recipe `auto`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from isentrope.recipe import Recipe
from isentrope.recipe.auto import ModelFacts, choose_recipe, format_retrieve, is_auto, read_auto_length

RESULTS = Path(__file__).parents[1] / "docs/results"


@pytest.mark.parametrize(
    ("facts", "length", "recipe", "words"),
    [
        (ModelFacts(8192), "1x", "plain", "inside the training length of 8192"),
        (ModelFacts(8192), "2x", "rerope:window=4096+share", "below 4 times"),
        (ModelFacts(8192), 32768, "rerope:window=4096+retrieve:blocks=16,size=128", "at most 2334 far keys"),
        (ModelFacts(256), "16x", "rerope:window=128+share+retrieve:blocks=16,size=16", "half of the training length"),
        (ModelFacts(2048), "4x", "rerope:window=1024+share+retrieve:blocks=16,size=64", "no temperature"),
        (ModelFacts(2048, is_causal=False), "4x", "rerope:window=1024+share", "looks ahead"),
        (ModelFacts(2048, (512, None)), "8x", "rerope:window=1024+share+retrieve:blocks=16,size=64", "keep it"),
        (ModelFacts(2048, (1500, None)), "8x", "rerope:window=1024+share", "no far keys to choose from"),
        (ModelFacts(2048, (512, 1500)), "8x", "plain", "every layer has a window of its own, of 1500 keys"),
    ],
)
def test_what_is_chosen_and_why(facts, length, recipe, words):
    choice = choose_recipe(facts, length)
    assert choice.recipe == recipe and any(words in reason for reason in choice.reasons), choice.reasons
    parts = [] if recipe == "plain" else recipe.split("+")
    assert all(any(reason.startswith(f"{part}: ") for reason in choice.reasons) for part in parts)
    Recipe.parse(recipe, train_length=facts.train_length)


def test_the_raw_files_bear_out_why_far_keys_are_chosen():
    lower, higher, more = set(), set(), set()  # than with share alone: perplexity, and passkeys found
    for path in RESULTS.glob("frontier/*/leaderboard.json"):
        board = json.loads(path.read_text(encoding="utf-8"))
        rows = {row["recipe"]: row for row in board["rows"] if row["ratio"] is not None}
        near = f"rerope:window={(board['train_length'] or 0) // 2}"
        if (alone := rows.get(f"{near}+share:beta=0.5")) is None:
            continue  # answers alone
        part = f"{near}+{format_retrieve(board['train_length'])}"
        chosen = rows.get(f"{part}+share:beta=0.5") or rows[part]
        (lower if chosen["ratio"] < alone["ratio"] else higher).add(path.parent.name)
        if alone["retrieved"] is not None:
            assert chosen["retrieved"]["hits"] > alone["retrieved"]["hits"]
            more.add(path.parent.name)
    assert more == {"gemma-131k", "gemma-262k", "smollm2-131k", "smollm2-32k", "tinyllama-32k", "tinyllama-8k"}
    assert lower == more | {"llama", "stories15M-connected"} and higher == {"stories15M"}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: choose_recipe(ModelFacts(None), 4096), "states the training length, got None; name a recipe"),
        (lambda: choose_recipe(ModelFacts(64, is_rotary=False), "2x"), "expected a model with rotary embeddings"),
        (lambda: choose_recipe(ModelFacts(64), "far"), "expected tokens such as 8192, or 4x"),
        (lambda: read_auto_length("auto"), "needs the length that the model is to read; write auto:length=4x"),
        (lambda: read_auto_length("auto:window=4"), "expected auto:length=4x"),
        (lambda: read_auto_length("auto:length=4x", 4096), "expected one length, got length=4096 too; leave one out"),
    ],
)
def test_what_cannot_be_chosen(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_texts_of_auto():
    assert is_auto("auto") and is_auto("auto:length=4x") and not is_auto("rerope:window=4") and not is_auto(None)
    assert read_auto_length("auto:length=4x") == "4x" and read_auto_length("auto", 4096) == 4096
