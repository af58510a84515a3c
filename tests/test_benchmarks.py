"""The benchmark suite runs and draws; what it measures is asserted nowhere."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from isentrope.core import switches

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def suite(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return {name: importlib.import_module(name) for name in ("run", "measure", "plot")}


@pytest.fixture
def tiny(suite, monkeypatch):
    """A CPU's shapes, at the shortest lengths."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    size = suite["measure"].sizes(quick=True)
    return replace(size, short=16, middle=24, long=32, windows=(8, 12), train_length=8, scaling=(16, 32, 64), seconds=0)


def measured(suite, size, names, out, seconds=float("inf")):
    return suite["run"].run(suite["run"].groups(size, names), size, out, seconds, Console(quiet=True))


def test_rows_are_whole_and_saved(suite, tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.import_module("first_calls"), "list_jobs", lambda size: iter(()))
    groups = ["targets", "attention", "window", "share", "retrieve", "backward", "memory"]
    rows, left = measured(suite, tiny, groups, tmp_path / "a.json")
    assert not left and not [row["failed"] for row in rows if "failed" in row]
    saved = json.loads((tmp_path / "a.json").read_text())
    assert saved["rows"] == rows and saved["provenance"]["torch"] == torch.__version__
    keys = [(row["group"], row["method"], row["n"]) for row in rows]
    assert len(set(keys)) == len(keys)  # nothing is measured twice, and files can be compared
    for row in rows:
        assert set(suite["measure"].BLANK) <= set(row)
        assert row["target"] is None and row["met"] is None  # those of a GPU
        assert row["of_peak"] is None  # of a card that is known
        whole = row["group"] in ("memory", "decode")
        assert whole or row["ratio"] == pytest.approx(row["ms"] / row["baseline_ms"])


def test_every_switch_is_measured_against_the_same_call_without_it(suite, tiny):
    targets = importlib.import_module("targets")
    lists = [getattr(targets, f"list_{name}") for name in ("switched", "rows", "bidirectional", "retrieve", "odd_rows")]
    cases = [case for each in lists for case in each(tiny)]
    other_cards = {switches.BAND_POINTERS, switches.BAND_BACKWARD}
    assert {name for case in cases for name in case.switches} == set(switches.SWITCHES) - other_cards
    for name in {case.switches for case in cases if case.switches}:
        assert any(case.compared or case.group == "retrieve" for case in cases if case.switches == name)
    for case in cases:
        variants = targets.list_variants(case)
        assert variants.get("", switches.DEFAULTS) == switches.DEFAULTS and len(variants) == 1 + case.compared
        assert set(case.switches) <= list(variants.values())[-1]
        if case.compared:
            name, without = next((name, used) for name, used in variants.items() if not set(case.switches) <= used)
            assert name == "" or name.startswith(", without "), without


@pytest.mark.parametrize("factor", [2, float("nan")])
def test_a_switch_that_changes_results_fails_alone(suite, tiny, monkeypatch, factor):
    targets = importlib.import_module("targets")
    case = next(iter(targets.list_switched(tiny)))
    make = targets.make_call

    def broken(case, tensors, used, **changed):
        call = make(case, tensors, used, **changed)
        return (lambda: [factor * x for x in call()]) if switches.BAND_SPANS_BACKWARD in used else call

    monkeypatch.setattr(targets, "make_call", broken)
    jobs = targets._list_jobs(tiny, case)
    assert next(jobs).work()["ms"] > 0
    with pytest.raises(AssertionError, match="away from the call without the switch"):
        next(jobs).work()


def test_pairs_are_counted(suite):
    count = importlib.import_module("calls").count_pairs
    i, j = torch.arange(12)[:, None], torch.arange(12)[None]
    assert count(12, 12) == (j <= i).sum() and count(12, 12, window=5) == ((j <= i) & (i - j < 5)).sum()
    assert count(12, 12, False) == 144 and count(12, 12, False, 3) == ((i - j).abs() <= 3).sum()
    assert count(4, 12) == (j <= i)[-4:].sum()


def test_limits_of_cards(suite, monkeypatch):
    limits = importlib.import_module("limits")
    assert limits.find_peak("NVIDIA H200") == (989e12, 4.8e12) and limits.find_peak("a CPU") is None
    monkeypatch.setattr(limits, "find_own_peak", lambda: limits.Peak(100e12, 1e12))
    assert (
        limits.find_limit(1e12, 1e9) == 10
        and limits.find_limit(None, 2e9) == 2
        and limits.find_limit(None, None) is None
    )
    rates = suite["measure"].rates(20.0, 1e12, 1e9)
    assert rates == {"tflops": 50.0, "limit_ms": 10.0, "of_peak": 0.5}


def test_others_give_the_same_results(suite, tiny, tmp_path):
    rows, left = measured(suite, tiny, ["others"], tmp_path / "o.json")
    assert not left and not [row["failed"] for row in rows if "failed" in row]
    assert len(rows) == 12 and all("0.0% apart" in row["note"] for row in rows)


def test_shapes(suite, tiny, tmp_path, monkeypatch):
    shapes = importlib.import_module("shapes")
    monkeypatch.setattr("sys.argv", ["shapes.py", "--out", str(tmp_path / "s.json")])
    monkeypatch.setattr(shapes, "sizes", lambda quick: tiny)
    shapes.main()
    taken = json.loads((tmp_path / "s.json").read_text())["microseconds"]
    assert len(taken) == 6 and min(taken.values()) > 0
    stored = json.loads((BENCHMARKS / "results" / "2026-11-18-h200-kernels.json").read_text())["microseconds"]
    monkeypatch.setattr(shapes, "make_tensors", lambda *sizes: [])
    assert {name for name, _, _ in shapes.list_calls("cuda")} == stored.keys()  # the script names what is stored


def test_first_calls(suite, tiny, tmp_path):
    first_calls = importlib.import_module("first_calls")
    requests = first_calls.list_requests(tiny)
    for facts in first_calls.measure_calls(list(requests.values()), True, str(tmp_path)):
        assert set(facts["ms"]) == {"length", "batch", "heads"} and set(facts["compiled"].values()) == {0}


def test_whole_models(suite, tiny, tmp_path, monkeypatch):
    models = importlib.import_module("models")
    small = {"hidden_size": 36, "intermediate_size": 64, "vocab_size": 100}
    for name, more in (("GAUAlphaConfig", {"attention_key_size": 16, "vocab_size": 12000}), ("LlamaConfig", {})):
        config = getattr(models, name)
        monkeypatch.setattr(models, name, lambda config=config, more=more, **given: config(**given | small | more))
    rows, left = measured(suite, tiny, ["decoding", "gau"], tmp_path / "d.json")
    assert not left and not [row["failed"] for row in rows if "failed" in row]
    assert {row["group"] for row in rows} == {"decoding", "gau"}


def test_a_failure_does_not_end_the_run(suite, tiny, tmp_path):
    def broken():
        raise ValueError("q: expected less\nand more")

    def work():
        return {"ratio": 1.5, "target": 1.2}

    jobs = [suite["measure"].Job("made", name, 1, each) for name, each in (("bad", broken), ("good", work))]
    size = replace(tiny, targets=True)
    rows, _ = suite["run"].run([lambda: iter(jobs)], size, tmp_path / "b.json", float("inf"), Console(quiet=True))
    assert rows[0]["failed"] == "q: expected less" and rows[0]["met"] is None
    assert rows[1]["met"] is False and "failed" not in rows[1]


def test_methods_are_chosen_by_how_their_names_begin(suite, tmp_path, monkeypatch):
    names = ("YaRN", "YaRN, sdpa", "YaRN, flex", "PI")
    jobs = [suite["measure"].Job("made", name, 1, lambda: {"ratio": 1.0}) for name in names]
    monkeypatch.setattr(suite["run"], "groups", lambda *arguments: [lambda: iter(jobs)])

    def run(*options):
        monkeypatch.setattr("sys.argv", ["run.py", "--quick", "--out", str(tmp_path / "e.json"), *options])
        suite["run"].main()
        return [row["method"] for row in json.loads((tmp_path / "e.json").read_text())["rows"]]

    assert run() == list(names)
    assert run("--match", "YaRN, sdpa") == ["YaRN, sdpa"]
    assert run("--match", "YaRN, ", "--match", "PI") == ["YaRN, sdpa", "YaRN, flex", "PI"]
    with pytest.raises(SystemExit):
        run("--match", "ALiBi")


def test_no_measurement_begins_after_the_time(suite, tiny, tmp_path):
    rows, left = measured(suite, tiny, ["backward"], tmp_path / "c.json", seconds=-1)
    assert not rows and len(left) == 2
    assert json.loads((tmp_path / "c.json").read_text())["left_out"] == left


def test_exponents(suite):
    exponent = suite["measure"].exponent
    assert exponent([(n, 3e-6 * n**2) for n in (1024, 2048, 4096, 8192)]) == pytest.approx(2)
    # the lower half does not count
    assert exponent([(1, 9.0), (2, 9.0), (4, 9.0), (8, 8.0), (16, 16.0), (32, 32.0)]) == pytest.approx(1)
    assert exponent([(1, 1.0), (2, 2.0)]) is None


def test_flops_count_what_a_mask_leaves(suite, tiny):
    method = importlib.import_module("cases").Method
    seen = torch.ones(32, 32).tril()
    full, window = seen.sum(), seen.triu(-7).sum()
    unit = 4 * tiny.size * tiny.heads
    assert method("", "").flops(32, tiny) == unit * full
    assert method("", "", window=8).flops(32, tiny) == unit * window


@pytest.mark.figures
def test_plots(suite, tiny, tmp_path):
    out = tmp_path / "d.json"
    measured(suite, tiny, ["scaling"], out)
    data = json.loads(out.read_text())
    assert any(row.get("exponent") for row in data["rows"])
    data["provenance"]["hardware"] = "NVIDIA H200"
    made = {"group": "attention", "method": "a", "n": 32, "ms": 1.0}
    data["rows"] += [
        suite["measure"].BLANK | made | {"ratio": r, "target": 1.1, "met": r <= 1.1} for r in (1.0, 1.2)
    ]  # fmt: skip
    out.write_text(json.dumps(data))
    drawn = suite["plot"].plots(out)
    assert [path.name for path in drawn] == ["d-scaling.png", "d-scaling.svg", "d-targets.png", "d-targets.svg"]
    assert all(path.stat().st_size > 1000 for path in drawn)
