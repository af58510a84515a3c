"""The same tokens whatever way a text reaches an extended model: caches, beams, guesses, several models, modes."""

from __future__ import annotations

import copy
import gc
from functools import cache

import pytest
import torch
from torch.testing import assert_close
from transformers import DynamicCache, LlamaForCausalLM, StaticCache

import isentrope as ise
from tests.fixtures.generation import (
    BY_LENGTH,
    EXACT,
    ROUNDED,
    SOME,
    STEADY,
    extended,
    gemma,
    greedy,
    in_chunks,
    is_likeliest,
    mistral,
    one_layer,
    padded,
    rows_of,
    whole,
)
from tests.fixtures.models import llama, tokens
from tests.fixtures.turns import in_halves, in_turns

pytestmark = pytest.mark.filterwarnings("ignore:.*was not trained with:UserWarning")
shared = cache(extended)  # a model for each recipe, which tests that ask for it do not change


@pytest.mark.parametrize("recipe", in_halves(STEADY, 0))
def test_greedy_tokens_do_not_depend_on_the_cache(recipe):
    model, ids = shared(recipe), tokens(2, 56)
    made = greedy(model, ids)
    assert made.shape == (2, 70)
    assert is_likeliest(model, made, 56)
    if recipe in SOME:
        assert torch.equal(greedy(model, ids, cache_implementation="static"), made)
        assert torch.equal(greedy(model, ids, prefill_chunk_size=17), made)


@pytest.mark.parametrize("recipe", in_halves(BY_LENGTH, 0))
def test_greedy_tokens_of_angles_that_follow_the_length(recipe):
    model, ids = shared(recipe), tokens(2, 56)
    assert torch.equal(greedy(model, ids, cache_implementation="static"), greedy(model, ids))
    single = extended(recipe, one_layer())
    assert torch.equal(greedy(single, ids), greedy(single, ids, use_cache=False))


@pytest.mark.parametrize("recipe", [*SOME, "selfextend:window=32,group=4"])
def test_beams(recipe):
    model, ids = shared(recipe), tokens(2, 58)
    options = {"num_beams": 3, "new": 10, "num_return_sequences": 2}
    expected = greedy(model, ids, use_cache=False, **options)
    assert expected.shape == (4, 68)
    assert torch.equal(greedy(model, ids, **options), expected)
    assert torch.equal(greedy(model, ids, cache_implementation="static", **options), expected)


@pytest.mark.parametrize("recipe", SOME)
def test_sampling_with_a_seed(recipe):
    model, ids = shared(recipe), tokens(2, 58)

    def sampled(**options):
        torch.manual_seed(3)
        return greedy(model, ids, 10, do_sample=True, num_return_sequences=3, **options)

    expected = sampled(use_cache=False)
    assert expected.shape == (6, 68) and len(expected.unique(dim=0)) == 6
    assert torch.equal(sampled(), expected)
    assert torch.equal(sampled(cache_implementation="static"), expected)


@pytest.mark.parametrize("recipe", [*SOME, *in_halves(BY_LENGTH, 1)])
def test_a_left_padded_batch_generates_as_each_row_alone(recipe):
    model, rows, new = shared(recipe), rows_of(60, 26, 50), 8
    ids, mask, _ = padded(rows, "left")
    batch = greedy(model, ids, new, attention_mask=mask)
    assert torch.equal(greedy(model, ids, new, attention_mask=mask, cache_implementation="static"), batch)
    for row, of_row in zip(rows, batch, strict=True):
        alone = of_row[None, ids.shape[1] - len(row) :]
        assert torch.equal(alone[:, : len(row)], row[None])
        if recipe in STEADY:
            assert is_likeliest(model, alone, len(row))
        else:
            assert torch.equal(alone, greedy(model, row[None], new))


@pytest.mark.parametrize("recipe", ["infoscale", "yarn:factor=4", "rerope:window=32+infoscale:train_length=64"])
def test_left_padded_beams(recipe):
    model, rows = shared(recipe), rows_of(60, 35)
    ids, mask, _ = padded(rows, "left")
    options = {"num_beams": 3, "new": 10}
    batch = greedy(model, ids, attention_mask=mask, **options)
    assert torch.equal(greedy(model, ids, attention_mask=mask, use_cache=False, **options), batch)
    for row, of_row in zip(rows, batch, strict=True):
        assert torch.equal(of_row[ids.shape[1] - len(row) :], greedy(model, row[None], **options)[0])


@pytest.mark.parametrize("recipe", [*SOME, "selfextend:window=32,group=4"])
def test_guessed_tokens_are_taken_back(recipe):
    """They come several at a time, and wrong ones are cropped from the cache."""
    model, ids = shared(recipe), tokens(1, 25).repeat(1, 2)
    made = greedy(model, ids, prompt_lookup_num_tokens=3)
    assert made.shape == (1, 64) and is_likeliest(model, made, 50)


@pytest.mark.parametrize("recipe", SOME)
def test_an_assistant_guesses(recipe):
    model, ids = extended(recipe), tokens(1, 56)
    assistant = copy.deepcopy(model)
    for each in (model, assistant):  # they may write token 0, which would be read as padding
        each.generation_config.pad_token_id = None
    with torch.no_grad():
        assistant.lm_head.weight += 0.05 * torch.randn(assistant.lm_head.weight.shape)
    made = greedy(model, ids, assistant_model=assistant)
    assert made.shape == (1, 70) and is_likeliest(model, made, 56)


@pytest.mark.parametrize("recipe", SOME)
def test_a_conversation_goes_on_from_its_cache(recipe):
    """A second call of generate with the first one's cache, and a new turn between."""
    model, ids = shared(recipe), tokens(1, 58)
    first = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=10, return_dict_in_generate=True
    )
    turn = torch.cat((first.sequences, tokens(1, 17, seed=8)), 1)
    second = greedy(model, turn, past_key_values=first.past_key_values, new=10)
    assert second.shape == (1, 95) and is_likeliest(model, second, 85)


# caches that let go


@pytest.mark.parametrize(
    ("recipe", "make"),
    in_turns(
        [
            "rerope:window=16+infoscale:train_length=20",
            "logn:train_length=20",
            "selfextend:window=16,group=4+logn:train_length=20,count=position",
            "rerope:window=16+lambda:sinks=3,window=16",
        ],
        (gemma, mistral),
    )
    # these look at where keys are in the row, and never act on the few that a cache of the model's window holds
    + [(recipe, mistral) for recipe in ("dualchunk:chunk=48", "sink:sinks=4,size=36", "lambda:sinks=4,window=36")],
)
def test_sliding_caches_give_what_no_cache_gives(recipe, make):
    model, ids = extended(recipe, make()), tokens(2, 75)
    expected = whole(model, ids)
    plain = whole(make().double(), ids)
    assert (expected - plain).abs().max() > 1e-3  # the recipe does something here
    for sizes in ([25, 30, 1, 5, *[1] * 5, 9], [*[1] * 42, 33]):
        assert_close(in_chunks(model, ids, sizes), expected, **ROUNDED)
        static = StaticCache(config=model.config, max_cache_len=120)
        assert_close(in_chunks(model, ids, sizes, static), expected, **ROUNDED)
    dynamic = DynamicCache(config=model.config)
    in_chunks(model, ids, [75], dynamic)
    assert dynamic.layers[0].keys.shape[2] < 40  # it did let go


@pytest.mark.parametrize("make", [mistral, gemma])
def test_sliding_caches_of_padded_batches(make):
    model = extended("rerope:window=16+infoscale:train_length=20", make())
    rows, new = rows_of(60, 15, 34), 8
    ids, mask, _ = padded(rows, "left")
    for kind in (None, "static"):
        batch = greedy(model, ids, attention_mask=mask, new=new, cache_implementation=kind)
        for row, of_row in zip(rows, batch, strict=True):
            alone = of_row[None, ids.shape[1] - len(row) :]
            assert torch.equal(alone[:, : len(row)], row[None]) and is_likeliest(model, alone, len(row))


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
def test_a_sliding_cache_counts_the_whole_row(static):
    """count="sequence" at the last token is its position, also when the first tokens are gone from the cache."""
    model = extended("logn:train_length=20,count=sequence", mistral(num_hidden_layers=1))
    oracle = extended("logn:train_length=20,count=position", mistral(num_hidden_layers=1))
    ids, sizes = tokens(2, 100), [30, 35, *[1] * 35]
    cache = StaticCache(config=model.config, max_cache_len=120) if static else None
    steps, expected = in_chunks(model, ids, sizes, cache), whole(oracle, ids)
    ends = torch.tensor(sizes).cumsum(0) - 1
    assert_close(steps[:, ends], expected[:, ends], **ROUNDED)


# several models


def test_two_models_side_by_side():
    recipes = ["rerope:window=32+infoscale:train_length=64", "yarn:factor=4", "sink:sinks=4,size=24", "logn", "alibi"]
    ids = tokens(2, 120)
    expected = [whole(extended(recipe), ids) for recipe in recipes]
    gc.collect()
    models = [extended(recipe) for recipe in recipes]
    plain = llama().double()
    models.append(plain)
    expected.append(whole(llama().double(), ids))
    caches = [DynamicCache(config=model.config) for model in models]
    logits = [[] for _ in models]
    with torch.no_grad():
        for chunk in ids.split([40, 30, 1, 1, 48], 1):
            for model, cache, got in zip(models, caches, logits, strict=True):
                got.append(model(chunk, past_key_values=cache, use_cache=True).logits)
    for got, truth in zip(logits, expected, strict=True):
        assert_close(torch.cat(got, 1), truth, **EXACT)


@pytest.mark.parametrize("recipe", SOME)
def test_models_that_share_a_config(recipe):
    first = llama().double()
    torch.manual_seed(0)
    second = LlamaForCausalLM(first.config).double().eval()
    second.load_state_dict(first.state_dict())
    assert second.config is first.config
    ids = tokens(1, 100)
    before = whole(first, ids)
    extended(recipe, second)
    assert torch.equal(whole(first, ids), before)
    assert_close(whole(second, ids), whole(extended(recipe), ids), **EXACT)
    assert not torch.allclose(whole(second, ids), before)
    ise.restore(second)
    assert torch.equal(whole(second, ids), before)


@pytest.mark.parametrize("recipe", [*SOME, "clex", "ssmax"])
def test_a_copy_of_an_extended_model(recipe):
    model, ids = extended(recipe), tokens(1, 100)
    expected = whole(model, ids)
    twin = copy.deepcopy(model)
    assert torch.equal(whole(twin, ids), expected)
    assert torch.equal(greedy(twin, ids, 4), greedy(model, ids, 4))
    ise.restore(twin)
    assert torch.equal(whole(twin, ids), whole(llama().double(), ids))
    assert torch.equal(whole(model, ids), expected)
    third = copy.deepcopy(model)
    ise.restore(model)
    assert torch.equal(whole(model, ids), whole(llama().double(), ids))
    assert torch.equal(whole(third, ids), expected)


# modes


@pytest.mark.parametrize("recipe", ["yarn:factor=4", "rerope:window=32+infoscale:train_length=64"])
def test_what_a_model_did_before_does_not_matter_to_another_dtype(recipe):
    """`to` rounds the frequencies of a plain model too; angles kept from before would not be those of this model."""
    ids = tokens(1, 100)
    fresh, used = (ise.extend(llama(), recipe) for _ in range(2))
    whole(used, ids)
    assert torch.equal(whole(used.bfloat16(), ids), whole(fresh.bfloat16(), ids))


@pytest.mark.parametrize("recipe", in_halves(STEADY + BY_LENGTH, 0))
def test_inference_mode_and_then_training(recipe):
    """Nothing that inference made may be in the way of a backward pass over the same shapes."""
    model, ids = extended(recipe), tokens(2, 75)
    padded_ids, mask, positions = padded(rows_of(75, 50), "left")
    with torch.inference_mode():
        expected = model(ids, use_cache=False).logits.clone()
        model(padded_ids, attention_mask=mask, position_ids=positions)
    out = model(ids, labels=ids, use_cache=False)
    assert_close(out.logits.detach(), expected.clone(), **EXACT)
    out.loss.backward()
    model(padded_ids, attention_mask=mask, position_ids=positions, labels=padded_ids).loss.backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in model.parameters())
    with torch.inference_mode():
        assert_close(model(ids, use_cache=False).logits, expected, **EXACT)


@pytest.mark.parametrize("recipe", in_halves(STEADY + BY_LENGTH, 1))
def test_autocast(recipe):
    """As a plain model under autocast: half the digits, and neither an error nor another result.

    One short row: where a processor has no such numbers, it takes a hundred times as long.
    """
    model, ids = extended(recipe).float(), tokens(1, 75)
    exact, plain = whole(model, ids), whole(llama(), ids)
    with torch.autocast("cpu", torch.bfloat16):
        rounded, plain_rounded = whole(model, ids), whole(llama(), ids)
        steps = in_chunks(model, ids, [40, 31, *[1] * 4])
        made = greedy(model, ids[:, :60], new=3)
        loss = model(ids, labels=ids).loss
    loss.backward()
    assert rounded.dtype == plain_rounded.dtype and made.shape == (1, 63)
    allowed = 2 * (plain_rounded.float() - plain).std()
    assert (rounded.float() - exact).std() < allowed
    if recipe in STEADY:
        assert (steps.float() - exact).std() < allowed
