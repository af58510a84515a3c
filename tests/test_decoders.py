"""Plans for causal models, and their recipes in order."""

from __future__ import annotations

import json
from io import StringIO

import pytest
from rich.console import Console
from typer.testing import CliRunner

from isentrope.cli import app
from isentrope.report import leaderboard
from isentrope.study.causal.plan import load
from isentrope.study.run import SHIPPED

PLAN = f"""
title: A small one
decoder: {{model: {SHIPPED / "llama"}}}
texts: "*.txt"
documents: 2
edges: [0, 32, 64, 96]
recipes: [plain, "rerope:window=16", "rerope:window=64"]
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("decoders")
    for name in "ab":
        (folder / f"{name}.txt").write_text(f"def {name}(x):\n    return x + 1  # and so on\n\n\n" * 9)
    (folder / "small.yaml").write_text(PLAN)
    return folder, CliRunner().invoke(app, ["study", "run", str(folder / "small.yaml"), "--out", str(folder / "out")])


def test_a_plan_from_the_command_line(run):
    folder, result = run
    assert result.exit_code == 0, result.output
    board = json.loads((folder / "out" / "small" / "leaderboard.json").read_text())
    assert board["train_length"] == 256 and len(board["rows"]) == 3
    last = [row["perplexity"][-1] for row in board["rows"]]
    assert last == sorted(last)
    found = {row["recipe"]: row for row in board["rows"]}
    assert found["plain"]["inside"] is None and found["plain"]["cost"] == 1
    assert abs(found["rerope:window=64"]["inside"]) < abs(found["rerope:window=16"]["inside"])
    assert found["plain"]["ratio"] == pytest.approx(1)
    assert found["plain"]["bits_per_byte"][2] > 0
    for name in ("leaderboard.md", "leaderboard.png", "leaderboard.svg", "perplexity.png"):
        assert (folder / "out" / "small" / name).stat().st_size


def test_what_was_found_again_is_beside_it(run, tmp_path):
    folder, _ = run
    rows = [{"recipe": "plain", "task": "passkey", "length": 96, "share": 0.25, "likeliest": 0.5}]
    (tmp_path / "retrieval.json").write_text(json.dumps({"config": {"score": "both"}, "rows": rows}))
    results = folder / "out" / "small" / "perplexity.json"
    (tmp_path / "perplexity.json").write_text(results.read_text())
    shown = Console(width=140, file=StringIO())
    shown.print(leaderboard.table(tmp_path))
    assert "passkey 96" in shown.file.getvalue() and "25 %" in shown.file.getvalue()


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("title:", "titel:", "got 'titel'"),
        ("model:", "modl:", "got 'modl'"),
        ('"*.txt"', '"*.text"', "got none like \\*.text"),
        ("[0, 32, 64, 96]", "[0, 64, 32]", "edges"),
        ("rerope:window=16", "reroop:window=16", "reroop"),
        ("documents: 2", "retrieval: {tasks: [passkee], lengths: [64]}", "passkee"),
        ("documents: 2", "retrieval: {tasks: [passkey]}", "missing lengths"),
    ],
)
def test_mistakes_are_answered_before_anything_is_loaded(run, tmp_path, before, after, words):
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "bad.yaml").write_text(PLAN.replace(before, after))
    with pytest.raises(ValueError, match=words):
        load(tmp_path / "bad.yaml")


def test_plans_of_another_kind_are_not_taken(tmp_path):
    (tmp_path / "other.yaml").write_text("title: x\nlengths: [64]\n")
    assert load(tmp_path / "other.yaml") is None


def test_decoders_do_not_mix(run):
    folder, _ = run
    result = CliRunner().invoke(app, ["study", "run", str(folder / "small.yaml"), "demo"])
    assert result.exit_code == 2 and "expected them alone" in result.stderr
