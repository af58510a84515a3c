"""StreamingCache: any length at constant memory, and the same as without forgetting."""

from __future__ import annotations

import copy
import os

import pytest
import torch
from torch.testing import assert_close
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import isentrope as ise
from tests.fixtures.generation import gemma, mistral
from tests.fixtures.models import TRAINED, llama, tokens

SINKS, SIZE = 4, 24
SINK = f"sink:sinks={SINKS},size={SIZE}"
LAMBDA = f"rerope:window={SIZE}+lambda:sinks={SINKS},window={SIZE}"
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 2.0,
    "original_max_position_embeddings": TRAINED,
    "attention_factor": 1.0,
}
RECIPES = [SINK, LAMBDA, f"yarn:factor=2+{SINK}", f"{SINK}+infoscale:train_length=8"]
FAR_LAWS = "logn:train_length=8,keys=far+share:beta=1,reference=2"
RECIPES += [f"{LAMBDA}+{FAR_LAWS}", f"rerope:window=12+{SINK}+{FAR_LAWS},sinks={SINKS}"]
EXACT = {"atol": 1e-9, "rtol": 0}
# a full cache and one token are no longer than what the recipe leaves alone: there the model's own angles are used,
# which transformers rounds to fp32
ROUNDED = {"atol": 5e-5, "rtol": 0}


def extended(recipe, **overrides):
    return ise.extend(llama(**overrides).double(), recipe)


@torch.no_grad()
def streamed(model, ids, sizes, cache=None):
    """Logits of all tokens, fed in chunks; the cache must stay small all along."""
    cache = ise.StreamingCache(model) if cache is None else cache
    logits, at = [], 0
    for size in sizes:
        logits.append(model(ids[:, at : at + size], past_key_values=cache).logits)
        at += size
        for layer in cache.layers:
            assert layer.keys.shape == layer.values.shape
            assert layer.keys.shape[2] == min(at, SINKS + SIZE - 1)
        assert cache.get_seq_length() == at
    assert at == ids.shape[1]
    return torch.cat(logits, 1)


@torch.no_grad()
def by_hand(model, ids, cap=None):
    """StreamingLLM, and with distances capped LM-Infinite, one token at a time over a plain model's weights."""
    base, head_dim = model.model, model.config.head_dim
    held = [([], []) for _ in base.layers]
    logits = []
    for token in ids[0]:
        x = base.embed_tokens(token)[None, None]
        for layer, (keys, values) in zip(base.layers, held, strict=True):
            attend, h = layer.self_attn, layer.input_layernorm(x)
            q, k, v = (f(h).view(-1, head_dim) for f in (attend.q_proj, attend.k_proj, attend.v_proj))
            if len(keys) == SINKS + SIZE:
                del keys[SINKS], values[SINKS]
            keys.append(k)
            values.append(v)
            groups = len(q) // len(k)
            key, value = (torch.stack(y, 1).repeat_interleave(groups, 0) for y in (keys, values))
            distance = torch.arange(len(keys)).flip(0)
            distance = distance if cap is None else distance.clamp(max=cap)
            cos, sin = base.rotary_emb(x, distance[None])
            turned, _ = apply_rotary_pos_emb(q[None, :, None].expand(-1, -1, len(keys), -1), q[None, :, None], cos, sin)
            weights = ((turned[0] * key).sum(-1) * head_dim**-0.5).softmax(-1)
            x = x + attend.o_proj((weights[..., None] * value).sum(1).flatten())
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        logits.append(model.lm_head(base.norm(x)))
    return torch.cat(logits, 1)


@pytest.mark.parametrize(
    ("recipe", "plain", "cap"),
    [
        (SINK, {}, None),
        (LAMBDA, {}, SIZE),
        (f"yarn:factor=2+{SINK}", {"rope_parameters": YARN}, None),
        (f"rerope:window=12+{SINK}", {}, 12),
    ],
)
def test_it_is_streaming_llm(recipe, plain, cap):
    model, ids = extended(recipe), tokens(1, 60)
    expected = by_hand(llama(**plain).double(), ids, cap)
    with torch.no_grad():
        assert_close(model(ids, use_cache=False).logits, expected, **ROUNDED)
    assert_close(streamed(model, ids, [1] * 60), expected, **ROUNDED)
    assert_close(streamed(model, ids, [30, 19, 2, 9]), expected, **ROUNDED)


@pytest.mark.parametrize("recipe", RECIPES)
def test_streaming_is_the_full_forward(recipe):
    model, ids = extended(recipe), tokens(2, 75)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
    for sizes in ([75], [40, 13, 2, 20], [29] * 2 + [17]):
        assert_close(streamed(model, ids, sizes), expected, **EXACT)
    steps = streamed(model, ids, [40] + [1] * 35)
    assert_close(steps, expected, **(ROUNDED if recipe == SINK else EXACT))
    assert_close(streamed(model, ids, [*[1] * 34, 41]), expected, **ROUNDED)  # the 28th token is let go


@pytest.mark.parametrize("window", [20, 40])
@pytest.mark.parametrize("make", [mistral, gemma])
@pytest.mark.parametrize("recipe", [SINK, LAMBDA])
def test_a_window_of_the_models_own(recipe, make, window):
    """One that reaches past the recipe's would hide the sinks from a token far from them: the same, or refused."""
    model, ids = ise.extend(make(sliding_window=window).double(), recipe), tokens(2, 100)
    if window > SIZE:
        try:
            ise.StreamingCache(model)
        except ValueError:
            return
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
    assert_close(streamed(model, ids, [40, 35, *[1] * 25]), expected, **ROUNDED)


@pytest.mark.parametrize("recipe", RECIPES)
def test_generate_gives_the_tokens_of_the_full_forward(recipe):
    model, ids = extended(recipe), tokens(3, 30)

    def generated(**options):
        return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=10, **options)

    expected = generated(do_sample=False, use_cache=False)
    assert torch.equal(generated(do_sample=False, past_key_values=ise.StreamingCache(model)), expected)
    chunked = generated(do_sample=False, past_key_values=ise.StreamingCache(model), prefill_chunk_size=7)
    assert torch.equal(chunked, expected)
    torch.manual_seed(1)
    expected = generated(do_sample=True, num_return_sequences=2, use_cache=False)
    torch.manual_seed(1)
    sampled = generated(do_sample=True, num_return_sequences=2, past_key_values=ise.StreamingCache(model))
    assert torch.equal(sampled, expected)


def test_rows_of_a_batch_are_rows_alone():
    model, ids = extended(SINK), tokens(3, 62)
    batch = streamed(model, ids, [50, *[1] * 12])
    for i in range(3):
        assert_close(batch[i : i + 1], streamed(model, ids[i : i + 1], [50, *[1] * 12]), **EXACT)


@pytest.mark.parametrize("recipe", [SINK, LAMBDA])
def test_beams(recipe):
    model, ids = extended(recipe), tokens(2, 40)
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 12, "num_beams": 3}
    expected = model.generate(ids, use_cache=False, **options)
    assert torch.equal(model.generate(ids, past_key_values=ise.StreamingCache(model), **options), expected)


def test_rows_of_the_cache_are_reordered():
    model, ids, order = extended(SINK), tokens(3, 60), torch.tensor([2, 0, 0])
    cache = ise.StreamingCache(model)
    streamed(model, ids, [60], cache)
    cache.reorder_cache(order)
    more = tokens(3, 2, seed=1)
    with torch.no_grad():
        logits = model(more, past_key_values=cache).logits
    expected = streamed(model, torch.cat((ids[order], more), 1), [60, 2])[:, -2:]
    assert_close(logits, expected, **EXACT)


def test_a_cache_that_was_reset_is_a_new_one():
    model, ids = extended(SINK), tokens(2, 60)
    cache = ise.StreamingCache(model)
    streamed(model, tokens(1, 70, seed=9), [35, 35], cache)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert torch.equal(streamed(model, ids, [31, 29], cache), streamed(model, ids, [31, 29]))


def test_a_copied_cache_goes_its_own_way():
    """As for a prompt that many texts begin with."""
    model, prompt = extended(SINK), tokens(1, 60)
    cache = ise.StreamingCache(model)
    streamed(model, prompt, [60], cache)
    for seed in (1, 2):
        more = tokens(1, 5, seed=seed)
        with torch.no_grad():
            logits = model(more, past_key_values=copy.deepcopy(cache)).logits
        assert_close(logits, streamed(model, torch.cat((prompt, more), 1), [60, 5])[:, -5:], **EXACT)


def test_a_conversation_goes_on():
    model, ids = extended(LAMBDA), tokens(1, 50)
    cache = ise.StreamingCache(model)
    options = {"do_sample": False, "max_new_tokens": 10}
    first = model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, **options)
    turn = torch.cat((first, tokens(1, 17, seed=2)), 1)
    second = model.generate(turn, attention_mask=torch.ones_like(turn), past_key_values=cache, **options)
    whole = model.generate(turn, attention_mask=torch.ones_like(turn), use_cache=False, **options)
    assert torch.equal(second, whole)


class Watch:
    """A streamer that looks at the memory of the process and the cache every 500 tokens."""

    def __init__(self, cache):
        self.cache, self.seen, self.cached, self.resident = cache, 0, [], []

    def put(self, value):
        self.seen += 1
        if self.seen % 500 == 0:
            held = [x for layer in self.cache.layers for x in (layer.keys, layer.values)]
            self.cached.append(sum(x.untyped_storage().nbytes() for x in held))
            self.resident.append(self._resident())

    def end(self):
        pass

    @staticmethod
    def _resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs /proc to measure memory")
@pytest.mark.parametrize("fed", [19_000, pytest.param(10, marks=pytest.mark.slow)])
def test_twenty_thousand_tokens_at_constant_memory(fed):
    """Most of them fed in chunks, or, which takes a minute, all but ten generated."""
    size = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    plain = llama(num_hidden_layers=1, **size)
    model, ids, new = ise.extend(copy.deepcopy(plain), SINK), tokens(1, fed), 20_010 - fed
    cache = ise.StreamingCache(model)
    watch = Watch(cache)
    options = {"max_new_tokens": new, "do_sample": True, "top_k": 0, "streamer": watch, "prefill_chunk_size": 500}
    out = model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, **options)
    assert out.shape == (1, 20_010)
    assert len(watch.cached) == new // 500 and len(set(watch.cached)) == 1
    assert watch.cached[0] == 2 * (SINKS + SIZE - 1) * 8 * 4  # one head of 8 numbers in fp32
    assert watch.resident[-1] - watch.resident[0] < 840 * new  # bytes

    # in one layer a token meets the sinks and the window alone, so that a plain pass over those is the same
    with torch.no_grad():
        logits = model(out[:, -1:], past_key_values=cache).logits[0, -1]
        expected = plain(torch.cat((out[:, :SINKS], out[:, -SIZE:]), 1)).logits[0, -1]
    assert_close(logits, expected)


# what it refuses


@pytest.mark.parametrize(
    "recipe",
    [
        "infoscale",
        "window:size=24",
        "rerope:window=24",
        "lambda:sinks=4,window=24",  # without ReRoPE the sinks' distances grow for ever
        "sink:sinks=4,size=24&window:size=12",
        # these say something about tokens that the cache has let go, or about where they stood
        f"rerope:window=40+lambda:sinks={SINKS},window={SIZE}",
        f"rerope:window=40+{SINK}",
        f"selfextend:window=16,group=4+{SINK}",
        f"leakyrerope:window=16+{SINK}",
        f"ntk:factor=2,dynamic=true+{SINK}",
        f"{SINK}+infoscale:train_length=8,count=position",
        f"{SINK}+infoscale:train_length=8,count=sequence",
        f"rerope:window=12+{SINK}+share:reference=2,sinks={SINKS + 1}",
    ],
)
def test_recipes_that_need_what_is_forgotten_are_refused(recipe):
    with pytest.raises(ValueError, match="StreamingCache"):
        ise.StreamingCache(extended(recipe))


def test_a_model_that_is_not_extended_is_refused():
    with pytest.raises(ValueError, match="not extended"):
        ise.StreamingCache(llama())


def test_padding_is_refused():
    """Padding would take the place of the sinks."""
    model, ids = extended(SINK), tokens(2, 50)
    mask = torch.ones_like(ids)
    mask[1, :10] = 0
    with pytest.raises(ValueError, match="padd"):
        model.generate(ids, attention_mask=mask, max_new_tokens=9, past_key_values=ise.StreamingCache(model))
    cache = ise.StreamingCache(model)

    def two_chunks():
        model(ids[:, :40], attention_mask=mask[:, :40], past_key_values=cache)
        model(ids[:, 40:], attention_mask=mask, past_key_values=cache)

    with torch.no_grad(), pytest.raises(ValueError, match="padd"):
        two_chunks()


def test_tokens_cannot_be_taken_back():
    model, ids = extended(SINK), tokens(1, 25).repeat(1, 2)
    cache = ise.StreamingCache(model)
    streamed(model, ids, [50], cache)
    with pytest.raises(ValueError, match="StreamingCache"):
        cache.crop(-1)
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 30}
    with pytest.raises(ValueError, match="StreamingCache"):
        model.generate(ids, past_key_values=ise.StreamingCache(model), prompt_lookup_num_tokens=3, **options)
