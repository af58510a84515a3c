"""The paper's protocol against the same written out, position by position."""

from __future__ import annotations

from math import exp, inf

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import isentrope.models as models
from isentrope.data.prepared import Documents
from isentrope.evaluation import masked_lm as study
from isentrope.evaluation.masked_lm import DocumentScore, MaskingProtocol, score_documents, summarize_scores

MASK = 4


def documents(*lengths):
    ids = np.random.default_rng(0).integers(5, 40, sum(lengths)).astype(np.int32)
    starts = np.cumsum([0, *lengths[:-1]])
    return Documents([f"d{i}" for i in range(len(lengths))], np.array(lengths), starts, ids)


def hashes(count):
    return [f"{i:064d}" for i in range(count)]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = models.GAUAlphaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, attention_key_size=8, num_hidden_layers=2,
        initializer_range=0.5, recipe="rerope:window=8+infoscale", max_position_embeddings=8,
    )  # fmt: skip
    return models.GAUAlphaForMaskedLM(config).eval()


def by_hand(model, tokens, at):
    ids = torch.tensor(tokens, dtype=torch.int64)[None].clone()
    label = ids[0, at].clone()
    ids[0, at] = MASK
    with torch.no_grad():
        logits = model(ids).logits[0, at]
    return F.cross_entropy(logits, label).item(), int(logits.argmax() == label)


def test_every_position_masked_alone(model):
    texts = documents(24, 30)
    scores = score_documents(model, texts, hashes(2), 20, MASK, MaskingProtocol(positions=None))
    for i, score in enumerate(scores):
        losses, hits = zip(*(by_hand(model, texts[i][:20], at) for at in range(20)), strict=True)
        assert (score.count, score.hits) == (20, sum(hits))
        assert score.loss == pytest.approx(sum(losses), abs=1e-4)


def test_some_positions_drawn_by_seed(model):
    texts = documents(24, 30)
    protocol = MaskingProtocol(positions=7)
    scores = score_documents(model, texts, hashes(2), 20, MASK, protocol)
    for i, score in enumerate(scores):
        at = protocol.draw_positions(20, hashes(2)[i])[:, 0]
        assert len(set(at.tolist())) == 7
        assert score.loss == pytest.approx(sum(by_hand(model, texts[i][:20], j)[0] for j in at), abs=1e-4)
    assert scores[0] == score_documents(model, texts, hashes(1), 20, MASK, protocol)[0]  # whatever else is evaluated
    again = score_documents(model, texts, hashes(2), 20, MASK, MaskingProtocol(positions=7, batch=3))
    assert [s.loss for s in again] == pytest.approx([s.loss for s in scores], abs=1e-4)
    other = MaskingProtocol(positions=7, seed=1).draw_positions(20, hashes(1)[0])
    assert not np.array_equal(other, protocol.draw_positions(20, hashes(1)[0]))
    assert not np.array_equal(protocol.draw_positions(20, hashes(2)[1]), protocol.draw_positions(20, hashes(1)[0]))


def test_many_masked_at_once(model):
    texts = documents(50)
    protocol = MaskingProtocol("random", positions=16)
    hidden = protocol.draw_positions(40, hashes(1)[0])
    assert hidden.shape == (3, 6)  # 15 % of 40, often enough for 16
    (score,) = score_documents(model, texts, hashes(1), 40, MASK, protocol)
    loss = 0.0
    for row in hidden:
        ids = torch.from_numpy(texts[0][:40].astype(np.int64))[None].clone()
        labels = ids[0, row].clone()
        ids[0, row] = MASK
        with torch.no_grad():
            loss += F.cross_entropy(model(ids).logits[0, row], labels, reduction="sum").item()
    assert score.count == 18 and score.loss == pytest.approx(loss, abs=1e-4)


def test_short_documents_are_left_out_and_never_tiled(model):
    scores = score_documents(model, documents(10, 30, 19), hashes(3), 20, MASK, MaskingProtocol(positions=3))
    assert [score.sha256 for score in scores] == hashes(3)[1:2]


def test_rows_are_bounded_by_tokens(model, monkeypatch):
    seen = []
    monkeypatch.setitem(study.MAX_TOKENS_PER_FORWARD, "cpu", 40)
    plain = type(model).forward
    monkeypatch.setattr(type(model), "forward", lambda self, **inputs: seen.append(inputs) or plain(self, **inputs))
    score_documents(model, documents(30), hashes(1), 20, MASK, MaskingProtocol(positions=5))
    assert [len(inputs["input_ids"]) for inputs in seen] == [2, 2, 1]
    assert all(inputs["at"].shape == (len(inputs["input_ids"]), 1) for inputs in seen)


def test_perplexity_is_over_predictions_and_intervals_over_documents():
    scores = [DocumentScore("a", 10, 20.0, 5), DocumentScore("b", 30, 30.0, 27)]
    actual = summarize_scores(scores)
    assert actual["ppl"] == pytest.approx(exp(50 / 40)) and actual["acc"] == pytest.approx(32 / 40)
    assert actual["ppl_low"] == pytest.approx(exp(1)) and actual["ppl_high"] == pytest.approx(exp(2))
    assert actual["acc_low"] == pytest.approx(0.5) and actual["acc_high"] == pytest.approx(0.9)
    assert summarize_scores(scores) == actual
    one = summarize_scores(scores[:1])
    assert one["ppl_low"] == one["ppl"] == one["ppl_high"]
    assert summarize_scores([DocumentScore("a", 1, 1e4, 0)])["ppl"] == inf


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"name": "double"}, "protocol"),
        ({"positions": 0}, "positions"),
        ({"share": 1.0}, "share"),
        ({"batch": 0}, "batch"),
    ],
)
def test_bad_protocols(options, words):
    with pytest.raises(ValueError, match=words):
        MaskingProtocol(**options)
