"""`isentrope laws`: what it computes, what it writes, how it fails."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import isentrope
from isentrope import theory
from isentrope.analysis import entropy_laws as laws
from isentrope.cli import app
from isentrope.report.figures import laws as figures
from isentrope.report.figures.style import spread_apart
from isentrope.report.tables.laws import build_laws_table, select_lengths

pytestmark = pytest.mark.figures

TINY = laws.EntropyLawsConfig(longest=256, queries=128)
KEYS = [law.key for law in laws.build_laws(TINY)]


def computed(config: laws.EntropyLawsConfig, out: Path) -> dict[tuple[str, int], dict[str, Any]]:
    data = json.loads(laws.measure_laws(config, out).read_text(encoding="utf-8"))
    return {(row["law"], row["n"]): row for row in data["rows"]}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return laws.measure_laws(TINY, tmp_path_factory.mktemp("laws"))


def test_lengths_double_and_end_at_the_longest() -> None:
    assert laws.EntropyLawsConfig().lengths == [2**power for power in range(6, 16)]
    assert laws.EntropyLawsConfig(longest=200).lengths == [64, 128, 200]


def test_results_are_complete_and_say_how_they_were_made(results: Path) -> None:
    data = json.loads(results.read_text(encoding="utf-8"))
    assert data["config"] == {
        "train_length": 64, "head_dim": 128, "alpha": 16.0, "longest": 256, "queries": 128, "seed": 0
    }  # fmt: skip
    assert data["versions"]["isentrope"] == isentrope.__version__
    assert set(data["versions"]) == {"python", "torch", "numpy", "isentrope"}
    assert [(row["law"], row["n"]) for row in data["rows"]] == [(key, n) for n in (64, 128, 256) for key in KEYS]
    assert [path.name for path in results.parent.iterdir() if path.name.startswith(".")] == []
    for law in data["laws"]:
        recipe = isentrope.Recipe.from_dict({"temperature": law["temperature"]})
        assert recipe.temperature.clamp is False


def test_measured_entropy_is_the_theory_where_that_holds(tmp_path: Path) -> None:
    mild = computed(laws.EntropyLawsConfig(longest=256, alpha=8, queries=512), tmp_path)
    for n in (64, 128, 256):
        assert mild["constant", n]["settled"]
        assert mild["constant", n]["entropy"] == pytest.approx(mild["constant", n]["theory"], abs=0.05)
    sharper = computed(laws.EntropyLawsConfig(longest=1024, alpha=16, queries=512), tmp_path)
    for n in (256, 512, 1024):
        assert sharper["constant", n]["entropy"] == pytest.approx(sharper["constant", n]["theory"], abs=0.05)
    for row in (*mild.values(), *sharper.values()):
        if row["settled"]:
            assert abs(row["entropy"] - row["theory"]) < 0.12 + 3 * row["standard_error"], row


def test_measured_entropy_leaves_the_theory_where_few_keys_carry_the_weight(tmp_path: Path) -> None:
    rows = computed(laws.EntropyLawsConfig(longest=4096, queries=128), tmp_path)
    kept, collapsed = rows["invariant", 4096], rows["loglength", 4096]
    assert not kept["settled"] and kept["entropy"] - kept["theory"] > 0.4
    assert not collapsed["settled"] and collapsed["theory"] < 0 < collapsed["entropy"] < 1


def test_only_the_matched_exact_law_keeps_the_entropy_of_the_theory() -> None:
    config = laws.EntropyLawsConfig()
    drift = {}
    for law in laws.build_laws(config):
        tau = law.temperature.scale(torch.tensor(config.lengths, dtype=torch.float64), config.head_dim)
        entropy = theory.entropy(config.lengths, tau.numpy() * config.alpha, config.head_dim)
        drift[law.key] = max(abs(entropy - config.train_entropy))
    assert drift.pop("invariant") < 1e-9
    assert drift.pop("exact_matched") < 0.02
    assert min(drift.values()) == drift["infoscale_matched"] > 1


def test_the_same_seed_gives_the_same_rows(results: Path, tmp_path: Path) -> None:
    again = json.loads(laws.measure_laws(TINY, tmp_path).read_text(encoding="utf-8"))
    assert again["rows"] == json.loads(results.read_text(encoding="utf-8"))["rows"]
    other = computed(laws.EntropyLawsConfig(longest=256, queries=128, seed=1), tmp_path)
    assert other["constant", 64]["entropy"] != again["rows"][0]["entropy"]
    # a length's numbers do not depend on which other lengths were asked for
    shorter = computed(laws.EntropyLawsConfig(longest=128, queries=128), tmp_path)
    assert [row for row in again["rows"] if row["n"] == 128 and row["law"] != "invariant"] == [
        row for (key, n), row in shorter.items() if n == 128 and key != "invariant"
    ]


def test_figures_are_whole_and_reproducible(results: Path) -> None:
    png, svg = figures.draw_laws(results)
    assert png.read_bytes().startswith(b"\x89PNG") and png.read_bytes().endswith(b"IEND\xaeB`\x82")
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")
    first = png.read_bytes(), svg.read_bytes()
    figures.draw_laws(results)
    assert (png.read_bytes(), svg.read_bytes()) == first
    assert sorted(path.name for path in results.parent.iterdir()) == ["laws.json", "laws.png", "laws.svg"]


def test_a_failed_write_leaves_the_old_file(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = results.read_bytes()
    names = sorted(results.parent.iterdir())

    def refuse(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", refuse)
    with pytest.raises(OSError, match="disk full"):
        laws.measure_laws(laws.EntropyLawsConfig(longest=65, queries=2), results.parent)
    assert results.read_bytes() == before and sorted(results.parent.iterdir()) == names


def test_labels_are_moved_apart_and_no_further() -> None:
    assert spread_apart([0.0, 0.5, 1.0], 0.1) == pytest.approx([0.0, 0.5, 1.0])
    assert spread_apart([0.5, 0.5, 0.5], 0.1) == pytest.approx([0.4, 0.5, 0.6])


def test_table_fits_80_columns(results: Path) -> None:
    console = Console(width=80)
    with console.capture() as capture:
        console.print(build_laws_table(results))
    lines = capture.get().splitlines()
    assert max(map(len, lines)) <= 80
    for law in json.loads(results.read_text(encoding="utf-8"))["laws"]:
        (line,) = [line for line in lines if line.split("  ")[0].strip() == law["label"]]
        assert len(line.removeprefix(" " + law["label"]).split()) == 6


@pytest.mark.parametrize(("count", "shown"), [(2, [0, 1]), (4, [0, 1, 2, 3]), (5, [0, 2, 4]), (10, [0, 3, 6, 9])])
def test_table_shows_a_few_lengths(count: int, shown: list[int]) -> None:
    assert select_lengths(list(range(count))) == shown


def test_command_prints_the_table_and_the_files(tmp_path: Path) -> None:
    out = tmp_path / "new" / "folder"
    ran = CliRunner().invoke(app, ["laws", "--length", "128", "--queries", "4", "--out", str(out)])
    assert ran.exit_code == 0, ran.output
    assert "Attention entropy" in ran.stdout and ran.stderr == ""
    assert sorted(path.name for path in out.iterdir()) == ["laws.json", "laws.png", "laws.svg"]
    for path in out.iterdir():
        assert str(path) in ran.stdout.replace("\n", "") and path.stat().st_size > 0


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--alpha", "-1"], "alpha"),
        (["--alpha", "nan"], "alpha"),
        (["--alpha", "128"], "alpha"),
        (["--length", "64"], "length"),
        (["--length", "32"], "length"),
        (["--train-length", "1"], "train_length"),
        (["--head-dim", "2"], "head_dim"),
        (["--head-dim", "4096"], "head_dim"),
        (["--queries", "1"], "queries"),
        (["--seed", "-1"], "seed"),
        (["--out", "{file}/below"], "below"),
    ],
)
def test_bad_options_are_answered_in_one_line(options: list[str], named: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    options = [option.format(file=tmp_path / "file") for option in options]
    ran = CliRunner().invoke(app, ["laws", "--out", str(tmp_path), "--length", "128", *options])
    assert ran.exit_code == 2 and ran.stdout == ""
    assert ran.stderr.count("\n") == 1 and ran.stderr.startswith("isentrope: ") and named in ran.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_version() -> None:
    ran = CliRunner().invoke(app, ["--version"])
    assert ran.exit_code == 0 and ran.stdout == f"isentrope {isentrope.__version__}\n"


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("isentrope.report.tables.laws", ["torch", "matplotlib"]),
        ("isentrope.report.tables.partition", ["torch", "matplotlib"]),
        ("isentrope.report.tables.perplexity", ["torch", "matplotlib"]),
        ("isentrope.report.tables.plans", ["torch", "matplotlib"]),
        ("isentrope.report.figures.laws", ["torch", "matplotlib.pyplot"]),
        ("isentrope.cli", ["torch", "matplotlib", "scipy"]),
    ],
)
def test_modules_above_torch_do_not_import_it(module: str, heavy: list[str]) -> None:
    # `import isentrope` itself brings torch: an empty package in its place shows what the module imports
    code = f"""
import importlib, sys, types
package = types.ModuleType("isentrope")
package.__path__ = {[str(Path(isentrope.__file__).parent)]!r}
sys.modules["isentrope"] = package
importlib.import_module({module!r})
print([name for name in {heavy!r} if name in sys.modules])
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"
