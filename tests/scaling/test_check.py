"""`benchmarks/scaling.py`: microbenchmarks become rates, and the page shows the errors of the stored run."""

from __future__ import annotations

import importlib
import json
import statistics
from pathlib import Path

import pytest

from isentrope.scaling.shape import shape_from_config
from isentrope.scaling.visibility import read_visibility

ROOT = Path(__file__).parents[2]
STORED = ROOT / "benchmarks" / "results" / "2026-11-17-cpu-scaling.json"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("scaling")


def test_microbenchmarks_become_rates(script):
    shape = shape_from_config("small", script.make_config(1))
    unit, n = 4 * shape.head_dim * shape.heads, 1024
    dense, chosen = (read_visibility(script.RECIPES[kind]) for kind in ("dense", "retrieved"))
    one = [{"tokens": n, "wall": 2.0, "cpu": 1.0}]
    calibration = {
        "linear": {"tokens": 100, "wall": 4.0, "cpu": 2.0},
        "attention": {"dense": one, "windowed": one, "retrieved": [{"tokens": n, "wall": 20.0, "cpu": 10.0}]},
        "messages": [{"bytes": 10, "wall": 0.5, "cpu": 0.1}, {"bytes": 1010, "wall": 2.5, "cpu": 1.1}],
    }
    device, link = script.read_calibration(calibration, "wall")
    assert device.linear_rate_at(shape.hidden) == 2 * 100 * shape.layer_weights / 4
    assert device.dense_rates == ((unit * dense.count_pairs(0, n), unit * dense.count_pairs(0, n) / 2),)
    seen = unit * chosen.count_pairs(0, n) / device.window_rates[0][1]
    choosing = unit * chosen.count_far_pairs(0, n) / (2 * chosen.pool) / device.choosing_rate
    assert seen + choosing == pytest.approx(20)
    assert (link.latency, link.inside) == (0.5, 500)
    assert script.read_calibration(calibration, "cpu")[1].inside == 1000
    doubled = script.average(calibration, script.average(calibration, calibration))
    assert doubled == calibration


def test_the_page_shows_the_stored_errors():
    rows = json.loads(STORED.read_text())["rows"]
    page = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
    by_way: dict[tuple[str, str], list[dict]] = {}
    for row in rows:
        by_way.setdefault((row["keys"], row["exchange"]), []).append(row)
    for way, some in by_way.items():
        assert [row["processes"] for row in some] == [1, 2, 4]
        cells = [f"{row['measured']['cpu']:.2f} s, {row['cpu']['error']:+.0%}" for row in some]
        walls = ", ".join(f"{row['wall']['error']:+.0%}" for row in some)
        assert "| " + " | ".join([*way, *cells, walls]) + " |" in page
    for clock, name in (("cpu", "Processor time"), ("wall", "Wall time")):
        errors = [abs(row[clock]["error"]) for row in rows]
        assert (
            f"{name}: median error {100 * statistics.median(errors):.0f} %, largest {100 * max(errors):.0f} %" in page
        )
