"""Checkpoints of a plan, trained by several processes."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from isentrope.data.prepared import PreparedCorpus
from isentrope.experiments import checkpoints
from isentrope.experiments import plan as plans
from isentrope.experiments.checkpoints import prepare_checkpoints
from isentrope.experiments.masked_plan import override_plan
from isentrope.utils.files import lock_file
from tests.fixtures.plans import PLAN

pytestmark = pytest.mark.usefixtures("on_one_thread")


@pytest.fixture(scope="module")
def plan():
    return plans.parse_plan("small", PLAN)


def test_a_training_that_another_process_is_at_comes_last(plan, corpus, tmp_path):
    said = []
    file = lock_file(tmp_path / "locks" / "dot-0")
    file.__enter__()

    def say(words):
        said.append(words)
        if words == "training cosine, seed 1":  # the last but the one that is being waited for
            file.__exit__(None, None, None)

    prepare_checkpoints(plan, PreparedCorpus.open(corpus), tmp_path, say)
    names = ["base, seed 0", "dot, seed 1", "cosine, seed 0", "cosine, seed 1", "dot, seed 0"]
    assert said == [f"training {name}" for name in names]


def test_what_has_no_seed_is_trained_by_one_process_whatever_seeds_they_are_at(plan, corpus, tmp_path, monkeypatch):
    at_once, lock = [], threading.Lock()

    def train(data, config, out):
        with lock:
            at_once.append(out)
        time.sleep(0.2)
        with lock:
            assert at_once.count(out) == 1
            at_once.remove(out)

    monkeypatch.setattr(checkpoints, "train", train)
    given = [override_plan(plan, None, None, seeds) for seeds in ("0,1", "1,2")]
    with ThreadPoolExecutor(2) as pool:
        list(
            pool.map(
                lambda each: prepare_checkpoints(each, PreparedCorpus.open(corpus), tmp_path, lambda words: None), given
            )
        )
