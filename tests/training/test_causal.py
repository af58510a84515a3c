"""Training a causal model."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from math import log

import numpy as np
import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

import isentrope as ise
from isentrope.data.prepared import PreparedCorpus
from isentrope.models.tokenizer import build_character_tokenizer
from isentrope.training.builders import build_batches, build_model
from isentrope.training.checkpoint import read_log
from isentrope.training.config import build_config
from isentrope.training.trainer import Interrupted, train
from tests.fixtures.training import CAUSAL, TINY, assert_same_weights, stop_at, weights

pytestmark = pytest.mark.usefixtures("on_one_thread")


def test_a_causal_model_learns(corpus, tmp_path):
    train(corpus, replace(CAUSAL, steps=100, batch=16, evaluate_every=50, log_every=10), tmp_path)
    rows = read_log(tmp_path / "log.jsonl")
    entropy = 2 * log(2)
    assert rows[0]["loss"] > 2 and rows[-1]["loss"] < entropy + 0.2
    assert entropy - 0.2 < rows[-1]["validation"] < entropy + 0.2


def test_batches_of_a_causal_model_are_followed_by_one_more_token(corpus):
    tokenizer = AutoTokenizer.from_pretrained(corpus / "tokenizer")
    batches, held_out = build_batches(PreparedCorpus.open(corpus), replace(CAUSAL, length=299, crop="first"), tokenizer)
    for split in (batches, held_out):
        batch = split[1]
        whole = np.stack([split.documents[i] for i in split.document_indices(1)])
        assert batch.keys() == {"input_ids", "labels"}
        assert np.array_equal(batch["input_ids"], whole[:, :-1]) and np.array_equal(batch["labels"], whole[:, 1:])
    with pytest.raises(ValueError, match="length: expected at most the shortest document's 300 tokens less 1, got 300"):
        build_batches(PreparedCorpus.open(corpus), replace(CAUSAL, length=300), tokenizer)


@pytest.mark.parametrize("at", [3, 6, 11])
def test_a_causal_run_goes_on_to_the_same_weights(corpus, causal, tmp_path, monkeypatch, at):
    with monkeypatch.context() as patch:
        stop_at(patch, at)
        with pytest.raises(Interrupted):
            train(corpus, CAUSAL, tmp_path)
    train(corpus, CAUSAL, tmp_path)
    for name in ("best", "final"):
        assert_close(weights(tmp_path, name), weights(causal, name), atol=0, rtol=0)
    assert (tmp_path / "log.jsonl").read_text() == (causal / "log.jsonl").read_text()


def test_a_causal_run_with_dropout_goes_on_to_the_same_weights(corpus, causal, tmp_path, monkeypatch):
    config = replace(CAUSAL, dropout=0.2)
    train(corpus, config, tmp_path / "whole")
    with monkeypatch.context() as patch:
        stop_at(patch, 5)
        with pytest.raises(Interrupted):
            train(corpus, config, tmp_path / "cut")
    train(corpus, config, tmp_path / "cut")
    assert_same_weights(tmp_path / "whole", tmp_path / "cut")
    with pytest.raises(AssertionError):
        assert_same_weights(tmp_path / "whole", causal)


def test_parts_of_a_causal_batch_add_up(corpus, tmp_path):
    for accumulate in (1, 4):
        train(corpus, replace(CAUSAL, rate=1e-3, accumulate=accumulate), tmp_path / str(accumulate))
    assert_same_weights(tmp_path / "1", tmp_path / "4", atol=1e-6)


@pytest.mark.parametrize("name", ["best", "final"])
def test_causal_models_load_and_give_the_recorded_loss(corpus, causal, name):
    llama, tokenizer = (kind.from_pretrained(causal / name) for kind in (AutoModelForCausalLM, AutoTokenizer))
    assert type(llama) is LlamaForCausalLM and llama.dtype == torch.float32 and llama.config.use_cache
    assert llama.config.max_position_embeddings == 16 and llama.config.vocab_size == len(tokenizer)
    assert llama.config.pad_token_id == tokenizer.pad_token_id and llama.config.eos_token_id is None
    assert llama.lm_head.weight is llama.model.embed_tokens.weight and "lm_head.weight" not in weights(causal, name)
    _, held_out = build_batches(PreparedCorpus.open(corpus), CAUSAL, tokenizer)
    losses = []
    for step in range(2):  # sixteen crops
        with torch.no_grad():
            logits = llama.eval()(held_out[step]["input_ids"]).logits
        losses.append(torch.nn.functional.cross_entropy(logits.mT, held_out[step]["labels"]).item())
    told = json.loads((causal / "train.json").read_text())["best"]["validation"]
    last = read_log(causal / "log.jsonl")[-1]["validation"]
    assert np.mean(losses) == pytest.approx(told if name == "best" else last, abs=1e-5)


def test_a_causal_model_needs_nothing_of_ours_to_go_on_with_a_text(causal, monkeypatch):
    """Its folder holds data alone: no file names a class or a module of this package, which cannot be imported here."""
    texts = [path.read_text() for path in (causal / "best").iterdir() if path.suffix != ".safetensors"]
    assert len(texts) >= 3 and not any(word in text for text in texts for word in ("isentrope", "auto_map"))
    for name in [name for name in sys.modules if name.split(".")[0] == "isentrope"]:
        monkeypatch.setitem(sys.modules, name, None)
    model, tokenizer = (kind.from_pretrained(causal / "best") for kind in (AutoModelForCausalLM, AutoTokenizer))
    assert {type(part).__module__.split(".")[0] for part in (model, tokenizer, model.config)} == {"transformers"}
    inputs = tokenizer(["abacab", "ab"], padding=True, return_tensors="pt")
    ids = model.generate(**inputs, max_new_tokens=5, do_sample=False)
    long, short = tokenizer.batch_decode(ids, skip_special_tokens=True)
    assert re.fullmatch("abacab[a-p]{5}", long) and re.fullmatch("ab[a-p]{5}", short)


def test_a_causal_model_is_extended(causal):
    llama, tokenizer = (kind.from_pretrained(causal / "best") for kind in (AutoModelForCausalLM, AutoTokenizer))
    ids = tokenizer("abacabad" * 25, return_tensors="pt").input_ids
    with torch.no_grad():
        plain = llama.eval()(ids).logits
        ise.extend(llama, "rerope:window=16+infoscale")
        actual = llama(ids).logits
    assert_close(actual[:, :16], plain[:, :16])  # the training length
    assert actual.isfinite().all() and not torch.allclose(actual[:, 64:], plain[:, 64:])


def test_a_causal_model_is_gone_on_from(corpus, done, causal, tmp_path):
    llama = LlamaForCausalLM.from_pretrained(causal / "best", dtype=torch.bfloat16)
    llama.save_pretrained(tmp_path / "narrow")
    config = replace(CAUSAL, model=str(tmp_path / "narrow"), sizes=None, layers=1, length=12, steps=1, rate=1e-9)
    train(corpus, replace(config, dropout=0.25), tmp_path / "run")
    base, actual = llama.state_dict(), weights(tmp_path / "run")
    assert actual.keys() == {name for name in base if "layers.1." not in name and name != "lm_head.weight"}
    for name, x in actual.items():
        assert_close(x, base[name].float(), atol=1e-8, rtol=0)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "final")
    assert loaded.dtype == torch.float32 and loaded.config.attention_dropout == 0.25
    assert loaded.config.num_hidden_layers == 1 and loaded.config.max_position_embeddings == 12
    for other, options, kinds in ((done, config, "llama, got gau_alpha"), (causal, TINY, "gau_alpha, got llama")):
        with pytest.raises(ValueError, match=f"model: expected one of type {kinds} in"):
            train(corpus, replace(options, model=str(other / "best"), sizes=None), tmp_path / "other")


def test_the_causal_preset_is_small():
    config = build_config("causal")
    with torch.device("meta"):
        llama = build_model(config, build_character_tokenizer(["".join(map(chr, range(32, 163)))]))
    assert llama.num_parameters() == 3_970_304 and llama.config.vocab_size == 136  # as many as SymPy's
    assert not llama.config.use_cache and llama.config.rope_parameters["rope_theta"] == 10000
