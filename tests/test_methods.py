"""Method cards: one for every part, as `docs/methods/make.py` writes them."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

from isentrope.evaluation.recipe_texts import parse_recipe
from isentrope.recipe.kinds import PARTS

CARDS = Path(__file__).parents[1] / "docs" / "methods"


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(CARDS / "make.py"))


def test_every_part_has_a_card_that_is_up_to_date(script: dict[str, Any]) -> None:
    files = script["build_files"]()
    assert {name for name in files if name.endswith(".md")} == {"index.md", *(f"{name}.md" for name in PARTS)}
    on_disk = {path.name for path in CARDS.iterdir() if path.suffix in (".md", ".svg")}
    assert on_disk == set(files)
    stale = [name for name, text in files.items() if (CARDS / name).read_text("utf-8") != text]
    assert stale == [], "run python docs/methods/make.py"


def test_recipes_of_cards_parse_and_texts_are_of_parts() -> None:
    texts = yaml.safe_load((CARDS / "texts.yaml").read_text("utf-8"))
    assert set(texts) == set(PARTS)
    for name, text in texts.items():
        assert name in str(parse_recipe(text["recipe"])) or name in ("and", "or", "full", "dot"), name
        assert set(text) == {"about", "use", "avoid", "source", "recipe", "picture"}, name


def test_pictures_are_the_distances_of_the_library(script: dict[str, Any]) -> None:
    for path in CARDS.glob("*.svg"):
        ElementTree.fromstring(path.read_text("utf-8"))
    near, beyond = script["distance_colour"](1), script["distance_colour"](script["TRAINED"])
    assert near in (CARDS / "rerope.svg").read_text() and beyond not in (CARDS / "rerope.svg").read_text()
    assert beyond in (CARDS / "rope.svg").read_text() and beyond in (CARDS / "string.svg").read_text()
