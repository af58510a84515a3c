"""Processes that share the work of a study: some fail, and others take over."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from isentrope.cli import app, jobs
from isentrope.experiments import checkpoints
from isentrope.experiments import masked_runner as study
from isentrope.experiments import plan as plans
from isentrope.experiments.runner import run_plan
from tests.fixtures.plans import PLAN

pytestmark = pytest.mark.usefixtures("on_one_thread")
SMALL_PLAN = PLAN.replace(", 4000", "").replace("[0, 1]", "[0]")
HOLD = """
import sys, time
from pathlib import Path
from isentrope.utils.files import lock_file
with lock_file(Path(sys.argv[1])):
    print(flush=True)
    time.sleep(600)
"""


def run_study(corpus, out, *options):
    (out / "mine.yaml").write_text(SMALL_PLAN)
    words = ("study", "run", out / "mine.yaml", "--data", corpus, "--out", out, *options)
    return CliRunner().invoke(app, [str(word) for word in words])


def fail_for_memory(monkeypatch, error, times=1):
    """Let the training `dot` fail some times, and return the trainings begun."""
    begun, plain = [], checkpoints.train

    def train(data, config, out):
        begun.append(out.name.partition("-")[0])
        if begun[-1] == "dot" and begun.count("dot") <= times:
            raise error
        return plain(data, config, out)

    monkeypatch.setattr(checkpoints, "train", train)
    return begun


def replace_command(monkeypatch, code):
    """Let further processes run this Python code."""

    def start(command, **options):
        return subprocess.Popen([sys.executable, "-c", code], **options)

    monkeypatch.setattr(jobs, "subprocess", SimpleNamespace(Popen=start))


def test_a_process_that_fails_is_reported_and_its_work_done(corpus, tmp_path, monkeypatch):
    replace_command(
        monkeypatch, "raise SystemExit('isentrope: training base, seed 0: out of memory; use fewer --jobs')"
    )
    result = run_study(corpus, tmp_path, "--jobs", 2)
    assert result.exit_code == 0, result.output
    log = tmp_path / "jobs" / "2.log"
    reason = "training base, seed 0: out of memory; use fewer --jobs"
    lines = result.stderr.splitlines()
    assert f"isentrope: process 2 ended with status 1, and the others continue: {reason} ({log})" in lines
    assert lines[-1] == f"isentrope: 1 of 2 processes failed, and the others did their work: {log}"
    assert len((tmp_path / "mine" / "results.jsonl").read_text().splitlines()) == 8


def test_a_process_that_is_killed_is_reported(corpus, tmp_path, monkeypatch):
    replace_command(monkeypatch, "import os; os.kill(os.getpid(), 9)")
    result = run_study(corpus, tmp_path, "--jobs", 2)
    assert result.exit_code == 0 and "process 2 was ended by SIGKILL, and the others continue: (" in result.stderr


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nand more"),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_a_training_without_enough_memory_ends_in_one_line(corpus, tmp_path, monkeypatch, error):
    fail_for_memory(monkeypatch, error)
    result = run_study(corpus, tmp_path, "--json")
    assert result.exit_code == 2 and not result.stdout and "Traceback" not in result.output
    message = "isentrope: training dot, seed 0: out of memory; use fewer --jobs, or end other programs on this device"
    assert result.stderr.splitlines()[-1] == message


def test_other_errors_of_a_training_are_raised(corpus, tmp_path, monkeypatch):
    fail_for_memory(monkeypatch, RuntimeError("shapes differ"))
    assert str(run_study(corpus, tmp_path).exception) == "shapes differ"


def test_a_training_without_enough_memory_is_tried_again_after_the_other_processes(corpus, tmp_path, monkeypatch):
    replace_command(
        monkeypatch,
        f"import time\nfrom pathlib import Path\nwhile not Path({str(tmp_path / 'go')!r}).exists(): time.sleep(0.1)",
    )
    begun = fail_for_memory(monkeypatch, torch.OutOfMemoryError())
    plain = jobs.Jobs.yield_memory
    monkeypatch.setattr(jobs.Jobs, "yield_memory", lambda self: (tmp_path / "go").touch() or plain(self))
    result = run_study(corpus, tmp_path, "--jobs", 2, "--json")
    assert result.exit_code == 0, result.output
    assert "the other processes continue, and this one after them" in result.stderr
    assert begun.count("dot") == 2 and len(json.loads(result.stdout)["tables"]) == 1


def test_what_a_killed_process_held_is_taken_over(corpus, tmp_path, monkeypatch):
    """Locks are the kernel's: they end with their process, however it ends."""
    lock = tmp_path / "locks" / "dot-0"
    with subprocess.Popen([sys.executable, "-c", HOLD, lock], stdout=subprocess.PIPE) as holder:
        holder.stdout.readline()
        begun, waits = fail_for_memory(monkeypatch, None, times=0), []
        monkeypatch.setattr(study.time, "sleep", lambda seconds: waits.append(list(begun)) or holder.kill())
        told = run_plan(plans.parse_plan("mine", SMALL_PLAN), tmp_path, corpus, lambda words: None)
    assert waits and begun[-1] == "dot" and "dot" not in waits[0] and told["done"] == told["cells"] == 8
