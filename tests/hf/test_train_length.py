"""The training length that a config states, and recipes for another one."""

from __future__ import annotations

import pytest
from transformers import BloomConfig, LlamaConfig, MptConfig, RobertaConfig

import isentrope as ise
from isentrope.hf.train_length import read_train_length
from tests.fixtures.models import llama


@pytest.mark.parametrize(
    ("config", "length"),
    [
        (LlamaConfig(max_position_embeddings=256), 256),
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
