"""A package that is not installed is named, with the extra that brings it; other ImportErrors stay as they are."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from isentrope.utils import shipped
from isentrope.utils.extras import EXTRAS, MissingExtraError, name_missing_extras, require_package

# what the smallest installation has: torch and numpy, and what these need themselves
CORE = """
import sys
from importlib.machinery import PathFinder

installed = {"torch", "torchgen", "functorch", "numpy", "isentrope", "sympy", "mpmath", "networkx", "jinja2",
             "markupsafe", "filelock", "fsspec", "typing_extensions", "setuptools", "triton"}
find_spec = PathFinder.find_spec

def find_installed(name, path=None, target=None):
    top = name.partition(".")[0]
    inside = top in sys.stdlib_module_names or top.startswith("_sysconfigdata") or top in installed
    return find_spec(name, path, target) if inside else None

PathFinder.find_spec = find_installed
import torch, isentrope as ise

q = torch.randn(1, 2, 12, 8)
recipes = "rope", "rerope:window=4+infoscale:train_length=8+share"
recipes += ("yarn:factor=2,original_length=8+logn:train_length=8",)
for recipe in recipes:
    assert ise.attention(q, q, q, ise.Recipe.parse(recipe), backend="dense").isfinite().all(), recipe
assert abs(ise.theory.entropy(64, 40.0, 64) + ise.theory.kl_from_uniform(40.0, 64) - 4.1588830833596715) < 1e-12
assert abs(ise.theory.kl_from_uniform(ise.theory.concentration(3.0, 128), 128) - 3) < 1e-11
try:
    ise.extend
except ImportError as error:
    print(error)
from isentrope.__main__ import main
main()
"""
# a process in which packages of the extras are missing
BARE = """
import json, sys
for name in {hidden!r}:
    sys.modules[name] = None
import isentrope
from typer.testing import CliRunner
from isentrope.cli import app

said = {{}}
for words in {commands!r}:
    result = CliRunner().invoke(app, words)
    said[" ".join(words[:2])] = [result.exit_code, result.stderr.strip() or repr(result.exception)]
for name in ("extend", "load", "describe", "StreamingCache"):
    try:
        getattr(isentrope, name)
    except ImportError as error:
        said[name] = [type(error).__name__, str(error)]
print(json.dumps(said))
"""
COMMANDS = [
    ["evaluate", "model", "--data", "x.txt"],
    ["perplexity", "model", "--data", "x.txt", "--recipe", "plain"],
    ["retrieval", "model", "--recipe", "plain"],
    ["inspect", "model", "--data", "x.txt"],
    ["calibrate", "model", "--data", "x.txt", "--length", "8"],
    ["train", "--data", "corpus", "--out", "run"],
    ["data", "prepare", "x.txt", "--out", "y"],
    ["study", "list"],
    ["study", "run", "main"],
    ["study", "status", "main"],
    ["study", "figures", "--data", "x"],
]


def test_torch_and_numpy_are_enough_for_attention_recipes_and_theory():
    done = subprocess.run([sys.executable, "-c", CORE], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert done.stdout == 'transformers is not installed: pip install "isentrope[hf]"\n'
    assert done.stderr == 'isentrope: typer is not installed: pip install "isentrope[cli]"\n'


def test_every_command_names_the_extra_that_is_missing():
    # the commands themselves need typer, which brings pydantic; torch and triton bring jinja2 and filelock
    hidden = [name for name in EXTRAS if name not in ("lm_eval", "typer", "pydantic", "rich", "jinja2", "filelock")]
    code = BARE.format(hidden=hidden, commands=COMMANDS)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    said = json.loads(done.stdout.splitlines()[-1])
    for words in COMMANDS:
        status, line = said[" ".join(words[:2])]
        assert status == 2 and "\n" not in line, (words, line)
        assert 'is not installed: pip install "isentrope[' in line, (words, line)
    for name in ("extend", "load", "describe", "StreamingCache"):
        kind, line = said[name]
        assert kind == "MissingExtraError"
        assert line == 'transformers is not installed: pip install "isentrope[hf]"'


@pytest.mark.parametrize(
    ("package", "extra"), [("yaml", "cli"), ("pyarrow", "train"), ("matplotlib", "report"), ("gguf", "smollm2")]
)
def test_a_missing_package(monkeypatch, package, extra):
    monkeypatch.setitem(sys.modules, package, None)
    message = rf'{package} is not installed: pip install "isentrope\[{extra}\]"'
    with pytest.raises(MissingExtraError, match=message), name_missing_extras():
        __import__(package)
    with pytest.raises(MissingExtraError, match=message):
        require_package(package)


@pytest.mark.parametrize("line", ["import transformers.no_such_part", "import no_such_package"])
def test_errors_from_inside_installed_packages_and_of_others_stay(line):
    with pytest.raises(ModuleNotFoundError) as caught, name_missing_extras():
        exec(line)
    assert not isinstance(caught.value, MissingExtraError)


def test_what_is_there_is_not_missing():
    require_package("yaml")


def test_models_that_ship_are_in_the_repository_alone(monkeypatch, tmp_path):
    assert (shipped.find_shipped_model("llama") / "model.safetensors").is_file()
    with pytest.raises(ValueError, match="shipped: expected one of cosine, dot, llama, got 'lama'"):
        shipped.find_shipped_model("lama")
    monkeypatch.setattr(shipped, "SHIPPED_MODELS", tmp_path / "none")
    with pytest.raises(ValueError, match="not in its wheel: clone the repository"):
        shipped.find_shipped_model("llama")
