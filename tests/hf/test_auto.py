"""`extend(model, "auto", length=…)`, `describe` on any model, and warnings that no longer hold."""

from __future__ import annotations

import copy
import json
import logging

import pytest
import torch
from transformers import MistralConfig
from transformers.utils import logging as transformers_logging

import isentrope as ise
from isentrope.evaluation.recipe_texts import under_recipe
from isentrope.hf.auto import choose_for_config, resolve_auto
from tests.fixtures.families import FAMILIES
from tests.fixtures.generation import mistral
from tests.fixtures.models import llama, tokens

CHOSEN = "rerope:window=32+share:reference=32+retrieve:size=8"


@pytest.mark.parametrize("arguments", [("auto", "4x"), ("auto", 256), ("auto:length=4x", None)])
def test_auto_is_what_it_stands_for(arguments):
    recipe, length = arguments
    model, ids = ise.extend(llama(), recipe, length=length), tokens(1, 200)
    assert ise.describe(model).recipe == CHOSEN
    with torch.no_grad():
        assert torch.equal(model(ids).logits, ise.extend(llama(), CHOSEN)(ids).logits)


def test_the_choice_and_its_reasons_are_saved(tmp_path):
    model = ise.extend(llama(), "auto", length="2x")
    page = str(ise.describe(model))
    assert "chosen    rerope:window=32: " in page and "chosen    no retrieve: below 4 times" in page
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())["isentrope"]
    assert saved["recipe"]["position"]["name"] == "rerope" and "auto" not in str(saved["recipe"])
    loaded = ise.load(tmp_path)
    assert str(ise.describe(loaded)) == page
    ise.restore(loaded).save_pretrained(tmp_path / "restored")
    assert "isentrope" not in (tmp_path / "restored" / "config.json").read_text()


def test_windows_of_the_model_stay():
    model = ise.extend(FAMILIES["gemma3"].model(), "auto", length="8x")
    windowed, whole = ise.describe(model).layers
    assert windowed.position == "the model's own" and whole.position.startswith("rerope") and whole.far_keys
    config = MistralConfig(sliding_window=64, max_position_embeddings=256)
    assert choose_for_config(config, "4x").recipe == "plain"
    lines = []
    assert resolve_auto(["plain", "auto"], llama().config, 100, lines.append)[1] == "rerope:window=32+share"
    assert lines[0] == "auto: rerope:window=32+share" and len(lines) > 3


@pytest.mark.parametrize(
    ("recipe", "options", "message"),
    [
        ("auto", {}, "needs the length that the model is to read; .* pass length='4x'"),
        ("infoscale", {"length": "4x"}, "expected none with a recipe other than 'auto'"),
        ("auto", {"length": "long"}, "expected tokens such as 8192"),
    ],
)
def test_lengths_that_do_not_fit(recipe, options, message):
    model = llama()
    with pytest.raises(ValueError, match=message):
        ise.extend(model, recipe, **options)
    assert not ise.describe(model).is_extended


def test_describe_a_model_as_it_is():
    model = llama()
    before = {name: id(value) for name, value in vars(model).items()}
    page = ise.describe(model)
    assert str(page).startswith("llama as it is, not extended; trained at 64 tokens\nlayers 0 … 1:")
    assert page.recipe == "plain" and page.layers[0].cache == "rotated keys" and page.reasons == ()
    assert {name: id(value) for name, value in vars(model).items()} == before
    with pytest.raises(ValueError, match="expected a transformers model, got Linear"):
        ise.describe(torch.nn.Linear(2, 2))


def test_a_window_beyond_the_training_length_warns():
    with pytest.warns(
        UserWarning, match=r"trained at 64 tokens, and rerope:window=100 .* choose a window of at most 64"
    ):
        ise.extend(llama(), "rerope:window=100")
    ise.extend(llama(), "rerope:window=64")


@pytest.mark.parametrize("length", [4, "1x"])
def test_auto_warns_of_a_length_inside_the_training_length(length):
    with pytest.warns(UserWarning, match=r"inside the training length of 64, so nothing changes; pass the length"):
        model = ise.extend(llama(), "auto", length=length)
    assert ise.describe(model).recipe == "plain"


def test_lengths_of_extended_models_are_not_warned_of(caplog, monkeypatch):
    transformers_logging.warning_once.cache_clear()  # another test may have been warned
    for name in ("transformers", "transformers.generation.stopping_criteria"):
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)
    model = ise.extend(llama(), "rerope:window=32")
    options = {"max_new_tokens": 2, "do_sample": False}
    for one in (model, copy.deepcopy(model)):
        one.generate(tokens(1, 80), **options)
    tokenizers = logging.getLogger("transformers.tokenization_utils_base")
    warning = (
        "Token indices sequence length is longer than the specified maximum sequence length for this model (80 > %d)."
    )
    tokenizers.warning(warning % 64)
    with under_recipe(model, "plain"):  # what commands measure an extended folder with
        model.generate(tokens(1, 80), **options)
    model.generate(tokens(1, 80), **options)
    ise.restore(model)
    with under_recipe(model, "plain"):  # beyond its length on purpose
        model.generate(tokens(1, 80), **options)
    assert not caplog.records
    model.generate(tokens(1, 80), **options)
    tokenizers.warning(warning % 77)
    said = dict.fromkeys(record.getMessage()[:19] for record in caplog.records)  # two loggers propagate here
    assert list(said) == ["This is a friendly ", "Token indices seque"]


def test_auto_where_the_config_scales_frequencies():
    """As people set YaRN for Qwen: the model reads four times its training length already, at other frequencies."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
    model = llama(rope_parameters=yarn, max_position_embeddings=256)
    with pytest.warns(UserWarning, match="nothing changes; plain: its config scales the frequencies for 256 tokens"):
        assert ise.describe(ise.extend(model, "auto", length=200)).recipe == "plain"
    ise.restore(model)
    description = ise.describe(ise.extend(model, "auto", length=512))
    assert description.recipe == "rerope:window=128+share:reference=128"
    advice = "'rope_type': 'default', 'rope_theta': <its own>} and max_position_embeddings=64"
    assert any(advice in reason for reason in description.reasons)


def test_auto_refuses_frequencies_that_follow_the_length():
    dynamic = llama(rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0})
    with pytest.raises(ValueError, match=r"recipe 'auto': not for rope_type 'dynamic'.*'rope_theta': 10000}"):
        ise.extend(dynamic, "auto", length="4x")


def test_windows_that_leave_new_distances_or_hide_first_keys_warn():
    for recipe in ("sink:sinks=4,size=100", "window:size=100", "lambda:sinks=4,window=100"):
        with pytest.warns(UserWarning, match=r"leaves distances up to 100 as they are"):
            ise.extend(llama(), recipe)
    with pytest.warns(UserWarning, match="beyond which the first 4 keys of sink:size=16 are not seen"):
        ise.extend(mistral(), "sink:sinks=4,size=16")
    with pytest.warns(UserWarning, match="nothing changes; plain: every layer has a window of its own"):
        ise.extend(mistral(), "auto", length="4x")


def test_generating_past_what_a_recipe_is_for_is_warned_of(caplog, monkeypatch):
    transformers_logging.warning_once.cache_clear()
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    model, options = ise.extend(llama(), "yarn:factor=2"), {"max_new_tokens": 2, "do_sample": False}
    model.generate(tokens(1, 100), **options)
    assert not caplog.records
    model.generate(tokens(1, 140), **options)
    assert "maximum length (128)" in caplog.records[0].getMessage()
