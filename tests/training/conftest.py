"""Finished runs, shared by the tests of training."""

from __future__ import annotations

import pytest

from isentrope.training.trainer import train
from tests.fixtures.training import CAUSAL, TINY, one_cpu_thread


@pytest.fixture(scope="session")
def done(corpus, tmp_path_factory):
    """A finished run of TINY."""
    out = tmp_path_factory.mktemp("runs") / "tiny"
    with one_cpu_thread():
        train(corpus, TINY, out)
    return out


@pytest.fixture(scope="session")
def causal(corpus, tmp_path_factory):
    """A finished run of CAUSAL."""
    out = tmp_path_factory.mktemp("runs") / "causal"
    with one_cpu_thread():
        train(corpus, CAUSAL, out)
    return out
