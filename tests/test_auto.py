"""The rule behind the recipe `auto`."""

from __future__ import annotations

import pytest

from isentrope.recipe import Recipe
from isentrope.recipe.auto import ModelFacts, choose_recipe, is_auto, read_auto_length


@pytest.mark.parametrize(
    ("facts", "length", "recipe", "words"),
    [
        (ModelFacts(8192), "1x", "plain", "inside the training length of 8192"),
        (ModelFacts(8192), "2x", "rerope:window=4096+share", "below 4 times"),
        (ModelFacts(8192), 32768, "rerope:window=4096+share+retrieve:blocks=16,size=128", "from 4 times"),
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
