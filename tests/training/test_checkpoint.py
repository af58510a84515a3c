"""Checkpoints: full disks, broken states and broken weights."""

from __future__ import annotations

import pickle
import shutil
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from typer.testing import CliRunner

from isentrope.cli import app
from isentrope.training import trainer as study
from isentrope.training.checkpoint import TrainingLog, read_log, save_tensors
from isentrope.training.trainer import Interrupted, train
from tests.fixtures.training import TINY, assert_same_weights, states, stop_at

pytestmark = pytest.mark.usefixtures("on_one_thread")
resource = pytest.importorskip("resource", reason="Windows limits no file sizes")


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
    monkeypatch.setattr(study.Trainer, "validate", lambda self: next(told))
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
    return "its content changed after it was written"


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
        ValueError, match=f"{words}.*; delete it, and the same command resumes from the first step"
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
    with pytest.raises(ValueError, match=r"train\.json: expected .*; delete it, and the same command resumes"):
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
    words = ["train", "--data", str(corpus), "--out", str(tmp_path / "run"), "--model", str(start), "--layers", "2"]
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
    log = TrainingLog(path, 3)
    log.add(step=4, loss=0.5)
    log.close()
    assert path.read_text() == '{"step": 2, "loss": 1.5}\n{"step": 4, "loss": 0.5}\n'
    assert read_log(tmp_path / "none.jsonl") == []
