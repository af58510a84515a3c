"""Plans: those that ship, and what is refused."""

from __future__ import annotations

import pytest

from isentrope.experiments import plan as plans
from isentrope.experiments.masked_plan import override_plan
from isentrope.models.gau.config import build_gau_recipe
from isentrope.training.config import build_config
from isentrope.utils.parsing import parse_numbers

PAPER = {
    "main": "table 4.2.3", "softmax-plus-cosine": "table 4.2.4-1", "softmax-plus": "table 4.2.4-2",
    "baselines": "table 9.7", "infoscale": "table 4.2.1", "cosscale": "table 4.2.2", "cosscale-sweep": "table 4.3.2",
    "ablation": "table 4.5",
}  # fmt: skip
SMALL = """
title: t
lengths: [8, 16]
checkpoints:
  a: {train: {preset: train}}
  b: {train: {preset: finetune, model: a, variant: pi}}
rows:
  - {method: PI, checkpoint: b, recipe: "pi:factor=4"}
"""


def test_the_papers_tables_are_there():
    assert PAPER.keys() <= set(plans.plan_names()) and {"demo", "beyond", "share"} <= set(plans.plan_names())
    for name, label in PAPER.items():
        assert plans.load_plan(name).label == label


@pytest.mark.parametrize("name", plans.plan_names())
def test_plans_that_ship(name):
    plan = plans.load_plan(name)
    for row in plan.rows:
        build_gau_recipe(row.recipe, plan.train_length, 128)
    for checkpoint in plan.required_checkpoints():
        if checkpoint.train:
            options = dict(checkpoint.train)
            config = build_config(options.pop("preset"), seed=0, **options)
            rows = [row for row in plan.rows if row.checkpoint == checkpoint.name]
            # a model is evaluated with the scores it was trained with
            assert all(("cosine" in row.recipe) == ("cosine" in config.recipe) for row in rows), checkpoint
    known = {(row.method, row.variant) for row in plan.rows}
    for claim in plan.claims:
        if claim["kind"] != "best_grows":
            than = claim["than"] if isinstance(claim["than"], list) else [claim["than"]]
            assert {(c["method"], c["variant"]) for c in [claim["this"], *than]} <= known and claim[
                "length"
            ] in plan.lengths
        else:
            assert {(method, claim["variant"]) for method in claim["methods"]} <= known
    assert plans.describe_plan(name)["cells"] == len(plan.rows) * len(plan.lengths) * len(plan.seeds)


def test_the_main_table_is_the_papers():
    plan = plans.load_plan("main")
    assert len(plan.rows) == 36 and plan.lengths == (128, 256, 512, 1024, 2048, 4096)
    assert plan.protocol.name == "single" and plan.protocol.positions == 256
    by = {(row.method, row.variant): row for row in plan.rows}
    assert by["Windowed", "both"].recipe == "rope+window:size=64+cosine:alpha=16+infoscale:count=sequence"
    assert by["ReRoPE", "C.S."].recipe == "rerope:window=64+cosine:alpha=128"
    assert by["YaRN (s = 32)", "I.S."].checkpoint == "yarn32"


def test_smaller_tables_are_rows_of_the_main_one():
    rows = set(plans.load_plan("main").rows)
    for name in ("baselines", "infoscale", "cosscale"):
        assert set(plans.load_plan(name).rows) <= rows


def test_every_law_of_near_and_far_keys_is_measured_for_every_method():
    plan = plans.load_plan("share")
    laws: dict[str, list[str]] = {}
    for row in plan.rows:
        laws.setdefault(row.method, []).append(row.variant)
    assert laws.pop("Windowed") == ["plain"]
    assert list(laws) == ["ReRoPE", "Leaky ReRoPE", "SelfExtend"] and len({tuple(each) for each in laws.values()}) == 1
    assert {row.variant for row in plan.rows if row.fit} == {"fitted"}


def test_what_a_checkpoint_starts_from_comes_first():
    assert [c.name for c in plans.parse_plan("x", SMALL).required_checkpoints()] == ["a", "b"]


def test_a_plan_from_a_file(tmp_path):
    (tmp_path / "mine.yaml").write_text(SMALL)
    assert plans.load_plan(str(tmp_path / "mine.yaml")).name == "mine"


def test_what_a_command_line_changes():
    plan = override_plan(plans.parse_plan("x", SMALL), "32,64", 0, "3,4")
    assert (plan.lengths, plan.protocol.positions, plan.seeds) == ((32, 64), None, (3, 4))
    assert override_plan(plan, None, None, None) == plan


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- a", "expected keys and values"),
        ("title: [", "expected YAML"),
        (SMALL + "lenghts: [8]", "unknown key 'lenghts'; did you mean 'lengths'"),
        (SMALL.replace("lengths: [8, 16]", ""), "missing lengths"),
        (SMALL.replace("[8, 16]", "[8, 8]"), "lengths"),
        (SMALL.replace("checkpoint: b", "checkpoint: c"), "unknown checkpoint 'c'"),
        (SMALL.replace("pi:factor=4", "pii:factor=4"), "did you mean 'pi'"),
        (SMALL.replace("model: a", "model: b"), "start from each other"),
        (SMALL.replace("{train: {preset: train}}", "{}"), "one of shipped, path and train"),
        (SMALL + '  - {method: PI, checkpoint: b, recipe: "pi:factor=4"}', "twice"),
        (SMALL + "protocol: {position: 3}", "did you mean 'positions'"),
        (SMALL + "protocol: {positions: many}", "protocol: positions: expected a whole number, got 'many'"),
        (SMALL.replace("checkpoint: b, ", "").replace("recipe: ", "recpie: "), "rows: item 1: unknown key 'recpie'"),
        (SMALL.replace("[8, 16]", "8"), "lengths: expected a list"),
        (SMALL.replace('"pi:factor=4"', '"pi:factor=4", fit: 3'), "fit: expected true or false"),
        (SMALL.replace('"pi:factor=4"', '"pi:factor=4+logn", fit: true'), "fit: expected a recipe without"),
        (SMALL.replace('"pi:factor=4"', '"rerope:window=8+share", fit: true'), "fit: expected a recipe without"),
        (SMALL.replace("[8, 16]", "[a]"), "plan x: lengths: item 1: expected a whole number, got 'a'"),
        (SMALL + "seeds: 0", "seeds: expected a list"),
        (SMALL.replace("checkpoint: b, ", ""), "missing checkpoint"),
        (SMALL.replace("preset: train", "presett: train"), "presett"),
        (SMALL.replace("preset: train", "preset: train, steps: -4"), "steps"),
        (SMALL.replace("model: a", "model: aa"), "unknown start 'aa'"),
        (SMALL.partition("rows:")[0], "expected rows"),
        (SMALL + "claims: [{text: t, kind: betterr}]", "kind: expected one of better"),
        (SMALL + "claims: [{text: t, kind: better, metric: accc, length: 8, this: 1, than: 1}]", "metric"),
        (
            SMALL + "claims: [{text: t, kind: better, metric: acc, length: 8, this: {method: X}, than: 1}]",
            "a row of the",
        ),
        (SMALL + "methods: [{method: X, recipe: rope, checkpoint: a}]", "missing cosine"),
        (SMALL + "methods: [{method: X, recipe: rope, checkpoint: a, variants: [C.S]}]", "did you mean 'C.S.'"),
    ],
)
def test_what_is_refused(text, words):
    with pytest.raises(ValueError, match=words.replace("[", r"\[").replace(".", r"\.")):
        plans.parse_plan("x", text).required_checkpoints()


def test_unknown_names_are_answered_with_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'ablation'"):
        plans.load_plan("ablations")
    with pytest.raises(ValueError, match="expected a file"):
        plans.load_plan("nowhere.yaml")
    with pytest.raises(ValueError, match="lengths: expected numbers"):
        parse_numbers("lengths", "8,x")


def test_a_plan_extends_one_that_ships():
    main, study = plans.load_plan("main"), plans.load_plan("study-main")
    assert study.rows == main.rows and study.lengths == main.lengths and study.label == main.label
    own = plans.load_plan("study").checkpoints
    assert study.checkpoints["base"] == own["base"] != main.checkpoints["base"]  # one pre-training for both
    assert study.checkpoints["dot"] == own["dot"] and {claim["kind"] for claim in study.claims} == {"superior"}
    with pytest.raises(ValueError, match="extends: unknown 'mian'; did you mean 'main'"):
        plans.parse_plan("own", "extends: mian")
    with pytest.raises(ValueError, match="expected a plan that extends none"):
        plans.parse_plan("own", "extends: study-main")
