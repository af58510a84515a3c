"""Trainings and studies killed at random moments, which must end in the same bytes as those left alone.

`training(seed, folder, kills)` and `study(seed, folder, kills)` return how often a process was killed and resumed, or
raise an AssertionError.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path

import torch

from isentrope.experiments import plan as plans
from isentrope.experiments.runner import run_plan
from tests.fixtures.corpus import make_corpus
from tests.fixtures.plans import PLAN
from tests.fixtures.training import arguments, assert_same_run

PROCESSES = multiprocessing.get_context("forkserver")
PRELOADED = [
    "isentrope.cli",
    "isentrope.experiments.runner",
    "isentrope.training.trainer",
    "isentrope.report.figures.losses",
]
PATIENCE = 600  # seconds


def _call(work: Callable[..., object], folder: Path, out: Path, said: Path) -> None:
    file = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.environ["ACCELERATE_USE_CPU"] = "true"
    torch.set_num_threads(1)
    work(folder, out)


def _train(folder: Path, out: Path) -> None:
    from isentrope.cli import app

    app(arguments(folder, out, 15))


def _study(folder: Path, out: Path) -> None:
    run_plan(plans.parse_plan("small", PLAN), out, folder, print)


def training(seed: int, folder: Path, kills: int) -> int:
    return _killed(_train, assert_same_run, seed, folder, kills)


def study(seed: int, folder: Path, kills: int) -> int:
    return _killed(_study, _assert_same_study, seed, folder, kills)


def _assert_same_study(one: Path, other: Path) -> None:
    results = [(out / "small" / "results.jsonl").read_bytes() for out in (one, other)]
    assert results[0] == results[1]


def _killed(
    work: Callable[[Path, Path], None], assert_same: Callable[[Path, Path], None], seed: int, folder: Path, kills: int
) -> int:
    """Kill at moments drawn evenly from the time that an uninterrupted one takes, and let the same command go on."""
    PROCESSES.set_forkserver_preload(PRELOADED)
    forkserver.ensure_running()
    moments, corpus = random.Random(seed), make_corpus(folder / "corpus")

    def start(out: Path) -> multiprocessing.process.BaseProcess:
        process = PROCESSES.Process(target=_call, args=(work, corpus, out, folder / "said"))
        process.start()
        return process

    def finish(out: Path) -> None:
        process = start(out)
        process.join(PATIENCE)
        assert process.exitcode == 0, (folder / "said").read_text()

    begun = time.monotonic()
    finish(folder / "alone")
    usual = time.monotonic() - begun
    done, attempt, out = 0, 0, folder / "killed-0"
    while done < kills:
        process = start(out)
        process.join(moments.uniform(0, usual))
        if process.exitcode is not None:  # it was faster: begin another
            assert process.exitcode == 0, (folder / "said").read_text()
            assert_same(out, folder / "alone")
            attempt += 1
            out = folder / f"killed-{attempt}"
            continue
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        done += 1
    finish(out)
    assert_same(out, folder / "alone")
    return done
