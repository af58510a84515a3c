"""Results of one plan from several runs."""

from __future__ import annotations

import json

import pytest

from isentrope.experiments.joining import join_results

ROWS = [{"method": "RoPE", "variant": variant} for variant in ("none", "InfoScale")]


def write_run(folder, seed, lengths=(64, 128), partition="p"):
    folder.mkdir()
    plan = {
        "name": folder.name, "title": "t", "lengths": list(lengths), "train_length": 64, "protocol": "random",
        "positions": 128, "rows": ROWS, "claims": [], "seeds": [seed], "data": {"partition": partition},
        "checkpoints": {f"base, seed {seed}": {}}, "run": {"commit": f"c{seed}"},
    }  # fmt: skip
    (folder / "plan.json").write_text(json.dumps(plan))
    cells = [row | {"length": n, "seed": seed, "key": f"{row['variant']}{n}{seed}"} for row in ROWS for n in lengths]
    (folder / "results.jsonl").write_text("".join(json.dumps(cell) + "\n" for cell in cells))
    (folder / "timings.jsonl").write_text("".join(json.dumps({"key": cell["key"]}) + "\n" for cell in cells))
    return folder


def test_seeds_measured_apart_become_one_study(tmp_path):
    runs = [write_run(tmp_path / f"run{seed}", seed) for seed in (2, 0)]
    plan = json.loads(join_results(runs, tmp_path / "all").read_text())
    assert (plan["name"], plan["seeds"]) == ("all", [0, 2])
    assert set(plan["checkpoints"]) == {"base, seed 0", "base, seed 2"}
    assert plan["runs"] == [{"seeds": [2], "commit": "c2"}, {"seeds": [0], "commit": "c0"}]
    keys, timed = (
        [json.loads(line)["key"] for line in (tmp_path / "all" / name).read_text().splitlines()]
        for name in ("results.jsonl", "timings.jsonl")
    )
    assert keys == timed and keys[:4] == ["none640", "none642", "none1280", "none1282"] and len(keys) == 8


def test_joined_results_keep_the_commit_of_every_run_when_joined_again(tmp_path):
    runs = [write_run(tmp_path / f"run{seed}", seed) for seed in (0, 1, 5)]
    join_results(runs[:2], tmp_path / "some")
    plan = json.loads(join_results([tmp_path / "some", runs[2]], tmp_path / "all").read_text())
    assert [(run["seeds"], run["commit"]) for run in plan["runs"]] == [([0], "c0"), ([1], "c1"), ([5], "c5")]


def test_runs_that_do_not_belong_together_are_refused(tmp_path):
    first = write_run(tmp_path / "first", 0)
    for name, reason, options in (
        ("lengths", "lengths differ", {"seed": 1, "lengths": (64,)}),
        ("documents", "documents differ", {"seed": 1, "partition": "q"}),
        ("again", "got 0 again", {"seed": 0}),
    ):
        with pytest.raises(ValueError, match=reason):
            join_results([first, write_run(tmp_path / name, **options)], tmp_path / "all")
    with pytest.raises(ValueError, match="expected one or more"):
        join_results([], tmp_path / "all")
