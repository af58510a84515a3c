"""Every supported family: frequencies as transformers scales them."""

from __future__ import annotations

import copy

import pytest
import torch

import isentrope as ise
from tests.fixtures.families import FAMILIES, LONG, ROTATING, close, logits, rotary_module, write_scaling
from tests.fixtures.models import TRAINED, llama, tokens
from tests.fixtures.refusals import refused
from tests.fixtures.turns import in_turns

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": TRAINED}
SCALED = {
    "pi:factor=4": {"rope_type": "linear", "factor": 4.0},
    "yarn:factor=4": YARN | {"attention_factor": 1.0},
    "ntk:factor=4,dynamic=true": {"rope_type": "dynamic", "factor": 4.0},
}
UNSCALED = [name for name in ROTATING if name != "gpt_oss"]  # GPT-OSS has YaRN already
# families whose attention_factor reaches every score, as a temperature does: all entries of all layers rotate alike
ALL_ROTATES = [name for name in UNSCALED if FAMILIES[name].all_rotates]


def scaled_by_transformers(family, scaling, length=LONG):
    if family.model_type == "phi3":
        return write_scaling(family.model(), length, **scaling)
    return family.model(family.config(scaling))


def against_transformers(name, text, scaling):
    """In fp64, so that nothing but the rounding of the frequencies, which is fp32, is left."""
    family = FAMILIES[name]
    ids = tokens(2, LONG)
    expected = logits(scaled_by_transformers(family, scaling).double(), ids)
    model = family.model().double()
    plain = logits(model, ids)
    with ise.extended(model, text):
        close(logits(model, ids), expected, 1e-4)
    assert (expected - plain).abs().max() > 0.01 * plain.abs().max()


@pytest.mark.parametrize(("name", "text"), in_turns(UNSCALED, list(SCALED), every=2))
def test_frequencies_are_those_of_transformers(name, text):
    against_transformers(name, text, SCALED[text])


@pytest.mark.parametrize("name", ALL_ROTATES)
def test_yarn_with_its_temperature_is_that_of_transformers(name):
    """Transformers puts YaRN's temperature on cos and sin, we put it on the score."""
    against_transformers(name, "yarn:factor=4+yarntemperature:factor=4", YARN)


@pytest.mark.parametrize("name", [name for name in UNSCALED if FAMILIES[name].model_type != "phi3"])
def test_static_ntk_is_a_larger_base(name):
    family = FAMILIES[name]
    dim = 2 * getattr(rotary_module(family.model()), family.frequencies_of("full_attention")).numel()
    against_transformers(name, "ntk:factor=4", {"rope_theta": family.rope["rope_theta"] * 4 ** (dim / (dim - 2))})


def test_interpolation_of_frequencies_that_are_scaled_already():
    model = FAMILIES["gpt_oss"].model()
    other = copy.deepcopy(model)
    rotary_module(other).inv_freq /= 4
    ids = tokens(2, LONG)
    with ise.extended(model, "pi:factor=4"):
        close(logits(model, ids), logits(other, ids), 1e-4)


def test_a_base_is_the_recipes_even_where_it_is_the_usual_one():
    """A model trained with another base is rotated with 10,000 if the recipe says so, and with its own if not."""
    ids = tokens(2, LONG)
    model, usual = (llama(rope_parameters={"rope_type": "default", "rope_theta": base}).double() for base in (500, 1e4))
    plain, expected = logits(model, ids), logits(usual, ids)
    assert (expected - plain).abs().max() > 0.01 * plain.abs().max()
    for text, result in (("rope", plain), ("rope:base=500", plain), ("rope:base=10000", expected)):
        with ise.extended(model, text):
            close(logits(model, ids), result, 1e-4)
    with ise.extended(usual, "yarn:factor=4"), ise.extended(model, "yarn:factor=4,base=10000"):
        close(logits(model, ids), logits(usual, ids), 1e-4)
    scaled = llama(rope_parameters=YARN | {"rope_theta": 500}).double()
    before = logits(scaled, ids)
    refused(scaled, "yarn:factor=4,base=500", "its frequencies are already scaled")
    with ise.extended(scaled, "rope:base=500"):  # its own
        assert torch.equal(logits(scaled, ids), before)
    for text in ("rerope:window=8", "pi:factor=2", "cope:clip=2"):
        refused(model, f"{text},base=10000", "starts from the model's frequencies; leave base out")
        with ise.extended(model, text):
            expected = logits(model, ids)
        with ise.extended(model, f"{text},base=500"):
            assert (logits(model, ids) == expected).all()
