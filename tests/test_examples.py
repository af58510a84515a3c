"""The notebooks in examples/: valid, without outputs, compilable; executed among the slow tests."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))
TIME_LIMIT_SECONDS = 600  # on idle machines a notebook takes two minutes at most


def read(path: Path) -> dict[str, Any]:
    notebook: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return notebook


def test_there_are_three() -> None:
    assert len(NOTEBOOKS) == 3


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_valid_and_compile(path: Path) -> None:
    notebook = read(path)
    assert notebook["nbformat"] == 4 and notebook["metadata"]["kernelspec"]["language"] == "python"
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    code = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] for cell in notebook["cells"] if cell["cell_type"] == "code")
    imports = [node for text in code for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
    assert code and imports
    for node in imports:
        if node.module and node.module.startswith("isentrope"):
            module = __import__(node.module, fromlist=[alias.name for alias in node.names])
            assert all(hasattr(module, alias.name) for alias in node.names), ast.unparse(node)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run(path: Path, tmp_path: Path) -> None:
    """Their cells one after another, as a script: no kernel is needed."""
    cells = ["".join(cell["source"]) for cell in read(path)["cells"] if cell["cell_type"] == "code"]
    command = [sys.executable, "-c", "\n".join(cells)]
    environment = os.environ | {"MPLBACKEND": "agg"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=TIME_LIMIT_SECONDS, check=False
    )
    assert done.returncode == 0 and done.stdout, done.stderr[-2000:]
