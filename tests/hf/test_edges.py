"""Corners: what a caller may do to an extended model besides running it."""

from __future__ import annotations

import gc
import io
import pickle
import warnings
import weakref

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    DynamicCache,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    MistralConfig,
    MistralForCausalLM,
    PersimmonConfig,
    PersimmonForCausalLM,
    Qwen2VLConfig,
    Qwen2VLTextConfig,
)
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLTextModel

import isentrope as ise
from isentrope.hf import introspection
from isentrope.hf import layer as layer_module
from tests.fixtures.models import llama, tokens

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}


def logits(model, ids, **options):
    with torch.no_grad():
        return model(input_ids=ids, **options)[0]


class OwnRotaryAttention(LlamaAttention):
    """Attention with a rotary module to itself, as some models have it."""

    def forward(self, hidden_states, position_embeddings=None, position_ids=None, **options):
        turns = self.rotary_emb(hidden_states, position_ids)
        return super().forward(hidden_states, position_embeddings=turns, position_ids=position_ids, **options)


@pytest.mark.parametrize("recipe", ["rerope:window=64", "pi:factor=4", "rerope:window=16+infoscale:train_length=16"])
def test_a_rotary_module_in_every_layer(recipe):
    model = llama()
    for layer in model.model.layers:
        layer.self_attn.__class__ = OwnRotaryAttention
        layer.self_attn.rotary_emb = LlamaRotaryEmbedding(model.config)
    ids = tokens(1, 40)
    plain = logits(model, ids)
    ropes = [layer.self_attn.rotary_emb for layer in model.model.layers]
    with ise.extended(model, recipe):
        actual = logits(model, ids)
        if recipe == "rerope:window=64":
            assert torch.equal(actual, plain)
        elif recipe == "pi:factor=4":
            assert torch.equal(ropes[0].inv_freq, ropes[1].inv_freq) and ropes[0].inv_freq[0] == 0.25
        else:
            assert [len(rope._forward_hooks) for rope in ropes] == [1, 1]
            steps, cache = [], DynamicCache(config=model.config)
            for i in range(40):
                steps.append(logits(model, ids[:, i : i + 1], past_key_values=cache, use_cache=True))
            torch.testing.assert_close(torch.cat(steps, 1), actual, atol=1e-4, rtol=1e-4)
    assert torch.equal(logits(model, ids), plain)


@pytest.mark.parametrize(("recipe", "name"), [("ssmax", "temperature"), ("clex:max_factor=4", "isentrope_position")])
def test_learned_parts_train_beside_adapters(recipe, name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        model = ise.extend(llama(), recipe, allow_untrained=True)
    lora = LoraConfig(target_modules=["q_proj"], modules_to_save=[name], r=2)
    wrapped = get_peft_model(model, lora).train()
    for module in wrapped.modules():
        if isinstance(module, ise.CLEX):
            module.factor.fill_(3)
    ids = tokens(2, 100)
    wrapped(input_ids=ids, labels=ids).loss.backward()
    learned = {key: x for key, x in wrapped.named_parameters() if f"{name}.modules_to_save" in key}
    moved = [x for key, x in learned.items() if ".up." not in key]  # CLEX's inner weights wait for its outer ones
    assert moved and all(x.grad is not None and x.grad.abs().sum() > 0 for x in moved)
    before = logits(wrapped.eval(), ids)
    with torch.no_grad():
        for x in learned.values():
            x.add_(0.3)
    assert not torch.allclose(logits(wrapped, ids), before)


@pytest.mark.parametrize("recipe", ["infoscale", "window:size=16", "yarn:factor=4", "rerope:window=16"])
def test_another_attention_implementation_is_refused(recipe):
    model, ids = llama(), tokens(1, 80)
    plain = logits(model, ids)
    ise.extend(model, recipe)
    model.set_attn_implementation("sdpa")
    with pytest.raises(RuntimeError, match="restore"):
        model(ids)
    ise.restore(model)
    assert torch.equal(logits(model, ids), plain)


@pytest.mark.parametrize("recipe", ["rerope:window=64", "rerope:window=16+infoscale:train_length=16"])
def test_cached_keys_stand_where_they_were_counted(recipe):
    model, ids = ise.extend(llama(), recipe), tokens(1, 21)
    cache = DynamicCache(config=model.config)
    logits(model, ids[:, :20], past_key_values=cache, use_cache=True)
    with pytest.raises(ValueError, match="continue those of the cached keys"):
        logits(model, ids[:, 20:], past_key_values=cache, position_ids=torch.tensor([[50]]), use_cache=True)


def test_positions_of_more_dimensions_are_refused():
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    text = Qwen2VLTextConfig(**SIZES, rope_parameters=rope)
    model = Qwen2VLTextModel(Qwen2VLConfig(text_config=text.to_dict()).text_config).eval()
    ids = tokens(1, 30)
    spread = torch.arange(30).expand(3, 1, 30) * torch.tensor([1, 2, 3])[:, None, None]
    try:
        ise.extend(model, "rerope:window=64")
    except ValueError:
        return  # refused at once: as good
    with pytest.raises(ValueError, match="position_ids"):
        logits(model, ids, position_ids=spread)


def test_positions_that_attention_is_not_shown():
    torch.manual_seed(0)
    sizes = {key: value for key, value in SIZES.items() if key != "num_key_value_heads"}
    model = PersimmonForCausalLM(PersimmonConfig(**sizes)).eval()
    ids = tokens(1, 40)
    jump = torch.arange(40)[None] + 100 * (torch.arange(40) >= 20)
    ise.extend(model, "rerope:window=16")
    logits(model, ids)
    with pytest.raises(ValueError, match="consecutive"):
        logits(model, ids, position_ids=jump, attention_mask=torch.ones_like(ids))


@pytest.mark.parametrize("count", ["sequence", "position", "visible"])
def test_a_sliding_cache_does_not_hide_the_length(count):
    """The law sets in past the model's own window: by keys in the cache it never would."""
    torch.manual_seed(0)
    config = MistralConfig(**(SIZES | {"num_hidden_layers": 1, "sliding_window": 16}))
    model = ise.extend(MistralForCausalLM(config).eval(), f"logn:train_length=40,count={count}")
    ids = tokens(1, 61)
    cache = DynamicCache(config=model.config)
    logits(model, ids[:, :60], past_key_values=cache, use_cache=True)
    step = logits(model, ids[:, 60:], past_key_values=cache, use_cache=True)
    torch.testing.assert_close(step[:, -1], logits(model, ids)[:, -1], atol=1e-4, rtol=1e-4)


def test_changes_of_the_config_outlive_restoring():
    model = llama()
    with ise.extended(model, "rerope:window=16"):
        model.resize_token_embeddings(120)
        model.config.use_cache = False
        ise.restore(model)  # and leaving the block is no error then
    assert model.config.vocab_size == 120 and model.config.use_cache is False
    assert model.config._attn_implementation == "sdpa" and "isentrope" not in model.config.to_dict()


@pytest.mark.parametrize("recipe", ["infoscale", "rerope:window=16+infoscale", "sink:sinks=4,size=16"])
def test_pickles(recipe):
    model, ids = ise.extend(llama(), recipe), tokens(1, 80)
    positions = torch.arange(80)[None]
    expected = logits(model, ids, position_ids=positions)
    torch.save(positions, io.BytesIO())  # nothing was left on the caller's tensor
    assert not vars(positions)
    twin = pickle.loads(pickle.dumps(model))
    assert torch.equal(logits(twin, ids), expected)


def test_a_model_is_freed():
    model = ise.extend(llama(), "rerope:window=16+infoscale")
    logits(model, tokens(1, 80))
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_a_description_says_which_distances_are_masked():
    assert "distance  1→1 64→masked 1024→masked" in str(ise.describe(ise.extend(llama(), "window:size=32")))


@pytest.mark.filterwarnings("ignore:.*leaves distances up to:UserWarning")
@pytest.mark.parametrize(
    ("recipe", "reach"),
    [
        ("selfextend:window=32,group=4", 160),  # ⌊159 / 4⌋ + 32 - 8 = 63
        ("leakyrerope:window=32,leak=16", 544),  # 32 + (543 - 32) / 16 < 64
        ("string:shift=32,local=8", 88),  # 87 - 32 + 8 = 63
        ("selfextend:window=32,group=2+window:size=200", 96),
        ("selfextend:window=32,group=2+window:size=90", None),  # all distances that are seen are old
        ("selfextend:window=32,group=2+sink:sinks=4,size=90", 96),
        ("yarn:factor=4", 256),
        ("yarn:factor=4+window:size=200", None),
        ("rerope:window=32", None),
        ("selfextend:window=32", None),  # by the length of the text
        ("string:shift=128", 64),  # near distances are left as they are
        ("infoscale", 64),
        ("infoscale+window:size=60", None),
        ("plain", 64),
    ],
)
def test_how_far_a_recipe_keeps_distances_inside_training(recipe, reach):
    description = ise.describe(ise.extend(llama(), recipe))
    assert description.layers[0].reach == reach and ("  reach " in str(description)) == (reach is not None)


def test_a_description_does_not_print_whole_tables():
    beta = torch.linspace(0.1, 0.9, 8).view(2, 4)
    description = ise.describe(ise.extend(llama(), ise.Recipe(position=ise.ReRoPE(16), share=ise.Share(beta))))
    assert len(str(description).splitlines()[0]) < len(description.recipe)


def test_the_public_names():
    names = {"extend", "extended", "restore", "load", "describe", "StreamingCache", "PoSECollator", "theory"}
    assert names <= set(dir(ise)) and names <= set(ise.__all__)


def test_models_are_introspected_once_where_recipes_follow_each_other(monkeypatch):
    model, ids, recipes = (
        llama(),
        tokens(1, 40),
        ("rerope:window=16", "pi:factor=4", "yarn:factor=4", "rerope:window=8"),
    )
    alone = []
    for recipe in recipes:
        with ise.extended(model, recipe):
            alone.append(logits(model, ids))
    passes = []
    record = introspection._record_pass
    monkeypatch.setattr(introspection, "_record_pass", lambda *a, **b: passes.append(a) or record(*a, **b))
    with introspection.introspect_once():
        for recipe, expected in zip(recipes, alone, strict=True):
            with ise.extended(model, recipe):
                assert torch.equal(logits(model, ids), expected)
    assert len(passes) == 2
    with ise.extended(model, recipes[0]):  # outside the block it is introspected again
        assert len(passes) == 4


def test_layers_that_rotate_as_the_one_before_are_not_searched(monkeypatch):
    tried, plain = [], introspection._rotation_error
    monkeypatch.setattr(introspection, "_rotation_error", lambda *a: tried.append(a) or plain(*a))
    first, *others = introspection.introspect(llama(num_hidden_layers=6))
    assert all(layer.rope.same(first.rope) and layer.rope.interleaved is False for layer in others)
    assert len(tried) == 2  # both layouts of pairs, in the first layer
    config = Gemma3TextConfig(**SIZES, head_dim=8, layer_types=["sliding_attention", "full_attention"])
    local, whole = (layer.rope.layer_type for layer in introspection.introspect(Gemma3ForCausalLM(config)))
    assert (local, whole) == ("sliding_attention", "full_attention") and len(tried) == 2 + 8


def test_layers_with_windows_of_their_own_need_no_matrix(monkeypatch):
    """Past the training length, where other layers change the output anyway, their windows run without a mask."""
    sizes = SIZES | {"max_position_embeddings": 24, "sliding_window": 9, "head_dim": 8}
    config = Gemma3TextConfig(**sizes, layer_types=["sliding_attention", "full_attention"])
    torch.manual_seed(0)
    model = ise.extend(Gemma3ForCausalLM(config).eval().double(), "rerope:window=12")
    inside, beyond = tokens(1, 24), tokens(2, 60)
    padding = torch.ones_like(beyond)
    padding[0, :7] = 0
    expected = logits(model, inside), logits(model, beyond), logits(model, beyond, attention_mask=padding)
    monkeypatch.setattr(layer_module, "MAX_MASK_ELEMENTS", 100)
    assert torch.equal(logits(model, inside), expected[0])
    monkeypatch.setattr(layer_module, "sdpa_attention_forward", None)  # not called any more
    torch.testing.assert_close(logits(model, beyond), expected[1], rtol=1e-9, atol=1e-9)
    got = logits(model, beyond, attention_mask=padding)
    torch.testing.assert_close(got[padding.bool()], expected[2][padding.bool()], rtol=1e-9, atol=1e-9)
