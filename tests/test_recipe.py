"""Recipes made from text and data: the mode their learned parts are in, and input that is not meant well."""

from __future__ import annotations

import torch
from torch.testing import assert_close

import isentrope as ise
from isentrope import Recipe, attention
from isentrope.models import GAUAlphaConfig, GAUAlphaForMaskedLM

CLEX = "clex:dim=8,train_length=4,max_factor=4"


def test_learned_parts_of_a_recipe_in_words_are_ready_for_use():
    text = Recipe.parse(CLEX + "+ssmax:heads=2")
    data = Recipe.from_dict(text.to_dict())
    for recipe in (text, data):
        assert [part.training for part in recipe.learned] == [False, False]
    q = torch.randn(1, 2, 13, 8, dtype=torch.float64)
    own = ise.CLEX(8, 4, max_factor=4).eval()
    own.load_state_dict(text.position.state_dict())
    expected = attention(q, q, q, Recipe(position=own), causal=True)
    assert_close(attention(q, q, q, Recipe(position=text.position), causal=True), expected, rtol=0, atol=0)
    # 13 keys are read at t = 4, which a part in training mode would not know
    assert not torch.allclose(attention(q, q, q, "rope", causal=True), expected)
    assert_close(attention(q, q, q, CLEX, causal=True), expected)  # untrained: the same whatever its weights


def test_a_new_gau_trains_its_learned_parts():
    config = GAUAlphaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=16, attention_key_size=8, num_hidden_layers=2, recipe="clex"
    )
    model = GAUAlphaForMaskedLM(config)
    learned = [module for module in model.modules() if isinstance(module, ise.CLEX)]
    assert len(learned) == 2 and all(module.training for module in learned)
    assert not any(module.training for module in model.eval().modules())
