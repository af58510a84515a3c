"""The results of a study, shared by the tests of reports."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fixtures.study import study


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return study(tmp_path_factory.mktemp("study"))
