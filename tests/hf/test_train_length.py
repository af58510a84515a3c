"""The training length that a config states, and recipes for another one."""

from __future__ import annotations

import warnings

import pytest
from transformers import (
    AutoModel,
    BertConfig,
    BloomConfig,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MptConfig,
    Phi3Config,
    RobertaConfig,
)

import isentrope as ise
from isentrope.cli.common import errors_in_one_line
from isentrope.hf.train_length import read_train_length
from tests.fixtures.models import llama


@pytest.mark.parametrize(
    ("config", "length"),
    [
        (LlamaConfig(max_position_embeddings=256), 256),
        (LlamaConfig(max_position_embeddings=256, original_max_position_embeddings=64), 256),  # nothing is scaled
        (Phi3Config(max_position_embeddings=16384), 16384),  # a default of 4096 before a scaling that it has not
        (GptOssConfig(), 131072),  # trained with YaRN's scaling
        (RobertaConfig(max_position_embeddings=514, pad_token_id=1), 512),
        (BloomConfig(seq_length=128), 128),
        (BloomConfig(), None),
        (MptConfig(max_seq_len=96), 96),
    ],
)
def test_lengths_of_configs(config, length):
    assert read_train_length(config) == length


@pytest.mark.parametrize(("kind", "length"), [("llama3", 256), ("yarn", 32)])
def test_the_training_length_of_scaled_frequencies(kind, length):
    """llama3's scaling comes with training at the longer length, YaRN's need not."""
    scaling = {"rope_type": kind, "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 32}
    if kind == "llama3":
        scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    model = ise.extend(llama(max_position_embeddings=256, rope_parameters=scaling), "infoscale")
    assert f"train_length={length}" in ise.describe(model).recipe


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
SCALED = {"max_position_embeddings": 64, "rope_parameters": YARN}


def collect_warnings(recipe, **overrides):
    """Return what `extend` warns of, on a model of 64 tokens unless the config says otherwise."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        ise.extend(llama(**overrides), recipe)
    return [str(warning.message) for warning in seen]


@pytest.mark.parametrize(
    ("recipe", "part", "length"),
    [
        ("infoscale:train_length=32", "infoscale:train_length=32", 32),
        ("logn:train_length=128", "logn:train_length=128", 128),
        ("yarntemperature:train_length=16", "yarntemperature:train_length=16", 16),
        ("yarn:factor=4,original_length=32", "yarn:factor=4,original_length=32", 32),
        ("selfextend:window=8,reach=0.5,train_length=32", "selfextend:window=8,reach=0.5,train_length=32", 32),
        # the position method takes its length from the temperature: one warning, of the part that was given it
        ("rerope:window=8+power:train_length=32+share", "power:train_length=32", 32),
        ("yarn:factor=4+infoscale:train_length=32", "infoscale:train_length=32", 32),
        ("layers:0=infoscale:train_length=32;1=infoscale", "infoscale:train_length=32", 32),
    ],
)
def test_a_length_of_another_model_is_warned_of(recipe, part, length):
    assert collect_warnings(recipe) == [
        f"llama: was trained at 64 tokens, and {part} is for {length}; leave that length out to use the model's own, "
        "unless its config is wrong"
    ]


@pytest.mark.parametrize(
    "recipe",
    [
        "infoscale",
        "infoscale:train_length=64",
        "yarn:factor=4,original_length=64+yarntemperature:factor=4",
        "rerope:window=16+power:train_length=64,gamma=0.1,keys=far+share:beta=0.7,reference=48",
        "rerope:window=16+share:reference=64",
        "fitted:lengths=(64,128),table=(1,1.5)",
        "fitted:lengths=(2,3),table=(1.5,1.5),clamp=False",  # the same at all lengths
        "fitted:lengths=(1,64,128),table=(1,1,1.3)",  # nothing up to 64
        "fitted:lengths=(32,64),table=(1,1)",
    ],
)
def test_the_length_of_the_model_is_not(recipe):
    assert collect_warnings(recipe) == []


@pytest.mark.parametrize("length", [16, 64])
def test_lengths_before_and_after_scaling_are_not(length):
    """A model with YaRN in its config may have been trained at either."""
    assert collect_warnings(f"infoscale:train_length={length}", **SCALED) == []
    (message,) = collect_warnings("infoscale:train_length=32", **SCALED)
    assert "trained at 16 tokens, and infoscale:train_length=32 is for 32" in message


def test_a_table_of_another_model_is_to_be_fitted_anew():
    (message,) = collect_warnings("fitted:lengths=(32,64),table=(1,1.5)")
    assert message.endswith("is for 32; fit it to this model, unless its config is wrong")


def test_the_length_after_linear_scaling_is_not_warned_of():
    """Some configs state the length before it, and a factor."""
    linear = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
    assert collect_warnings("infoscale:train_length=256", rope_parameters=linear) == []


def test_the_window_of_some_layers_is_no_training_length():
    assert collect_warnings("infoscale:train_length=16", sliding_window=16, layer_types=["sliding_attention"] * 2) == []
    mixed = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
    (message,) = collect_warnings("infoscale:train_length=16", **mixed)
    assert "is for 16" in message


def test_a_model_is_warned_of_once():
    model = llama()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(3):
            with ise.extended(model, "infoscale:train_length=32"):
                pass
    assert len(seen) == 1


def test_nothing_is_said_of_models_whose_length_is_unknown():
    model = llama()
    model.config.__dict__["max_position_embeddings"] = None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ise.extend(model, "rerope:window=16+infoscale:train_length=32+share:reference=1000")


def test_a_reference_beyond_the_training_length_is_warned_of():
    (message,) = collect_warnings("rerope:window=16+share:reference=100")
    assert message == (
        "llama: was trained at 64 tokens, and no query saw the 100 keys of share:reference=100; leave reference out"
    )


def test_a_window_beyond_the_training_length_is_warned_of():
    (message,) = collect_warnings("rerope:window=80")
    assert message == (
        "llama: was trained at 64 tokens, and rerope:window=80 leaves distances up to 80 as they are, of which those "
        "beyond 64 are new to it, as without a recipe; choose a window of at most 64, such as 32"
    )


@pytest.mark.parametrize("make", [BertConfig, GPT2Config])
def test_a_recipe_that_learned_positions_end_before_is_warned_of(make):
    names = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 64}
    model = AutoModel.from_config(make(vocab_size=9, bos_token_id=1, eos_token_id=1, **names))
    with pytest.warns(UserWarning, match="trained at 64 tokens, where its learned positions end, so that infoscale"):
        ise.extend(model, "infoscale")
    ise.restore(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ise.extend(model, "window:size=16")  # which changes shorter texts


def test_a_saved_recipe_is_not_warned_of_again(tmp_path):
    with pytest.warns(UserWarning, match="is for 32"):
        ise.extend(llama(), "infoscale:train_length=32").save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ise.load(tmp_path)


def test_commands_print_it_as_one_line():
    usual = warnings.formatwarning
    with errors_in_one_line():
        place = ise.extend.__code__.co_filename
        assert warnings.formatwarning("a length", UserWarning, place, 1) == "isentrope: a length\n"
        assert "other.py:1: UserWarning" in warnings.formatwarning("theirs", UserWarning, "other.py", 1)
    assert warnings.formatwarning is usual
