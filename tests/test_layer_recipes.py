"""A recipe per layer: its text, its data, which layers have which recipe, and what is refused."""

from __future__ import annotations

import copy
import json
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import isentrope as ise
from isentrope import LayerRecipes, Recipe
from isentrope.calibration.config import CalibrationConfig
from isentrope.evaluation.ranking import forgets
from isentrope.evaluation.recipe_texts import pair_with_untempered
from isentrope.experiments.masked_plan import _expand_methods
from isentrope.experiments.plan_schema import Method
from isentrope.models.gau.config import build_gau_recipe
from isentrope.recipe.layer_sets import LayerSet
from isentrope.recipe.layers import add_parts
from isentrope.training.config import build_config
from tests.fixtures import gau
from tests.fixtures.recipes import examples, named
from tests.test_recipe_text import far_laws, one_law

MIXED = "layers:0-2=rope+infoscale:train_length=64;3-=rerope:window=40+share:reference=24"


@st.composite
def layer_recipes(draw):
    """Layers 0 … 11 dealt out at random, with or without the rest of them."""
    count = draw(st.integers(1, 4))
    owners = draw(st.lists(st.integers(0, count - 1), min_size=12, max_size=12))
    groups = {}
    for layer, owner in enumerate(owners):
        groups.setdefault(owner, []).append(layer)
    recipes = [draw(one_law | far_laws) for _ in groups]
    pairs = list(zip(groups.values(), recipes, strict=True))
    last = draw(named(["given", "open", "rest"]))
    if last == "open":
        pairs += [("12-", draw(one_law))]
    return LayerRecipes([*pairs, ("*", draw(one_law))] if last == "rest" else pairs)


@examples(30)
@given(layer_recipes())
def test_recipes_per_layer_survive_text_and_json(recipe):
    assert Recipe.parse(str(recipe)) == recipe
    assert str(Recipe.parse(str(recipe))) == str(recipe)
    assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict(), allow_nan=False))) == recipe


@pytest.mark.parametrize(
    ("text", "written"),
    [
        (MIXED, MIXED),
        (" layers : 3- = rerope:window=40+share:reference=24 ; 0 - 2=rope+infoscale:train_length=64", MIXED),
        ("layers:*=plain;7,5,0=rope", "layers:0,5,7=rope;*=plain"),
        ("layers:2,0,1=rope;4-4=nope;3,5-=pi:factor=2", "layers:0-2=rope;3,5-=pi:factor=2;4=nope"),
        ("layers:0=(window:size=4|sink:size=2)&causal;1-=rope", None),
    ],
)
def test_text_is_brought_into_order(text, written):
    recipe = Recipe.parse(text)
    assert isinstance(recipe, LayerRecipes) and Recipe.parse(str(recipe)) == recipe
    assert written is None or str(recipe) == written


def test_each_layer_has_its_recipe():
    recipe = Recipe.parse("layers:0,2=rope;*=plain;3-4=rerope:window=40+infoscale+share", train_length=64)
    law = ise.InfoScale(64)
    assert [str(recipe.for_layer(i)) for i in (0, 1, 2, 5)] == ["rope", "plain", "rope", "plain"]
    assert recipe.for_layer(4) == Recipe(position=ise.ReRoPE(40), temperature=law, share=ise.Share(reference=24))
    same = LayerRecipes({"3-4": recipe.for_layer(3), 0: "rope", "*": Recipe()})
    assert same != recipe and LayerRecipes({"3-4": recipe.for_layer(3), "0,2": "rope", "*": Recipe()}) == recipe
    assert recipe.parts == (ise.RoPE(), *recipe.for_layer(3).parts) and recipe.learned == ()
    for other in (copy.deepcopy(recipe), pickle.loads(pickle.dumps(recipe))):
        assert other == recipe and hash(other) == hash(recipe)
    assert recipe != Recipe() and recipe != "plain" and "'0,2': Recipe(" in repr(recipe)


def test_lengths_are_filled_in_for_each():
    recipe = Recipe.parse("layers:0=rerope:window=40+share;1=rerope:window=40+logn:train_length=100+share")
    filled = recipe.fill_train_length(64)
    assert [filled.for_layer(i).share.reference for i in (0, 1)] == [24, 60]
    assert [recipe.resolve().for_layer(i).share.reference for i in (0, 1)] == [None, 60]


def test_tables_of_layers_count_those_of_the_model():
    recipe = LayerRecipes({"0": "plain", "1-": Recipe(temperature=ise.Power(64, [[0.0], [1.0], [2.0]]))})
    assert recipe.for_layer(2).temperature.gamma == (2.0,)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("layers:0-2=rope;2-=nope;1=nope", r"layers given twice: 1-2; keep one recipe for each"),
        ("layers:0-4=rope;2-7=nope;6-=nope", r"layers given twice: 2-4,6-7;"),
        ("layers:0-2,1=rope", r"layers given twice: 1 in '0-2,1'"),
        ("layers:*=rope;*=nope", r"layers given twice: \*"),
        ("layers:", "expected layers=recipe, as in 'layers:0-2=sink:size=1024;3-=rerope.*got ''"),
        ("layers:0-2", "expected layers=recipe"),
        ("layers:0=", "expected layers=recipe.*got '0='"),
        ("layers:0=rope;", "expected layers=recipe"),
        ("layers:-1=rope", r"expected indices such as '3', '0-2', '3-' to the last.*got '-1'"),
        ("layers:3-1=rope", r"expected indices.*got '3-1'"),
        ("layers:0,*=rope", r"expected indices.*got '0,\*'"),
        ("layers:=rope", r"expected indices.*got ''"),
        ("layers:0=layers:1=rope", "expected one recipe for these layers, got a recipe per layer, layers:1=rope"),
        ("rope+layers:0=rope", "expected a recipe per layer as the whole text"),
        ("layers:0=rope+layers:1=nope", "expected a recipe per layer as the whole text"),
        ("layers:0=ropes", "unknown part 'ropes'"),
        ("layers:0=infoscale", "missing option 'train_length'"),
        ("layers:0=(rope;1=nope", "matching brackets"),
    ],
)
def test_wrong_texts(text, message):
    with pytest.raises(ValueError, match=message):
        Recipe.parse(text)


@pytest.mark.parametrize(
    "data",
    [
        {"layers": []},
        {"layers": "0-2"},
        {"layers": [{"position": {"name": "rope"}}]},
        {"layers": [["0-2", "rope"]]},
        {"layers": [{"layers": "0"}], "position": {"name": "rope"}},
        {"layers": [{"layers": [{"layers": "0"}]}]},
        {"layers": [{"layers": "0", "rope": {}}]},
        {"layers": [{"layers": True}]},
    ],
)
def test_wrong_data(data):
    with pytest.raises(ValueError, match=r"layers|unknown key"):
        Recipe.from_dict(data)


@pytest.mark.parametrize("value", ["0-2", 3, [0, 1, 5], "0,4-", "*"])
def test_sets_are_written_as_they_are_read(value):
    layers = LayerSet.parse(value)
    assert LayerSet.parse(str(layers)) == layers


@pytest.mark.parametrize(
    ("text", "count", "message"),
    [
        ("layers:0-2=rope;3-=nope", 3, "layers that the model does not have: 3-; its own are 0 … 2"),
        ("layers:0-6=rope", 4, "layers that the model does not have: 4-6; its own are 0 … 3"),
        ("layers:0-2,9=rope;3-=nope", 4, None),  # twice, at parse time
        ("layers:0,2=rope", 5, r"layers without a recipe: 1,3-4; add them, or '\*=plain' for all the rest"),
        ("layers:0-2=rope;*=nope", 3, r"\* stands for none of the model's, which are 0 … 2"),
        ("layers:0-2=rope;3-=nope", 4, ""),
        ("layers:0-2=rope;*=nope", 12, ""),
    ],
)
def test_every_layer_of_a_model_has_one_recipe(text, count, message):
    if message == "":
        Recipe.parse(text).check_layers(range(count))
    else:
        with pytest.raises(ValueError, match=message or "layers given twice: 9"):
            Recipe.parse(text).check_layers(range(count))


def test_a_layer_without_recipe_is_named():
    with pytest.raises(ValueError, match=r"layers without a recipe: 3; add it"):
        Recipe.parse("layers:0-2=rope").for_layer(3)


def test_one_call_takes_the_recipe_of_one_layer():
    q = torch.randn(1, 2, 6, 8)
    recipe = Recipe.parse(MIXED)
    for given_recipe in (recipe, MIXED):
        with pytest.raises(ValueError, match=r"that of one layer.*pass recipe.for_layer\(i\)"):
            ise.attention(q, q, q, given_recipe)
    for name in ("score", "position", "temperature", "mask", "share", "temperatures", "cacheable"):
        with pytest.raises(ValueError, match="got a recipe per layer"):
            getattr(recipe, name)
    assert ise.attention(q, q, q, recipe.for_layer(1)).shape == q.shape


def test_parts_are_added_to_every_layer():
    assert add_parts("rope", ["cosine:alpha=4"]) == "rope+cosine:alpha=4"
    assert add_parts("layers:0=rope;1-=nope", ["logn", "cosine"]) == "layers:0=rope+logn+cosine;1-=nope+logn+cosine"
    entry = Method(method="m", recipe="layers:0=rope;*=nope", cosine="c")
    rows = _expand_methods("plan", [entry], ("C.S.",))
    assert rows[0].recipe == "layers:0=rope+cosine:alpha=128;*=nope+cosine:alpha=128"
    config = build_config("train", None, 4.0, recipe="layers:0=rope;*=nope")
    assert config.recipe == "layers:0=rope+cosine:alpha=4;*=nope+cosine:alpha=4"


def test_comparisons_take_recipes_per_layer():
    bare, law = "layers:0=rope;*=nope", "layers:0=rope+infoscale;*=nope"
    assert list(pair_with_untempered([bare, law])) == [(law, bare)]
    assert forgets("layers:0=window:size=4;*=sink:size=4") and not forgets("layers:0=window:size=4;*=rope")
    with pytest.raises(ValueError, match="expected one for all layers, whose law is fitted"):
        CalibrationConfig(64, "layers:0=rope;*=nope")


def test_gau_takes_a_recipe_per_layer():
    text = "layers:0=rerope:window=8+infoscale;*=softmaxplus"
    recipe = build_gau_recipe(text, 16, 8)
    assert recipe.for_layer(0).position == ise.ReRoPE(8, layout="interleaved")
    assert recipe.for_layer(2).position == ise.RoPE(layout="interleaved")
    model, ids = gau.model(recipe=text, max_position_embeddings=16), gau.tokens()
    one, other = (
        gau.model(recipe=text, max_position_embeddings=16) for text in ("rerope:window=8+infoscale", "softmaxplus")
    )
    other.gau_alpha.encoder.layer[0].gau.recipe = one.gau_alpha.encoder.layer[0].gau.recipe
    with torch.no_grad():
        expected = other(input_ids=ids).logits
        assert torch.equal(model(input_ids=ids).logits, expected)
        assert not torch.allclose(one(input_ids=ids).logits, expected)
    assert Recipe.from_dict(model.config.recipe) == recipe
    with pytest.raises(ValueError, match="layers that the model does not have: 3-"):
        gau.model(recipe="layers:0-2=rope;3-=nope")
