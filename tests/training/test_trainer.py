"""Training: that it learns, what it leaves behind, and the paper's variants."""

from __future__ import annotations

import json
from dataclasses import replace
from math import log

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close
from transformers import AutoModelForMaskedLM, AutoTokenizer

import isentrope.models as models
from isentrope.data.prepare import PrepareOptions, prepare
from isentrope.data.prepared import PreparedCorpus
from isentrope.data.source import Source
from isentrope.positions import CLEX
from isentrope.training import trainer as study
from isentrope.training.builders import build_batches, build_model
from isentrope.training.checkpoint import read_log
from isentrope.training.config import VARIANTS, TrainingConfig, build_config
from isentrope.training.trainer import Interrupted, train
from isentrope.utils.files import lock_file
from tests.fixtures.training import GENTLE, SIZES, TINY, assert_same_weights, stop_at, weights

pytestmark = pytest.mark.usefixtures("on_one_thread")


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
    documents = len(PreparedCorpus.open(corpus).documents("train"))
    for row in rows:
        assert {"step", "epoch", "loss", "rate"} <= set(row) <= {"step", "epoch", "loss", "rate", "validation"}
        assert row["epoch"] == pytest.approx(row["step"] * 8 / documents, abs=1e-4)
        assert row["rate"] == TINY.learning_rate(row["step"] - 1, 12)


def test_folders_of_others_are_refused_and_not_removed(corpus, tmp_path):
    (tmp_path / "final").mkdir()
    (tmp_path / "final" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="final: expected a model or no such folder, got other files"):
        train(corpus, replace(TINY, steps=1), tmp_path)
    assert (tmp_path / "final" / "notes.txt").read_text() == "mine"


def test_train_json_says_how(done):
    told = json.loads((done / "train.json").read_text())
    assert told["finished"] and told["steps"] == 12 and told["processes"] == 1 and told["seconds"] > 0
    assert TrainingConfig(**told["config"]) == TINY
    assert {"torch", "commit", "date", "hardware"} <= set(told["run"])
    lowest = min((row["validation"], row["step"]) for row in read_log(done / "log.jsonl") if "validation" in row)
    assert (told["best"]["validation"], told["best"]["step"]) == lowest


@pytest.mark.parametrize("name", ["best", "final"])
def test_saved_models_load_and_give_the_recorded_loss(corpus, done, name):
    gau, tokenizer = (kind.from_pretrained(done / name) for kind in (AutoModelForMaskedLM, AutoTokenizer))
    assert type(gau) is models.GAUAlphaForMaskedLM and gau.dtype == torch.float32
    assert gau.config.max_position_embeddings == 16 and len(tokenizer) == gau.config.vocab_size
    assert tokenizer.get_vocab() == AutoTokenizer.from_pretrained(corpus / "tokenizer").get_vocab()
    _, held_out = build_batches(PreparedCorpus.open(corpus), TINY, tokenizer)
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
    monkeypatch.setattr(study.Trainer, "validate", lambda self: next(told))
    actual = train(corpus, replace(TINY, evaluate_every=4), tmp_path / "run")
    assert actual["best"] == {"step": 8, "validation": 1.0}
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
    monkeypatch.setattr(study, "build_model", None)  # nothing is trained
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


def test_a_folder_that_another_process_trains_in_is_refused(corpus, tmp_path):
    with lock_file(tmp_path / ".lock"), pytest.raises(ValueError, match="another process trains in this folder"):
        train(corpus, TINY, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]
    assert train(corpus, replace(TINY, steps=1), tmp_path)["finished"]


def test_another_corpus_in_the_same_folder_is_refused(corpus, done, tmp_path):
    other = prepare(
        Source(str(corpus.parent / "texts.jsonl")), tmp_path, PrepareOptions(longer_than=200, test=4, seed=1)
    )
    with pytest.raises(ValueError, match="the corpus differ"):
        train(other.parent, TINY, done)


def test_epochs_in_place_of_steps(corpus, tmp_path):
    told = train(corpus, replace(TINY, steps=0, epochs=1.5), tmp_path)
    assert told["steps"] == round(1.5 * len(PreparedCorpus.open(corpus).documents("train")) / 8)


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
    build = study.build_model
    monkeypatch.setattr(study, "build_model", lambda *given: build(*given).double())
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
    config = replace(build_config("train", variant, cosscale, steps=2), layers=2, sizes=SIZES, length=16, batch=8,
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
    actual = dict(loaded.named_parameters())
    assert actual.keys() == begun.keys() == weights(tmp_path).keys()
    assert sum("learned" in name for name in actual) == (4 if variant == "clex" else 0)
    for name, x in actual.items():
        assert torch.equal(x, weights(tmp_path)[name]) and not torch.equal(x, begun[name]), name


def begin(config, corpus):
    """The model that a run of this configuration begins with."""
    torch.manual_seed(config.seed)
    return build_model(config, AutoTokenizer.from_pretrained(corpus / "tokenizer"))


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
    config = replace(build_config("finetune", "pi", model=str(done / "best"), steps=1), rate=1e-9, length=12, batch=8,
                     validation=8)  # fmt: skip
    for layers in (1, 2):
        out = tmp_path / str(layers)
        train(corpus, replace(config, layers=layers), out)
        base, actual = weights(done, "best"), weights(out)
        assert actual.keys() == {name for name in base if layers == 2 or "layer.1." not in name}
        for name, x in actual.items():
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


def test_fine_tuning_draws_batches_of_its_own(corpus):
    prepared = PreparedCorpus.open(corpus)
    tokenizer = AutoTokenizer.from_pretrained(prepared.tokenizer_path)
    runs = [build_config(name, steps=2, length=16) for name in ("train", "finetune")]
    one, other = (build_batches(prepared, config, tokenizer)[0][0] for config in runs)
    assert not torch.equal(one["input_ids"], other["input_ids"])
