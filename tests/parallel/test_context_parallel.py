"""Sequences that 2 and 4 processes share: attention, logits, losses and gradients are those of one process."""

from __future__ import annotations

import re
import subprocess
import sys
from multiprocessing import get_context
from pathlib import Path

import pytest

from tests.parallel.cases import list_matrix, list_ulysses
from tests.parallel.decoding import MODELS, run_decoding
from tests.parallel.engines import CHECKS, run_checks
from tests.parallel.models import list_models, run_models
from tests.parallel.workers import context_parallel, run_cases, run_death, run_mixture, spawn, ulysses

pytestmark = pytest.mark.filterwarnings("default")  # what torch and models say in other processes is no error
EXAMPLE = Path(__file__).parents[2] / "examples" / "context_parallel.py"


def list_both(every):
    return list_matrix("gather", every) + list_matrix("ring", every)


def test_recipes_and_models_in_two_processes(tmp_path):
    """A part of what the slow tests run, in one start of processes: that takes most of the time."""
    jobs = (
        (run_cases, (list_both(83), context_parallel)),
        (run_cases, (list_ulysses(2, 131), ulysses)),
        (run_models, (list_models(2, 9),)),
        (run_decoding, (MODELS[:8],)),
        (run_checks, (("mask", "torch", "generation"),)),
    )
    spawn(run_mixture, tmp_path, 2, jobs)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_every_recipe(size, tmp_path):
    spawn(run_cases, tmp_path, size, list_both(1), context_parallel)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_every_recipe_with_heads_for_tokens(size, tmp_path):
    spawn(run_cases, tmp_path, size, list_ulysses(size), ulysses)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_every_model(size, tmp_path):
    spawn(run_models, tmp_path, size, list_models(size))


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKS)
def test_engines(name, tmp_path):
    spawn(run_checks, tmp_path, 2, (name,))


@pytest.mark.slow
def test_a_process_that_dies_ends_the_others(tmp_path):
    context = get_context("spawn")
    processes = [context.Process(target=run_death, args=(rank, str(tmp_path), 2)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [1, 9]
    assert "process 0 of 2 lost the connection to another" in (tmp_path / "message").read_text()


@pytest.mark.slow
def test_the_example():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    result = subprocess.run([*command, str(EXAMPLE)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    losses = re.findall(r"loss of all (\d+\.\d{6})", result.stdout)
    generated = re.findall(r"generated: (\[.*\])", result.stdout)
    assert len(losses) == len(generated) == 2 and losses[0] == losses[1] and generated[0] == generated[1]
    assert result.stdout.count("500 of 1000 keys") == 2
