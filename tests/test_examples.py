"""The notebooks in examples/: valid, without outputs, compilable; executed among the slow tests."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))
TIME_LIMIT_SECONDS = 600  # of a cell; on idle machines a notebook takes two minutes at most


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
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    nbclient.NotebookClient(
        notebook, timeout=TIME_LIMIT_SECONDS, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    assert any(cell.get("outputs") for cell in notebook.cells)
