"""`isentrope train`: that it learns, what it leaves behind, and what it says when it cannot go on."""

from __future__ import annotations

import json
import logging
import pickle
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from dataclasses import replace
from math import log
from pathlib import Path

import numpy as np
import pytest
import torch
from isentrope.study import train as study
from isentrope.study.checkpoint import Log, read_log, save_tensors
from isentrope.study.prepare import Options, prepare
from isentrope.study.regimen import PRESETS, VARIANTS, Config, configured, read_sizes
from isentrope.study.step import Stepper, ahead
from isentrope.study.train import Diverged, Interrupted, train
from safetensors import safe_open
from safetensors.torch import load_file
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer, LlamaForCausalLM
from typer.testing import CliRunner

import isentrope as ise
import isentrope.models as models
from isentrope.cli import app
from isentrope.data.prepared import Prepared
from isentrope.data.source import Source
from isentrope.models.tokenizer import character_tokenizer
from isentrope.positions import CLEX

pytestmark = pytest.mark.usefixtures("on_one_thread")
SIZES = {"hidden_size": 32, "intermediate_size": 48, "attention_key_size": 8}
TINY = Config(
    layers=2, sizes=SIZES, length=16, batch=8, steps=12, rate=1e-2, validation=16,
    evaluate_every=6, save_every=4, log_every=2,
)  # fmt: skip


def weights(run, name="final"):
    return load_file(run / name / "model.safetensors")


def states(run):
    return sorted(int(path.stem[6:]) for path in run.glob("state-*.safetensors"))


def assert_same_weights(one, other, atol=0.0):
    assert_close(weights(one), weights(other), atol=atol, rtol=0)


@pytest.fixture(scope="module")
def done(corpus, tmp_path_factory):
    """A finished run of TINY."""
    out = tmp_path_factory.mktemp("runs") / "tiny"
    train(corpus, TINY, out)
    return out


def stepping(monkeypatch, change):
    """Let `change(step, loss)`, steps from 1, have a word in what each step returns."""
    plain = Stepper.__call__

    def call(self, batch, rate):
        loss = plain(self, batch, rate)
        return change(self.taken, loss)

    monkeypatch.setattr(Stepper, "__call__", call)


def stop_at(monkeypatch, step, number=signal.SIGTERM):
    def change(taken, loss):
        if taken == step:
            signal.raise_signal(number)
        return loss

    stepping(monkeypatch, change)


# what a run is


def test_the_loss_falls_to_what_can_be_known(corpus, tmp_path):
    train(corpus, replace(TINY, steps=150, batch=16, dropout=0.0, evaluate_every=50, log_every=10), tmp_path)
    rows = read_log(tmp_path / "log.jsonl")
    entropy = 2 * log(2)
    assert rows[0]["loss"] > 2 and rows[-1]["loss"] < entropy + 0.3
    assert entropy - 0.3 < rows[-1]["validation"] < entropy + 0.3


def test_the_log_has_a_row_for_every_interval(corpus, done):
    rows = read_log(done / "log.jsonl")
    assert [row["step"] for row in rows] == [2, 4, 6, 8, 10, 12]
    assert [row["step"] for row in rows if "validation" in row] == [6, 12]
    documents = len(Prepared.open(corpus).documents("train"))
    for row in rows:
        assert {"step", "epoch", "loss", "rate"} <= set(row) <= {"step", "epoch", "loss", "rate", "validation"}
        assert row["epoch"] == pytest.approx(row["step"] * 8 / documents, abs=1e-4)
        assert row["rate"] == TINY.learning_rate(row["step"] - 1, 12)


def test_train_json_says_how(done):
    told = json.loads((done / "train.json").read_text())
    assert told["finished"] and told["steps"] == 12 and told["processes"] == 1 and told["seconds"] > 0
    assert Config(**told["config"]) == TINY
    assert {"torch", "commit", "date", "hardware"} <= set(told["run"])
    lowest = min((row["validation"], row["step"]) for row in read_log(done / "log.jsonl") if "validation" in row)
    assert (told["best"]["validation"], told["best"]["step"]) == lowest


@pytest.mark.parametrize("name", ["best", "final"])
def test_saved_models_load_and_give_the_recorded_loss(corpus, done, name):
    gau, tokenizer = (kind.from_pretrained(done / name) for kind in (AutoModelForMaskedLM, AutoTokenizer))
    assert type(gau) is models.GAUAlphaForMaskedLM and gau.dtype == torch.float32
    assert gau.config.max_position_embeddings == 16 and len(tokenizer) == gau.config.vocab_size
    assert tokenizer.get_vocab() == AutoTokenizer.from_pretrained(corpus / "tokenizer").get_vocab()
    _, held_out = study._batches(Prepared.open(corpus), TINY, tokenizer)
    losses = []
    for step in range(2):  # sixteen crops
        batch = held_out[step]
        with torch.no_grad():
            logits = gau.eval()(batch["input_ids"]).logits
        picked = logits.gather(1, batch["at"][..., None].expand(-1, -1, logits.shape[-1]))
        losses.append(torch.nn.functional.cross_entropy(picked.flatten(0, 1), batch["labels"].flatten()).item())
    told = json.loads((done / "train.json").read_text())["best"]["validation"]
    last = read_log(done / "log.jsonl")[-1]["validation"]
    assert np.mean(losses) == pytest.approx(told if name == "best" else last, abs=1e-5)


def test_best_is_the_model_of_the_lowest_validation_loss(corpus, tmp_path, monkeypatch):
    told = iter([3.0, 1.0, 2.0])
    monkeypatch.setattr(study.Run, "validate", lambda self: next(told))
    found = train(corpus, replace(TINY, evaluate_every=4), tmp_path / "run")
    assert found["best"] == {"step": 8, "validation": 1.0}
    # the same weights as where a run of this schedule stands after eight steps
    stop_at(monkeypatch, 8)
    told = iter([3.0, 1.0])
    with pytest.raises(Interrupted):
        train(corpus, replace(TINY, evaluate_every=4), tmp_path / "stopped")
    state = load_file(tmp_path / "stopped" / "state-000000008.safetensors")
    best, final = weights(tmp_path / "run", "best"), weights(tmp_path / "run")
    assert best.keys() == {name[6:] for name in state if name.startswith("model.")}
    assert all(torch.equal(x, state[f"model.{name}"]) for name, x in best.items())
    assert not all(torch.equal(x, final[name]) for name, x in best.items())


def test_two_runs_are_the_same_and_another_seed_is_another(corpus, done, tmp_path):
    torch.manual_seed(99)  # of no consequence
    train(corpus, TINY, tmp_path / "again")
    assert_same_weights(tmp_path / "again", done)
    assert (tmp_path / "again" / "log.jsonl").read_text() == (done / "log.jsonl").read_text()
    train(corpus, replace(TINY, seed=1), tmp_path / "other")
    with pytest.raises(AssertionError):
        assert_same_weights(tmp_path / "other", done)


def test_a_finished_run_returns_at_once(corpus, done, monkeypatch):
    monkeypatch.setattr(study, "build", None)  # nothing is trained
    before = {path: path.stat().st_mtime_ns for path in done.rglob("*")}
    assert train(corpus, TINY, done) == json.loads((done / "train.json").read_text())
    assert {path: path.stat().st_mtime_ns for path in done.rglob("*")} == before


def test_another_run_in_the_same_folder_is_refused(corpus, done, tmp_path, monkeypatch):
    for other, named in (({"rate": 1e-3}, "rate differ"), ({"seed": 1, "batch": 4}, "batch, seed differ")):
        with pytest.raises(ValueError, match=named) as error:
            train(corpus, replace(TINY, **other), done)
        assert str(done) in str(error.value)
    stop_at(monkeypatch, 5)
    with pytest.raises(Interrupted):
        train(corpus, TINY, tmp_path / "unfinished")
    with pytest.raises(ValueError, match="sizes differ"):
        train(corpus, replace(TINY, sizes=SIZES | {"hidden_size": 16}), tmp_path / "unfinished")


def test_another_corpus_in_the_same_folder_is_refused(corpus, done, tmp_path):
    other = prepare(Source(str(corpus.parent / "texts.jsonl")), tmp_path, Options(longer_than=200, test=4, seed=1))
    with pytest.raises(ValueError, match="the corpus differ"):
        train(other.parent, TINY, done)


def test_epochs_in_place_of_steps(corpus, tmp_path):
    told = train(corpus, replace(TINY, steps=0, epochs=1.5), tmp_path)
    assert told["steps"] == round(1.5 * len(Prepared.open(corpus).documents("train")) / 8)


# Adam divides gradients by their size, so that where they all but vanish the rounding of their sum counts in full: a
# rate of 1e-2 turns it into differences of up to 2e-6, this one into 1e-7. Other dropout would make them 1e-2.
GENTLE = replace(TINY, rate=1e-3, dropout=0.1)


def test_parts_of_a_batch_add_up(corpus, tmp_path):
    """Dropout included: it is a row's own."""
    for accumulate in (1, 2, 4):
        train(corpus, replace(GENTLE, accumulate=accumulate), tmp_path / str(accumulate))
    whole = read_log(tmp_path / "1" / "log.jsonl")
    for accumulate in (2, 4):
        assert_same_weights(tmp_path / "1", tmp_path / str(accumulate), atol=1e-6)
        # clipping and Adam undo a factor of the gradient; the loss does not
        for row, expected in zip(read_log(tmp_path / str(accumulate) / "log.jsonl"), whole, strict=True):
            assert row == pytest.approx(expected, abs=1e-6)


def test_parts_of_a_batch_add_up_exactly_but_for_rounding(corpus, tmp_path, monkeypatch):
    """At the full rate: in fp64 nothing is left of what differs in fp32."""
    build = study.build
    monkeypatch.setattr(study, "build", lambda *given: build(*given).double())
    for accumulate in (1, 4):
        train(corpus, replace(TINY, dropout=0.1, accumulate=accumulate), tmp_path / str(accumulate))
    assert all(x.dtype == torch.float64 for x in weights(tmp_path / "1").values())
    assert_same_weights(tmp_path / "1", tmp_path / "4", atol=1e-12)


def test_bf16(corpus, done, tmp_path):
    train(corpus, replace(TINY, precision="bf16"), tmp_path)
    assert all(x.dtype == torch.float32 for x in weights(tmp_path).values())
    for row, exact in zip(read_log(tmp_path / "log.jsonl"), read_log(done / "log.jsonl"), strict=True):
        assert row["loss"] != exact["loss"] and row["loss"] == pytest.approx(exact["loss"], rel=0.02)


# the paper's variants

BOTH = [*((name, None) for name in VARIANTS), ("plain", 128.0), ("clex", 16.0), ("alibi", 128.0)]


@pytest.mark.parametrize(("variant", "cosscale"), BOTH)
def test_every_variant_trains(corpus, tmp_path, variant, cosscale):
    config = replace(configured("train", variant, cosscale, steps=2), layers=2, sizes=SIZES, length=16, batch=8,
                     rate=1e-2, validation=8)  # fmt: skip
    train(corpus, config, tmp_path)
    loaded = AutoModelForMaskedLM.from_pretrained(tmp_path / "final")
    recipe = loaded.config.recipe
    names = {"plain": "rope", "pose": "rope", "yarn16": "yarn", "yarn32": "yarn"}
    assert recipe["position"]["name"] == names.get(variant, variant)
    assert recipe.get("score") == (cosscale and {"name": "cosine", "alpha": cosscale})
    if "yarn" in variant:
        assert recipe["position"]["factor"] == int(variant[4:]) and recipe["position"]["original_length"] == 16
    begun = dict(begin(config, corpus).named_parameters())
    found = dict(loaded.named_parameters())
    assert found.keys() == begun.keys() == weights(tmp_path).keys()
    assert sum("learned" in name for name in found) == (4 if variant == "clex" else 0)
    for name, x in found.items():
        assert torch.equal(x, weights(tmp_path)[name]) and not torch.equal(x, begun[name]), name


def begin(config, corpus):
    """The model that a run of this configuration begins with."""
    torch.manual_seed(config.seed)
    return study.build(config, AutoTokenizer.from_pretrained(corpus / "tokenizer"))


def test_clex_draws_one_t_a_step_for_all_layers(corpus, tmp_path, monkeypatch):
    drawn, plain = [], CLEX.sample
    monkeypatch.setattr(CLEX, "sample", lambda self, generator: drawn.append(plain(self, generator)))
    train(corpus, replace(TINY, recipe="clex", steps=5), tmp_path)
    assert len(drawn) == 10 and drawn[::2] == drawn[1::2] and len(set(drawn)) > 2


def test_positions_of_pose_reach_the_model(corpus, tmp_path, monkeypatch):
    farthest = []
    forward = models.GAUAlphaForMaskedLM.forward

    def noted(self, *args, position_ids, **options):
        farthest.append(int(position_ids.max()))
        return forward(self, *args, position_ids=position_ids, **options)

    monkeypatch.setattr(models.GAUAlphaForMaskedLM, "forward", noted)
    train(corpus, replace(TINY, pose=4096), tmp_path)
    assert max(farthest) > 2000


# from a model


def test_a_model_is_gone_on_from_and_may_lose_layers(corpus, done, tmp_path):
    config = replace(configured("finetune", "pi", model=str(done / "best"), steps=1), rate=1e-9, length=12, batch=8,
                     validation=8)  # fmt: skip
    for layers in (1, 2):
        out = tmp_path / str(layers)
        train(corpus, replace(config, layers=layers), out)
        base, found = weights(done, "best"), weights(out)
        assert found.keys() == {name for name in base if layers == 2 or "layer.1." not in name}
        for name, x in found.items():
            assert_close(x, base[name], atol=1e-8, rtol=0)
        loaded = AutoModelForMaskedLM.from_pretrained(out / "final")
        assert loaded.config.num_hidden_layers == layers and loaded.config.max_position_embeddings == 12
        assert loaded.config.recipe["position"] == {"name": "pi", "factor": 4, "layout": "interleaved"}


def test_dropout_is_the_models_own_unless_given(corpus, done):
    config = replace(TINY, model=str(done / "best"), sizes=None)
    assert begin(config, corpus).config.hidden_dropout_prob == 0.1
    given = begin(replace(config, dropout=0.0), corpus).config
    assert given.hidden_dropout_prob == given.attention_probs_dropout_prob == 0.0


def test_a_model_of_another_vocabulary_is_refused(corpus, tmp_path):
    sizes = SIZES | {"num_hidden_layers": 2, "vocab_size": 99}
    models.GAUAlphaForMaskedLM(models.GAUAlphaConfig(**sizes)).save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match=r"model: expected the corpus' tokenizer, got 99 and \d+ tokens"):
        train(corpus, replace(TINY, model=str(tmp_path / "model"), sizes=None), tmp_path / "out")
    assert not (tmp_path / "out" / "train.json").exists()


def test_more_layers_than_the_model_has_and_no_model_are_refused(corpus, done, tmp_path):
    with pytest.raises(ValueError, match="layers: expected at most the model's 2, got 3"):
        train(corpus, replace(TINY, model=str(done / "best"), sizes=None, layers=3), tmp_path)
    with pytest.raises(ValueError, match="nowhere: expected a folder with a model"):
        train(corpus, replace(TINY, model=str(tmp_path / "nowhere"), sizes=None), tmp_path)


# a causal model

CAUSAL = replace(TINY, objective="causal", sizes={"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2})


@pytest.fixture(scope="module")
def causal(corpus, tmp_path_factory):
    """A finished run of CAUSAL."""
    out = tmp_path_factory.mktemp("runs") / "causal"
    train(corpus, CAUSAL, out)
    return out


def test_a_causal_model_learns(corpus, tmp_path):
    train(corpus, replace(CAUSAL, steps=100, batch=16, evaluate_every=50, log_every=10), tmp_path)
    rows = read_log(tmp_path / "log.jsonl")
    entropy = 2 * log(2)
    assert rows[0]["loss"] > 2 and rows[-1]["loss"] < entropy + 0.2
    assert entropy - 0.2 < rows[-1]["validation"] < entropy + 0.2


def test_batches_of_a_causal_model_are_followed_by_one_more_token(corpus):
    tokenizer = AutoTokenizer.from_pretrained(corpus / "tokenizer")
    batches, held_out = study._batches(Prepared.open(corpus), replace(CAUSAL, length=299, crop="first"), tokenizer)
    for found in (batches, held_out):
        batch = found[1]
        whole = np.stack([found.documents[i] for i in found.members(1)])
        assert batch.keys() == {"input_ids", "labels"}
        assert np.array_equal(batch["input_ids"], whole[:, :-1]) and np.array_equal(batch["labels"], whole[:, 1:])
    with pytest.raises(ValueError, match="length: expected at most the shortest document's 300 tokens less 1, got 300"):
        study._batches(Prepared.open(corpus), replace(CAUSAL, length=300), tokenizer)


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
    _, held_out = study._batches(Prepared.open(corpus), CAUSAL, tokenizer)
    losses = []
    for step in range(2):  # sixteen crops
        with torch.no_grad():
            logits = llama.eval()(held_out[step]["input_ids"]).logits
        losses.append(torch.nn.functional.cross_entropy(logits.mT, held_out[step]["labels"]).item())
    told = json.loads((causal / "train.json").read_text())["best"]["validation"]
    last = read_log(causal / "log.jsonl")[-1]["validation"]
    assert np.mean(losses) == pytest.approx(told if name == "best" else last, abs=1e-5)


def test_a_causal_model_needs_nothing_of_ours_to_go_on_with_a_text(causal):
    code = f"""
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
model, tokenizer = (kind.from_pretrained({str(causal / "best")!r}) for kind in (AutoModelForCausalLM, AutoTokenizer))
inputs = tokenizer(["abacab", "ab"], padding=True, return_tensors="pt")
texts = tokenizer.batch_decode(model.generate(**inputs, max_new_tokens=5, do_sample=False), skip_special_tokens=True)
assert "isentrope" not in sys.modules
print(*texts, sep=",")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    long, short = done.stdout.strip().split(",")
    assert re.fullmatch("abacab[a-p]{5}", long) and re.fullmatch("ab[a-p]{5}", short)


def test_a_causal_model_is_extended(causal):
    llama, tokenizer = (kind.from_pretrained(causal / "best") for kind in (AutoModelForCausalLM, AutoTokenizer))
    ids = tokenizer("abacabad" * 25, return_tensors="pt").input_ids
    with torch.no_grad():
        plain = llama.eval()(ids).logits
        ise.extend(llama, "rerope:window=64+infoscale")
        found = llama(ids).logits
    assert_close(found[:, :16], plain[:, :16])  # the training length
    assert found.isfinite().all() and not torch.allclose(found[:, 64:], plain[:, 64:])


def test_a_causal_model_is_gone_on_from(corpus, done, causal, tmp_path):
    llama = LlamaForCausalLM.from_pretrained(causal / "best", dtype=torch.bfloat16)
    llama.save_pretrained(tmp_path / "narrow")
    config = replace(CAUSAL, model=str(tmp_path / "narrow"), sizes=None, layers=1, length=12, steps=1, rate=1e-9)
    train(corpus, replace(config, dropout=0.25), tmp_path / "run")
    base, found = llama.state_dict(), weights(tmp_path / "run")
    assert found.keys() == {name for name in base if "layers.1." not in name and name != "lm_head.weight"}
    for name, x in found.items():
        assert_close(x, base[name].float(), atol=1e-8, rtol=0)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "final")
    assert loaded.dtype == torch.float32 and loaded.config.attention_dropout == 0.25
    assert loaded.config.num_hidden_layers == 1 and loaded.config.max_position_embeddings == 12
    for other, options, kinds in ((done, config, "llama, got gau_alpha"), (causal, TINY, "gau_alpha, got llama")):
        with pytest.raises(ValueError, match=f"model: expected one of type {kinds} in"):
            train(corpus, replace(options, model=str(other / "best"), sizes=None), tmp_path / "other")


def test_the_causal_preset_is_small():
    config = configured("causal")
    with torch.device("meta"):
        llama = study.build(config, character_tokenizer(["".join(map(chr, range(32, 163)))]))
    assert llama.num_parameters() == 3_970_304 and llama.config.vocab_size == 136  # as many as SymPy's
    assert not llama.config.use_cache and llama.config.rope_parameters["rope_theta"] == 10000


# settings


@pytest.mark.parametrize("steps", [1, 2, 3, 7, 10, 99, 100, 1500])
@pytest.mark.parametrize("warmup", [0.0, 0.1, 0.5, 0.99])
def test_the_rate_rises_over_its_share_and_falls(steps, warmup):
    config = Config(steps=steps, rate=2e-4, warmup=warmup)
    rates = np.array([config.learning_rate(step, steps) for step in range(steps)])
    top = int(rates.argmax())
    assert rates.max() == pytest.approx(2e-4) and (rates > 0).all()
    assert abs(top + 1 - max(1, warmup * steps)) <= 0.5
    assert (np.diff(rates[: top + 1]) > 0).all() and (np.diff(rates[top:]) < 0).all()
    # straight lines
    assert np.diff(rates[: top + 1], 2) == pytest.approx(0, abs=1e-12)
    assert np.diff(rates[top:], 2) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("preset", PRESETS)
def test_presets(preset):
    config = configured(preset)
    for name, value in PRESETS[preset].items():
        assert getattr(config, name) == value
    assert configured(preset, epochs=3.0).steps == 0 and configured(preset, steps=5).epochs == 0


@pytest.mark.parametrize("preset", [name for name in PRESETS if name != "causal"])
def test_presets_with_a_variant(preset):
    config = configured(preset)
    assert configured(preset, "pose", 128.0, rate=0.5, crop=None) == replace(
        config, recipe="rope+cosine:alpha=128", pose=4096, rate=0.5
    )


def test_sizes_are_read():
    assert read_sizes("hidden_size=64, attention_key_size=16") == {"hidden_size": 64, "attention_key_size": 16}
    assert read_sizes(None) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preset": "trian"}, "preset: expected one of pretrain, train"),
        ({"variant": "longrope"}, "variant: expected one of plain, pi"),
        ({"variant": "pi", "recipe": "rope"}, "variant: expected a variant, or recipe and pose, got both"),
        ({"variant": "pi", "pose": 64}, "variant: expected a variant, or recipe and pose, got both"),
        ({"precision": "fp16"}, "precision: expected one of auto, bf16, fp32, got 'fp16'"),
        ({"steps": 5, "epochs": 2.0}, "steps, epochs: expected one of them, above 0, got 5 and 2.0"),
        ({"steps": 0}, "steps, epochs"),
        ({"steps": -3, "epochs": 2.0}, "steps"),
        ({"epochs": float("inf")}, "epochs"),
        ({"layers": 0}, "layers: expected 1 or more, got 0"),
        ({"length": 0}, "length: expected 1 or more, got 0"),
        ({"batch": 0}, "batch: expected 1 or more, got 0"),
        ({"accumulate": 0}, "accumulate: expected 1 or more, got 0"),
        ({"log_every": 0}, "log_every: expected 1 or more, got 0"),
        ({"validation": 0}, "validation: expected 1 or more, got 0"),
        ({"save_every": -1}, "save_every"),
        ({"evaluate_every": -1}, "evaluate_every"),
        ({"rate": 0.0}, "rate"),
        ({"rate": float("inf")}, "rate"),
        ({"rate": float("nan")}, "rate"),
        ({"warmup": 1.0}, "warmup"),
        ({"dropout": 1.0}, "dropout"),
        ({"dropout": -0.1}, "dropout"),
        ({"clip": -1.0}, "clip"),
        ({"decay": -1.0}, "decay"),
        ({"seed": 1 << 64}, "seed"),
        ({"sizes": {"num_hidden_layers": 2}}, "sizes: expected hidden_size, .*, got 'num_hidden_layers'"),
        ({"sizes": {"hidden_size": 0}}, "sizes"),
        ({"sizes": {"hidden_size": -4}}, "sizes"),
        ({"sizes": {"hidden_size": 32}, "model": "runs/base"}, "sizes: expected none where a model is given"),
        ({"sizes": {"num_attention_heads": 2}}, "sizes: expected .*attention_key_size, got 'num_attention_heads'"),
        ({"objective": "next"}, "objective: expected one of masked, causal, got 'next'"),
    ],
    ids=str,
)
def test_bad_settings(options, message):
    with pytest.raises(ValueError, match=message):
        configured(**({"preset": "train"} | options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"variant": "pi"}, "recipe: expected rope with the objective causal, got 'pi:factor=4'"),
        ({"cosscale": 128.0}, r"recipe: expected rope .*, got 'rope\+cosine:alpha=128'"),
        ({"variant": "pose"}, "pose: expected None with the objective causal, got 4096"),
        ({"share": 0.3}, "share: expected 0.15 with the objective causal, got 0.3"),
        ({"sizes": {"attention_key_size": 8}}, "sizes: expected .*num_attention_heads, got 'attention_key_size'"),
        ({"sizes": {"num_attention_heads": 0}}, "sizes: expected 1 or more, got num_attention_heads=0"),
        ({"sizes": {"hidden_size": 36}}, "sizes: expected heads of an even size, got hidden_size=36 for 4 heads"),
    ],
    ids=str,
)
def test_bad_settings_of_a_causal_model(options, message):
    with pytest.raises(ValueError, match=message):
        configured("causal", **options)


@pytest.mark.parametrize("text", ["hidden_size", "hidden_size=", "hidden_size=big", "", "=3,"])
def test_bad_sizes(text):
    with pytest.raises(ValueError, match="sizes: expected"):
        configured("train", sizes=read_sizes(text))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"crop": "last"}, "crop: expected one of random, first, got 'last'"),
        ({"share": 0.0}, "share"),
        ({"length": 301}, "length: expected at most the shortest document's 300 tokens, got 301"),
        ({"pose": 8}, "pose: expected at least the length 16, got 8"),
        ({"batch": 7, "accumulate": 2}, "batch: expected a multiple of 1 process.* 2 parts, got 7"),
        ({"recipe": "rop"}, "unknown part 'rop'; did you mean 'rope'"),
        ({"recipe": "rope+cosine:alpha=-1"}, "alpha"),
        ({"sizes": SIZES | {"attention_key_size": 7}}, "even"),
    ],
    ids=str,
)
def test_settings_that_do_not_fit_the_corpus(corpus, tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        train(corpus, replace(TINY, **options), tmp_path / "out")


def test_a_folder_without_a_corpus(tmp_path):
    with pytest.raises(ValueError, match=r"manifest.json: expected a corpus made ready.*isentrope data prepare"):
        train(tmp_path, TINY, tmp_path / "out")


# trackers


def scalars(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "isentrope"))
    events.Reload()
    return {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


def test_tensorboard_holds_the_losses(done):
    found, rows = scalars(done), read_log(done / "log.jsonl")
    assert found.keys() == {"epoch", "loss", "rate", "validation"}
    for tag, values in found.items():
        assert values == pytest.approx({row["step"]: row[tag] for row in rows if tag in row}, rel=1e-6)


def without(monkeypatch, *names):
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name in names else find(name, *rest))


def test_trackers_that_are_unknown_or_missing(corpus, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="track: expected tensorboard or wandb, got 'tensorbord'"):
        train(corpus, TINY, tmp_path, ("tensorbord",))
    without(monkeypatch, "wandb")
    with pytest.raises(ValueError, match="track: expected wandb to be installed; pip install wandb"):
        train(corpus, TINY, tmp_path, ("tensorboard", "wandb"))


def test_no_tracker_is_needed(corpus, done, tmp_path):
    train(corpus, TINY, tmp_path, ())
    assert (tmp_path / "log.jsonl").read_text() == (done / "log.jsonl").read_text()
    assert not (tmp_path / "isentrope").exists()


def test_without_tensorboard_the_log_is_enough(corpus, tmp_path, monkeypatch, caplog):
    without(monkeypatch, "tensorboard")
    with caplog.at_level(logging.WARNING, "isentrope"):
        train(corpus, TINY, tmp_path)
    assert "tensorboard is not installed" in caplog.text and len(read_log(tmp_path / "log.jsonl")) == 6


# when the loss is of no use any more


def bad_loss(monkeypatch, at, value):
    stepping(monkeypatch, lambda step, loss: torch.full_like(loss, value) if step >= at else loss)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("at", [3, 7, 8, 12])
def test_a_loss_that_is_no_number_ends_the_run(corpus, tmp_path, monkeypatch, at, value):
    """TINY saves every four steps and logs every two."""
    bad_loss(monkeypatch, at, value)
    config = replace(TINY, batch=4)
    with pytest.raises(Diverged, match=rf"^step {at}: the loss is {value}") as error:
        train(corpus, config, tmp_path)
    batches, _ = study._batches(Prepared.open(corpus), config, AutoTokenizer.from_pretrained(corpus / "tokenizer"))
    names = [batches.documents.names[i] for i in batches.members(at - 1)]
    assert f"in a batch of {', '.join(names)};" in str(error.value)
    last = (at - 1) // 4 * 4
    assert states(tmp_path) == ([last] if last else [])
    kept = f"the last good state is of step {last} in" if last else "no state was saved"
    assert kept in str(error.value) and str(tmp_path) in str(error.value)
    assert all(row["step"] < at for row in read_log(tmp_path / "log.jsonl"))
    assert not json.loads((tmp_path / "train.json").read_text())["finished"]


def test_a_batch_of_many_documents_is_named_in_part(corpus, tmp_path, monkeypatch):
    bad_loss(monkeypatch, 1, float("nan"))
    with pytest.raises(Diverged, match=r"in a batch of .*d\d+, .*d\d+, .*d\d+, .*d\d+ and 4 more; no state was saved"):
        train(corpus, TINY, tmp_path)


def test_a_loss_that_rises_ends_the_run(corpus, tmp_path, monkeypatch):
    bad_loss(monkeypatch, 7, 50.0)
    with pytest.raises(Diverged, match=r"^step 8: the loss rose to 50 from \d\.\d+.*state is of step 4 in.*lower rate"):
        train(corpus, TINY, tmp_path)
    assert states(tmp_path) == [4]


def test_a_run_that_diverged_goes_on_where_it_was_good(corpus, done, tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        bad_loss(patch, 7, float("nan"))
        with pytest.raises(Diverged):
            train(corpus, TINY, tmp_path)
    train(corpus, TINY, tmp_path)
    assert_same_weights(tmp_path, done)
    assert (tmp_path / "log.jsonl").read_text() == (done / "log.jsonl").read_text()


# stopped, and gone on with


@pytest.mark.parametrize("at", [1, 3, 6, 11])
def test_a_run_stopped_at_any_step_goes_on_to_the_same_weights(corpus, done, tmp_path, monkeypatch, at):
    with monkeypatch.context() as patch:
        stop_at(patch, at)
        with pytest.raises(Interrupted, match=f"SIGTERM at step {at}: saved; the same command goes on from"):
            train(corpus, TINY, tmp_path)
    assert states(tmp_path) == [at]
    train(corpus, TINY, tmp_path)
    assert_same_weights(tmp_path, done)
    assert (tmp_path / "log.jsonl").read_text() == (done / "log.jsonl").read_text()


@pytest.mark.parametrize("at", [5, 6])
def test_tensorboard_goes_on_with_the_curve(corpus, done, tmp_path, monkeypatch, at):
    """Logged or not, the step that a run goes on from."""
    with monkeypatch.context() as patch:
        stop_at(patch, at)
        with pytest.raises(Interrupted):
            train(corpus, TINY, tmp_path)
    (events,) = (tmp_path / "isentrope").iterdir()
    events.rename(events.with_name("events.out.tfevents.0"))  # the first of all, even if the second is still the same
    train(corpus, TINY, tmp_path)
    assert scalars(tmp_path) == scalars(done)


def test_a_run_stopped_at_every_step(corpus, done, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        stop_at(patch, 1)
        for step in range(1, 12):
            with pytest.raises(Interrupted, match=f"at step {step}:"):
                train(corpus, TINY, tmp_path)
    train(corpus, TINY, tmp_path)
    assert_same_weights(tmp_path, done)
    assert (tmp_path / "log.jsonl").read_text() == (done / "log.jsonl").read_text()


def test_clex_and_pose_go_on_to_the_same_weights(corpus, tmp_path, monkeypatch):
    config = replace(TINY, recipe="clex+cosine:alpha=16", pose=64, steps=4)
    train(corpus, config, tmp_path / "whole")
    with monkeypatch.context() as patch:
        stop_at(patch, 2)
        with pytest.raises(Interrupted):
            train(corpus, config, tmp_path / "cut")
    train(corpus, config, tmp_path / "cut")
    assert_same_weights(tmp_path / "cut", tmp_path / "whole")


def test_a_signal_at_the_last_step_comes_too_late(corpus, done, tmp_path, monkeypatch):
    stop_at(monkeypatch, 12)
    assert train(corpus, TINY, tmp_path)["finished"]
    assert_same_weights(tmp_path, done)


def test_handlers_of_signals_are_put_back(corpus, tmp_path, monkeypatch):
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    stop_at(monkeypatch, 2, signal.SIGINT)
    with pytest.raises(Interrupted, match="SIGINT at step 2"):
        train(corpus, TINY, tmp_path)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


# a full disk


@contextmanager
def files_of_at_most(size):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def partial_files(folder):
    return [path for path in folder.rglob("*") if "partial" in path.name]


def test_a_full_disk_leaves_the_last_state(corpus, done, tmp_path, monkeypatch):
    """A state is three times as large as the model, which fits."""
    with monkeypatch.context() as patch:
        stop_at(patch, 3)
        with pytest.raises(Interrupted):
            train(corpus, TINY, tmp_path)
    state = tmp_path / "state-000000003.safetensors"
    before = state.read_bytes()
    with files_of_at_most(len(before) // 2), pytest.raises(OSError, match=r"state-000000004.safetensors: cannot be"):
        train(corpus, TINY, tmp_path)
    assert states(tmp_path) == [3] and state.read_bytes() == before
    assert load_file(state) and not partial_files(tmp_path)
    train(corpus, TINY, tmp_path)
    assert_same_weights(tmp_path, done)
    assert (tmp_path / "log.jsonl").read_text() == (done / "log.jsonl").read_text()


def test_a_full_disk_leaves_the_best_model(corpus, tmp_path, monkeypatch):
    told = iter([3.0, 2.0])
    monkeypatch.setattr(study.Run, "validate", lambda self: next(told))
    config = replace(TINY, evaluate_every=3)
    with monkeypatch.context() as patch:
        stop_at(patch, 4)
        with pytest.raises(Interrupted):
            train(corpus, config, tmp_path)
    best = tmp_path / "best" / "model.safetensors"
    before = best.read_bytes()
    with files_of_at_most(len(before) // 2), pytest.raises(OSError, match=r"best/model.safetensors: cannot be written"):
        train(corpus, config, tmp_path)
    assert best.read_bytes() == before and states(tmp_path) == [4] and not partial_files(tmp_path)


def test_tensors_are_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "folder" / "x.safetensors"
    save_tensors({"x": torch.arange(4)}, path, {"is": "first"})
    with files_of_at_most(1 << 12), pytest.raises(OSError, match=r"x.safetensors: cannot be written .* is intact"):
        save_tensors({"x": torch.zeros(1 << 16)}, path, {"is": "second"})
    assert torch.equal(load_file(path)["x"], torch.arange(4)) and not partial_files(tmp_path)
    plain = tmp_path / "plain"
    plain.touch()
    assert path.stat().st_mode == plain.stat().st_mode


@pytest.fixture(scope="module")
def stopped(corpus, tmp_path_factory):
    """A run that was stopped at its fifth step."""
    out = tmp_path_factory.mktemp("stopped") / "run"
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, 5)
        with pytest.raises(Interrupted):
            train(corpus, TINY, out)
    return out


def truncate_state(path):
    path.write_bytes(path.read_bytes()[:-1])
    return "broken safetensors file"


def flip_a_weight(path):
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(bytes(content))
    return "its content was changed after it was written"


def rename_a_weight(path):
    tensors = load_file(path)
    tensors["model.other"] = tensors.pop(next(name for name in tensors if name.startswith("model.")))
    save_tensors(tensors, path, {"progress": "{}"})
    return "of another model"


@pytest.mark.parametrize("harm", [truncate_state, flip_a_weight, rename_a_weight])
def test_a_broken_state_is_named_and_gone_on_without(corpus, done, stopped, tmp_path, harm):
    out = Path(shutil.copytree(stopped, tmp_path / "run"))
    path = out / "state-000000005.safetensors"
    words = harm(path)
    with pytest.raises(
        ValueError, match=f"{words}.*; delete it, and the same command goes on from the first step"
    ) as e:
        train(corpus, TINY, out)
    assert str(e.value).startswith(f"{path}: ")
    path.unlink()
    train(corpus, TINY, out)
    assert_same_weights(out, done)


def test_a_state_from_before_checksums_is_gone_on_from(corpus, done, stopped, tmp_path):
    out = Path(shutil.copytree(stopped, tmp_path / "run"))
    path = out / "state-000000005.safetensors"
    with safe_open(path, "pt") as file:
        progress = file.metadata()["progress"]
    save_tensors(load_file(path), path, {"progress": progress})
    train(corpus, TINY, out)
    assert_same_weights(out, done)


@pytest.mark.parametrize("content", ["", "{}", '{"identity": "'])
def test_a_broken_train_json_is_named(corpus, done, stopped, tmp_path, content):
    out = Path(shutil.copytree(stopped, tmp_path / "run"))
    (out / "train.json").write_text(content)
    with pytest.raises(ValueError, match=r"train\.json: expected .*; delete it, and the same command goes on"):
        train(corpus, TINY, out)
    (out / "train.json").unlink()
    train(corpus, TINY, out)
    assert_same_weights(out, done)


def test_broken_weights_of_a_finished_run_are_named(corpus, done, tmp_path):
    out = Path(shutil.copytree(done, tmp_path / "run"))
    (out / "final" / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=r"final/model\.safetensors: broken .*; delete .*run to train it again"):
        train(corpus, TINY, out)


def test_a_start_from_broken_weights_or_a_pickle(corpus, done, tmp_path):
    start = Path(shutil.copytree(done / "best", tmp_path / "start"))
    path = start / "model.safetensors"
    words = ["train", str(corpus), "--out", str(tmp_path / "run"), "--model", str(start), "--layers", "2"]
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2 and f"{path}: broken safetensors file" in result.stderr
    assert len(result.stderr.splitlines()) == 1
    tensors = load_file(done / "best" / "model.safetensors")
    save_tensors({f"other.{name}": x for name, x in tensors.items()}, path, {"format": "pt"})
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2 and f"{path}: lacks " in result.stderr and len(result.stderr.splitlines()) == 1
    path.unlink()
    (start / "pytorch_model.bin").write_bytes(pickle.dumps(tensors))
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2 and "pytorch_model.bin, a pickle" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_log_that_was_cut_short_is_gone_on_with(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 2, "loss": 1.5}\n{"step": 4, "loss": 1.0}\n{"step": 6, "lo')
    assert [row["step"] for row in read_log(path)] == [2, 4]
    log = Log(path, 3)
    log.add(step=4, loss=0.5)
    log.close()
    assert path.read_text() == '{"step": 2, "loss": 1.5}\n{"step": 4, "loss": 0.5}\n'
    assert read_log(tmp_path / "none.jsonl") == []


# batches made ahead


def test_batches_come_in_order_and_errors_where_they_belong():
    with ahead(lambda step: {"step": step}, 3, 50, pin=False) as batches:
        assert [batch["step"] for batch in batches] == list(range(3, 50))
    with ahead(lambda step: {"step": step}, 5, 5, pin=False) as batches:
        assert list(batches) == []

    def failing(step):
        if step == 4:
            raise ValueError("no such batch")
        return {"step": step}

    with ahead(failing, 0, 9, pin=False) as batches:
        assert [next(batches)["step"] for _ in range(4)] == [0, 1, 2, 3]
        with pytest.raises(ValueError, match="no such batch"):
            next(batches)


def test_batches_are_not_made_far_ahead():
    made = []
    with ahead(lambda step: made.append(step) or {}, 0, 10_000, pin=False, depth=2) as batches:
        for _ in range(5):
            next(batches)
    assert 5 <= len(made) <= 12


@pytest.mark.parametrize("asked_for", [0, 1, 5])
def test_no_thread_outlives_its_batches(asked_for):
    """One inside torch when the interpreter ends takes the process down with it: SIGABRT instead of a code."""
    before = threading.active_count()
    with ahead(lambda step: {"x": torch.rand(1000).sort()[0]}, 0, 10_000, pin=False) as batches:
        for _ in range(asked_for):
            next(batches)
    assert threading.active_count() == before


# the command

runner = CliRunner()


def tell(*arguments):
    return runner.invoke(app, [str(word) for word in arguments])


SMALL = ("--layers", 2, "--sizes", "hidden_size=32,intermediate_size=48,attention_key_size=8", "--length", 16,
         "--batch", 32, "--steps", 4, "--evaluate-every", 2)  # fmt: skip


def test_help_has_an_example():
    shown = tell("train", "--help")
    assert shown.exit_code == 0
    words = " ".join(shown.output.split())
    assert "isentrope train data/laws --out runs/base --preset pretrain" in words and "accelerate launch" in words


def test_the_command_trains_and_draws_the_losses(corpus, tmp_path):
    out = tmp_path / "run"
    shown = tell("train", corpus, "--out", out, *SMALL, "--variant", "pi", "--cosscale", 128)
    assert shown.exit_code == 0, shown.output
    assert "lowest validation loss" in shown.stdout and "of 4" in shown.stdout
    assert (out / "loss.png").read_bytes()[:4] == b"\x89PNG" and "<svg" in (out / "loss.svg").read_text()
    for name in ("best", "final", "log.jsonl", "loss.png"):
        assert str(out / name) in shown.stdout.split()
    assert json.loads((out / "train.json").read_text())["config"]["recipe"] == "pi:factor=4+cosine:alpha=128"
    again = tell("train", corpus, "--out", out, *SMALL, "--variant", "pi", "--cosscale", 128)
    assert again.exit_code == 0 and again.stdout == shown.stdout


def assert_one_line(shown, code, *words):
    assert shown.exit_code == code and isinstance(shown.exception, SystemExit), shown
    last = shown.stderr.strip().splitlines()
    assert len(last) == 1 and last[0].startswith("isentrope: "), shown.stderr
    assert all(word in last[0] for word in words), shown.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--variant", "longrope"), ("variant", "longrope")),
        (("--variant", "pi", "--recipe", "rope"), ("variant", "recipe")),
        (("--preset", "trian"), ("preset", "trian")),
        (("--sizes", "hidden_size=big"), ("sizes", "big")),
        (("--precision", "fp8"), ("precision", "fp8")),
        (("--recipe", "rop"), ("did you mean 'rope'",)),
        (("--track", "tensorbord"), ("track", "tensorbord")),
        (("--track", "wandb"), ("wandb", "pip install wandb")),
        (("--accumulate", 3), ("batch", "3 parts")),
        (("--length", 4000), ("length", "4000")),
        (("--epochs", "inf"), ("epochs",)),
        (("--epochs", 2.0), ("steps", "epochs")),
        (("--dropout", 1.0), ("dropout",)),
        (("--crop", "last"), ("crop", "last")),
    ],
    ids=str,
)
def test_mistakes_end_in_one_line(corpus, tmp_path, monkeypatch, arguments, words):
    without(monkeypatch, "wandb")
    given = SMALL if "--epochs" not in arguments or 2.0 in arguments else SMALL[:8]
    assert_one_line(tell("train", corpus, "--out", tmp_path / "run", *given, *arguments), 2, *words)
    assert not (tmp_path / "run" / "train.json").exists()


def test_folders_that_are_not_there_end_in_one_line(corpus, tmp_path):
    missing = tmp_path / "nowhere"
    assert_one_line(tell("train", missing, "--out", tmp_path / "run", *SMALL), 2, str(missing), "data prepare")
    model = ("--model", missing, "--steps", 4)
    assert_one_line(tell("train", corpus, "--out", tmp_path / "run", *model), 2, str(missing), "expected a folder")
    assert_one_line(tell("losses", missing), 2, str(missing), "isentrope train")


def test_a_run_that_diverges_ends_in_one_line(corpus, tmp_path, monkeypatch):
    bad_loss(monkeypatch, 1, float("nan"))
    shown = tell("train", corpus, "--out", tmp_path, *SMALL)
    assert_one_line(shown, 1, "step 1: the loss is nan", "no state was saved")


# figures of several runs


@pytest.fixture(scope="module")
def four(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("four")
    for name, recipe in (("a", "rope"), ("b", "alibi"), ("c", "rope+cosine:alpha=16"), ("d", "alibi+cosine:alpha=16")):
        train(corpus, replace(TINY, recipe=recipe, steps=4), folder / name)
    return [folder / name for name in "abcd"]


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_losses_of_several_runs_in_one_figure(four, tmp_path, count):
    shown = tell("losses", *four[:count], "--out", tmp_path / "figures" / "losses")
    assert shown.exit_code == 0, shown.output
    assert (tmp_path / "figures" / "losses.png").read_bytes()[:4] == b"\x89PNG"
    drawn = (tmp_path / "figures" / "losses.svg").read_text()
    # text is drawn as text
    assert ("with CosScale" in drawn) == (count == 4) and ("epoch" in drawn) == (count in (2, 3))
    assert "rope" in drawn and ("validation" in drawn) == (count == 1)


def test_losses_of_a_run_that_is_being_written(four, tmp_path):
    for name in ("train.json", "log.jsonl"):
        (tmp_path / name).write_text((four[0] / name).read_text())
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')
    shown = tell("losses", tmp_path, "--out", tmp_path / "losses")
    assert shown.exit_code == 0, shown.output


def test_losses_of_a_run_whose_files_are_broken(four, tmp_path):
    for name in ("train.json", "log.jsonl"):
        (tmp_path / name).write_text((four[0] / name).read_text())
    with (tmp_path / "log.jsonl").open("ab") as file:
        file.write(b"\xff\n")
    drawn = tell("losses", tmp_path, "--out", tmp_path / "losses")
    assert_one_line(drawn, 2, "log.jsonl, line")
    (tmp_path / "train.json").write_text("")
    drawn = tell("losses", tmp_path, "--out", tmp_path / "losses")
    assert_one_line(drawn, 2, "train.json: expected JSON, got a broken file (it is empty)")


def test_losses_of_a_run_that_has_not_begun(four, tmp_path):
    (tmp_path / "train.json").write_text((four[0] / "train.json").read_text())
    (tmp_path / "log.jsonl").touch()
    assert_one_line(tell("losses", tmp_path, "--out", tmp_path / "losses"), 2, "expected losses, got none yet")


def test_fine_tuning_draws_batches_of_its_own(corpus):
    prepared = Prepared.open(corpus)
    tokenizer = AutoTokenizer.from_pretrained(prepared.tokenizer_path)
    runs = [configured(name, steps=2, length=16) for name in ("train", "finetune")]
    one, other = (study._batches(prepared, config, tokenizer)[0][0] for config in runs)
    assert not torch.equal(one["input_ids"], other["input_ids"])
