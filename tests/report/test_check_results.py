"""Numbers on the results pages are those of the raw files beside them; `make check-results` checks every plan."""

from __future__ import annotations

import json
import shutil
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

RESULTS = Path(__file__).parents[2] / "docs" / "results"


@pytest.fixture(scope="module")
def check():
    spec = spec_from_file_location("check_results", RESULTS / "check.py")
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_raw_files_are_those_whose_hashes_were_recorded(check):
    """Of the studies; comparisons of decoders grow with every sitting, and `make check-results` checks them."""
    growing = ("frontier/", "share/")
    assert [line for line in check.check_hashes(write=False) if not line.startswith(growing)] == []


def test_marked_blocks_are_printed_from_the_raw_files(check):
    assert list(check.check_pages(write=False)) == []


@pytest.mark.parametrize("plan", ["demo", "share/gau/statutes", "archive/statutes/why"])
def test_tables_are_those_of_their_results(check, plan):
    assert list(check.check_tables([RESULTS / plan])) == []


def test_a_changed_number_is_found(check, tmp_path, monkeypatch):
    monkeypatch.setattr(check, "ROOT", tmp_path)
    shutil.copytree(RESULTS / "demo", tmp_path / "demo")
    path = tmp_path / "demo" / "results.jsonl"
    first, *others = path.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join([json.dumps(json.loads(first) | {"acc": 0.123}), *others]), encoding="utf-8")
    assert "demo/table.md: not what its results.jsonl gives" in list(check.check_tables([tmp_path / "demo"]))


def test_an_unknown_block_is_refused(check):
    with pytest.raises(ValueError, match="expected one of questions"):
        check.render("question", [])
