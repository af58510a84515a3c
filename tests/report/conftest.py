"""A study with its report, shared by the tests of reports."""

from __future__ import annotations

from pathlib import Path

import pytest

from isentrope.report.html import page
from tests.fixtures.figures import rendered
from tests.fixtures.study import study


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with rendered():  # whichever test asks first
        folder = study(tmp_path_factory.mktemp("study"))
        page.write_report(folder)
    return folder
