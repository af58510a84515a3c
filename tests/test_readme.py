"""The README: short, its snippets run alone, its numbers and texts are those of raw files, its commands those of CI."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path

import pytest

from tests.fixtures.documentation import stand_in

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
ADDRESS = "https://github.com/isentrope/isentrope/blob/main/"
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_it_is_short_and_code_comes_early():
    assert len(README.split()) < 700
    assert README.splitlines().index("```python") < 20


@pytest.fixture
def a_long_text(tmp_path, monkeypatch):
    """A folder with a text past the length of the Llama that ships, which stands for every name on the hub."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.txt").write_text("def f(x):\n    return x\n" * 20)
    stand_in(monkeypatch)


@pytest.mark.parametrize("block", BLOCKS, ids=["extend", "attention"])
def test_snippets_run_alone(block, a_long_text, capsys):
    exec(compile(block.replace("max_new_tokens=60", "max_new_tokens=6"), "README.md", "exec"), {})
    assert capsys.readouterr().out


def test_the_table_is_that_of_the_raw_files(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["table.py", "--check"])
    runpy.run_path(str(ROOT / "docs" / "results" / "generation" / "table.py"), run_name="__main__")


def test_the_generation_is_that_of_the_raw_file():
    rows = json.loads((ROOT / "docs" / "results" / "generation" / "smollm2.json").read_text(encoding="utf-8"))["rows"]
    plain, extended = rows
    for row in rows:
        assert " ".join(row["continuation"].split()) in README
    assert " ".join(plain["reply"].split()) in README and not plain["found"]
    assert f"`{extended['recipe']}`" in README and extended["found"] and "**48213**. Remember" in README


def test_make_commands_exist_and_are_those_of_ci():
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    commands = set(re.findall(r"^make (\w+)", README, re.MULTILINE))
    ran = re.findall(r"^make (\w+)", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert commands == {"demo", "test"} <= targets and "test" in ran


def test_links_are_absolute_and_lead_to_files():
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert links and all(link.startswith(ADDRESS) for link in links)
    for link in links:
        assert (ROOT / link.removeprefix(ADDRESS)).exists(), link
