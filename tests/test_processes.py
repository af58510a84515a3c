"""Tests in copies of one process (tests/fixtures/processes.py): all of them run, and none is lost silently."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CONFTEST = """
import pytest
from tests.fixtures.processes import run_in_processes

@pytest.fixture(scope="session")
def made_once(tmp_path_factory):
    return tmp_path_factory.mktemp("once")

def pytest_runtestloop(session):
    return run_in_processes(session, 2)
"""
PASSING = """
import logging
import pytest

logging.basicConfig()  # a handler with the stream that there is while tests are collected

@pytest.mark.parametrize("n", range(3))
def test_passes(n, tmp_path, made_once):
    print("seen nowhere")
    logging.error("nor this")
    (tmp_path / "file").write_text(str(n))

def test_is_skipped():
    pytest.skip("so it is")
"""


@pytest.fixture
def run(tmp_path):
    def run(*options: str, **files: str) -> tuple[int, str]:
        (tmp_path / "conftest.py").write_text(CONFTEST)
        (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -q -p no:cacheprovider\n")
        for name, text in files.items():
            (tmp_path / f"test_{name}.py").write_text(text)
        command = [sys.executable, "-m", "pytest", str(tmp_path), "-c", str(tmp_path / "pytest.ini"), *options]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
        return done.returncode, done.stdout

    return run


def test_all_files_run(run):
    status, output = run(a=PASSING, b=PASSING, c=PASSING)
    assert status == 0 and "9 passed, 3 skipped" in output and "seen nowhere" not in output and "nor this" not in output


def test_a_failure_is_reported_as_usual(run):
    failing = "def test_fails():\n    print('seen')\n    assert 1 == 2\n"
    status, output = run("-x", a="def test_passes():\n    pass\n", b=failing)
    assert status == 1 and "1 failed" in output and "stopping after 1 failures" in output
    assert "assert 1 == 2" in output and "test_b.py::test_fails" in output and "\nseen\n" in output


def test_a_process_that_dies_is_a_failure(run):
    dying = "import os\n\ndef test_dies():\n    os.kill(os.getpid(), 9)\n"
    status, output = run(a=PASSING, b=dying, c=PASSING)
    assert status == 1 and "test_b.py::test_dies" in output and "the process that ran it died: -9" in output
