"""The house rules: imports run downwards, backends do not know each other, importing is light, modules stay small."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import isentrope
from isentrope.backends.merge import MergedBackend
from isentrope.backends.protocol import Backend
from isentrope.dispatch import BACKENDS

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "isentrope"
# a module may import from levels below its own; packages on one level do not import each other
LEVELS = (
    ("version",),
    ("utils",),
    ("core", "parts"),
    ("head_tables", "gguf_tokenizer"),
    ("scores", "masks", "temperatures", "positions", "share", "retrieve", "theory"),
    ("recipe", "backends", "pretrained"),
    ("builder", "entropy"),
    ("block_selection",),
    ("dispatch",),
    ("functional",),
    ("parallel",),
    ("hf", "models"),
    ("data",),
    ("training",),
    ("evaluation",),
    ("analysis", "scaling"),
    ("calibration",),
    ("experiments",),
    ("report",),
    ("cli", "run", "saved_config", "peft_methods", "deprecated"),
    ("__main__",),
)
LEVEL = {name: level for level, names in enumerate(LEVELS) for name in names}
MODULES = sorted(SOURCE.rglob("*.py"))
MAX_PARAMETERS = 7
# the public entry point, and signatures that transformers calls
MANY_PARAMETERS = {
    ("functional.py", "attention"),
    ("hf/layer.py", "attention_forward"),
    ("hf/mask.py", "make_frames_mask"),
    ("models/gau/config.py", "__init__"),
    ("models/gau/modeling.py", "forward"),
}


@cache
def list_nodes(path: Path) -> list[ast.AST]:
    """List the nodes of a module's syntax tree, the whole of it first; several tests go through them."""
    return list(ast.walk(ast.parse(path.read_text())))


@pytest.fixture(scope="module", autouse=True)
def _forget_nodes():
    yield
    list_nodes.cache_clear()


def package(module: str) -> str:
    """The file or folder directly under the package."""
    return module.split(".")[1] if "." in module else ""


def imports(path: Path, on_import: bool = False) -> set[str]:
    """Modules of the package that a file imports, or imports at once; `from isentrope import x` is `isentrope.x`."""
    modules = set()
    nodes = list_nodes(path)
    top = [each for node in nodes[0].body for each in (node.body if isinstance(node, ast.With) else [node])]
    for node in top if on_import else nodes:
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            is_root = node.module == "isentrope"
            modules |= {f"isentrope.{alias.name}" for alias in node.names} if is_root else {node.module}
    return {name for name in modules if name.split(".")[0] == "isentrope"}


def test_imports_run_downwards():
    wrong = []
    for path in MODULES:
        own = path.relative_to(SOURCE).with_suffix("").parts[0]
        for name in imports(path) if own != "__init__" else ():
            target = package(name)
            if target not in LEVEL:
                wrong.append(f"{path.relative_to(SOURCE)} imports {name} from the public surface, not from its module")
            elif target != own and LEVEL[target] >= LEVEL[own]:
                wrong.append(f"{path.relative_to(SOURCE)} ({own}) imports {name}")
    assert not wrong, "\n".join(wrong)


def test_every_package_has_a_level():
    packages = {path.relative_to(SOURCE).with_suffix("").parts[0] for path in MODULES} - {"__init__"}
    assert packages == set(LEVEL), packages ^ set(LEVEL)


def test_backends_import_neither_methods_nor_one_another():
    parts = (
        "protocol",
        "merge",
        "merge_kernel",
        "additive_masks",
        "cpu_tiles",
        "graph_plan",
        "one_query",
        "tile_kernels",
        "wide_matmul",
        "padding",
        "softmax_kernel",
    )
    shared = {f"isentrope.backends.{part}" for part in parts}
    delegating = {
        "band/backend.py": {"isentrope.backends.sdpa"},  # far keys, backward
        "blocks/backend.py": {"isentrope.backends.sdpa", "isentrope.backends.band.backend"},  # near keys, backward
        "blocks/one_query_kernel.py": {"isentrope.backends.decode.kernel"},  # how it rotates and multiplies
    }
    for path in (SOURCE / "backends").rglob("*.py"):
        name = str(path.relative_to(SOURCE / "backends"))
        others = {name for name in imports(path) if name.startswith("isentrope.backends")}
        if name.startswith(("band/", "blocks/", "decode/")):  # the modules of one backend
            others = {other for other in others if not other.startswith(f"isentrope.backends.{name.split('/')[0]}.")}
        assert others <= shared | delegating.get(name, set()), f"{name} imports {others - shared}"
        assert {package(name) for name in imports(path)} <= {"backends", "core", "utils"}


def test_every_backend_implements_the_protocol():
    modules = {path.stem for path in (SOURCE / "backends").glob("*.py")}
    modules |= {path.parent.name for path in (SOURCE / "backends").glob("*/backend.py")}
    assert set(BACKENDS) == modules - {
        "__init__",
        "additive_masks",
        "cpu_tiles",
        "graph_plan",
        "one_query",
        "merge",
        "softmax_kernel",
        "merge_kernel",
        "padding",
        "protocol",
        "tile_kernels",
        "wide_matmul",
    }
    for name, backend in BACKENDS.items():
        assert isinstance(backend, Backend) and backend.name == name and backend.__doc__
        assert backend.gradient in ("autograd", "merged", "none")
        assert isinstance(backend, MergedBackend) == (backend.gradient == "merged")
        for member in ("refusal", "forward"):
            expected = inspect.signature(getattr(Backend, member)).parameters
            assert list(inspect.signature(getattr(type(backend), member)).parameters) == list(expected)


def test_a_backend_is_chosen_in_one_place():
    for path in MODULES:
        for node in list_nodes(path) if "auto" in path.read_text().lower() else ():
            compared = isinstance(node, ast.Compare) and [ast.unparse(x) for x in (node.left, *node.comparators)]
            if compared and any("auto" in part.lower() for part in compared):
                assert path.name == "dispatch.py" or not any("backend" in part for part in compared), path


def test_functions_have_few_parameters():
    many = set()
    for path in MODULES:
        name = str(path.relative_to(SOURCE))
        if path.stem.endswith("kernel") or name.startswith("cli/"):  # a command has a parameter for every option
            continue
        for node in list_nodes(path):
            if isinstance(node, ast.FunctionDef):
                arguments = [x.arg for x in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
                if len([x for x in arguments if x not in ("self", "cls")]) > MAX_PARAMETERS:
                    many.add((name, node.name))
    assert many == MANY_PARAMETERS, many ^ MANY_PARAMETERS


def test_names_are_plain_words():
    house = {"told", "asked", "found", "held", "looks", "pieces", "shown", "meeting", "meetings", "regimen", "watch"}
    for path in MODULES:
        for node in list_nodes(path):
            name = getattr(node, "id", None) or getattr(node, "arg", None) or getattr(node, "name", None)
            words = set(name.lower().split("_")) if isinstance(name, str) else set()
            assert not words & house - ({"held"} if "out" in words else set()), f"{path.name}: {name}"


def test_report_reads_results_without_torch():
    names = ("clusters", "decisions", "frontier", "metrics", "ranking", "results")
    torchless = [SOURCE / "evaluation" / f"{name}.py" for name in names]
    known = {f"isentrope.evaluation.{path.stem}" for path in torchless}
    for path in (*(SOURCE / "report").rglob("*.py"), SOURCE / "evaluation" / "__init__.py", *torchless):
        names = imports(path, on_import=True)
        assert {package(name) for name in names} <= {"report", "utils", "evaluation"}, path
        assert {name for name in names if package(name) == "evaluation"} <= known, path
        assert not re.search(r"^(import|from) (torch|transformers)", path.read_text(), re.M), path


def test_importing_isentrope_loads_torch_and_nothing_heavier():
    heavy = ["transformers", "peft", "matplotlib", "sklearn", "scipy", "pandas", "datasets", "typer", "rich", "triton"]
    code = (
        "import isentrope, sys; assert 'torch' not in sys.modules; import torch; before = set(sys.modules)\n"
        "isentrope.attention, isentrope.ReRoPE, isentrope.masks\n"
        f"print([m for m in {heavy} if m in set(sys.modules) - before])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_theory_is_there_when_asked_for():
    assert isentrope.theory.peak_cosine(128.0, 128) == pytest.approx(0.62456, abs=1e-5)
    with pytest.raises(AttributeError, match="no attribute 'theorie'"):
        _ = isentrope.theorie


@pytest.mark.parametrize("folder", ["src/isentrope", "tests", "benchmarks"])
def test_modules_stay_small(folder):
    lengths = {str(path): len(path.read_text().splitlines()) for path in (ROOT / folder).rglob("*.py")}
    assert not {path: lines for path, lines in lengths.items() if lines > 400}
