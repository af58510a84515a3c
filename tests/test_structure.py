"""The house rules: imports run downwards, backends do not know each other, importing is light, modules stay small."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import isentrope

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "isentrope"
# a module may import from storeys below its own; siblings on one storey do not know each other
STOREYS = (
    ("parts", "region", "precision", "compiled", "files", "imports", "dtypes", "extras"),
    ("pretrained",),
    ("scores", "masks", "temperatures", "positions", "theory", "layout"),
    ("recipe", "fold"),
    ("backends",),
    ("asked",),
    ("attention",),
    ("hf", "models", "data"),
    ("study", "saved_config", "run"),
    ("report",),
    ("cli",),
)
STOREY = {room: level for level, rooms in enumerate(STOREYS) for room in rooms}
MODULES = sorted(SOURCE.rglob("*.py"))


def room(module: str) -> str:
    """The file or folder directly under the package."""
    return module.split(".")[1] if "." in module else ""


def imports(path: Path) -> set[str]:
    """Modules of the package that a file imports, `from isentrope import x` taken as `isentrope.x`."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            is_root = node.module == "isentrope"
            found |= {f"isentrope.{alias.name}" for alias in node.names} if is_root else {node.module}
    return {name for name in found if name.split(".")[0] == "isentrope"}


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_run_downwards(path):
    own = path.relative_to(SOURCE).with_suffix("").parts[0]
    if own == "__init__":
        return
    for name in imports(path):
        target = room(name)
        if target == own or target.startswith("__"):
            continue
        # anything else is a name of the public surface, which stands on the attention storey
        storey = STOREY.get(target, STOREY["attention"])
        assert storey < STOREY[own], f"{path.name} ({own}) imports {name}"


def test_every_room_has_a_storey():
    rooms = {path.relative_to(SOURCE).with_suffix("").parts[0] for path in MODULES} - {"__init__"}
    assert rooms <= set(STOREY), rooms - set(STOREY)


def test_backends_are_blind_to_one_another():
    shared = {"isentrope.backends"} | {f"isentrope.backends.{part}" for part in ("call", "merge", "product")}
    of_others = {"band", "decode"}  # with a kernel of its own, and another for what that leaves
    for path in (SOURCE / "backends").glob("*.py"):
        others = {name for name in imports(path) if name.startswith("isentrope.backends")}
        assert others <= shared or path.stem in of_others, f"{path.name} imports {others - shared}"
        assert not {room(name) for name in imports(path)} & {"temperatures", "positions", "scores", "recipe"}


def test_report_reads_results_without_torch():
    for path in (SOURCE / "report").glob("*.py"):
        assert {room(name) for name in imports(path)} <= {"report", "files"}
        assert "torch" not in path.read_text()


def test_importing_isentrope_loads_torch_and_nothing_heavier():
    heavy = ["transformers", "matplotlib", "sklearn", "scipy", "pandas", "datasets", "typer", "rich", "triton"]
    code = (
        "import torch, sys; before = set(sys.modules); import isentrope\n"
        f"print([m for m in {heavy} if m in set(sys.modules) - before])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_theory_is_there_when_asked_for():
    assert isentrope.theory.peak_cosine(128.0, 128) == pytest.approx(0.62456, abs=1e-5)
    with pytest.raises(AttributeError, match="no attribute 'theorie'"):
        _ = isentrope.theorie


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_modules_stay_small(path):
    assert len(path.read_text().splitlines()) <= 400


@pytest.mark.parametrize("folder", ["tests", "benchmarks"])
def test_tests_and_benchmarks_stay_small(folder):
    lengths = {str(path): len(path.read_text().splitlines()) for path in (ROOT / folder).rglob("*.py")}
    assert not {path: lines for path, lines in lengths.items() if lines > 400}
