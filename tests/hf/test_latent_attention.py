"""Latent attention: heads whose last entries rotate, and caches that hold what keys and values are made of."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.testing import assert_close
from transformers import StaticCache

import isentrope as ise
from isentrope.hf.capture import capture_attention
from tests.fixtures.dense import Dense, dense, rerope
from tests.fixtures.families import FAMILIES, LONG, at_rest, close, logits, rotary_module
from tests.fixtures.generation import (
    BY_LENGTH,
    EXACT,
    LENGTH,
    NEAR_AND_FAR,
    ROUNDED,
    SOME,
    STEADY,
    extended,
    in_chunks,
    whole,
)
from tests.fixtures.models import TRAINED, tokens
from tests.fixtures.refusals import refused

pytestmark = pytest.mark.filterwarnings("ignore:.*was not trained with:UserWarning")
LATENT = ["deepseek_v3", "deepseek_v2"]
MSCALE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": TRAINED, "mscale": 1.0}


@pytest.mark.parametrize("recipe", STEADY)
def test_tokens_one_by_one_are_the_whole_row(recipe):
    model, ids = extended(recipe, FAMILIES["deepseek_v3"].model()), tokens(2, LENGTH)
    expected = whole(model, ids)
    assert (expected - whole(FAMILIES["deepseek_v3"].model().double(), ids)).abs().max() > 1e-2
    assert_close(in_chunks(model, ids, [70, *[1] * 6, 2, 1, 31]), expected, **EXACT)


@pytest.mark.parametrize("name", LATENT)
@pytest.mark.parametrize("recipe", [*SOME, *BY_LENGTH[:3]])
def test_a_static_cache_gives_the_same(name, recipe):
    model, ids = extended(recipe, FAMILIES[name].model()), tokens(1, LENGTH)
    parts = ids.split([80, 1, 29], 1)
    static = StaticCache(model.config, max_cache_len=LENGTH + 10)
    with torch.no_grad():
        outputs = [model(part, past_key_values=static).logits for part in parts]
    if recipe in STEADY:
        assert_close(torch.cat(outputs, 1), whole(model, ids), **EXACT)
    assert_close(torch.cat(outputs, 1), in_chunks(model, ids, [80, 1, 29]), **EXACT)


@pytest.mark.parametrize("name", LATENT)
def test_a_padded_batch_is_each_row_alone(name):
    model, ids = extended(NEAR_AND_FAR, FAMILIES[name].model()), tokens(2, LENGTH)
    mask = torch.ones_like(ids)
    mask[1, :30] = 0
    out = whole(model, ids, attention_mask=mask)
    assert_close(out[:1], whole(model, ids[:1]), **EXACT)
    assert_close(out[1:, 30:], whole(model, ids[1:, 30:]), **EXACT)


def test_a_streaming_cache_keeps_sinks_and_a_window():
    model, ids = extended("sink:sinks=4,size=24", FAMILIES["deepseek_v3"].model()), tokens(1, LENGTH)
    cache = ise.StreamingCache(model)
    with torch.no_grad():
        outputs = [model(part, past_key_values=cache).logits for part in ids.split(10, 1)]
    assert_close(torch.cat(outputs, 1), whole(model, ids), **ROUNDED)
    assert cache.layers[0].keys.shape[2] < 40


@pytest.mark.parametrize("name", LATENT)
def test_a_scaling_that_the_model_was_trained_with_stays(name):
    """DeepSeek's YaRN, whose mscale is in the scores and, where both are equal, not in cosines and sines."""
    family = FAMILIES[name]
    model = family.build_model(family.config(MSCALE | {"mscale_all_dim": 1.0}), torch.float64, 0)
    ids = tokens(1, LONG)
    plain = logits(model, ids)
    with dense(family, copy.deepcopy(model), Dense(rerope(32))) as oracle:
        expected = logits(oracle, ids)
    assert (expected - plain).abs().max() > 1e-2 * plain.abs().max()
    with ise.extended(model, "rerope:window=32"):
        close(logits(model, ids), expected, 1e-6)
    short = logits(model, ids[:, :TRAINED])
    with ise.extended(model, "rerope:window=64"):
        assert torch.equal(logits(model, ids[:, :TRAINED]), short)


def test_a_factor_on_some_entries_of_a_head_is_refused():
    family = FAMILIES["deepseek_v3"]
    model = family.build_model(family.config(MSCALE | {"mscale_all_dim": 0.5}), torch.float32, 0)
    refused(model, "rerope:window=32", "deepseek_v3: rotates part of a head and scales it")


@pytest.mark.parametrize("name", LATENT)
def test_gradients_are_those_of_the_reference(name):
    ids, gradients = tokens(2, 70), []
    for backend in ("auto", "reference"):
        model = FAMILIES[name].model().double()
        ise.extend(model, NEAR_AND_FAR, backend=backend)
        model(ids, labels=ids).loss.backward()
        gradients.append({key: x.grad for key, x in model.named_parameters() if "attn" in key})
    for key, expected in gradients[1].items():
        assert expected.abs().max() > 0
        assert_close(gradients[0][key], expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", LATENT)
def test_captured_queries_and_keys_can_be_turned_back(name):
    """What a plain model is measured by: as attention gets them, and before they were rotated."""
    model, ids, raw, seen = FAMILIES[name].model().double(), tokens(1, 40), [], []
    with torch.no_grad(), capture_attention(model, seen.append):
        model(ids)
    handle = rotary_module(model).register_forward_hook(lambda module, args, output: at_rest(output))
    with torch.no_grad(), capture_attention(model, raw.append):
        model(ids)
    handle.remove()
    assert seen[0].applied_rope.roll == 2 * seen[0].applied_rope.theta.shape[-1]
    assert not torch.equal(seen[0].q, raw[0].q)
    for ours, expected in ((seen[0].without_position().q, raw[0].q), (seen[0].without_position().k, raw[0].k)):
        assert_close(ours, expected, atol=1e-6, rtol=0)


def test_it_is_extended_under_autocast():
    """Where queries arrive in another dtype than keys."""
    model, ids = FAMILIES["deepseek_v3"].model(), tokens(1, LENGTH)
    with torch.autocast("cpu", torch.bfloat16):
        ise.extend(model, NEAR_AND_FAR)
        rounded = logits(model, ids)
    close(rounded.float(), logits(model, ids), 0.2)


def test_it_is_saved_and_loaded(tmp_path):
    model, ids = ise.extend(FAMILIES["deepseek_v3"].model(), NEAR_AND_FAR), tokens(1, LENGTH)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(ise.load(tmp_path), ids), logits(model, ids))


def test_it_compiles():
    model, ids = ise.extend(FAMILIES["deepseek_v3"].model(), NEAR_AND_FAR), tokens(1, LENGTH)
    expected = logits(model, ids)
    close(logits(torch.compile(model, backend="eager"), ids), expected, 1e-5)
