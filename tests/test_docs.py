"""The documentation: snippets run alone, commands and options exist, links and named tests lead somewhere."""

from __future__ import annotations

import ast
import os
import re
import shlex
from pathlib import Path

import pytest
import typer.main

from isentrope.cli import app
from tests.fixtures.documentation import stand_in
from tests.fixtures.registered_parts import forget_registered

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
WRITTEN = [*DOCS.glob("*.md"), *DOCS.glob("guides/*.md"), *DOCS.glob("api/*.md")]
OTHERS = [ROOT / "CONTRIBUTING.md", *DOCS.glob("results/**/README.md"), *DOCS.glob("methods/*.md")]
RUN_ELSEWHERE = {"laws.md", "inspect.md"}  # tests of their topic run these
BLOCKS = {
    f"{path.stem}-{number}": block
    for path in WRITTEN
    if path.name not in RUN_ELSEWHERE
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL))
}


def name_page(path):
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("name", BLOCKS)
def test_snippets_run_alone(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    stand_in(monkeypatch)
    with forget_registered():
        exec(compile(BLOCKS[name], name, "exec"), {})


@pytest.mark.parametrize("path", [*WRITTEN, *OTHERS], ids=name_page)
def test_links_lead_to_files(path):
    for link in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8")):
        assert re.match(r"[a-z]+:", link) or Path(os.path.normpath(path.parent / link)).exists(), link


def find_commands():
    """Lines `isentrope …` in blocks of code, without what follows a comment."""
    for path in [ROOT / "README.md", *WRITTEN]:
        for block in re.findall(r"```\w*\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL):
            for line in re.findall(r"^(?:accelerate launch .*?-m isentrope\.cli|isentrope) (.*)$", block, re.MULTILINE):
                yield pytest.param(shlex.split(line, comments=True), id=f"{path.stem}: {line.split('#')[0].strip()}")


COMMANDS = typer.main.get_command(app)


@pytest.mark.parametrize("words", list(find_commands()))
def test_commands_and_options_exist(words):
    command = COMMANDS
    while hasattr(command, "commands") and words:
        name, *words = words
        assert name in command.commands, name
        command = command.commands[name]
    known = {
        option for parameter in command.params if not getattr(parameter, "hidden", False) for option in parameter.opts
    }
    assert {word for word in words if word.startswith("--")} <= known | {"--help"}


def test_every_row_of_the_support_matrix_names_tests_that_exist():
    rows = [line for line in (DOCS / "support.md").read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    named = re.findall(r"`(\S+\.py)::(\w+)`", "\n".join(rows))
    assert len(named) > 60
    for file in {file for file, _ in named}:
        tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
        there = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        missing = {test for other, test in named if other == file} - there
        assert not missing, f"{file}: {missing}"
    for row in rows:
        if not row.startswith("| --") and ("| works" in row or "| refused" in row):
            assert "::" in row, row


def test_pages_are_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for path in WRITTEN:
        assert path.relative_to(DOCS).as_posix() in navigation
