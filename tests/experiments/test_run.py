"""A study from its plan to its results: what is missing is done, once, and nothing is lost."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import reduce
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from isentrope.calibration import masked_lm
from isentrope.experiments import checkpoints
from isentrope.experiments import masked_runner as study
from isentrope.experiments import plan as plans
from isentrope.experiments.masked_plan import override_plan, plan_masked_evaluation
from isentrope.experiments.runner import plan_status, run_plan
from isentrope.recipe import Recipe
from isentrope.utils.files import lock_file
from tests.fixtures.corpus import make_corpus
from tests.fixtures.plans import PLAN

pytestmark = pytest.mark.usefixtures("on_one_thread")


@pytest.fixture(scope="module")
def plan():
    return plans.parse_plan("small", PLAN)


@pytest.fixture(scope="module")
def done(plan, corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("done")
    told = run_plan(plan, out, corpus, lambda words: None)
    # 4000 tokens no document has
    assert told == {"plan": "small", "cells": 24, "done": 16, "failed": 8}
    return out


def rows(out, name="small"):
    return [json.loads(line) for line in (out / name / "results.jsonl").read_text().splitlines()]


def counting(monkeypatch):
    seen = []
    plain = study.score_documents

    def score_documents(model, documents, hashes, length, *others):
        seen.append(length)
        return plain(model, documents, hashes, length, *others)

    monkeypatch.setattr(study, "score_documents", score_documents)
    return seen


def copied(done, tmp_path):
    """The checkpoints of a finished study, without its cells."""
    shutil.copytree(done / "checkpoints", tmp_path / "checkpoints")
    return tmp_path


def test_results_are_in_the_plans_order_and_complete(done, plan):
    actual = rows(done)
    order = [(row.variant, n, seed) for row in plan.rows for n in plan.lengths for seed in plan.seeds]
    assert [(row["variant"], row["length"], row["seed"]) for row in actual] == order
    for row in actual:
        assert len(row["key"]) == 16 and row["protocol"] == "single" and row["run"]["torch"]
        if row["length"] == 4000:
            assert row["failed"] == "no test document has 4000 tokens" and row["ppl"] is None
            continue
        assert row["failed"] is None and row["skipped"] == 0 and len(row["documents"]) == 4
        assert all(document["count"] == 6 for document in row["documents"])
        assert row["ppl_low"] <= row["ppl"] <= row["ppl_high"] and 0 <= row["acc"] <= 1
        assert len(row["entropy"]) == len(row["entropy_ratio"]) == 2
        if row["length"] == 16:
            assert row["entropy_ratio"] == pytest.approx([1.0, 1.0])
    told = json.loads((done / "small" / "plan.json").read_text())
    assert told["label"] == "table x" and told["data"]["statistics"]["test"]["documents"] == 4
    assert told["checkpoints"]["dot"]["config"]["recipe"] == "rope" and told["checkpoints"]["dot"]["log"]
    timings = [json.loads(line) for line in (done / "small" / "timings.jsonl").read_text().splitlines()]
    assert [t["key"] for t in timings] == [row["key"] for row in actual] and sum(
        t["seconds"] > 0 for t in timings
    ) == 16


def test_infoscale_changes_nothing_inside_the_training_length(done):
    by = {(row["variant"], row["length"], row["seed"]): row for row in rows(done)}
    assert by["both", 16, 0]["documents"] == by["C.S.", 16, 0]["documents"]
    assert by["both", 64, 0]["documents"] != by["C.S.", 64, 0]["documents"]
    assert by["plain", 64, 0]["documents"] != by["plain", 64, 1]["documents"]  # another training seed


def test_rerunning_does_only_what_is_missing(done, plan, corpus, monkeypatch):
    before, seen = (done / "small" / "results.jsonl").read_bytes(), counting(monkeypatch)
    run_plan(plan, done, corpus, lambda words: None)
    assert set(seen) == {4000}  # what failed is tried again
    lost = next(row for row in rows(done) if row["length"] == 64)
    (done / "cells" / f"{lost['key']}.json").unlink()
    run_plan(plan, done, corpus, lambda words: None)
    assert seen.count(64) == 1 and 16 not in seen and (done / "small" / "results.jsonl").read_bytes() == before


@pytest.mark.parametrize("content", ["", '{"result": {"ppl"', "{}", "[]", '{"result": {}, "timing": {}}'])
def test_a_broken_cell_is_named_and_measured_again(done, plan, corpus, tmp_path, monkeypatch, caplog, content):
    out = Path(shutil.copytree(done, tmp_path / "out"))
    before = (out / "small" / "results.jsonl").read_bytes()
    lost = next(row for row in rows(out) if row["length"] == 64)
    path = out / "cells" / f"{lost['key']}.json"
    path.write_text(content)
    assert plan_status(plan, out) == {"plan": "small", "cells": 24, "done": 15, "failed": 8}
    assert f"{path}: " in caplog.messages[0] and "it has to be measured again" in caplog.messages[0]
    seen = counting(monkeypatch)
    run_plan(plan, out, corpus, lambda words: None)
    assert seen.count(64) == 1 and 16 not in seen and (out / "small" / "results.jsonl").read_bytes() == before


def test_a_broken_list_of_cells_is_named(done, plan, tmp_path):
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "cells.json").write_text('["a')
    with pytest.raises(ValueError, match=r"cells\.json: expected JSON, got a broken file .*; run the plan again"):
        plan_status(plan, tmp_path)


@pytest.mark.parametrize("content", ["", "{}", '{"identity": "'])
def test_a_broken_train_json_is_named_and_trained_again(done, corpus, tmp_path, content):
    """Checkpoints lie in folders named by their configuration: what is trained there again is the same."""
    plan = plans.parse_plan(
        "small", PLAN.replace("[16, 64, 4000]", "[16]").replace("[0, 1]", "[0]") + "variants: [plain]"
    )
    out = copied(done, tmp_path)
    folder = max(
        out.glob("checkpoints/dot-*"),
        key=lambda path: json.loads((path / "train.json").read_text())["config"]["seed"] == 0,
    )
    weights = (folder / "best" / "model.safetensors").read_bytes()
    (folder / "train.json").write_text(content)
    said = []
    assert run_plan(plan, out, corpus, said.append)["done"] == 1
    assert len(said) == 1 and str(folder / "train.json") in said[0] and "starts again" in said[0]
    assert json.loads((folder / "train.json").read_text())["finished"]
    assert (folder / "best" / "model.safetensors").read_bytes() == weights


def test_broken_weights_of_a_checkpoint_are_named(done, corpus, tmp_path):
    plan = plans.parse_plan(
        "small", PLAN.replace("[16, 64, 4000]", "[16]").replace("[0, 1]", "[0]") + "variants: [plain]"
    )
    out = copied(done, tmp_path)
    path = next(out.glob("checkpoints/base-*")) / "best" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ValueError, match=r"broken safetensors file .*; delete .* to train it again") as caught:
        run_plan(plan, out, corpus, lambda words: None)
    assert str(caught.value).startswith(f"{path}: ")


def test_weights_that_a_study_is_given(done, corpus, tmp_path):
    mine = Path(shutil.copytree(next(done.glob("checkpoints/dot-*")) / "best", tmp_path / "model"))
    plan, path = plan_masked_evaluation(str(mine), ["rope"], "16", 2, "single"), mine / "model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if "o_dense" in name)
    save_file({("other" if key == name else key): x for key, x in tensors.items()}, path, {"format": "pt"})
    with pytest.raises(ValueError, match=f"model.safetensors: lacks {name} of the gau_alpha model, but has other"):
        run_plan(plan, tmp_path, corpus, lambda words: None)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ValueError, match=r"broken safetensors file .*; fetch or save it again"):
        run_plan(plan, tmp_path, corpus, lambda words: None)


def test_interrupted_and_resumed_gives_the_same_file(done, plan, corpus, tmp_path, monkeypatch):
    out, plain, count = copied(done, tmp_path), study.score_documents, iter(range(100))

    def score_documents(*arguments):
        if next(count) == 5:
            raise KeyboardInterrupt
        return plain(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(study, "score_documents", score_documents)
        with pytest.raises(KeyboardInterrupt):
            run_plan(plan, out, corpus, lambda words: None)
    assert not list(out.rglob("*.partial"))
    assert plan_status(plan, out) == {"plan": "small", "cells": 24, "done": 4, "failed": 1}
    assert study.collect_masked_plan(plan, out, corpus) == plan_status(plan, out)
    keys = [row["key"] for row in rows(out)]
    assert len(keys) == 5 and keys == [row["key"] for row in rows(done) if row["key"] in keys]
    with pytest.raises(ValueError, match=r"cells\.json: expected 8 cells, got 24; give the options of the run"):
        study.collect_masked_plan(replace(plan, lengths=(16,)), out, corpus)
    run_plan(plan, out, corpus, lambda words: None)
    assert (out / "small" / "results.jsonl").read_bytes() == (done / "small" / "results.jsonl").read_bytes()


def test_a_run_cut_off_in_training_has_the_cells_of_what_was_trained(plan, corpus, tmp_path, monkeypatch):
    plain, said = checkpoints.train, []

    def train(*arguments):
        if len(said) == 3:
            raise KeyboardInterrupt
        return plain(*arguments)

    monkeypatch.setattr(checkpoints, "train", train)
    with pytest.raises(KeyboardInterrupt):
        run_plan(plan, tmp_path, corpus, said.append)
    assert said == ["training base, seed 0", "training dot, seed 0", "training dot, seed 1"]
    # dot at seed 0: two recipes at three lengths, one of which no document has
    assert plan_status(plan, tmp_path) == {"plan": "small", "cells": 24, "done": 4, "failed": 2}


def test_plans_share_cells_and_checkpoints(done, corpus, monkeypatch):
    seen = counting(monkeypatch)
    part = plans.parse_plan("part", PLAN + "variants: [plain, I.S.]")
    told = run_plan(part, done, corpus, lambda words: pytest.fail(words))
    assert set(seen) == {4000} and told["done"] == 8
    assert [row["ppl"] for row in rows(done, "part")] == [
        row["ppl"] for row in rows(done) if row["variant"] in ("plain", "I.S.")
    ]


def test_a_cell_that_fails_leaves_the_others_alone(done, plan, corpus, tmp_path, monkeypatch):
    out, plain = copied(done, tmp_path), study.score_documents

    def score_documents(model, documents, hashes, length, *others):
        if length == 64:
            raise torch.OutOfMemoryError("64 tokens are too many\nand more")
        return plain(model, documents, hashes, length, *others)

    monkeypatch.setattr(study, "score_documents", score_documents)
    told = run_plan(plan, out, corpus, lambda words: None)
    assert told == {"plan": "small", "cells": 24, "done": 8, "failed": 16}
    assert {row["failed"] for row in rows(out) if row["length"] == 64} == {"out of memory: 64 tokens are too many"}


def test_a_checkpoint_that_diverges_is_the_reason_of_its_cells(done, corpus, tmp_path, monkeypatch):
    def train(data, config, out):
        raise checkpoints.Diverged("step 3: the loss is nan")

    monkeypatch.setattr(checkpoints, "train", train)
    plan = plans.parse_plan("small", PLAN)
    assert run_plan(plan, tmp_path, corpus, lambda words: None)["failed"] == 24
    assert {row["failed"] for row in rows(tmp_path)} == {"checkpoint base: step 3: the loss is nan"}


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_processes_share_the_cells_whoever_comes_first(done, plan, corpus, tmp_path, monkeypatch, order):
    """Each process as if alone: what one has written by then must not change what the other takes on."""
    out = copied(done, tmp_path)
    seen = counting(monkeypatch)
    monkeypatch.setattr(study, "_write_results", lambda *arguments: None)
    for index in order:
        fake = SimpleNamespace(
            process_index=index, num_processes=2, is_main_process=index == 0, device=torch.device("cpu"),
            wait_for_everyone=lambda: None,
        )  # fmt: skip
        monkeypatch.setattr(study, "PartialState", lambda fake=fake: fake)
        run_plan(plan, out, corpus, lambda words: None)
        assert len(list((out / "cells").iterdir())) == (12 if index == order[0] else 24)
    assert len(seen) == 24


def test_models_of_other_tokens_are_refused(done, corpus, tmp_path):
    mine = next(done.glob("checkpoints/dot-*")) / "best"
    other = make_corpus(tmp_path / "other", letters="ponmlkjihgfedcbazy")
    plan = plan_masked_evaluation(str(mine), ["rope"], "16", 2, "single")
    assert plan.train_length == 16 and run_plan(plan, tmp_path, corpus, lambda words: None)["done"] == 1
    with pytest.raises(ValueError, match="expected the tokens of the corpus"):
        run_plan(plan, tmp_path, other, lambda words: None)


def test_another_config_is_another_cell(done, corpus, tmp_path):
    mine, actual = next(done.glob("checkpoints/dot-*")) / "best", []
    shutil.copytree(mine, tmp_path / "model")
    for layers in (2, 1):
        config = json.loads((tmp_path / "model" / "config.json").read_text()) | {"num_hidden_layers": layers}
        (tmp_path / "model" / "config.json").write_text(json.dumps(config))
        plan = plan_masked_evaluation(str(tmp_path / "model"), ["rope"], "16", 2, "single")
        run_plan(plan, tmp_path, corpus, lambda words: None)
        actual.append(rows(tmp_path, plan.name)[0])
    assert actual[0]["key"] != actual[1]["key"] and len(actual[1]["entropy"]) == 1


def test_what_is_not_trained_has_one_seed(done, corpus, tmp_path):
    mine = next(done.glob("checkpoints/dot-*")) / "best"
    plan = override_plan(plan_masked_evaluation(str(mine), ["rope"], "16", 2, "single"), None, None, "3,4")
    assert plan.num_cells == 1 and run_plan(plan, tmp_path, corpus, lambda words: None)["cells"] == 1


def test_the_plans_training_length_is_what_recipes_leave_open(done, corpus, tmp_path, monkeypatch):
    mine, taken = next(done.glob("checkpoints/dot-*")) / "best", []
    plain = study.score_documents
    monkeypatch.setattr(
        study, "score_documents", lambda model, *others: taken.append(model.config.recipe) or plain(model, *others)
    )
    plan = replace(plan_masked_evaluation(str(mine), ["infoscale"], "16", 2, "single"), train_length=8)
    run_plan(plan, tmp_path, corpus, lambda words: None)
    assert taken[0]["temperature"]["train_length"] == 8


def test_what_is_fitted_is_in_the_results(done, corpus, tmp_path, monkeypatch):
    """A temperature, and where there are far keys their temperature and share law; inside the training length none."""
    monkeypatch.setattr(masked_lm, "PROTOCOL", replace(masked_lm.PROTOCOL, positions=None))
    mine = next(done.glob("checkpoints/dot-*")) / "best"
    plan = plan_masked_evaluation(str(mine), ["rope", "rerope:window=8"], "16,64", 4, "single")
    plan = replace(plan, rows=tuple(replace(row, fit=True) for row in plan.rows))
    assert run_plan(plan, tmp_path, corpus, lambda words: None)["done"] == 4
    inside, beyond, far_inside, far_beyond = rows(tmp_path, plan.name)
    assert (inside["recipe"], far_inside["recipe"]) == ("rope", "rerope:window=8") and beyond["fit"]
    assert Recipe.parse(beyond["recipe"]).temperature.lengths == (16, 64)
    recipe = Recipe.parse(far_beyond["recipe"])
    assert recipe.temperature.train_length == 16 and recipe.temperature.keys == "far" and recipe.share.reference == 8


def test_without_a_corpus(plan, tmp_path):
    with pytest.raises(ValueError, match="--data"):
        run_plan(plan, tmp_path)


def test_what_another_process_is_at_is_left_to_it(plan, corpus, done, tmp_path, monkeypatch):
    shutil.copytree(done, tmp_path / "out")
    shutil.rmtree(tmp_path / "out" / "cells")
    seen = counting(monkeypatch)
    key = rows(done)[0]["key"]  # the first of its row: 16, 64 and 4000 tokens
    with lock_file(tmp_path / "out" / "locks" / key):
        told = run_plan(plan, tmp_path / "out", corpus, lambda words: None, is_helper=True)
    assert len(seen) == 21 and told["done"] == 14
    run_plan(plan, tmp_path / "out", corpus, lambda words: None)
    assert len(seen) == 21 + 3 + 7  # the row that was left, and again what failed
    assert rows(tmp_path / "out") == rows(done)


@pytest.mark.parametrize("held", ["training", "cell"])
def test_the_next_plan_is_worked_on_while_others_hold_what_is_left_of_one(plan, corpus, done, tmp_path, held):
    changes = {"cosine: {": "scaled: {", "cosine: cosine": "cosine: scaled", "16}": "32}"}
    other = plans.parse_plan("other", reduce(lambda text, change: text.replace(*change), changes.items(), PLAN))
    other = replace(other, rows=tuple(row for row in other.rows if row.checkpoint == "scaled"))
    if held == "cell":
        copied(done, tmp_path)
    said = []
    with lock_file(tmp_path / "locks" / ("dot-0" if held == "training" else rows(done)[0]["key"])):
        complete = study.run_masked_plans([plan, other], tmp_path, corpus, said.append)
        assert next(complete) == (other, plan_status(other, tmp_path))
        assert not (tmp_path / "small" / "results.jsonl").exists()
    assert next(complete)[0] == plan and not list(complete)
    names = ["scaled, seed 0", "scaled, seed 1"]
    if held == "training":
        names = ["base, seed 0", "dot, seed 1", "cosine, seed 0", "cosine, seed 1", *names, "dot, seed 0"]
    assert said == [f"training {name}" for name in names]


def test_processes_that_train_together_do_one_plan_after_another(plan, corpus, done, tmp_path, monkeypatch):
    fake = SimpleNamespace(
        process_index=0, num_processes=2, is_main_process=False, device=torch.device("cpu"),
        wait_for_everyone=lambda: None,
    )  # fmt: skip
    monkeypatch.setattr(study, "PartialState", lambda: fake)
    held = lock_file(copied(done, tmp_path) / "locks" / rows(done)[0]["key"])
    held.__enter__()
    monkeypatch.setattr(study.time, "sleep", lambda seconds: held.__exit__(None, None, None))
    complete = study.run_masked_plans([plan, replace(plan, name="other")], tmp_path, corpus, lambda words: None)
    assert [each.name for each, _ in complete] == ["small", "other"]


def test_what_is_measured_needs_no_training(plan, corpus, done, tmp_path, monkeypatch):
    """Cells alone come back from another machine: they and the plan are enough."""
    shutil.copytree(done / "cells", tmp_path / "cells")
    monkeypatch.setattr(checkpoints, "train", lambda *others: pytest.fail("trains again"))
    run_plan(override_plan(plan, "16,64", None, None), tmp_path, corpus, lambda words: None)
    assert rows(tmp_path) == [row for row in rows(done) if row["length"] != 4000]
    monkeypatch.undo()
    (tmp_path / "cells" / f"{rows(tmp_path)[-1]['key']}.json").unlink()
    said = []
    run_plan(override_plan(plan, "16,64", None, None), tmp_path, corpus, said.append)
    last = rows(tmp_path)[-1]
    assert said == ["training base, seed 0", f"training {last['checkpoint']}, seed {last['seed']}"]
