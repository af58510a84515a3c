"""Recipes survive text and JSON."""

import json
from dataclasses import replace
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

import isentrope as ise
from isentrope import Recipe
from tests.fixtures.recipes import examples, named

counts = named(["visible", "sequence", "position"])
lengths_st = st.integers(4, 10**7)
factors = st.floats(1, 1e9) | st.integers(1, 64)
rotary = {
    "base": st.floats(1.5, 1e9),
    "layout": named(["half", "interleaved"]),
    "rotary_dim": st.none() | st.integers(1, 64).map(lambda m: 2 * m),
}
law = {"clamp": st.booleans(), "count": counts}
exponents = st.floats(-4, 4, allow_subnormal=False) | st.integers(-4, 4)
tables = st.one_of(
    exponents,
    st.lists(exponents, min_size=1, max_size=3),
    st.lists(st.lists(exponents, min_size=2, max_size=2), min_size=1, max_size=3),
)
originals = st.none() | st.integers(1, 10**6)
position_parts = st.one_of(
    st.builds(ise.RoPE, **rotary),
    st.builds(ise.PI, factors, **rotary),
    st.builds(ise.NTK, factors, st.booleans(), originals, **rotary),
    st.builds(ise.YaRN, factors, originals, beta_fast=st.floats(1, 64), beta_slow=st.floats(0.1, 2), **rotary),
    st.builds(ise.ReRoPE, st.integers(1, 5000), **rotary),
    st.builds(ise.LeakyReRoPE, st.integers(1, 5000), factors, **rotary),
    st.builds(ise.SelfExtend, st.integers(1, 5000), st.integers(1, 64), **rotary),
    st.builds(ise.DPE, st.integers(1, 5000), st.lists(st.integers(1, 64), min_size=1, max_size=8), **rotary),
    st.builds(ise.LongRoPE, st.lists(factors, min_size=1, max_size=8), original_length=originals, **rotary),
    st.builds(ise.LongRoPE, **rotary),
    st.builds(ise.CoPE, st.none() | st.integers(0, 64), originals, **rotary),
    st.builds(ise.Resonance, factors, originals, **rotary),
    st.builds(ise.ALiBi),
    st.builds(ise.NoPE),
)


@st.composite
def fitted(draw):
    steps = draw(st.lists(st.integers(1, 10**3), min_size=1, max_size=4))
    grid = list(accumulate(steps, lambda n, step: n + max(n // 1000 + 1, step)))
    values = st.floats(0, 1e3, allow_subnormal=False) | st.integers(0, 3)
    table = st.lists(values, min_size=len(grid), max_size=len(grid))
    for _ in range(draw(st.integers(0, 2))):
        table = st.lists(table, min_size=2, max_size=2)
    return ise.Fitted(grid, draw(table), clamp=draw(st.booleans()), count=draw(counts))


temperature_parts = st.one_of(
    st.builds(ise.Constant, **law),
    st.builds(ise.LogLength, **law),
    st.builds(ise.SoftmaxPlus, st.floats(1.1, 1e6), **law),
    st.builds(ise.LogN, lengths_st, **law),
    st.builds(ise.Power, lengths_st, st.none() | tables, **law),
    st.builds(ise.YaRNTemperature, lengths_st, **law),
    st.builds(ise.YaRNTemperature, factor=factors, **law),
    st.builds(ise.InfoScale, lengths_st, st.floats(-20, 1), **law),
    st.builds(ise.InfoScaleExact, lengths_st, st.floats(-20, 1), **law),
    st.builds(ise.Llama4, st.integers(1, 10**5), st.floats(0, 2), **law),
    fitted(),
)
mask_parts = st.recursive(
    st.one_of(
        st.builds(ise.Full),
        st.builds(ise.Causal),
        st.builds(ise.Window, st.integers(1, 10**6)),
        st.builds(ise.Sink, st.integers(0, 9), st.integers(1, 10**6)),
        st.builds(ise.Lambda, st.integers(0, 9), st.integers(1, 10**6)),
    ),
    lambda part: st.tuples(part, part, st.booleans()).map(lambda x: x[0] & x[1] if x[2] else x[0] | x[1]),
    max_leaves=6,
)
score_parts = st.builds(ise.Dot) | st.builds(ise.Cosine, st.floats(1e-3, 1e4))
one_law = st.builds(
    Recipe, st.none() | score_parts, st.none() | position_parts, st.none() | temperature_parts, st.none() | mask_parts
)
near_law, far_law = (
    temperature_parts.map(lambda part, keys=keys: replace(part, keys=keys)) for keys in ("near", "far")
)
far_laws = st.builds(
    Recipe,
    st.none() | score_parts,
    st.builds(ise.ReRoPE, st.integers(1, 5000), **rotary) | st.builds(ise.SelfExtend, st.integers(1, 99), st.just(2)),
    st.one_of(st.none(), temperature_parts, near_law, far_law, st.tuples(far_law, near_law)),
    st.none() | mask_parts,
    st.none() | st.builds(ise.Share, tables, st.none() | st.integers(1, 10**6), count=named(["far", "visible"])),
)


@examples(60)
@given(one_law | far_laws)
def test_recipes_survive_text_and_json(recipe):
    assert Recipe.parse(str(recipe)) == recipe
    assert str(Recipe.parse(str(recipe))) == str(recipe)
    assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict(), allow_nan=False))) == recipe


@examples(40)
@given(
    st.builds(
        ise.CLEX, st.integers(2, 8).map(lambda m: 2 * m), st.integers(1, 99), st.integers(1, 9), st.none() | st.just(3)
    ),
    st.builds(ise.SSMax, st.integers(1, 9), st.integers(4, 99), st.booleans(), count=counts),
)
def test_recipes_with_learned_parts_survive_text_and_json(clex, ssmax):
    recipe = Recipe(position=clex, temperature=ssmax)
    for back in (Recipe.parse(str(recipe)), Recipe.from_dict(json.loads(json.dumps(recipe.to_dict())))):
        assert back.to_dict() == recipe.to_dict()
        for name, value in back.position.state_dict().items():
            assert value.shape == clex.state_dict()[name].shape
        assert [p.shape for p in back.temperature.parameters()] == [p.shape for p in ssmax.parameters()]


@pytest.mark.parametrize(
    "text",
    [
        "plain",
        "yarn:factor=16+infoscale:train_length=64+cosine:alpha=128",
        "selfextend:window=1024,group=8+logn:train_length=2048",
        "rerope:window=64+logn:train_length=64,keys=near+power:train_length=64,gamma=(0.1,-0.2,),keys=far+causal+share:beta=1",
        "rerope:window=64+share:beta=((1,0.5,),(0,-1,),),reference=64,count=visible",
        "rope+window:size=64&sink:size=8|lambda:window=16",
        "rope+(window:size=64|causal)&sink:size=8",
    ],
)
def test_recipe_text_comes_back_unchanged(text):
    written = str(Recipe.parse(text))
    if "|" in text and "&" in text:  # brackets are written wherever & and | meet
        assert Recipe.parse(written) == Recipe.parse(text)
    else:
        assert written == text


def test_and_binds_tighter_than_or():
    mask = Recipe.parse("window:size=4&causal|sink:size=2").mask
    assert mask == (ise.Window(4) & ise.Causal()) | ise.Sink(4, 2)
    assert mask != ise.Window(4) & (ise.Causal() | ise.Sink(4, 2))


def test_a_pair_is_near_before_far_in_any_order():
    near, far = ise.LogN(64, keys="near"), ise.SSMax(4, keys="far")
    text = "rerope:window=64+logn:train_length=64,keys=near+ssmax:heads=4,keys=far"
    for pair in ((near, far), [far, near]):
        recipe = Recipe(position=ise.ReRoPE(64), temperature=pair)
        assert recipe.temperature == recipe.temperatures == (near, far) and str(recipe) == text
        assert recipe.learned == (far,) and recipe.parts[1:] == (near, far)
    swapped = "ssmax:heads=4,keys=far+rerope:window=64+logn:train_length=64,keys=near"
    assert str(Recipe.parse(swapped)) == text
    data = Recipe.parse(text).to_dict()
    assert [part["keys"] for part in data["temperature"]] == ["near", "far"]
    assert str(Recipe.from_dict({**data, "temperature": data["temperature"][::-1]})) == text


def test_one_temperature_may_be_given_as_a_pair_of_one_and_none_as_an_empty_one():
    law = ise.LogN(64)
    assert Recipe(temperature=[law]) == Recipe(temperature=law) and Recipe(temperature=()) == Recipe()
    assert Recipe(temperature=law).temperatures == (law,) and Recipe().temperatures == ()
