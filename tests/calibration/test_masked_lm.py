"""Laws of GAU-α fitted to validation documents."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

from isentrope.calibration import masked_lm
from isentrope.calibration.masked_lm import fit_masked_law, set_law
from isentrope.data.prepared import Documents
from isentrope.evaluation.masked_lm import MaskingProtocol, UnmeasurableError, score_documents
from isentrope.models import GAUAlphaConfig, GAUAlphaForMaskedLM
from isentrope.share import Share
from isentrope.temperatures import Fitted, Power

pytestmark = pytest.mark.usefixtures("on_one_thread")
LENGTH, TRAIN_LENGTH, MASK = 64, 16, 3
PROTOCOL = MaskingProtocol("random", positions=20, seed=1)


@pytest.fixture(autouse=True)
def _few_positions(monkeypatch):
    monkeypatch.setattr(masked_lm, "PROTOCOL", PROTOCOL)


@pytest.fixture(scope="module")
def documents():
    """Nine documents, one of them too short; letters come in runs, so that near keys say more than far ones."""
    random = np.random.default_rng(0)
    texts = [random.integers(4, 12, 40 if i == 1 else 80).repeat(2).astype(np.int32) for i in range(9)]
    texts[1] = texts[1][: LENGTH - 1]
    lengths = np.array([len(text) for text in texts])
    names = [f"d{i}" for i in range(len(texts))]
    return Documents(names, lengths, np.cumsum(lengths) - lengths, np.concatenate(texts)), names


def build(recipe):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "attention_key_size": 8, "num_hidden_layers": 2}
    config = GAUAlphaConfig(
        vocab_size=12, **sizes, max_position_embeddings=TRAIN_LENGTH, recipe=recipe, initializer_range=0.5
    )
    return GAUAlphaForMaskedLM(config).eval().double()


def loss(model, documents, law):
    set_law(model, law)
    scores = score_documents(model, *documents, LENGTH, MASK, PROTOCOL)
    return sum(score.loss for score in scores) / sum(score.count for score in scores)


def test_a_temperature_is_the_best_of_a_grid(documents):
    model = build("rope")
    (tau,) = fit_masked_law(model, *documents, LENGTH, TRAIN_LENGTH, MASK)
    assert tau.lengths == (TRAIN_LENGTH, LENGTH) and tau.table[0] == 1.0
    assert all(layer.gau.recipe.temperature == tau for layer in model.gau_alpha.encoder.layer)
    grid = [(Fitted((16, 64), (1.0, value), count="sequence"),) for value in (0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0)]
    assert loss(model, documents, (tau,)) <= min(loss(model, documents, law) for law in grid) + 1e-3


@pytest.mark.parametrize("recipe", ["rerope:window=8", "selfextend:window=8,group=4"])
def test_far_keys_get_a_temperature_and_a_share(documents, recipe):
    model = build(recipe)
    law = fit_masked_law(model, *documents, LENGTH, TRAIN_LENGTH, MASK)
    power, share = law
    assert power.keys == "far" and power.train_length == TRAIN_LENGTH and share.reference == TRAIN_LENGTH - 8
    assert abs(power.gamma * np.log(4)) <= 0.7001 and 0 <= share.beta <= 3
    assert all(layer.gau.recipe.share == share for layer in model.gau_alpha.encoder.layer)
    best = loss(model, documents, law)
    closed = loss(model, documents, (Share(reference=8),))
    assert best <= min(loss(model, documents, ()), closed) + 1e-6
    pairs = product((-0.25, 0.0, 0.25), (0.0, 1.5, 3.0))
    grid = [(Power(16, gamma, keys="far"), Share(beta, 8)) for gamma, beta in pairs]
    assert best <= min(loss(model, documents, each) for each in grid) + 1e-3


def test_nothing_is_fitted_inside_the_training_length(documents):
    assert fit_masked_law(build("rerope:window=8"), *documents, TRAIN_LENGTH, TRAIN_LENGTH, MASK) == ()


def test_no_document_is_long_enough(documents):
    with pytest.raises(UnmeasurableError, match="no validation document has 4000 tokens"):
        fit_masked_law(build("rope"), *documents, 4000, TRAIN_LENGTH, MASK)
