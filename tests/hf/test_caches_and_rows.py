"""What a recipe does, and what is refused, whatever cache keys come from and however long the row is."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close
from transformers import DynamicCache, LlamaModel, StaticCache

import isentrope as ise
from tests.fixtures.generation import mistral
from tests.fixtures.models import TRAINED, llama, tokens

EXACT = {"atol": 1e-9, "rtol": 0}
CHOICE = "retrieve:blocks=1,size=4,sinks=4,queries=1"
# position methods that keep all distances of such rows, where keys beyond the window are far ones all the same
KEEPING = [
    (f"jetlong:window=8+{CHOICE}", 60),
    (f"lampe:window=8,tail=0+{CHOICE}", 60),
    (f"leakyrerope:window=8,reach=0.75+{CHOICE}", 40),
    ("selfextend:window=8+share:beta=1,reference=4", 40),
    ("lampe:window=8,tail=0+share:beta=1,reference=4", 60),
    ("dpe:window=8,scales=(1,1)+share:beta=1", 100),
    ("layers:0=jetlong:window=8+share:beta=1,reference=4;1=plain", 60),
]
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "original_max_position_embeddings": TRAINED,
}


def extended(recipe, **overrides):
    return ise.extend(llama(**overrides).double(), recipe)


@torch.no_grad()
@pytest.mark.parametrize(("recipe", "length"), KEEPING)
def test_laws_and_choices_act_where_a_position_method_keeps_distances(recipe, length):
    """In a static cache the row is as long as the cache, so that no part is idle by its length."""
    model, ids = extended(recipe), tokens(1, length)
    static = StaticCache(config=model.config, max_cache_len=2 * length)
    out = model(ids, use_cache=False).logits
    assert_close(out, model(ids, past_key_values=static).logits, atol=1e-4, rtol=0)
    assert (out - llama().double()(ids).logits).abs().max() > 1e-2


@torch.no_grad()
def test_nothing_changes_inside_training_where_no_far_key_counts():
    """Bit for bit: neither more far keys than of before, nor more blocks than may be chosen."""
    ids = tokens(1, 60)
    plain = llama()(ids).logits
    for recipe in ("jetlong:window=8+share", "jetlong:window=8+retrieve:blocks=16,size=4"):
        assert torch.equal(ise.extend(llama(), recipe)(ids).logits, plain)


@torch.no_grad()
@pytest.mark.parametrize("recipe", ["sink:sinks=4,size=60", "yarn:factor=2", "infoscale:train_length=8"])
def test_a_streaming_cache_of_another_recipe_is_refused(recipe):
    """Which keeps other keys; also while it is empty."""
    model = extended("sink:sinks=4,size=24")
    cache = ise.StreamingCache(model)
    ise.extend(ise.restore(model), recipe)
    with pytest.raises(ValueError, match=r"expected a StreamingCache made for .* made for sink:size=24, which keeps"):
        model(tokens(1, 50), past_key_values=cache)


@torch.no_grad()
@pytest.mark.parametrize("recipe", ["sink:sinks=4,size=24", "rerope:window=24+lambda:sinks=4,window=24"])
def test_positions_that_jump_in_an_ordinary_cache_are_refused(recipe):
    """Under a recipe too that a cache might drop keys of, in which positions do jump."""
    model, ids = extended(recipe), tokens(1, 60)
    positions = torch.arange(60)[None] + 40 * (torch.arange(60) >= 50)
    cache = DynamicCache(config=model.config)
    model(ids[:, :50], position_ids=positions[:, :50], past_key_values=cache)
    with pytest.raises(ValueError, match="expected positions that continue those of the cached keys"):
        model(ids[:, 50:], position_ids=positions[:, 50:], past_key_values=cache)


@torch.no_grad()
def test_a_cache_of_the_plain_model_is_refused_as_a_positional_argument():
    model, ids = LlamaModel(llama().config).eval(), tokens(1, 60)
    cache = DynamicCache(config=model.config)
    model(ids[:, :50], None, None, cache)
    ise.extend(model, "rerope:window=24")
    with pytest.raises(ValueError, match="past_key_values: expected an empty cache"):
        model(ids[:, 50:], None, None, cache)


@torch.no_grad()
@pytest.mark.parametrize("recipe", ["rerope:window=32", "dualchunk:chunk=40", "leakyrerope:window=32"])
def test_frequencies_of_each_row_in_batches(recipe):
    """LongRoPE's are those of a row's length, also where queries are at one distance from all far keys."""
    model = extended(recipe, head_dim=16, max_position_embeddings=4 * TRAINED, rope_parameters=LONGROPE)
    ids, mask = tokens(2, 100), torch.ones(2, 100, dtype=torch.long)
    mask[1, :30] = 0
    assert_close(model(ids, attention_mask=mask).logits[1, 30:], model(ids[1:, 30:]).logits[0], **EXACT)
    static = StaticCache(config=model.config, max_cache_len=150)
    assert_close(model(ids, past_key_values=static).logits, model(ids).logits, **EXACT)


@torch.no_grad()
def test_left_padding_goes_on_in_a_sliding_cache_that_has_dropped_tokens():
    """Without position ids, which transformers then counts from the first slot."""
    model, ids = ise.extend(mistral().double(), "rerope:window=12"), tokens(2, 60)
    mask = torch.ones(2, 60, dtype=torch.long)
    mask[1, :5] = 0
    cache = DynamicCache(config=model.config)
    model(ids[:, :50], attention_mask=mask[:, :50], past_key_values=cache)
    out = model(ids[:, 50:], attention_mask=mask, past_key_values=cache).logits
    for row, first in enumerate((0, 5)):
        alone = model(ids[row : row + 1, first:], use_cache=False).logits
        assert_close(out[row : row + 1], alone[:, -10:], **EXACT)


@torch.no_grad()
def test_laws_that_are_not_defined_at_one_key_do_not_meet_padding():
    recipe = "rerope:window=2+infoscale:train_length=8,clamp=false+retrieve:blocks=1,size=4,sinks=0,queries=1"
    model, ids = extended(recipe), tokens(2, 75)
    mask = torch.ones(2, 75, dtype=torch.long)
    mask[1, 30:] = 0
    out = model(ids, attention_mask=mask, use_cache=False).logits
    assert_close(out[1:, :30], model(ids[1:, :30], use_cache=False).logits, **EXACT)
