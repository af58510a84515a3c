"""The study's commands, and the models that ship."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer, BertConfig, T5Config
from typer.testing import CliRunner

from isentrope.analysis import entropy_laws
from isentrope.cli import app
from isentrope.experiments import plan as plans
from isentrope.experiments.checkpoints import SHIPPED_MODELS
from tests.fixtures.commands import assert_one_line
from tests.fixtures.plans import PLAN

pytestmark = pytest.mark.usefixtures("on_one_thread")
TABLES = ("table.md", "table.tex", "table.csv", "claims.json", "report.html", "results.jsonl", "plan.json")


def tell(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture(scope="module")
def study(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("study")
    (folder / "mine.yaml").write_text(PLAN.replace(", 4000", "").replace("[0, 1]", "[0]"))
    return folder, tell("study", "run", folder / "mine.yaml", "--data", corpus, "--out", folder)


def test_a_study_from_the_command_line(study):
    folder, result = study
    assert result.exit_code == 0, result.output
    assert "A small study" in result.stdout and "report.html" in result.stdout
    for name in TABLES:
        assert (folder / "mine" / name).stat().st_size, name
    figures = {path.name for path in (folder / "mine" / "figures").iterdir()}
    assert {"acc.png", "acc.svg", "ppl.svg", "entropy.png", "figures.json"} <= figures
    assert "<html" in (folder / "mine" / "report.html").read_text()


def test_status_says_how_far_it_is(study):
    folder, _ = study
    result = tell("study", "status", folder / "mine.yaml", "--out", folder)
    assert "8 of 8 cells done, 0 failed, 0 missing" in result.stdout
    result = tell("study", "status", folder / "mine.yaml", "--out", folder / "mine", "--json")
    assert json.loads(result.stdout) == {"plan": "mine", "cells": 8, "done": 0, "failed": 0}
    assert_one_line(tell("study", "status", folder / "mine.yaml", "--out", folder / "nowhere"), "no such folder; --out")


def test_what_is_measured_can_be_reported_before_the_end(study, corpus, tmp_path):
    folder, _ = study
    words = ("study", "run", folder / "mine.yaml", "--data", corpus, "--report-only", "--out")
    assert_one_line(tell(*words, tmp_path), "expected results of the plan mine, got none; run it without --report-only")
    out = shutil.copytree(folder, tmp_path / "part")
    lost = json.loads((out / "mine" / "results.jsonl").read_text().splitlines()[0])
    (out / "cells" / f"{lost['key']}.json").unlink()
    result = tell(*words, out)
    assert result.exit_code == 0 and "1 of 8 cells are not measured; run without --report-only" in result.stderr
    assert len((out / "mine" / "results.jsonl").read_text().splitlines()) == 7


@pytest.mark.slow
def test_several_jobs_give_the_same_results(study, corpus, tmp_path):
    folder, _ = study
    words = ("study", "run", folder / "mine.yaml", "--data", corpus, "--out", tmp_path, "--jobs", 2)
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "isentrope.cli", *map(str, words)], env=environment, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "mine" / "results.jsonl").read_text() == (folder / "mine" / "results.jsonl").read_text()
    assert "Traceback" not in (tmp_path / "jobs" / "2.log").read_text()


def test_what_a_command_line_changes(study, corpus):
    folder, _ = study
    result = tell("study", "run", folder / "mine.yaml", "--data", corpus, "--out", folder, "--lengths", "16,5000")
    assert result.exit_code == 1 and "4 of 8 cells failed" in result.stderr


def test_evaluating_a_model(study, corpus, tmp_path):
    folder, _ = study
    model = next(folder.glob("checkpoints/dot-*")) / "best"
    result = tell(
        "evaluate", model, "--data", corpus, "--recipe", "rope", "--recipe", "rerope:window=16+infoscale",
        "--lengths", "16,40", "--positions", 4, "--protocol", "random", "--out", tmp_path,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in next(tmp_path.glob("evaluate-*/results.jsonl")).read_text().splitlines()]
    assert [(row["recipe"], row["length"]) for row in rows] == [
        (recipe, n) for recipe in ("rope", "rerope:window=16+infoscale") for n in (16, 40)
    ]


def test_the_list_names_every_plan():
    result = tell("study", "list")
    for name in ("laws", "dataset", *plans.plan_names()):
        assert re.search(rf"^ {name} ", result.stdout, re.MULTILINE), name


def test_the_data_set_as_a_plan(corpus):
    result = tell("study", "run", "dataset", "--data", corpus)
    assert result.exit_code == 0 and "number of samples" in result.stdout


def test_the_laws_as_formulas_and_by_value(tmp_path, monkeypatch):
    few = partial(entropy_laws.EntropyLawsConfig, queries=16)
    monkeypatch.setattr(entropy_laws, "EntropyLawsConfig", few)
    result = tell("study", "run", "laws", "--out", tmp_path)
    assert result.exit_code == 0 and "ln n / ln n_tr" in result.stdout
    assert re.search(r"InfoScale ε=0.*1\.392", result.stdout.replace("\n", " ")), result.stdout  # 64 → 4096, d = 128


def test_mistakes_end_in_one_line(corpus, tmp_path):
    assert_one_line(tell("study", "run", "ablations", "--data", corpus), "did you mean 'ablation'")
    assert_one_line(tell("study", "run", "ablation", "--out", tmp_path), "--data")
    assert_one_line(tell("study", "run", "dataset"), "--data")
    assert_one_line(tell("study", "run", "ablation", "--data", tmp_path / "no"), "isentrope data prepare")
    assert_one_line(tell("study", "run", "ablation", "--data", corpus, "--lengths", "8,x"), "lengths")
    assert_one_line(tell("study", "status", "nothing"), "unknown 'nothing'")
    assert_one_line(tell("evaluate", tmp_path, "--data", corpus, "--recipe", "rope"), "config.json")
    assert_one_line(
        tell("evaluate", SHIPPED_MODELS / "dot", "--data", corpus, "--recipe", "ropes"), "did you mean 'rope'"
    )
    assert_one_line(
        tell("evaluate", SHIPPED_MODELS / "dot", "--data", corpus, "--recipe", "rope"),
        "expected the tokens of the corpus",
    )


@pytest.mark.parametrize("command", ["run", "figures"])
def test_help_has_an_example(command):
    assert f"isentrope study {command}" in tell("study", command, "--help").stdout


def test_a_model_of_another_kind_is_not_evaluated(corpus, tmp_path):
    """Its weights would be left out, and random ones measured."""
    words = ("--data", corpus, "--recipe", "rope", "--out", tmp_path)
    BertConfig(architectures=["BertForMaskedLM"]).save_pretrained(tmp_path / "bert")
    assert_one_line(tell("evaluate", tmp_path / "bert", *words), "expected a causal one or GAU-α, got BertForMaskedLM")
    T5Config().save_pretrained(tmp_path / "t5")
    assert_one_line(tell("evaluate", tmp_path / "t5", *words), "got t5")
    assert_one_line(tell("evaluate", SHIPPED_MODELS / "llama", *words), "data: expected text for a causal model")
    assert_one_line(
        tell("evaluate", SHIPPED_MODELS / "dot", *words, "--length", "4x"), "--length: not for a model of type GAU-α"
    )
    assert_one_line(
        tell("evaluate", SHIPPED_MODELS / "dot", *words[:2]), "recipe, data: expected recipes and one corpus"
    )
    plan = tmp_path / "llama.yaml"
    rows = "rows: [{method: a, checkpoint: a, recipe: rope}]"
    plan.write_text(f"title: a\nlengths: [16]\ncheckpoints: {{a: {{path: {SHIPPED_MODELS / 'llama'}}}}}\n{rows}\n")
    assert_one_line(tell("study", "run", plan, "--data", corpus, "--out", tmp_path), "gau_alpha, got llama")
    plan.write_text(f"title: a\nlengths: [16]\ncheckpoints: {{a: {{train: {{preset: causal}}}}}}\n{rows}\n")
    assert_one_line(tell("study", "run", plan, "--data", corpus, "--out", tmp_path), "expected masked", "got causal")


def test_the_llama_that_ships_knows_its_text():
    """An ordinary model of transformers, trained at 256 characters."""
    folder = Path(str(SHIPPED_MODELS / "llama"))
    assert (folder / "model.safetensors").stat().st_size < 8 * 2**20
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.config.max_position_embeddings == 256
    ids = tokenizer("def __init__(self, x):\n        self.x = ", return_tensors="pt").input_ids
    written = model.generate(ids, max_new_tokens=2, do_sample=False)[0]
    assert tokenizer.decode(written).endswith("self.x = x\n")


@pytest.mark.parametrize("name", ["dot", "cosine"])
def test_the_models_that_ship_know_their_text(name):
    folder = Path(str(SHIPPED_MODELS / name))
    assert (folder / "model.safetensors").stat().st_size < 4 * 2**20
    model, tokenizer = AutoModelForMaskedLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    text = "        return self.func(*args)\n\n    def __init__(self, x):\n  "
    ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
    hidden = torch.arange(5, 60, 6)
    masked = ids.clone()
    masked[0, hidden] = tokenizer.mask_token_id
    with torch.no_grad():
        hits = (model.eval()(masked).logits[0, hidden].argmax(-1) == ids[0, hidden]).float().mean()
    assert hits > 0.5
