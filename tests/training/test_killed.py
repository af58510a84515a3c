"""`isentrope train` in processes of its own: killed at any moment, told to stop, or sharing the work."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from typer.testing import CliRunner

from isentrope.cli import app
from isentrope.training import checkpoint
from isentrope.training import trainer as study
from isentrope.training.checkpoint import read_log
from isentrope.training.step import Stepper
from isentrope.training.trainer import Diverged, Interrupted, train
from tests.fixtures.corpus import make_corpus
from tests.fixtures.training import (
    GENTLE,
    STEPS,
    TINY,
    arguments,
    assert_same_run,
    assert_same_weights,
    one_cpu_thread,
    states,
    stop_at,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")  # Python 3.12, the runner
ALONE = {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
PATIENCE = 600  # seconds: on a busy machine another process may take long to start


@pytest.fixture(scope="module", autouse=True)
def _processes():
    with one_cpu_thread(), pytest.MonkeyPatch.context() as patch:
        for name, value in ALONE.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("killed"))


def in_process(function, said, environment, rest):
    file = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(file, stream)
    sys.stdout, sys.stderr = (os.fdopen(stream, "w", 1, closefd=False) for stream in (1, 2))  # pytest's until now
    os.environ.update(environment)
    AcceleratorState._reset_state(reset_partial_state=True)  # of runs in the process that this one is a copy of
    torch.set_num_threads(1)
    function(*rest)


def start(function, said, *rest, **environment):
    """Another process that calls the function; what it says goes into the file `said`."""
    # from a copy of this process nothing is imported again; one that uses a GPU cannot be copied
    processes = multiprocessing.get_context("spawn" if torch.cuda.is_initialized() else "fork")
    process = processes.Process(target=in_process, args=(function, said, environment, rest))
    process.start()
    return process


def ended(process):
    process.join(PATIENCE)
    return process.exitcode


def wait_until(condition, runs):
    """Until the condition holds, of a process that goes on running."""
    begun = time.monotonic()
    while not condition():
        assert runs() and time.monotonic() - begun < PATIENCE
        time.sleep(0.01)
    assert runs()


def logged(run):
    return max((row["step"] for row in read_log(run / "log.jsonl")), default=0)


# the command, killed and told to stop


@pytest.fixture(scope="module")
def uninterrupted(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "uninterrupted"
    assert CliRunner().invoke(app, arguments(corpus, out, STEPS)).exit_code == 0
    return out


MOMENTS = {
    "at the beginning": lambda out: (out / "log.jsonl").exists(),
    "at the first state": states,
    "with the log ahead of the state": lambda out: states(out)[-1] < logged(out),
    "on the way": lambda out: logged(out) > 20,
}


def test_killed_again_and_again_the_command_goes_on_to_the_same_weights(corpus, uninterrupted, tmp_path):
    out, said = tmp_path / "run", tmp_path / "said"
    command, reached = arguments(corpus, out, 15), 0
    for moment, has_come in MOMENTS.items():
        process = start(app, said, command)
        wait_until(lambda has_come=has_come: has_come(out), process.is_alive)
        process.kill()
        assert ended(process) == -signal.SIGKILL, moment
        assert not json.loads((out / "train.json").read_text())["finished"]
        assert reached <= max(states(out), default=0) < STEPS
        reached = max(states(out), default=0)
    assert reached >= 30
    assert ended(start(app, said, command)) == 0, said.read_text()
    assert_same_run(out, uninterrupted)


def test_told_to_stop_the_command_saves_says_so_and_goes_on_to_the_same_weights(corpus, uninterrupted, tmp_path):
    """Nothing is saved before the end but what the signals make it save."""
    out, said = tmp_path / "run", tmp_path / "said"
    command = arguments(corpus, out, STEPS)
    process = start(app, said, command)
    wait_until(lambda: logged(out) >= 20, process.is_alive)
    process.terminate()
    assert ended(process) == 128 + signal.SIGTERM
    stopped = assert_says_where_it_stopped("SIGTERM", said, out)

    process = start(app, said, command)
    wait_until(lambda: logged(out) > stopped, process.is_alive)
    os.kill(process.pid, signal.SIGINT)
    assert ended(process) == 128 + signal.SIGINT
    assert assert_says_where_it_stopped("SIGINT", said, out) > stopped

    assert ended(start(app, said, command)) == 0, said.read_text()
    assert_same_run(out, uninterrupted)


def assert_says_where_it_stopped(name, said, out):
    last = said.read_text().splitlines()[-1]
    told = re.fullmatch(rf"isentrope: {name} at step (\d+): saved; the same command resumes from (.*)", last)
    assert told, said.read_text()
    assert told[2] == str(out) and states(out) == [int(told[1])]
    return int(told[1])


# killed at the worst moments


def die(*anything):
    os.kill(os.getpid(), signal.SIGKILL)


def half_a_file_of(chosen):
    rename = os.replace

    def renaming(partial, path):
        if chosen(Path(path)):
            os.truncate(partial, partial.stat().st_size // 2)
            die()
        rename(partial, path)

    os.replace = renaming


def keep_earlier_states():
    unlink = Path.unlink
    Path.unlink = lambda self, **options: die() if self.name.startswith("state-") else unlink(self, **options)


def no_final_model():
    save = study.Trainer._save_model
    study.Trainer._save_model = lambda self, name, weights: die() if name == "final" else save(self, name, weights)


def half_a_row():
    def add(self, **row):
        self.file.write(json.dumps(row)[:20])
        self.file.flush()
        die()

    checkpoint.TrainingLog.add = add


# TINY has twelve steps, saves at 4 and 8, and is at its best at 6, which is on disk from 8 on, and again at 12
WORST = {
    "half a state": (lambda: half_a_file_of(lambda path: path.stem == "state-000000008"), [4]),
    "half a best model": (lambda: half_a_file_of(lambda path: path.parent.name == "best" and path.exists()), [8]),
    "two states": (keep_earlier_states, [4, 8]),
    "no final model": (no_final_model, [8]),
    "half a row of the log": (half_a_row, []),
}


def killed(worst, corpus, out):
    WORST[worst][0]()
    train(corpus, TINY, out)


@pytest.fixture(scope="module")
def done(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "tiny"
    train(corpus, TINY, out)
    return out


@pytest.mark.parametrize("worst", WORST)
def test_killed_leaving(worst, corpus, done, tmp_path):
    out = tmp_path / "run"
    assert ended(start(killed, tmp_path / "said", worst, corpus, out)) == -signal.SIGKILL
    assert states(out) == WORST[worst][1]
    train(corpus, TINY, out)
    assert_same_run(out, done)
    assert states(out) == []


# two processes

SHARED = replace(GENTLE, accumulate=2)


def share(corpus, config, out, told_to_stop_at=None):
    """What the command does, in one of two processes."""
    if told_to_stop_at is not None:
        plain = Stepper.__call__

        def call(self, batch, rate):
            loss = plain(self, batch, rate)
            if self.steps_taken == told_to_stop_at:
                signal.raise_signal(signal.SIGTERM)
            return loss

        Stepper.__call__ = call
    try:
        train(corpus, config, out)
    except Interrupted as stopped:
        sys.exit(128 + stopped.number)
    except ValueError as error:
        sys.exit(str(error))
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def break_down(corpus, config, out, save=60.0):
    """The fourth step leaves weights that are no numbers behind a loss that is one."""
    study.SAVE_INTERVAL_SECONDS, plain = save, Stepper.__call__

    def call(self, batch, rate):
        loss = plain(self, batch, rate)
        if self.steps_taken == 4:
            with torch.no_grad():
                self.parameters[0].fill_(float("nan"))
        return loss

    Stepper.__call__ = call
    try:
        train(corpus, config, out)
    except Diverged as error:
        sys.exit(str(error))


def two(folder, *rest, second=(), work=share):
    """Two processes that share a run: their exit codes, and what they said."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    said = [folder / f"said-{rank}" for rank in range(2)]
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    processes = [
        start(work, said[rank], *rest, *(second if rank else ()), **world, RANK=str(rank), LOCAL_RANK=str(rank))
        for rank in range(2)
    ]
    return [ended(process) for process in processes], [path.read_text() for path in said]


@pytest.fixture(scope="module")
def alone(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "alone"
    train(corpus, SHARED, out)
    return out


def assert_same_up_to_rounding(one, other):
    assert_same_weights(one, other, atol=1e-6)
    rows = [read_log(run / "log.jsonl") for run in (one, other)]
    for row, expected in zip(*rows, strict=True):
        assert row == pytest.approx(expected, abs=1e-6)


def test_two_processes_are_one(corpus, alone, tmp_path):
    """Dropout and parts of batches included."""
    out = tmp_path / "run"
    codes, said = two(tmp_path, corpus, SHARED, out)
    assert codes == [0, 0], said
    assert json.loads((out / "train.json").read_text())["processes"] == 2
    assert_same_up_to_rounding(out, alone)
    assert "step 12/12" in said[0] and "step" not in said[1]


def test_two_processes_go_on_with_what_one_began(corpus, alone, tmp_path):
    out = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, 5)
        with pytest.raises(Interrupted):
            train(corpus, SHARED, out)
    assert states(out) == [5]
    codes, said = two(tmp_path, corpus, SHARED, out)
    assert codes == [0, 0], said
    assert_same_up_to_rounding(out, alone)


def test_two_processes_stop_together_where_one_is_told_to(corpus, alone, tmp_path):
    """They agree at the next row of the log, which is every second step."""
    out = tmp_path / "run"
    codes, said = two(tmp_path, corpus, SHARED, out, second=(5,))
    assert codes == [143, 143], said
    assert states(out) == [6]
    train(corpus, SHARED, out)  # and one goes on with what two began
    assert_same_up_to_rounding(out, alone)


def test_two_processes_save_together_though_their_clocks_differ(corpus, tmp_path):
    """One that alone looked at its weights, and found them broken, would leave the other waiting for it."""
    config = replace(SHARED, save_every=0, evaluate_every=12)
    codes, said = two(tmp_path, corpus, config, tmp_path / "run", second=(0.0,), work=break_down)
    assert codes == [1, 1]
    assert all("step 4: a weight is not finite" in words for words in said), said


def test_a_batch_that_two_processes_cannot_share(corpus, tmp_path):
    codes, said = two(tmp_path, corpus, replace(SHARED, batch=6), tmp_path / "run")
    assert codes == [1, 1]
    assert all("batch: expected a multiple of 2 processes × 2 parts, got 6" in words for words in said)
