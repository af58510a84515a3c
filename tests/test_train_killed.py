"""`isentrope train` in processes of its own: killed at any moment, told to stop, or sharing the work."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from multiprocessing import forkserver
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close
from typer.testing import CliRunner

from isentrope.cli import app
from isentrope.study import checkpoint
from isentrope.study import train as study
from isentrope.study.checkpoint import read_log
from isentrope.study.step import Stepper
from isentrope.study.train import Interrupted, train
from tests.test_train import TINY, assert_same_weights, make_corpus, one_cpu_thread, states, stop_at, weights

# processes that begin where torch is already imported, without threads or anything else of this one
PROCESSES = multiprocessing.get_context("forkserver")
ALONE = {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
PATIENCE = 120  # seconds
STEPS = 200


@pytest.fixture(scope="module", autouse=True)
def _processes():
    with one_cpu_thread(), pytest.MonkeyPatch.context() as patch:
        for name, value in ALONE.items():
            patch.setenv(name, value)
        PROCESSES.set_forkserver_preload(["isentrope.cli", "isentrope.study.train", "isentrope.report.losses"])
        forkserver.ensure_running()
        yield


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("killed"))


def arguments(corpus, out, save_every):
    sizes = "hidden_size=32,intermediate_size=48,attention_key_size=8"
    words = ("train", corpus, "--out", out, "--layers", 2, "--sizes", sizes, "--length", 16, "--batch", 16,
             "--steps", STEPS, "--rate", 0.01, "--evaluate-every", 90, "--save-every", save_every)  # fmt: skip
    return [str(word) for word in words]


@pytest.fixture(scope="module")
def uninterrupted(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "uninterrupted"
    assert CliRunner().invoke(app, arguments(corpus, out, save_every=STEPS)).exit_code == 0
    return out


def in_process(function, said, environment, *rest):
    """Run by another process; what it says goes into the file `said`."""
    file = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1), os.dup2(file, 2)
    os.environ.update(environment)
    torch.set_num_threads(1)
    function(*rest)


def start(function, said, *rest, **environment):
    process = PROCESSES.Process(target=in_process, args=(function, said, environment, *rest))
    process.start()
    return process


def ended(process):
    process.join(PATIENCE)
    assert process.exitcode is not None
    return process.exitcode


def wait_until(condition, runs):
    """Until the condition holds of a process that has not ended."""
    begun = time.monotonic()
    while not condition():
        assert runs() and time.monotonic() - begun < PATIENCE
        time.sleep(0.002)
    assert runs()


def logged(run):
    return max((row["step"] for row in read_log(run / "log.jsonl")), default=0)


def same_log(one, other):
    return (one / "log.jsonl").read_text() == (other / "log.jsonl").read_text()


# killed

MOMENTS = {
    "before anything is saved": lambda out: (out / "log.jsonl").exists() and not states(out),
    "at the first state": lambda out: states(out),
    "with the log ahead of the state": lambda out: states(out)[-1] + 5 < logged(out),
    "on the way": lambda out: logged(out) >= 140,
}


def test_killed_again_and_again_and_gone_on_with(corpus, uninterrupted, tmp_path):
    out, said = tmp_path / "run", tmp_path / "said"
    command = arguments(corpus, out, save_every=15)
    reached = -1
    for moment, has_come in MOMENTS.items():
        process = start(app, said, command)
        wait_until(lambda has_come=has_come: has_come(out), process.is_alive)
        process.kill()
        assert ended(process) == -signal.SIGKILL, moment
        assert not json.loads((out / "train.json").read_text())["finished"]
        assert max(states(out), default=0) >= reached < STEPS
        reached = max(states(out), default=0)
    assert ended(start(app, said, command)) == 0, said.read_text()
    assert_same_weights(out, uninterrupted)
    assert same_log(out, uninterrupted)
    assert torch.equal(*(load_file(run / f"state-{STEPS:09d}.safetensors")["model.cls.predictions.decoder.weight"]
                         if "model.cls.predictions.decoder.weight" in load_file(run / f"state-{STEPS:09d}.safetensors")
                         else torch.zeros(1) for run in (out, uninterrupted)))  # fmt: skip


def die(*args, **options):
    os.kill(os.getpid(), signal.SIGKILL)


def half_a_file(tensors, path, metadata):
    Path(path).write_bytes(b"\0" * 1000)
    die()


def killed_when(moment, corpus, config, out):
    if moment == "a state is half written":
        save = checkpoint.save_file

        def saving(tensors, path, metadata):
            (half_a_file if "state-000000008" in path.name else save)(tensors, path, metadata)

        checkpoint.save_file = saving
    elif moment == "the best model is half written":
        save = checkpoint.save_file

        def saving(tensors, path, metadata):
            again = path.parent.name == "best" and (path.parent / "model.safetensors").exists()
            (half_a_file if again else save)(tensors, path, metadata)

        checkpoint.save_file = saving
    elif moment == "the earlier state is still there":
        Path.unlink = lambda self, missing_ok=False: die() if self.name.startswith("state-") else None
    elif moment == "only the final model is missing":
        study.Run._save_model = lambda self, name: die() if name == "final" else None
    else:
        study.Log.add = die
    train(corpus, config, out)


LEFT = {
    "a state is half written": [4],
    "the best model is half written": [4],
    "the earlier state is still there": [4, 8],
    "only the final model is missing": [12],
    "the first row is logged": [],
}


@pytest.fixture(scope="module")
def done(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "tiny"
    train(corpus, TINY, out)
    return out
