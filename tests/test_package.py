"""The wheel and the sdist: small, typed, and complete."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from isentrope.utils.extras import EXTRAS
from isentrope.version import __version__

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
MAX_WHEEL_BYTES = 1_000_000
# where the name to install differs from the name to import
DISTRIBUTIONS = {"yaml": "pyyaml", "sklearn": "scikit-learn", "lm_eval": "lm-eval"}
# what transformers brings itself
BROUGHT = {"huggingface_hub", "safetensors", "tokenizers"}


def list_extra(extra: str) -> set[str]:
    """Return the names of the packages that an extra installs, those of extras that it names included."""
    names = set()
    for requirement in PROJECT["optional-dependencies"][extra]:
        if own := re.match(r"isentrope\[(.+)\]$", requirement):
            names |= set().union(*(list_extra(other) for other in own[1].split(",")))
        else:
            names.add(re.match(r"[\w-]+", requirement)[0])
    return names


def test_torch_and_numpy_are_the_only_dependencies():
    assert {re.match(r"[\w-]+", name)[0] for name in PROJECT["dependencies"]} == {"torch", "numpy"}


@pytest.mark.parametrize("package", sorted(EXTRAS))
def test_the_extra_that_an_error_names_installs_the_package(package):
    name = "transformers" if package in BROUGHT else DISTRIBUTIONS.get(package, package)
    assert name in list_extra(EXTRAS[package])


def test_versions_agree():
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)[1] == __version__


def test_addresses_are_those_of_pyproject():
    """README, site, citation and templates cannot read them there, so that they are compared."""
    source, site = PROJECT["urls"]["Source"], PROJECT["urls"]["Documentation"]
    assert all(address.startswith((source, site)) for address in PROJECT["urls"].values())
    names = ("README.md", "SECURITY.md", "CITATION.cff", "mkdocs.yml", ".github/ISSUE_TEMPLATE/config.yml")
    for path in (ROOT / name for name in names):
        addresses = re.findall(r"https://[\w.]*github\.\w+/[^\s)>\"]*", path.read_text(encoding="utf-8"))
        assert addresses and all(address.startswith((source, site)) for address in addresses), path


def test_wheel(tmp_path):
    pytest.importorskip("hatchling")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.stat().st_size < MAX_WHEEL_BYTES
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        entry_points = archive.read(f"isentrope-{__version__}.dist-info/entry_points.txt").decode()
    assert "isentrope = isentrope.__main__:main" in entry_points
    assert "isentrope/py.typed" in names
    data = ("experiments/plans/demo.yaml", "report/html/page.css", "report/tables/published.json")
    assert {f"isentrope/{name}" for name in data} <= names
    assert not [name for name in names if "shipped" in name.split("/") or name.endswith(".safetensors")]


def test_sdist():
    """By the list of its files: to compress its weights would take seconds."""
    sdist = pytest.importorskip("hatchling.builders.sdist")
    names = {file.distribution_path for file in sdist.SdistBuilder(str(ROOT)).recurse_included_files()}
    assert {"docs/results/README.md", "CHANGELOG.md", "CITATION.cff", "SECURITY.md", "tests/test_package.py"} <= names
    assert "src/isentrope/models/shipped/llama/model.safetensors" in names
