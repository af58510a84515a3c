"""`isentrope recipes` describes every part from its class, and shells complete their names."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from isentrope.cli import app
from isentrope.cli.completion import complete_recipe, list_part_names
from isentrope.recipe import PARTS
from isentrope.recipe.catalog import list_parts
from tests.fixtures.commands import assert_one_line


def run(*words):
    return CliRunner().invoke(app, ["recipes", *words])


def test_every_part_has_a_formula_and_its_options():
    described = {part.name: part for part in list_parts()}
    assert set(described) == set(PARTS)
    for name, part in described.items():
        assert part.formula and [option.name for option in part.options] == list(PARTS[name][1].options())
        assert all(option.meaning for option in part.options), name
    assert described["rerope"].source == "Su, 2023" and "(" not in described["rope"].source
    assert described["infoscale"].source.startswith("Li et al.") and described["infoscale"].source.endswith("13–15")
    assert described["share"].source == "this library" and described["causal"].source == "Vaswani et al., 2017"
    options = {option.name: option for option in described["selfextend"].options}
    assert options["window"].required and options["window"].text == "window=…" and options["base"].text == "base"
    assert options["reach"].meaning.startswith("in place of group") and options["layout"].meaning  # inherited
    assert not next(option for option in described["infoscale"].options if option.name == "train_length").required


def test_the_list_and_one_in_detail():
    shown = run()
    assert shown.exit_code == 0 and all(f"\n{name}" in shown.stdout for name in PARTS), shown.output
    detail = run("rerope").stdout
    assert "required" in detail and "Su, 2023" in detail
    printed = json.loads(run("share", "--json").stdout)
    assert [part["name"] for part in printed["parts"]] == ["share"] and printed["parts"][0]["options"]
    kinds = {part["kind"] for part in json.loads(run("--kind", "mask", "--json").stdout)["parts"]}
    assert kinds == {"mask"}
    assert_one_line(run("rerpoe"), "did you mean 'rerope'")
    assert_one_line(run("--kind", "masks"), "kind: unknown 'masks'; did you mean 'mask'")


def test_names_are_completed_without_importing_the_classes():
    assert set(list_part_names()) == set(PARTS)
    assert complete_recipe("rer") == ["rerope"] and "plain" in complete_recipe("pl")
    assert complete_recipe("rerope:window=64+sh") == ["rerope:window=64+share"]
    assert "--install-completion" in CliRunner().invoke(app, ["--help"]).output
