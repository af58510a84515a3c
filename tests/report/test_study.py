"""Figures of a study over pre-trainings, from results of known effect."""

from __future__ import annotations

import json
from math import log, sqrt
from pathlib import Path

import pytest

from isentrope.report.best_temperatures import (
    FittedModel,
    collect_best_temperatures,
    compute_laws,
    compute_residuals,
    read_calibrated,
)
from isentrope.report.claims import evaluate_claims
from isentrope.report.figures.study import collect_gains, rank_correlation
from isentrope.report.figures.temperatures import draw_fitted_models
from isentrope.report.load import load_plans
from isentrope.report.study import draw_study
from isentrope.temperatures import InfoScale, InfoScaleExact, LogN, Power, YaRNTemperature

pytestmark = pytest.mark.figures

CLAIMS = (("RoPE", "superior", "acc"), ("Windowed", "equivalent", "acc"), ("RoPE", "superior", "ppl"))
GAINS = {"RoPE": 0.2, "ReRoPE": 0.1, "Windowed": 0.0}  # and the rise of entropy, ten times that


def write_study(folder):
    """Three pre-trainings, four documents; hits and entropy by formula."""
    rows = [{"method": method, "variant": variant} for method in GAINS for variant in ("none", "InfoScale", "fitted")]
    row = lambda method, variant: {"method": method, "variant": variant}  # noqa: E731
    claims = [
        {"text": f"InfoScale improves {method}", "kind": kind, "metric": metric, "length": 256,
         "this": row(method, "InfoScale"), "than": row(method, "none")}
        for method, kind, metric in CLAIMS
    ]  # fmt: skip
    plan = {"name": "s", "title": "S", "lengths": [128, 256], "protocol": "random", "train_length": 64, "rows": rows}
    (folder / "plan.json").write_text(json.dumps(plan | {"claims": claims, "seeds": [0, 1, 2]}))
    cells = []
    for r in rows:
        for length in plan["lengths"]:
            for seed in range(3):
                gain = GAINS[r["method"]] * (r["variant"] != "none")
                hits = [round(1000 * (0.5 + gain + 0.01 * seed + 0.02 * d)) + (d * seed) % 3 for d in range(4)]
                documents = [
                    {"sha256": f"d{d}", "count": 1000, "hits": hit, "loss": 2000.0 - hit} for d, hit in enumerate(hits)
                ]
                entropy = [3.0 + 10 * GAINS[r["method"]] + 0.01 * seed]
                recipe = "rope+fitted:lengths=(64,256,),table=(1,1.5,)" if r["variant"] == "fitted" else "rope"
                numbers = {"acc": sum(hits) / 4000, "ppl": 4.0, "entropy": entropy, "entropy_ratio": [entropy[0] / 3]}
                cells.append(
                    r | numbers | {"length": length, "seed": seed, "pretraining": f"p{seed}", "protocol": "random"}
                    | {"documents": documents, "failed": None, "recipe": recipe, "key": f"{len(cells)}"}
                    | {f"{m}_{end}": numbers[m] for m in ("acc", "ppl") for end in ("low", "high")}
                )  # fmt: skip
    (folder / "results.jsonl").write_text("".join(json.dumps(cell) + "\n" for cell in cells))
    return folder


def test_a_study_has_its_figures(tmp_path):
    written = {path.name for path in draw_study(write_study(tmp_path))}
    names = {"claims", "pretrainings", "gain", "temperatures"}
    assert written == {f"{name}.{kind}" for name in names for kind in ("png", "svg")}
    assert set(json.loads((tmp_path / "figures" / "figures.json").read_text())) == {f"{name}.svg" for name in names}
    assert "InfoScale improves Windowed" in (tmp_path / "figures" / "claims.svg").read_text()


def test_the_gain_goes_with_the_rise_of_entropy(tmp_path):
    (plan,) = load_plans(write_study(tmp_path))
    points = collect_gains(plan.grids[0])
    assert len(points) == 9 and {point.method for point in points} == set(GAINS)
    assert points[0].rise == pytest.approx(2.0) and points[0].gain == pytest.approx(0.2)
    assert rank_correlation(points) > 0.8 and rank_correlation(points[:2]) is None
    assert [v["decision"] for v in evaluate_claims(plan.grids[0])] == ["superior", "equivalent", "superior"]


def test_best_temperatures_beside_the_laws(tmp_path):
    (plan,) = load_plans(write_study(tmp_path))
    assert collect_best_temperatures(plan.grids[0]) == {method: {128: 1.5, 256: 1.5} for method in GAINS}
    laws = compute_laws([64, 4096], 64, 128)
    expected = [InfoScale(64), InfoScaleExact(64), LogN(64), Power(64), YaRNTemperature(64)]
    for values, law in zip(laws.values(), expected, strict=True):
        assert values[64] == pytest.approx(1) and values[4096] == pytest.approx(tau(law, 4096), rel=1e-5)


RESULTS = Path(__file__).parents[2] / "docs" / "results"


@pytest.mark.parametrize(
    ("folder", "size"), [("llama/calibrate-rerope", 64), ("stories15M/calibrate", 48), ("smollm2/calibrate", 64)]
)
def test_laws_beside_fitted_temperatures_are_those_of_the_calibration(folder, size):
    path = RESULTS / folder / "calibrate.json"
    data = json.loads(path.read_text(encoding="utf-8"))
    fitted, trained = read_calibrated(path), data["train_length"]
    assert list(fitted) == [n for n in data["knots"] if n > trained]
    for name, law in (("infoscale", "InfoScale"), ("logn", "LogN")):
        curve = next(each["tau"] for each in data["candidates"] if each["name"] == name)
        own = {round(n): tau for n, tau in zip(curve["n"], curve["rows"][0], strict=True)}
        laws = compute_laws(list(fitted), trained, size)[law]
        assert [laws[n] for n in fitted] == pytest.approx([own[n] for n in fitted], rel=1e-5)


def test_what_laws_leave_of_fitted_temperatures(tmp_path):
    exact = compute_laws([128, 4096], 64, 128)["LogN"]
    models = [FittedModel("a", 64, 128, {"RoPE": exact}), FittedModel("b", 64, 128, {"ReRoPE": {128: 1.0}})]
    left = compute_residuals(models)
    assert left["LogN"]["a"] == pytest.approx(0) and left["none"]["b"] == 0
    assert left["LogN"]["all"] == pytest.approx(log(exact[128]) / sqrt(3))
    assert [path.suffix for path in draw_fitted_models(models, tmp_path / "fitted")] == [".png", ".svg"]
    text = (tmp_path / "fitted.svg").read_text()
    assert all(name in text for name in ("InfoScale", "LogN", "Power", "YaRN", "fitted: ReRoPE"))


def tau(law, n):
    import torch

    return float(law.law(torch.tensor([float(n)], dtype=torch.float64), 128))
