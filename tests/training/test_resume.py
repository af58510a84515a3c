"""Runs that diverge or are stopped, and resume."""

from __future__ import annotations

import json
import signal
from dataclasses import replace

import pytest
import torch
from transformers import AutoTokenizer

from isentrope.data.prepared import PreparedCorpus
from isentrope.report.repeats import compare_weights
from isentrope.training.builders import build_batches
from isentrope.training.checkpoint import read_log
from isentrope.training.trainer import Diverged, Interrupted, train
from tests.fixtures.training import TINY, assert_same_weights, bad_loss, states, stop_at

pytestmark = pytest.mark.usefixtures("on_one_thread")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("at", [3, 7, 8, 12])
def test_a_loss_that_is_no_number_ends_the_run(corpus, tmp_path, monkeypatch, at, value):
    """TINY saves every four steps and logs every two."""
    bad_loss(monkeypatch, at, value)
    config = replace(TINY, batch=4)
    with pytest.raises(Diverged, match=rf"^step {at}: the loss is {value}") as error:
        train(corpus, config, tmp_path)
    batches, _ = build_batches(PreparedCorpus.open(corpus), config, AutoTokenizer.from_pretrained(corpus / "tokenizer"))
    names = [batches.documents.names[i] for i in batches.document_indices(at - 1)]
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
        with pytest.raises(Interrupted, match=f"SIGTERM at step {at}: saved; the same command resumes from"):
            train(corpus, TINY, tmp_path)
    assert states(tmp_path) == [at]
    train(corpus, TINY, tmp_path)
    assert_same_weights(tmp_path, done)
    assert (tmp_path / "log.jsonl").read_text() == (done / "log.jsonl").read_text()


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


def test_a_run_repeats_bit_for_bit_and_its_log_says_so(corpus, done, tmp_path):
    """Hashes and `deterministic` are for comparing runs: on a CPU neither changes a weight."""
    runs = [tmp_path / "one", tmp_path / "other", tmp_path / "third"]
    for run, seed in zip(runs, (0, 0, 1), strict=True):
        train(corpus, replace(TINY, hash_every=3, deterministic=True, seed=seed), run)
        assert not torch.are_deterministic_algorithms_enabled()
    assert_same_weights(runs[0], done)
    hashed = [row["step"] for row in read_log(runs[0] / "log.jsonl") if "weights" in row]
    assert hashed == [3, 6, 9, 12]
    same, other = compare_weights(runs)
    assert same.endswith("the same weights, bit for bit, up to step 12")
    assert other.endswith("the weights differ at step 3, and are equal up to step 0")
    assert compare_weights([runs[0], done]) == []
    with pytest.raises(ValueError, match="deterministic differ"):
        train(corpus, replace(TINY, hash_every=3), runs[0])
