"""Names that a shell completes. They are read without importing PyTorch, which takes seconds."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path


@cache
def list_part_names() -> tuple[str, ...]:
    """Read the names of a recipe's parts from the source of `isentrope.recipe.kinds`."""
    source = Path(__file__).parents[1] / "recipe" / "kinds.py"
    tree = ast.parse(source.read_text(encoding="utf-8"))
    kinds = next(node.value for node in tree.body if isinstance(node, ast.AnnAssign))
    tuples = [node for node in ast.walk(kinds) if isinstance(node, ast.Tuple)] if kinds else []
    elements = [element for each in tuples for element in each.elts]
    names = (each.attr if isinstance(each, ast.Attribute) else getattr(each, "id", "") for each in elements)
    return tuple(name.lower() for name in names if name)


def complete_part(incomplete: str) -> list[str]:
    """Complete the name of a part."""
    return [name for name in list_part_names() if name.startswith(incomplete.lower())]


def complete_recipe(incomplete: str) -> list[str]:
    """Complete the name of the last part of a recipe."""
    before, plus, last = incomplete.rpartition("+")
    names = complete_part(last) + ([] if before else [name for name in ("plain", "auto") if name.startswith(last)])
    return [f"{before}{plus}{name}" for name in names]
