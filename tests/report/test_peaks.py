"""Theorem 1 of the paper, decided by a rule from measured peaks."""

from __future__ import annotations

import json

import pytest

from isentrope.report.peaks import Peak, decide_peaks, load_peaks, write_peaks
from isentrope.theory import peak_cosine


def make_peaks(values):
    theory = [float(peak_cosine(alpha, 128)) for alpha in (8, 32, 128)]
    return [Peak(a, 3, 128, t, t + x, t + x) for a, t, x in zip((8, 32, 128), theory, values, strict=True)]


@pytest.mark.parametrize(
    ("distances", "verdicts"),
    [
        ((0, 0.04, -0.04), ["holds", "holds"]),
        ((0.7, 0.6, 0.2), ["holds", "does not hold"]),  # near 1 throughout
        ((0.04, 0.04, -0.5), ["does not hold", "does not hold"]),
    ],
)
def test_both_claims_by_their_rules(distances, verdicts):
    assert [verdict["verdict"] for verdict in decide_peaks(make_peaks(distances))] == verdicts


@pytest.mark.parametrize("attended", [(0.9, 0.9, 0.9), (0.95, 0.935, 0.92)])
def test_neither_level_nor_slowly_falling_peaks_rise(attended):
    peaks = [Peak(a, 3, 128, 0.5, 0.9, x) for a, x in zip((8, 32, 128), attended, strict=True)]
    assert decide_peaks(peaks)[0]["verdict"] == "does not hold"


def test_one_model_decides_no_direction():
    one, two = decide_peaks(make_peaks((0.5, 0, 0))[:1])
    assert one["verdict"] == "not measured" and "largest distance 0.50, at α = 8" in two["words"]


def test_peaks_of_inspections_are_kept_with_their_run(tmp_path):
    for alpha in (16, 8):
        folder = tmp_path / str(alpha)
        folder.mkdir()
        angles = {"before": {"pairs_peak": 0.1, "attention_peak": alpha / 100}}
        theory = {"alpha": alpha, "head_dim": 128, "peak_cosine": 0.1}
        data = {"theory": theory, "angles": angles, "layer": 3, "weights": "ab", "run": {"commit": "c"}}
        (folder / "inspect.json").write_text(json.dumps(data))
    path = write_peaks([tmp_path / "16", tmp_path / "8"], tmp_path / "peaks.json")
    assert [(peak.alpha, peak.attended) for peak in load_peaks(path)] == [(8, 0.08), (16, 0.16)]
    assert json.loads(path.read_text())["run"] == {"commit": "c"}
    (tmp_path / "8" / "inspect.json").write_text(json.dumps(data | {"theory": None}))
    with pytest.raises(ValueError, match="expected a model with CosScale"):
        write_peaks([tmp_path / "8"], path)
