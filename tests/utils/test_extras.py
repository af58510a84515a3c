"""A package that is not installed is named, with the extra that brings it; other ImportErrors stay as they are."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from isentrope.utils.extras import EXTRAS, MissingExtraError, name_missing_extras, require_package

# a process in which nothing but the core is installed
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


def test_every_command_names_the_extra_that_is_missing():
    hidden = [name for name in EXTRAS if name != "lm_eval"]
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


@pytest.mark.parametrize(("package", "extra"), [("yaml", "train"), ("pyarrow", "data"), ("gguf", "smollm2")])
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
