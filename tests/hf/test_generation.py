"""The same logits and tokens whatever way a text reaches an extended model: chunks, padding, packing, caches, beams."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch.testing import assert_close
from transformers import (
    DynamicCache,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    StaticCache,
)

import isentrope as ise
from isentrope.hf import layer
from tests.fixtures.models import TRAINED, VOCABULARY, llama, tokens

pytestmark = pytest.mark.filterwarnings("ignore:.*was not trained with:UserWarning")

LENGTH = 110  # past the training length, 64, and every window below
EXACT = {"atol": 1e-9, "rtol": 0}
# transformers rounds angles to fp32. That shows where a token stands at another position, and where a text starts
# inside the window, turned as the model itself would turn it, and grows past it. Logits here reach 7
ROUNDED = {"atol": 5e-5, "rtol": 0}

# angles, and so logits, that do not depend on how long the row has become
STEADY = [
    "infoscale",
    "logn:count=position",
    "yarn:factor=4",
    "pi:factor=2",
    "ntk:factor=4",
    "rerope:window=32+infoscale:train_length=64",
    "leakyrerope:window=32",
    "selfextend:window=32,group=4",
    "sink:sinks=4,size=24",
    "yarn:factor=2+sink:sinks=4,size=24",
    "rerope:window=24+lambda:sinks=5,window=24",
    "window:size=24",
    "ssmax",
    "cosine:alpha=16",
    "alibi",
    "nope+infoscale",
]
BY_LENGTH = ["ntk:factor=4,dynamic=true", "clex", "infoscale:count=sequence"]
# one of each kind of cache and branch, where every recipe would say the same again
SOME = ["infoscale", "yarn:factor=4", "rerope:window=32+infoscale:train_length=64", "sink:sinks=4,size=24", "alibi"]


def extended(recipe, model=None):
    """A tiny model in fp64 under a recipe; what the recipe learns is moved away from where it starts."""
    model = (llama() if model is None else model).double()
    ise.extend(model, recipe, allow_untrained=True)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, x in model.named_parameters():
            if "isentrope" in name:
                x += 0.2 * torch.rand(x.shape, generator=generator, dtype=torch.float64)
    return model


@torch.no_grad()
def whole(model, ids, **options):
    return model(ids, use_cache=False, **options).logits


@torch.no_grad()
def in_chunks(model, ids, sizes, cache=None, mask=None, positions=None):
    """Logits of all tokens, fed in chunks through a cache."""
    cache = DynamicCache(config=model.config) if cache is None else cache
    logits, at = [], 0
    for size in sizes:
        options = {} if positions is None else {"position_ids": positions[:, at : at + size]}
        options |= {} if mask is None else {"attention_mask": mask[:, : at + size]}
        logits.append(model(ids[:, at : at + size], past_key_values=cache, use_cache=True, **options).logits)
        at += size
    assert at == ids.shape[1]
    return torch.cat(logits, 1)


def padded(rows, side):
    """Rows of different lengths as a batch: ids, mask, and positions counted from each row's first token."""
    width = max(len(row) for row in rows)
    ids, mask = torch.zeros(2, len(rows), width, dtype=torch.int64)
    for i, row in enumerate(rows):
        place = slice(width - len(row), None) if side == "left" else slice(len(row))
        ids[i, place], mask[i, place] = row, 1
    return ids, mask, (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)


def rows_of(*lengths):
    return [tokens(1, n, seed=n)[0] for n in lengths]


def greedy(model, ids, new=20, **options):
    options = {"do_sample": False, "max_new_tokens": new} | options
    mask = options.pop("attention_mask", torch.ones_like(ids))
    return model.generate(ids, attention_mask=mask, **options)


# chunks


@pytest.mark.parametrize("recipe", STEADY)
def test_prefill_is_chunked_prefill_is_token_by_token(recipe):
    model, ids = extended(recipe), tokens(2, LENGTH)
    expected = whole(model, ids)
    assert (expected - whole(llama().double(), ids)).abs().max() > 1e-2  # the recipe does something here
    for sizes in ([40, 1, 33, 2, 20, 14], [40] + [1] * (LENGTH - 40)):
        assert_close(in_chunks(model, ids, sizes), expected, **EXACT)


@pytest.mark.parametrize("recipe", STEADY)
def test_from_the_first_token_on(recipe):
    model, ids = extended(recipe), tokens(1, 70)
    expected = whole(model, ids)
    for sizes in ([*[1] * 40, 30], [7, 20, 3, 1, 36, 3]):
        assert_close(in_chunks(model, ids, sizes), expected, **ROUNDED)


@pytest.mark.parametrize("recipe", STEADY + BY_LENGTH)
def test_a_static_cache_gives_the_same(recipe):
    """Its keys run past the last token, and the rest of them must count for nothing."""
    model, ids, sizes = extended(recipe), tokens(2, 75), [40, 3, 20, *[1] * 12]
    static = StaticCache(config=model.config, max_cache_len=LENGTH)
    assert_close(in_chunks(model, ids, sizes, static), in_chunks(model, ids, sizes), **EXACT)


def one_layer(**overrides):
    return llama(num_hidden_layers=1, **overrides)


def dynamic_ntk(length):
    """transformers' own."""
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    return one_layer(rope_parameters=rope).double()


def untrained_clex(length):
    """NTK scaling at a factor that goes up by steps: another base for every length."""
    stretch = (2 * -(-length // TRAINED) - 1) ** (8 / 6)
    return one_layer(rope_parameters={"rope_type": "default", "rope_theta": 10000.0 * stretch}).double()


def by_position(length):
    """For the last token its position says the same as the length of the row."""
    return extended("infoscale:count=position", one_layer())


ORACLES = (dynamic_ntk, untrained_clex, by_position)


@pytest.mark.parametrize(("recipe", "oracle"), [*zip(BY_LENGTH, ORACLES, strict=True)])
@pytest.mark.parametrize("static", [False, True])
def test_angles_that_follow_the_length_reach_cached_keys(recipe, oracle, static):
    """In one layer, whose keys know nothing of each other, every step must be as a new pass over all that there is."""
    model, ids, sizes = one_layer().double(), tokens(2, LENGTH), [20, 30, *[1] * 20, 20, *[1] * 20]
    ise.extend(model, recipe)
    cache = StaticCache(config=model.config, max_cache_len=LENGTH) if static else None
    steps = in_chunks(model, ids, sizes, cache)
    for end in torch.tensor(sizes).cumsum(0).tolist()[1::9]:
        assert_close(steps[:, end - 1], whole(oracle(end), ids[:, :end])[:, -1], **ROUNDED)


# batches


@pytest.mark.parametrize("given", [False, True], ids=["", "position_ids"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("recipe", STEADY + BY_LENGTH)
def test_a_padded_batch_is_each_row_alone(recipe, side, given):
    model, rows = extended(recipe), rows_of(LENGTH, 40, 97)
    ids, mask, positions = padded(rows, side)
    logits = whole(model, ids, attention_mask=mask, **({"position_ids": positions} if given else {}))
    for row, of_row, kept in zip(rows, logits, mask.bool(), strict=True):
        expected = whole(model, row[None])[0]
        assert_close(of_row[kept], expected, **(EXACT if given or side == "right" else ROUNDED))


@pytest.mark.parametrize("recipe", STEADY + BY_LENGTH)
def test_short_rows_in_a_long_batch(recipe):
    """Rows inside the window, a row of one token, and a batch that is short as a whole."""
    model = extended(recipe)
    for rows in (rows_of(100, 1, 20), rows_of(20, 3, 11)):
        for side in ("left", "right"):
            ids, mask, positions = padded(rows, side)
            logits = whole(model, ids, attention_mask=mask, position_ids=positions)
            assert logits.isfinite().all()
            for row, of_row, kept in zip(rows, logits, mask.bool(), strict=True):
                assert_close(of_row[kept], whole(model, row[None])[0], **ROUNDED)


@pytest.mark.parametrize(("static", "given"), [(False, True), (True, False)])
@pytest.mark.parametrize("recipe", STEADY + BY_LENGTH)
def test_a_left_padded_batch_decodes_as_each_row_alone(recipe, static, given):
    model, rows, new = extended(recipe), rows_of(70, 40, 58), 8
    ids, mask, positions = padded(rows, "left")
    width = ids.shape[1]
    more = tokens(3, new, seed=5)
    steps = torch.arange(1, new + 1)
    ids, mask = torch.cat((ids, more), 1), torch.cat((mask, torch.ones_like(more)), 1)
    positions = torch.cat((positions, positions[:, -1:] + steps), 1) if given else None
    cache = StaticCache(config=model.config, max_cache_len=width + new + 9) if static else None
    logits = in_chunks(model, ids, [width, *[1] * new], cache, mask, positions)
    for i, row in enumerate(rows):
        expected = in_chunks(model, torch.cat((row, more[i]))[None], [len(row), *[1] * new])
        assert_close(logits[i : i + 1, width - len(row) :], expected, **(EXACT if given else ROUNDED))


@pytest.mark.parametrize("recipe", STEADY + BY_LENGTH)
def test_packed_rows_are_separate_rows(recipe):
    model, rows = extended(recipe), rows_of(45, 90, 40, 75)
    positions = torch.cat([torch.arange(len(row)) for row in rows])[None]
    packed = whole(model, torch.cat(rows)[None], position_ids=positions)[0]
    for row, logits in zip(rows, packed.split([len(row) for row in rows]), strict=True):
        assert_close(logits, whole(model, row[None])[0], **EXACT)


@pytest.mark.parametrize("recipe", SOME)
def test_batches_of_other_sizes_one_after_another(recipe):
    """Nothing kept from one call may leak into the next."""
    model, short, long = extended(recipe), tokens(2, 33), tokens(3, LENGTH, seed=1)
    expected = whole(model, short), whole(model, long)
    for _ in range(2):
        assert torch.equal(whole(model, short), expected[0])
        assert torch.equal(whole(model, long), expected[1])
    assert_close(whole(model, long[:1]), expected[1][:1], **EXACT)
    ids, mask, positions = padded([long[0], short[0]], "left")
    assert_close(whole(model, ids, attention_mask=mask, position_ids=positions)[0], expected[1][0], **EXACT)
    ids, mask, positions = padded([short[0, :20], long[0]], "left")
    assert_close(whole(model, ids, attention_mask=mask, position_ids=positions)[1], expected[1][0], **EXACT)


@pytest.mark.parametrize("recipe", SOME)
def test_position_ids_that_start_anywhere(recipe):
    """Distances are what counts."""
    model, ids = extended(recipe), tokens(1, LENGTH)
    shifted = whole(model, ids, position_ids=torch.arange(1000, 1000 + LENGTH)[None])
    assert_close(shifted, whole(model, ids), atol=2e-4, rtol=0)  # fp32 angles at 1000


@pytest.mark.parametrize("quiet", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("recipe", ["rerope:window=32", "selfextend:window=32,group=4", "sink:sinks=4,size=24"])
def test_position_ids_are_read_at_every_call(recipe, quiet):
    """The same tensor with other numbers in it is not the same positions."""
    model, ids = extended(recipe), tokens(1, 100)
    with quiet():
        positions, mask = torch.arange(100)[None], torch.ones_like(ids)
        for each in (model, model, extended(recipe)):  # another has not asked before
            found = whole(each, ids, position_ids=positions, attention_mask=mask)
            assert_close(found, whole(each, ids, position_ids=positions.clone(), attention_mask=mask), **EXACT)
            positions[:, 50:] += 40


@pytest.mark.parametrize("quiet", [torch.inference_mode, torch.no_grad])
def test_position_ids_are_read_once_a_pass(quiet, monkeypatch):
    """What a look costs, on a GPU a wait, is not for every layer to pay."""
    looks = []
    look = layer._place
    monkeypatch.setattr(layer, "_place", lambda *given: looks.append(0) or look(*given))
    model, ids = extended("rerope:window=32"), tokens(1, 100)
    with quiet():
        for count in (1, 2):
            whole(model, ids, position_ids=torch.arange(100)[None])
            assert len(looks) == count
    assert not next(m for m in model.modules() if isinstance(m, layer.Layer)).together.seen  # nothing is held on to


# generate


@pytest.mark.parametrize("recipe", STEADY)
def test_greedy_tokens_do_not_depend_on_the_cache(recipe):
    model, ids = extended(recipe), tokens(2, 50)
    expected = greedy(model, ids, use_cache=False)
    assert expected.shape == (2, 70)
    assert torch.equal(greedy(model, ids), expected)
    if recipe in SOME:
        assert torch.equal(greedy(model, ids, cache_implementation="static"), expected)
        assert torch.equal(greedy(model, ids, prefill_chunk_size=17), expected)


@pytest.mark.parametrize("recipe", BY_LENGTH)
def test_greedy_tokens_of_angles_that_follow_the_length(recipe):
    model, ids = extended(recipe), tokens(2, 50)
    assert torch.equal(greedy(model, ids, cache_implementation="static"), greedy(model, ids))
    single = extended(recipe, one_layer())
    assert torch.equal(greedy(single, ids), greedy(single, ids, use_cache=False))


@pytest.mark.parametrize("recipe", [*SOME, "selfextend:window=32,group=4"])
def test_beams(recipe):
    model, ids = extended(recipe), tokens(2, 50)
    options = {"num_beams": 3, "new": 16, "num_return_sequences": 2}
    expected = greedy(model, ids, use_cache=False, **options)
    assert expected.shape == (4, 66)
    assert torch.equal(greedy(model, ids, **options), expected)
    assert torch.equal(greedy(model, ids, cache_implementation="static", **options), expected)


@pytest.mark.parametrize("recipe", SOME)
def test_sampling_with_a_seed(recipe):
    model, ids = extended(recipe), tokens(2, 50)

    def sampled(**options):
        torch.manual_seed(3)
        return greedy(model, ids, do_sample=True, num_return_sequences=3, **options)

    expected = sampled(use_cache=False)
    assert expected.shape == (6, 70) and len(expected.unique(dim=0)) == 6
    assert torch.equal(sampled(), expected)
    assert torch.equal(sampled(cache_implementation="static"), expected)


@pytest.mark.parametrize("recipe", SOME + BY_LENGTH)
def test_a_left_padded_batch_generates_as_each_row_alone(recipe):
    model, rows = extended(recipe), rows_of(60, 22, 50)
    ids, mask, _ = padded(rows, "left")
    batch = greedy(model, ids, attention_mask=mask)
    assert torch.equal(greedy(model, ids, attention_mask=mask, cache_implementation="static"), batch)
    for row, of_row in zip(rows, batch, strict=True):
        assert torch.equal(of_row[ids.shape[1] - len(row) :], greedy(model, row[None])[0])


@pytest.mark.parametrize("recipe", ["infoscale", "yarn:factor=4", "rerope:window=32+infoscale:train_length=64"])
def test_left_padded_beams(recipe):
    model, rows = extended(recipe), rows_of(60, 35)
    ids, mask, _ = padded(rows, "left")
    options = {"num_beams": 3, "new": 20}
    batch = greedy(model, ids, attention_mask=mask, **options)
    assert torch.equal(greedy(model, ids, attention_mask=mask, use_cache=False, **options), batch)
    for row, of_row in zip(rows, batch, strict=True):
        assert torch.equal(of_row[ids.shape[1] - len(row) :], greedy(model, row[None], **options)[0])


@pytest.mark.parametrize("recipe", [*SOME, "selfextend:window=32,group=4"])
def test_guessed_tokens_are_taken_back(recipe):
    """They come several at a time, and wrong ones are cropped from the cache."""
    model, ids = extended(recipe), tokens(1, 25).repeat(1, 2)
    assert torch.equal(greedy(model, ids, prompt_lookup_num_tokens=3), greedy(model, ids))


@pytest.mark.parametrize("recipe", SOME)
def test_an_assistant_guesses(recipe):
    model, ids = extended(recipe), tokens(1, 50)
    expected = greedy(model, ids)
    assistant = copy.deepcopy(model)
    for each in (model, assistant):  # they may write token 0, which would be read as padding
        each.generation_config.pad_token_id = None
    with torch.no_grad():
        assistant.lm_head.weight += 0.05 * torch.randn(assistant.lm_head.weight.shape)
    assert torch.equal(greedy(model, ids, assistant_model=assistant), expected)


@pytest.mark.parametrize("recipe", SOME)
def test_a_conversation_goes_on_from_its_cache(recipe):
    """A second call of generate with the first one's cache, and a new turn between."""
    model, ids = extended(recipe), tokens(1, 50)
    first = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=20, return_dict_in_generate=True
    )
    turn = torch.cat((first.sequences, tokens(1, 17, seed=8)), 1)
    second = greedy(model, turn, past_key_values=first.past_key_values, new=20)
    assert torch.equal(second, greedy(model, turn, use_cache=False, new=20))


# caches that let go


SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": TRAINED,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "initializer_range": 0.3,
}


def mistral(**overrides):
    torch.manual_seed(0)
    return MistralForCausalLM(MistralConfig(**(SIZES | {"sliding_window": 40} | overrides))).eval()


def gemma(**overrides):
    """Every other layer sees a window."""
    torch.manual_seed(0)
    types = ["sliding_attention", "full_attention"]
    sizes = {"sliding_window": 30, "layer_types": types, "query_pre_attn_scalar": 8}
    return Gemma3ForCausalLM(Gemma3TextConfig(**(SIZES | sizes | overrides))).eval()


@pytest.mark.parametrize("make", [mistral, gemma])
@pytest.mark.parametrize(
    "recipe",
    [
        "rerope:window=16+infoscale:train_length=20",
        "logn:train_length=20",
        "selfextend:window=16,group=4+logn:train_length=20,count=position",
        "rerope:window=16+lambda:sinks=3,window=16",
    ],
)
def test_sliding_caches_give_what_no_cache_gives(make, recipe):
    model, ids = extended(recipe, make()), tokens(2, 90)
    expected = whole(model, ids)
    plain = whole(make().double(), ids)
    assert (expected - plain).abs().max() > 1e-3  # the recipe does something here
    for sizes in ([25, 30, 1, 5, *[1] * 29], [*[1] * 50, 40]):
        assert_close(in_chunks(model, ids, sizes), expected, **ROUNDED)
        static = StaticCache(config=model.config, max_cache_len=120)
        assert_close(in_chunks(model, ids, sizes, static), expected, **ROUNDED)
    dynamic = DynamicCache(config=model.config)
    in_chunks(model, ids, [90], dynamic)
    assert dynamic.layers[0].keys.shape[2] < 40  # it did let go


@pytest.mark.parametrize("make", [mistral, gemma])
def test_sliding_caches_of_padded_batches(make):
    model = extended("rerope:window=16+infoscale:train_length=20", make())
    rows, new = rows_of(60, 15, 44), 20
    ids, mask, _ = padded(rows, "left")
    for cache in (None, "static"):
        batch = greedy(model, ids, attention_mask=mask, new=new, cache_implementation=cache)
        for row, of_row in zip(rows, batch, strict=True):
            assert torch.equal(of_row[ids.shape[1] - len(row) :], greedy(model, row[None], new=new, use_cache=False)[0])


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
    assert torch.equal(greedy(twin, ids), greedy(model, ids))
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


@pytest.mark.parametrize("recipe", STEADY + BY_LENGTH)
def test_inference_mode_and_then_training(recipe):
    """Nothing that inference made may be in the way of a backward pass over the same shapes."""
    model, ids = extended(recipe), tokens(2, 80)
    padded_ids, mask, positions = padded(rows_of(80, 50), "left")
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


@pytest.mark.parametrize("recipe", STEADY + BY_LENGTH)
def test_autocast(recipe):
    """As a plain model under autocast: half the digits, and neither an error nor another result."""
    model, ids = extended(recipe).float(), tokens(2, 90)
    exact, plain = whole(model, ids), whole(llama(), ids)
    with torch.autocast("cpu", torch.bfloat16):
        rounded, plain_rounded = whole(model, ids), whole(llama(), ids)
        steps = in_chunks(model, ids, [40, 35, *[1] * 15])
        made = greedy(model, ids[:, :60], new=10)
        loss = model(ids, labels=ids).loss
    loss.backward()
    assert rounded.dtype == plain_rounded.dtype and made.shape == (2, 70)
    allowed = 2 * (plain_rounded.float() - plain).std()
    assert (rounded.float() - exact).std() < allowed
    if recipe in STEADY:
        assert (steps.float() - exact).std() < allowed
