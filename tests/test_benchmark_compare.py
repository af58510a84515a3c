"""benchmarks/compare.py: what became slower, and its exit status."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def compare(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("compare")


def write(path, **ratios):
    rows = [
        {"group": "attention", "method": name, "n": 64, "ms": 2.0, "ratio": ratio}
        if ratio != "failed"
        else {"group": "attention", "method": name, "n": 64, "ms": None, "ratio": None, "failed": "no memory"}
        for name, ratio in ratios.items()
    ]
    path.write_text(json.dumps({"rows": rows}))
    return str(path)


def test_rows_beyond_noise_are_printed(compare, tmp_path, capsys):
    old = write(tmp_path / "old.json", a=1.0, b=1.0, c=1.0, gone=1.0)
    new = write(tmp_path / "new.json", a=1.04, b=0.8, c=1.02, added=1.0)
    assert compare.main([old, new]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["slower", "faster", "3"]
    assert "+4.0%" in lines[0] and "-20.0%" in lines[1] and "only in old: 1, only in new: 1" in lines[2]


def test_a_slowdown_over_the_threshold_is_an_error(compare, tmp_path, capsys):
    old, new = write(tmp_path / "old.json", a=1.0, b=2.0), write(tmp_path / "new.json", a=1.2, b=2.0)
    assert compare.main([old, new]) == 1
    assert capsys.readouterr().out.startswith("regression")
    assert compare.main([old, new, "--threshold", "0.25"]) == 0
    assert compare.main([old, new, "--by", "ms"]) == 0
    capsys.readouterr()
    assert compare.main([old, new, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["regressions"] == 1 and found["rows"][0]["change"] == pytest.approx(0.2) and len(found["rows"]) == 2


def test_a_new_failure_is_an_error_and_an_old_one_is_not(compare, tmp_path, capsys):
    old, new = write(tmp_path / "old.json", a=1.0, b="failed"), write(tmp_path / "new.json", a="failed", b="failed")
    assert compare.main([old, new]) == 1
    assert "failed      attention, a, n = 64" in capsys.readouterr().out
    assert compare.main([new, new]) == 0


def test_files_that_cannot_be_compared(compare, tmp_path, capsys):
    good, bad = write(tmp_path / "good.json", a=1.0), tmp_path / "bad.json"
    for text in (None, "[", "{}", '{"rows": [{"group": "a"}]}'):
        if text is not None:
            bad.write_text(text)
        assert compare.main([good, str(bad)]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
    row = {"group": "a", "method": "b", "n": 1, "ratio": 1.0}
    bad.write_text(json.dumps({"rows": [row, row]}))
    assert compare.main([good, str(bad)]) == 2
    with pytest.raises(SystemExit):
        compare.main([good, good, "--noise", "0.5"])


def test_stored_results_compare(compare):
    results = BENCHMARKS / "results"
    before, after = (str(results / f"2026-11-16-h200-structure-{name}.json") for name in ("before", "after"))
    assert compare.main([before, after]) in (0, 1)
