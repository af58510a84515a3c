"""Recipes and models that cannot be extended are refused with the reason, and the model stays as it was."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MptConfig,
    MptForCausalLM,
    T5Config,
    T5EncoderModel,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTModel,
)

import isentrope as ise
from isentrope.parts import Part
from tests.fixtures.families import FAMILIES, logits
from tests.fixtures.models import TRAINED, VOCABULARY, llama, tokens
from tests.fixtures.refusals import LONG, refused


@pytest.mark.parametrize(
    ("recipe", "match"),
    [
        ("rerop:window=32", "unknown part 'rerop'; did you mean 'rerope'"),
        ("infoscal", "did you mean 'infoscale'"),
        ("rerope:windw=32", "unknown option 'windw'; did you mean 'window'"),
        ("rerope", "missing option 'window'"),
        ("rerope:window=0", "window"),
        ("rerope:window=32+yarn:factor=4", "one position"),
        ("alibi+rerope:window=32", "one position.*ALiBi takes the place of rotation"),
        ("", "expected text such as"),
        (None, "expected a Recipe or its text"),
        (ise.ReRoPE(32), "expected a Recipe or its text"),
    ],
)
def test_unreadable_recipe(recipe, match):
    refused(llama(), recipe, match)


@pytest.mark.parametrize("recipe", ["cosine:alpha=16", "ssmax", "alibi", "nope", "cosine:alpha=16+infoscale"])
def test_untrained_parts(recipe):
    name = recipe.split(":")[0].split("+")[0]
    refused(llama(), recipe, f"llama: was not trained with {name}.*allow_untrained=True")
    model = llama()
    with pytest.warns(UserWarning, match=f"was not trained with {name}"):
        ise.extend(model, recipe, allow_untrained=True)
    assert logits(model, tokens(1, LONG)).isfinite().all()


def test_wrong_number_of_heads():
    refused(llama(), "ssmax:heads=3", "llama: has 4 attention heads.*3", allow_untrained=True)


@pytest.mark.parametrize(
    ("table", "match"),
    [
        ([[[1.0, 1.2]]], "layer"),  # of two layers
        ([[1.0, 1.2]] * 3, "heads"),  # of four heads
        ([[[1.0, 1.2]] * 3] * 2, "heads"),
    ],
)
def test_table_that_does_not_fit(table, match):
    refused(llama(), ise.Recipe(temperature=ise.Fitted((64, 128), table)), match)


class OwnShare:
    def bias(self, n_far):
        return -torch.log(n_far)


class LearnedShare(nn.Module, Part):
    def bias(self, n_far):
        return -torch.log(n_far)


@pytest.mark.parametrize(
    ("share", "match"),
    [
        (ise.Share((0.5,) * 3), "llama: has 4 attention heads.*share.*has 3"),
        (ise.Share([[0.5] * 4]), "layer"),  # of two layers
        (OwnShare(), "parts that a config can hold.*OwnShare"),
        (LearnedShare(), "share law without parameters.*LearnedShare"),
    ],
)
def test_share_law_that_does_not_fit(share, match):
    refused(llama(), ise.Recipe(position=ise.ReRoPE(32), share=share), match)


def test_unknown_backend():
    refused(llama(), "infoscale", "backend.*'nonsense'", backend="nonsense")


@pytest.mark.parametrize("recipe", ["infoscale", "logn", "yarn:factor=4", "ntk:factor=4,dynamic=true", "clex"])
def test_training_length_that_nobody_states(recipe):
    """Configs are checked by transformers; one without a length is made by hand."""
    model = llama()
    model.config.__dict__["max_position_embeddings"] = None
    refused(model, recipe, "train_length|original_length")
    with_length = {
        "infoscale": "infoscale:train_length=64",
        "logn": "logn:train_length=64",
        "clex": "clex:train_length=64",
        "yarn:factor=4": "yarn:factor=4,original_length=64",
        "ntk:factor=4,dynamic=true": "ntk:factor=4,dynamic=true,original_length=64",
    }
    with ise.extended(model, with_length[recipe]):
        assert logits(model, tokens(1, LONG)).isfinite().all()


# --- models ---------------------------------------------------------------------------------------------------------


def t5(kind):
    sizes = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    return kind(T5Config(**sizes, pad_token_id=0, decoder_start_token_id=0, eos_token_id=None)).eval()


def mpt():
    sizes = {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": TRAINED, "vocab_size": VOCABULARY}
    return MptForCausalLM(MptConfig(**sizes)).eval()


def bloom():
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    return BloomForCausalLM(BloomConfig(hidden_size=32, n_head=4, n_layer=2, vocab_size=VOCABULARY, **ids)).eval()


SEEN = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}


def test_images_beside_text():
    """The layers of its text could be reached: the error names those that could not."""
    text = llama().config.to_dict()
    model = LlavaForConditionalGeneration(
        LlavaConfig(text_config=text, vision_config={"model_type": "clip_vision_model"} | SEEN, image_token_index=90)
    ).eval()
    refused(model, "rerope:window=32", "llava: has attention beside its text's.*vision_tower")


def test_images_alone():
    with pytest.raises(ValueError, match="vit: reads no tokens"):
        ise.extend(ViTModel(ViTConfig(**SEEN)), "infoscale:train_length=4")


@pytest.mark.parametrize("recipe", ["infoscale:train_length=64", "rerope:window=32", "window:size=16"])
def test_soft_cap(recipe):
    family = FAMILIES["gemma2"]
    model = family.model(family.config(attn_logit_softcapping=50.0))
    model.config._attn_implementation = "eager"
    refused(model, recipe, "gemma2: .*soft cap")


@pytest.mark.parametrize("recipe", ["infoscale:train_length=64", "rerope:window=32"])
@pytest.mark.parametrize(
    ("kind", "match"),
    [(T5ForConditionalGeneration, "t5: .*encoder and a decoder"), (T5EncoderModel, "t5: .*position bias")],
)
def test_t5(kind, match, recipe):
    refused(t5(kind), recipe, match)


@pytest.mark.parametrize("recipe", ["infoscale:train_length=64", "rerope:window=32"])
@pytest.mark.parametrize("make", [mpt, bloom])
def test_models_with_attention_of_their_own(make, recipe):
    """Named, with what is missing; not with an error from inside their code."""
    model = make()
    refused(model, recipe, f"{model.config.model_type}: (?!.*size of tensor).*AttentionInterface")


@pytest.mark.parametrize("recipe", ["rerope:window=32", "yarn:factor=4", "pi:factor=4", "selfextend:window=8,group=2"])
@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_position_recipe_without_rotation(name, recipe):
    refused(FAMILIES[name].model(), recipe, f"{name}: has no rotary embedding")


def test_a_choice_of_far_keys_in_both_directions():
    recipe = "rerope:window=16+retrieve:blocks=2,size=4"
    refused(FAMILIES["modernbert"].model(), recipe, "modernbert: layer . reads in both directions.*leave out retrieve")


@pytest.mark.parametrize("recipe", ["alibi", "nope"])
def test_other_positions_without_rotation(recipe):
    refused(FAMILIES["bert"].model(), recipe, "bert: has no rotary embedding", allow_untrained=True)


BY_LENGTH = {
    "dynamic": {"factor": 4.0},
    "longrope": {
        "factor": 4.0,
        "short_factor": [1.0] * 4,
        "long_factor": [1.0, 1.5, 2.0, 3.0],
        "original_max_position_embeddings": TRAINED,
    },
}


def by_length(kind, trained):
    options = BY_LENGTH[kind] | {"rope_type": kind, "rope_theta": 10000.0}
    if kind == "longrope":
        options["original_max_position_embeddings"] = trained
        return llama(max_position_embeddings=4 * trained, rope_parameters=options)
    return llama(max_position_embeddings=trained, rope_parameters=options)


@pytest.mark.parametrize("trained", [TRAINED, 512])
@pytest.mark.parametrize("recipe", ["rerope:window=32", "yarn:factor=4", "pi:factor=2", "sink:sinks=4,size=24"])
def test_frequencies_that_change_with_the_length(recipe, trained):
    refused(by_length("dynamic", trained), recipe, "llama: its rope_type 'dynamic' changes")


def test_longrope_where_the_length_is_not_known():
    refused(by_length("longrope", TRAINED), "sink:sinks=4,size=24", "longrope' changes .*leave the sinks out")
    refused(by_length("longrope", TRAINED), "yarn:factor=4", r"already scaled \(rope_type 'longrope'\)")
    model = ise.extend(by_length("longrope", TRAINED), "rerope:window=24+lambda:sinks=4,window=24")
    with pytest.raises(ValueError, match="StreamingCache: expected angles that do not depend on the length"):
        ise.StreamingCache(model)


@pytest.mark.parametrize("trained", [TRAINED, 512])
@pytest.mark.parametrize("kind", BY_LENGTH)
def test_temperatures_are_no_matter_to_frequencies_that_change(kind, trained):
    """The model's own rotation stays, on both sides of its training length."""
    model = by_length(kind, trained)
    short, long = logits(model, tokens(1, 40)), logits(model, tokens(1, LONG))
    with ise.extended(model, "infoscale:train_length=128+window:size=128"):
        assert torch.equal(logits(model, tokens(1, 40)), short)
        assert torch.equal(logits(model, tokens(1, LONG)), long)


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": TRAINED,
}


@pytest.mark.parametrize("recipe", ["yarn:factor=4", "ntk:factor=4", "ntk:factor=4,dynamic=true", "clex"])
def test_frequencies_that_are_scaled_already(recipe):
    model = llama(rope_parameters=LLAMA3, max_position_embeddings=8 * TRAINED)
    name = recipe.split(":")[0]
    refused(
        model, recipe, f"llama: its frequencies are already scaled .rope_type 'llama3'.*{name}.*was trained with them"
    )


def test_how_to_load_a_model_without_its_scaling():
    """Its length is that of before only where that is said too."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": TRAINED, "rope_theta": 10000.0}
    model = llama(rope_parameters=yarn, max_position_embeddings=4 * TRAINED)
    advice = f"'rope_type': 'default', 'rope_theta': 10000}} and max_position_embeddings={TRAINED}, or use a method"
    refused(model, "ntk:factor=4", re.escape(advice))
    plain = {"rope_type": "default", "rope_theta": 10000.0}
    assert ise.describe(llama(rope_parameters=plain, max_position_embeddings=TRAINED)).train_length == TRAINED


@pytest.mark.parametrize("recipe", ["rerope:window=40", "leakyrerope:window=40", "selfextend:window=40,group=4"])
def test_scaled_frequencies_can_be_kept(recipe):
    model = llama(rope_parameters=LLAMA3, max_position_embeddings=8 * TRAINED)
    short, long = logits(model, tokens(1, 40)), logits(model, tokens(1, LONG))
    with ise.extended(model, recipe):
        assert torch.equal(logits(model, tokens(1, 40)), short)
        assert not torch.allclose(logits(model, tokens(1, LONG)), long, atol=1e-2)


class OddAttention(nn.Module):
    """Attention that transformers' interface does not see."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(32, 32)

    def forward(self, hidden_states, **unused):
        return self.mix(hidden_states), None


@pytest.mark.parametrize("recipe", ["infoscale", "rerope:window=32", "yarn:factor=4"])
def test_a_layer_that_is_not_reached(recipe):
    model = llama()
    model.model.layers[1].self_attn = OddAttention()
    refused(model, recipe, r"llama: .*AttentionInterface.*model\.layers\.1\.self_attn")


@pytest.mark.parametrize("model", [nn.Linear(2, 2), "llama", None, llama().config], ids=lambda x: type(x).__name__)
def test_not_a_transformers_model(model):
    with pytest.raises(ValueError, match="expected a transformers model"):
        ise.extend(model, "infoscale")


def test_weights_that_are_not_there():
    with torch.device("meta"):
        model = llama()
    with pytest.raises(ValueError, match=r"llama: .*meta"):
        ise.extend(model, "infoscale")
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("recipe", ["rerope:window=32", "infoscale", "rerop"])
def test_extended_twice(recipe):
    model = ise.extend(llama(), "rerope:window=24")
    refused(model, recipe, "already extended with 'rerope:window=24'.*restore")
    refused(model.model, recipe, "already extended")
    ise.restore(model)
    ise.extend(model, "infoscale")


def test_extended_inside():
    model = llama()
    inner = ise.extend(model.base_model.__class__(model.config), "rerope:window=24")
    model.model = inner
    refused(model, "infoscale", "inside it is already extended")


@pytest.mark.parametrize("call", [ise.restore, ise.StreamingCache])
def test_not_extended(call):
    with pytest.raises(ValueError, match="not extended"):
        call(llama())
    model = ise.restore(ise.extend(llama(), "infoscale"))
    with pytest.raises(ValueError, match="not extended"):
        call(model)
