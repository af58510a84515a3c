"""`isentrope far-laws`: what it computes, what it writes, how it fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console
from typer.testing import CliRunner

from isentrope.analysis import far_laws
from isentrope.cli import app
from isentrope.report.figures.far_laws import draw_far_laws
from isentrope.report.figures.style import LAW_STYLES
from isentrope.report.tables.far_laws import build_far_laws_table
from tests.fixtures.commands import assert_one_line

pytestmark = pytest.mark.figures

TINY = far_laws.FarLawsConfig(train_length=256, window=128, longest=1024, queries=64)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return far_laws.compute_far_laws(TINY, tmp_path_factory.mktemp("far-laws"))


@pytest.fixture(scope="module")
def rows(results: Path) -> dict[tuple[str, int], dict[str, Any]]:
    data = json.loads(results.read_text(encoding="utf-8"))
    return {(row["law"], row["n"]): row for row in data["rows"]}


def test_every_law_leaves_the_training_length_alone(rows: dict[tuple[str, int], dict[str, Any]]) -> None:
    for law in far_laws.build_far_laws(TINY):
        row = rows[law.key, 256]
        assert (row["near_tau"], row["far_tau"], row["bias"]) == pytest.approx((1, 1, 0))
        assert row["needle_share"] == pytest.approx(0.5, abs=0.05)  # exactly half for closed sums; 128 keys fluctuate
        assert law.key in LAW_STYLES


def test_exact_values_agree_with_samples(rows: dict[tuple[str, int], dict[str, Any]]) -> None:
    for row in rows.values():
        for quantity in far_laws.QUANTITIES:
            sampled = row["sampled"][quantity]
            # 5 standard errors: with 81 comparisons on fixed seeds
            assert abs(sampled["mean"] - row[quantity]) < 5 * sampled["standard_error"], (row["law"], quantity)


def test_laws_do_what_they_are_derived_for(rows: dict[tuple[str, int], dict[str, Any]]) -> None:
    before, last = rows["constant", 256], {key: row for (key, n), row in rows.items() if n == 1024}
    assert last["constant"]["far_share"] > 2 * before["far_share"]
    # the share of the closed sums is kept; that of 128 keys fluctuates by Var ln Z / 8, some hundredths
    assert last["share_100"]["far_share"] == pytest.approx(before["far_share"], abs=0.04)
    assert before["far_share"] < last["prior"]["far_share"] < last["share_050"]["far_share"]
    assert last["share_100"]["far_entropy"] == pytest.approx(last["constant"]["far_entropy"])
    assert last["logn"]["needle_share"] > last["constant"]["needle_share"] > last["share_100"]["needle_share"]
    assert last["logn_far"]["needle_share"] > last["share_100"]["needle_share"]


def test_figures_and_table_are_whole(results: Path) -> None:
    png, svg = draw_far_laws(results)
    assert png.read_bytes().startswith(b"\x89PNG") and ElementTree.parse(svg).getroot().tag.endswith("svg")
    console = Console(width=80)
    with console.capture() as capture:
        console.print(build_far_laws_table(results))
    lines = capture.get().splitlines()
    assert max(map(len, lines)) <= 80
    for law in far_laws.build_far_laws(TINY):
        assert [line for line in lines if line.strip().startswith(law.label)]


def test_the_same_seed_gives_the_same_rows(results: Path, tmp_path: Path) -> None:
    again = json.loads(far_laws.compute_far_laws(TINY, tmp_path).read_text(encoding="utf-8"))
    assert again["rows"] == json.loads(results.read_text(encoding="utf-8"))["rows"]


def test_command_prints_the_table_and_the_files(tmp_path: Path) -> None:
    options = ["--train-length", "64", "--window", "32", "--length", "128", "--queries", "2", "--out", str(tmp_path)]
    ran = CliRunner().invoke(app, ["far-laws", *options])
    assert ran.exit_code == 0 and ran.stderr == "", ran.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["far_laws.json", "far_laws.png", "far_laws.svg"]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--window", "0"], "window"),
        (["--window", "8192"], "train_length"),
        (["--length", "100"], "length"),
        (["--head-dim", "0"], "head_dim"),
        (["--queries", "1"], "queries"),
        (["--sigma", "-1"], "sigma"),
        (["--sigma", "nan"], "sigma"),
        (["--near-mean", "inf"], "near_mean"),
    ],
)
def test_bad_options_are_answered_in_one_line(options: list[str], named: str, tmp_path: Path) -> None:
    assert_one_line(CliRunner().invoke(app, ["far-laws", "--out", str(tmp_path), *options]), named)
    assert not list(tmp_path.iterdir())
