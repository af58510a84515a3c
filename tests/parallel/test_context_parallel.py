"""Sequences that 2 and 4 processes share: attention, logits, losses and gradients are those of one process."""

from __future__ import annotations

import pytest

from tests.parallel.cases import list_matrix, list_ulysses
from tests.parallel.models import list_models, run_models
from tests.parallel.workers import context_parallel, run_cases, spawn, ulysses


def run_matrix(tmp_path, size, every):
    cases = list_matrix("gather", every) + list_matrix("ring", every)
    spawn(run_cases, tmp_path, size, cases, context_parallel)


def test_recipes_in_two_processes(tmp_path):
    run_matrix(tmp_path, 2, 17)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_every_recipe(size, tmp_path):
    run_matrix(tmp_path, size, 1)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_ulysses(size, tmp_path):
    spawn(run_cases, tmp_path, size, list_ulysses(1), ulysses)


def test_models_in_two_processes(tmp_path):
    spawn(run_models, tmp_path, 2, list_models(3))


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_every_model(size, tmp_path):
    spawn(run_models, tmp_path, size, list_models(1))
