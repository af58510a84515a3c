"""`isentrope plan-scale`: what it writes and prints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from isentrope.cli import app
from isentrope.report.tables.scaling import format_seconds
from isentrope.scaling.hardware import H200, LINKS
from isentrope.scaling.plan import ScalePlan, parse_tokens, predict_plan, select_fastest
from isentrope.scaling.shape import SHAPES
from isentrope.utils.shipped import find_shipped_model
from tests.fixtures.commands import assert_one_line

ROOT = Path(__file__).parents[2]


def run(*words):
    return CliRunner().invoke(app, ["plan-scale", *words])


@pytest.mark.figures
def test_a_plan(tmp_path):
    result = run("--model", "70b", "--tokens", "1M", "--gpus", "1,128", "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert "Prefill of 70b under rerope:window=4096" in result.output and "refused" in result.output
    assert {path.name for path in tmp_path.iterdir()} == {f"plan-scale.{kind}" for kind in ("json", "png", "svg")}
    data = json.loads((tmp_path / "plan-scale.json").read_text())
    assert data["device"]["source"] and data["link"]["source"] and data["models"][0]["weights"] > 70e9
    assert len(data["rows"]) == 2 * (4 + 2 + 3)
    refused = [row for row in data["rows"] if row["refused"]]
    assert {(row["gpus"], row["exchange"]) for row in refused} == {(128, "ulysses")}
    fastest = select_fastest(data["rows"])
    assert len(fastest) == 2 * 3
    assert {row["exchange"] for row in fastest if row["keys"] == "windowed" and row["gpus"] > 1} == {"gather"}


def test_json_of_a_folder(tmp_path):
    words = (
        "--model",
        str(find_shipped_model("llama")),
        "--recipe",
        "window:size=8",
        "--gpus",
        "2",
        "--tokens",
        "4096",
    )
    result = run(*words, "--link", "12.5", "--efficiency", "1", "--json", "--out", str(tmp_path))
    data = json.loads(result.stdout)
    assert data["link"]["inside_bandwidth"] == 12.5e9 and data["link"]["efficiency"] == 1
    assert [row["exchange"] for row in data["rows"]] == ["gather", "ulysses"]
    assert data["rows"][0]["fits"] and len(data["files"]) == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--tokens", "1G"), "tokens"),
        (("--gpus", "0"), "gpus"),
        (("--gpus", "many"), "gpus"),
        (("--link", "ethernet"), "link"),
        (("--efficiency", "2"), "efficiency"),
        (("--recipe", "alibi"), "alibi"),
    ],
)
def test_mistakes_end_in_one_line(words, message, tmp_path):
    assert_one_line(run(*words, "--out", str(tmp_path / "out")), message)
    assert not (tmp_path / "out" / "plan-scale.json").exists()


def test_lengths_and_times():
    assert parse_tokens("131072, 64K,10m") == (131072, 65536, 10 << 20)
    assert [format_seconds(s) for s in (0, 0.0123, 1.5, 150, 7300)] == ["0 s", "12.3 ms", "1.5 s", "2.5 min", "2.03 h"]


def render_table(rows):
    """The lines of the page's table: the fastest way for each model, length and kind of keys."""
    fastest = {(row["model"], row["tokens"], row["keys"], row["gpus"]): row for row in select_fastest(rows)}
    gpus = sorted({row["gpus"] for row in rows})
    for model, tokens, keys in dict.fromkeys(key[:3] for key in fastest):
        cells = []
        for count in gpus:
            row = fastest[model, tokens, keys, count]
            time = format_seconds(row["seconds"]) if row["fits"] else "too large"
            cells.append(f"{time} ({row['exchange']}, {row['memory_bytes'] / 1e9:.0f} GB)" if row["fits"] else time)
        yield f"| {model.upper()}, {tokens >> 20} M | {keys} | {' | '.join(cells)} |"


def test_the_page_shows_the_stored_plan():
    stored = json.loads((ROOT / "benchmarks" / "results" / "plan-scale" / "plan-scale.json").read_text())
    plan = ScalePlan(
        tuple(SHAPES[row["name"]] for row in stored["models"]),
        tuple(dict.fromkeys(row["recipe"] for row in stored["rows"])),
        tuple(dict.fromkeys(row["tokens"] for row in stored["rows"])),
        tuple(dict.fromkeys(row["gpus"] for row in stored["rows"])),
        H200,
        LINKS["ndr"],
    )
    for row, expected in zip(predict_plan(plan), stored["rows"], strict=True):
        assert row == {
            key: pytest.approx(value) if isinstance(value, float) else value for key, value in expected.items()
        }
    page = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8").splitlines()
    assert set(render_table(stored["rows"])) <= set(page)
