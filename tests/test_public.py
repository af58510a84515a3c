"""The public surface: few names, typed and documented, and parts that are all in the contract matrix."""

from __future__ import annotations

import ast
import inspect
from importlib.resources import files

import pytest

import isentrope as ise
from isentrope.recipe import KINDS
from tests.contract import matrix

NAMESPACES = {"masks", "positions", "scores", "temperatures", "theory"}
CLASSES = {part.__name__ for parts in KINDS.values() for part in parts} | {"Document", "Padding", "PoSE"}
NAMES = sorted(set(ise.__all__) - NAMESPACES - CLASSES)


def test_names():
    assert set(ise.__all__) >= NAMESPACES
    assert len(ise.__all__) == len(set(ise.__all__))
    assert len(NAMES) <= 18
    assert set(ise.__all__) <= set(dir(ise))


@pytest.mark.parametrize("name", NAMES)
def test_public_functions_document_every_argument(name):
    function = getattr(ise, name)
    docstring = inspect.getdoc(function)
    assert docstring
    if not inspect.isfunction(function):
        return
    missing = [argument for argument in inspect.signature(function).parameters if f"{argument}:" not in docstring]
    assert not missing


def test_the_package_says_that_it_is_typed():
    assert files("isentrope").joinpath("py.typed").is_file()
    tree = ast.parse(inspect.getsource(ise))
    blocks = [node for node in tree.body if isinstance(node, ast.If)]  # what type checkers see of the lazy names
    imports = [node for block in blocks for node in ast.walk(block) if isinstance(node, ast.ImportFrom)]
    seen = {alias.name for node in imports for alias in node.names}
    assert seen == set(ise._LAZY) | NAMESPACES == set(ise.__all__)


@pytest.mark.parametrize(
    ("kind", "texts"),
    [
        ("position", matrix.POSITIONS),
        ("temperature", matrix.TEMPERATURES),
        ("mask", matrix.MASKS),
        ("score", matrix.SCORES),
        ("share", matrix.SHARES),
    ],
)
def test_every_part_is_in_the_contract_matrix(kind, texts):
    default = {"dot", "full"}  # what a recipe without the part means
    combined = {"and": "&", "or": "|"}
    for part in KINDS[kind]:
        name = combined.get(part.name(), part.name())
        assert name in default or any(name in text for text in texts), name
