"""Numbers on the results pages are those of the raw files beside them; `make check-results` checks every plan."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from runpy import run_path

import pytest

from isentrope.experiments.plan import plan_names

RESULTS = Path(__file__).parents[2] / "docs" / "results"


@pytest.fixture(scope="module")
def check():
    spec = spec_from_file_location("check_results", RESULTS / "check.py")
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    with pytest.MonkeyPatch.context() as patch:  # the steps of the study ask for the same large files
        patch.setattr(module.study_costs, "read_lines", cache(module.study_costs.read_lines))
        yield module
    del sys.modules[spec.name]


def test_raw_files_are_those_whose_hashes_were_recorded(check):
    """Of the studies; comparisons of decoders grow with every sitting, and `make check-results` checks them."""
    growing = ("frontier/", "share/")
    assert [line for line in check.check_hashes(write=False) if not line.startswith(growing)] == []


def test_plans_of_fitted_laws_are_those_of_the_fits(tmp_path, monkeypatch):
    script = tmp_path / "fitted.py"
    shutil.copy(RESULTS / "share" / "fitted.py", script)
    monkeypatch.setattr(sys, "argv", [str(script), str(RESULTS / "share")])
    run_path(str(script), run_name="__main__")
    written = {path.name: path.read_text() for path in tmp_path.glob("*.yaml")}
    assert written and all((RESULTS / "share" / name).read_text() == text for name, text in written.items())
    monkeypatch.setattr(sys, "argv", [str(script), str(tmp_path)])
    with pytest.raises(SystemExit, match=r"expected smollm2-calibrate/calibrate\.json of a finished fit"):
        run_path(str(script), run_name="__main__")


def test_claims_about_small_llamas_are_decided_by_what_is_measured(check, tmp_path):
    script, edges = check.fit_blocks.SMALL_LLAMAS, [0, 256, 4096]
    with pytest.raises(SystemExit, match="expected results-d"):
        script.render_claims(tmp_path)
    losses = {"rerope:window=8": 1.3, "rerope:window=8+infoscale": 1.2, "rerope:window=8+power": 1.2}
    losses |= {"rerope:window=8+share:beta=0.5": 1.1, "selfextend:window=8,group=6+infoscale": 1.2}
    losses["selfextend:window=8,group=6+share:beta=0.5"] = 1.2
    for length in script.LENGTHS:
        for size in script.SIZES:
            before = script.render_claims(tmp_path) if (length, size) == (512, 128) else ""
            for seed in script.SEEDS:
                cells = [
                    {"recipe": recipe, "text": str(text), "loss": [0, (loss + 0.1 * text) * 3840]}
                    for recipe, loss in losses.items()
                    for text in range(4)
                ]
                path = script.get_path(tmp_path, length, size, seed)
                path.parent.mkdir(parents=True)
                path.write_text(json.dumps({"config": {"edges": edges}, "cells": cells}), encoding="utf-8")
    assert "Not measured in full: length 512 with heads of 128." in before and "over all" not in before
    text = script.render_claims(tmp_path)
    overall, configurations, missing = (block.splitlines() for block in text.split("\n\n"))
    assert (len(overall), len(configurations), missing) == (2 + 4, 2 + 9, ["Not measured in full: none."])
    assert text.count("**holds**") == 3 * 10  # no gain with SelfExtend
    assert "| `rerope+infoscale` below `rerope` | 9.5 % | 9.5 to 9.5 % | 36 of 36 | 0.00 | **holds** |" in overall
    assert configurations[2].startswith("| 128, 32 | 9.5 % (9.5 to 9.5 %) **holds** |")


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


def test_every_seed_of_the_study_has_its_commit(check):
    (plan,) = check.study_blocks.load_plans(RESULTS / "study")
    commits = {
        seed: {cell["run"]["commit"] for cell in plan.cells if cell["seed"] == seed} for seed in plan.metadata["seeds"]
    }
    assert all(found and "unknown" not in found for found in commits.values())


def test_results_without_a_commit_are_refused(check, tmp_path, monkeypatch):
    monkeypatch.setattr(check, "HERE", tmp_path)
    (tmp_path / "results.jsonl").write_text('{"run": {"commit": "unknown"}}', encoding="utf-8")
    monkeypatch.setattr(check, "HASHES", tmp_path / "hashes.json")
    assert "expected the commit that measured it" in next(check.check_hashes(write=True))


def test_the_script_of_the_study_names_plans_that_ship():
    script = RESULTS / "study.sh"
    subprocess.run(["bash", "-n", script], check=True)
    text = script.read_text(encoding="utf-8")
    named = {name for names in re.findall(r"\bplan \"?(study[a-z -]*)\"? \"\$", text) for name in names.split()}
    assert named == {name for name in plan_names() if name.startswith("study")}
    steps = re.search(r"^all=\(([a-z ]+)\)", text, re.M)[1].split()
    assert all(
        re.search(rf"^        {step}\) ", text, re.M) and re.search(rf"^#   .*\b{step}\b", text, re.M) for step in steps
    )


def test_tables_of_benchmarks_take_the_latest_row(check, tmp_path, monkeypatch):
    blocks = check.benchmark_blocks
    row = {"group": "rows", "method": "window, padded", "n": 64, "baseline": "8 rows", "target": 1.1}
    made = {"provenance": {"hardware": "NVIDIA H200"}}
    for name, ratio in (("a.json", 1.3), ("b.json", 1.2)):
        rows = [row | {"ratio": ratio, "met": False, "of_peak": 0.5}, row | {"n": 128, "ratio": None, "met": None}]
        (tmp_path / name).write_text(json.dumps(made | {"rows": rows}), encoding="utf-8")
    monkeypatch.setattr(blocks, "RESULTS", tmp_path)
    row |= {"ratio": 9.0, "met": False}
    (tmp_path / "c.json").write_text(json.dumps(made | {"rows": [row]}), encoding="utf-8")
    monkeypatch.setattr(blocks, "FILES", {"a.json": (), "b.json": (), "c.json": ("others",)})
    blocks.read_rows.cache_clear()
    lines = check.render("benchmark_ratios", ["rows"]).splitlines()
    assert lines[0] == "| | 64 | target | of the card's peak |"
    assert lines[2] == "| window, padded | **1.20** | 1.1 | 50% |"
    assert check.render("benchmark_ratios", ["prefill"]) == check.render("benchmark_ratios", ["rows", "128"])
    blocks.read_rows.cache_clear()


def test_what_others_run_has_columns_of_each_device(check, tmp_path, monkeypatch):
    blocks = check.benchmark_blocks
    row = {"group": "others", "n": 64, "met": None}
    measured = {"Some CPU": ("ReRoPE 8 against two", 0.25), "NVIDIA H200": ("ReRoPE 16/4 against two", 0.5)}
    for n, (hardware, (method, ratio)) in enumerate(measured.items(), 1):
        rows = [row | {"method": method, "ratio": ratio, "n": 64 * n}]
        document = {"provenance": {"hardware": hardware}, "rows": rows}
        (tmp_path / f"{n}.json").write_text(json.dumps(document), encoding="utf-8")
    monkeypatch.setattr(blocks, "RESULTS", tmp_path)
    monkeypatch.setattr(blocks, "FILES", {"1.json": (), "2.json": ()})
    blocks.read_rows.cache_clear()
    lines = check.render("benchmark_others", []).splitlines()
    assert lines == ["| | GPU, 128 | CPU, 64 |", "|---|---|---|", "| ReRoPE against two | 0.50 | 0.25 |"]
    blocks.read_rows.cache_clear()
