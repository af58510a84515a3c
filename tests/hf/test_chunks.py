"""Dual Chunk Attention and STRING on a model whose training length fills in their options."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

import isentrope as ise
from tests.fixtures.generation import ROUNDED, extended, greedy, in_chunks, padded, rows_of, whole
from tests.fixtures.models import llama, tokens

RECIPES = ["dualchunk", "dualchunk:chunk=20+share", "string"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_generation_does_not_depend_on_the_cache(recipe):
    model, ids = extended(recipe), tokens(2, 50)
    expected = greedy(model, ids, use_cache=False)
    assert torch.equal(greedy(model, ids), expected)
    assert torch.equal(greedy(model, ids, cache_implementation="static"), expected)
    assert torch.equal(greedy(model, ids, prefill_chunk_size=17), expected)
    assert_close(in_chunks(model, ids, (19, 1, 23, 7)), whole(model, ids), **ROUNDED)


@pytest.mark.parametrize("recipe", RECIPES)
def test_padded_rows_are_as_each_row_alone(recipe):
    model, rows = extended(recipe), rows_of(90, 22, 70)
    ids, mask, _ = padded(rows, "left")
    together = whole(model, ids, attention_mask=mask)
    for row, out in zip(rows, together, strict=True):
        assert_close(out[-len(row) :], whole(model, row[None])[0], **ROUNDED)


def test_options_come_from_the_training_length():
    model = llama()
    ise.extend(model, "dualchunk+share")
    page = ise.describe(model)
    assert page.recipe == "dualchunk:chunk=48+share:reference=24"
    # 2^20 is 16 past a multiple of L = 40, so that 2^20 - 64 is 32 past one, two chunks before
    assert page.layers[0].distances[:2] == (1.0, 48.0 - 32)
    assert max(d for d in page.layers[0].distances if d is not None) <= 48
    ise.restore(model)
    ise.extend(model, "string")
    assert ise.describe(model).recipe == "string:shift=21"


def test_a_short_row_is_the_plain_model():
    model, ids = llama(), tokens(2, 48)
    expected, shorter = model(ids).logits, model(ids[:, :21]).logits
    with ise.extended(model, "dualchunk"):
        assert torch.equal(model(ids).logits, expected)
    with ise.extended(model, "string"):
        assert torch.equal(model(ids[:, :21]).logits, shorter)
        assert not torch.allclose(model(ids).logits, expected, atol=1e-4), "it acts inside the training length"
