"""A real model far past its training length: stories15M, a TinyStories Llama trained at 256 tokens."""

from __future__ import annotations

import os
from itertools import pairwise
from math import exp
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import isentrope as ise
from isentrope.evaluation.perplexity import token_losses

MODELS = Path(os.environ.get("ISENTROPE_MODELS", Path(__file__).parents[3] / "shared" / "models"))
FOLDER = MODELS / "stories15M"
pytestmark = pytest.mark.skipif(
    not FOLDER.is_dir(), reason="needs the model stories15M in the folder $ISENTROPE_MODELS"
)
BOS, EOS = 1, 2


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


def write_stories(model, length):
    """The model's own stories, one after another: text that it finds easy while it can still read it."""
    torch.manual_seed(0)
    beginnings = torch.full((length // 96, 1), BOS)
    actual = model.generate(beginnings, max_new_tokens=104, do_sample=True, pad_token_id=EOS)
    text = torch.cat([row[row != EOS] for row in actual])[:length]
    assert len(text) == length
    return text


@pytest.fixture(scope="module")
def stories(model):
    return write_stories(model, 768)


def perplexities(model, text, recipe=None, edges=(64, 256, 512, 1024)):
    if recipe is None:
        losses = token_losses(model, text)
    else:
        with ise.extended(model, recipe):
            losses = token_losses(model, text)
    return [exp(losses[a - 1 : b - 1].mean()) for a, b in pairwise(edges)]


@pytest.mark.parametrize("length", [768, pytest.param(2048, marks=pytest.mark.slow)])
def test_the_order_of_methods_past_the_training_length(model, stories, length):
    edges, text = (64, 256, length // 2, length), stories if length == 768 else write_stories(model, length)
    plain = perplexities(model, text, edges=edges)
    tempered = perplexities(model, text, "infoscale", edges)
    yarn = perplexities(model, text, "yarn:factor=16", edges)
    rerope = perplexities(model, text, "rerope:window=128", edges)
    both = perplexities(model, text, "rerope:window=128+infoscale", edges)
    window = perplexities(model, text, "window:size=256", edges)
    inside = plain[0]
    assert plain[-1] > 20 * inside  # the plain model cannot read at all
    assert tempered[-1] > 20 * inside  # a temperature alone does not repair angles the model has never seen
    assert inside * 2 < yarn[-1] < plain[-1] / 2
    assert rerope[-1] < 1.5 * inside < yarn[-1]
    assert both[-1] <= 1.02 * rerope[-1]
    assert window[-1] < 1.5 * inside
    assert both[0] == pytest.approx(inside, rel=1e-2)


def test_generation_goes_on_past_the_training_length(model, stories):
    prompt = stories[None, :600]
    with ise.extended(model, "rerope:window=128+infoscale"):
        told = model.generate(prompt, max_new_tokens=40, do_sample=False, pad_token_id=EOS)
    losses = perplexities(model, told[0, 400:], edges=(200, told.shape[1] - 400))
    assert losses[0] < 4  # what was written reads as a story to the model at a length it knows
    broken = model.generate(prompt, max_new_tokens=40, do_sample=False, pad_token_id=EOS)
    assert perplexities(model, broken[0, 400:], edges=(200, broken.shape[1] - 400))[0] > 2 * losses[0]
