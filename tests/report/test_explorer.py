"""The explorer page: its formulas are the library's, its curves are the measured ones, and it needs no network."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from isentrope.analysis.formula_values import LAWS, METHODS, compute_formula_values
from isentrope.cli import app
from isentrope.report.html.explorer import write_explorer
from tests.fixtures.commands import assert_one_line

ROOT = Path(__file__).parents[2]
LLAMA = ROOT / "docs" / "results" / "llama"
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
    "--disable-dev-shm-usage", "--virtual-time-budget=3000", "--window-size=1280,900",
)  # fmt: skip
# moves every slider, chooses every method and law, and leaves what it saw in the document
PROBE = """<script>
const errors = [];
addEventListener("error", (event) => errors.push(event.message));
addEventListener("load", () => {
  const seen = {};
  for (const method of $("method").options) {
    $("method").value = method.value;
    update();
    seen[method.value] = [$("recipe").textContent, $("distance-text").textContent];
  }
  for (const law of $("law").options) { $("law").value = law.value; update(); }
  for (const id of ["trained", "times", "window", "beta", "sigma", "dim"]) {
    for (const end of ["min", "max"]) { $(id).value = $(id)[end]; $(id).dispatchEvent(new Event("input")); }
  }
  const wide = document.documentElement.scrollWidth > innerWidth;
  const lines = document.querySelectorAll("#measured polyline").length;
  const answer = { errors, seen, wide, lines, ...document.documentElement.dataset };
  const element = document.createElement("script");
  Object.assign(element, { type: "application/json", id: "answer", textContent: JSON.stringify(answer) });
  document.body.append(element);
});
</script>"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("explorer") / "explorer.html"
    result = CliRunner().invoke(app, ["explore", "--out", str(out), "--results", str(LLAMA)], catch_exceptions=False)
    assert result.exit_code == 0 and result.stdout.strip() == str(out)
    return out


def read_data(page: Path) -> dict[str, Any]:
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text("utf-8"), re.DOTALL)
    assert match
    data: dict[str, Any] = json.loads(match[1])
    return data


def test_the_page_is_one_small_file_with_the_measured_curves(page: Path) -> None:
    text = page.read_text("utf-8")
    assert "http:" not in text and "https:" not in text and "{{" not in text and len(text) < 300_000
    measured = json.loads((LLAMA / "perplexity.json").read_text())
    curves = {study["name"]: study for study in read_data(page)["measured"]}
    assert "llama" in curves and len(curves) == len(list(LLAMA.rglob("perplexity.json")))
    rows = {row["recipe"]: row["perplexity"] for row in curves["llama"]["rows"]}
    assert rows["plain"] == pytest.approx(measured["rows"][0]["perplexity"], rel=1e-4)
    assert curves["llama"]["train_length"] == 256


def test_perplexities_that_are_no_numbers_leave_a_page_that_browsers_read(tmp_path: Path) -> None:
    row = {"recipe": "plain", "perplexity": [3.0, float("nan"), float("inf")]}
    results = {"model": {"name": "small"}, "config": {"edges": [0, 4, 8, 16]}, "cells": [], "rows": [row]}
    (tmp_path / "perplexity.json").write_text(json.dumps(results))
    (curve,) = read_data(write_explorer(tmp_path / "explorer.html", {}, tmp_path))["measured"]
    assert curve["rows"] == [{"recipe": "plain", "perplexity": [3.0, None, None]}]


def test_values_that_the_page_is_checked_with(page: Path) -> None:
    checks = read_data(page)["checks"]
    assert checks == json.loads(json.dumps(compute_formula_values()))
    assert {row["method"] for row in checks["distances"]} == set(METHODS)
    assert {row["law"] for row in checks["laws"]} == set(LAWS)
    farthest = [row for row in checks["distances"] if (row["method"], row["n"], row["j"]) == ("rerope", 200, 0)]
    assert max(row["value"] for row in farthest) == 32  # ReRoPE's distances end at the window
    script = (ROOT / "src" / "isentrope" / "report" / "html" / "explorer.js").read_text("utf-8")
    assert all(re.search(rf"^  {name}: ", script, re.MULTILINE) for name in (*METHODS, *LAWS))


def test_the_page_of_the_site_has_every_measured_curve(tmp_path: Path) -> None:
    page = write_explorer(tmp_path / "explorer.html", {}, ROOT / "docs" / "results")  # as docs/links.py does
    assert len(page.read_bytes()) < 300_000 and len(read_data(page)["measured"]) > 5


@pytest.mark.skipif(BROWSER is None, reason="no chromium, chromium-browser, google-chrome or chrome found")
def test_the_page_in_a_browser(page: Path) -> None:
    probe, profile = page.with_name("probe.html"), page.with_name("profile")
    probe.write_text(page.read_text("utf-8").replace("</body>", f"{PROBE}</body>"), encoding="utf-8")
    command = [str(BROWSER), *FLAGS, f"--user-data-dir={profile}", "--dump-dom", probe.as_uri()]
    settings = os.environ | {"HOME": str(page.parent)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=settings)
    shutil.rmtree(profile, ignore_errors=True)
    match = re.search(r'<script type="application/json" id="answer">(.*?)</script>', done.stdout, re.DOTALL)
    assert match, done.stderr[-2000:]
    answer = json.loads(unescape(match[1]))
    checks = compute_formula_values()
    assert answer["errors"] == [] and answer["wrong"] == "0"
    assert int(answer["checked"]) == sum(map(len, checks.values()))
    assert not answer["wide"] and answer["lines"] >= 3
    assert answer["seen"]["rerope"][0] == "rerope:window=128+share:beta=0.5"
    assert ": 0 % of the pairs" in answer["seen"]["rerope"][1] and ": 0 % of" not in answer["seen"]["rope"][1]


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    options = ["explore", "--out", str(tmp_path / "page.html"), "--results", str(tmp_path / "none")]
    assert_one_line(CliRunner().invoke(app, options), "results: expected a folder with perplexity.json files")


def test_a_folder_without_results(tmp_path: Path) -> None:
    options = ["explore", "--out", str(tmp_path / "page.html"), "--results", str(tmp_path)]
    assert_one_line(CliRunner().invoke(app, options), f"results: expected perplexity.json in {tmp_path}")
    assert not (tmp_path / "page.html").exists()
