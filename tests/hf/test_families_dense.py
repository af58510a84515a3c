"""Every supported family: long inputs as a dense computation has them."""

from __future__ import annotations

import copy

import pytest
import torch

import isentrope as ise
from tests.fixtures.dense import (
    OTHERS,
    POSITIONS,
    Dense,
    against_dense,
    dense,
    first_and_window,
    in_cache,
    infoscale,
    rerope,
)
from tests.fixtures.families import FAMILIES, LONG, ROTATING, STREAM, close, logits
from tests.fixtures.models import tokens
from tests.fixtures.turns import in_turns


@pytest.mark.parametrize("name", FAMILIES)
def test_the_oracle_is_the_model(name):
    """With nothing changed, the dense computation gives the plain model's logits."""
    family = FAMILIES[name]
    model = family.model()
    expected = logits(model, tokens(1, LONG))
    whole = Dense(lambda i, j, seen: i - j) if family.rope is not None else Dense()
    with dense(family, copy.deepcopy(model).double(), whole) as oracle:
        close(logits(oracle, tokens(1, LONG)).float(), expected, 1e-4)


@pytest.mark.parametrize(("name", "text"), in_turns(ROTATING, list(POSITIONS), 3))
def test_position_recipes_match_dense(name, text):
    against_dense(name, text, POSITIONS[text])


def test_position_recipe_reaches_windowed_layers_where_there_are_no_others():
    family = FAMILIES["gemma3"]
    model = family.model(family.config(layer_types=["sliding_attention"] * 2))
    ids = tokens(2, LONG)
    plain = logits(model, ids)
    with ise.extended(model, "rerope:window=16"):
        assert (logits(model, ids) - plain).abs().max() > 1e-3 * plain.abs().max()


@pytest.mark.parametrize(("name", "text"), in_turns(FAMILIES, list(OTHERS), 2))
def test_temperatures_and_windows_match_dense(name, text):
    against_dense(name, text, OTHERS[text])


@pytest.mark.parametrize("name", FAMILIES)
def test_sink_recipe_matches_dense(name):
    """Distances within the cache for causal models; a model that looks ahead has no cache, and keeps its own."""
    measured = None if FAMILIES[name].bidirectional else in_cache
    against_dense(name, STREAM, Dense(measured, first_and_window(4, 24)))


UNTRAINED = {
    "nope": Dense(lambda i, j, seen: 0 * (i - j)),
    "alibi": Dense(
        lambda i, j, seen: 0 * (i - j),
        bias=lambda i, j: -torch.tensor([1 / 4, 1 / 16, 1 / 64, 1 / 256])[:, None, None] * (i - j).abs(),
    ),
    "cosine:alpha=16": Dense(alpha=16),
    "cosine:alpha=16+rerope:window=32+infoscale:train_length=32": Dense(rerope(32), tau=infoscale(32), alpha=16),
}


@pytest.mark.parametrize("text", UNTRAINED)
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_neox", "granite", "glm", "modernbert"])
def test_untrained_parts_match_dense(name, text):
    with pytest.warns(UserWarning, match="was not trained with"):
        against_dense(name, text, UNTRAINED[text], allow_untrained=True)
