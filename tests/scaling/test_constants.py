"""Every rate of the H200 is that of a raw file, and passes of whole models take about what is predicted from them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from isentrope.scaling.hardware import H200, LINKS
from isentrope.scaling.prefill import Setup, compute_attention_seconds, predict
from isentrope.scaling.shape import ModelShape
from isentrope.scaling.visibility import read_visibility

ROOT = Path(__file__).parents[2]
SMOLLM = ModelShape("SmolLM2-135M", 30, 576, 9, 3, 64, 1536, 49152, tied=True)
TINYLLAMA = ModelShape("TinyLlama-1.1B", 22, 2048, 32, 4, 64, 5632, 32000)
RESULTS = ROOT / "docs" / "results"
MILLION = RESULTS / "frontier" / "smollm2-1m"


def read_rows():
    return json.loads((ROOT / "benchmarks" / "results" / "2026-11-16-h200-8.json").read_text())["rows"]


def read_seconds(folder, recipe):
    """The fastest measurement of a recipe over all texts of a folder: others were made while the device was shared."""
    files = [*folder.glob("*/perplexity.json"), *folder.glob("*/retrieval.json")]
    cells = [cell for file in files for cell in json.loads(file.read_text())["cells"] if cell["recipe"] == recipe]
    return min(cell["seconds"]["forced"] if isinstance(cell["seconds"], dict) else cell["seconds"] for cell in cells)


@pytest.mark.parametrize(
    ("method", "points", "operations"),
    [
        ("ReRoPE 1024", H200.dense_rates, lambda n: 4 * 128 * 32 * n * n / 2),
        ("window 1024", H200.window_rates, lambda n: 4 * 128 * 32 * n * 1024),
    ],
)
def test_attention_rates(method, points, operations):
    rows = [row for row in read_rows() if row["group"] == "scaling" and row["method"] == method]
    assert [(operations(row["n"]), row["tflops"] * 1e12) for row in rows] == [
        (pytest.approx(at), pytest.approx(rate, rel=2e-3)) for at, rate in points
    ]


def test_small_heads_and_choosing():
    log = (ROOT / "benchmarks" / "results" / "2026-11-17-h200-decoding.txt").read_text()
    dense, chosen = map(float, re.search(r"votes 131072: .*dense ([\d.]+) .*representative ([\d.]+) ", log).groups())
    n, unit = 131072, 4 * 64 * 9
    large = next(row for row in read_rows() if (row["group"], row["method"], row["n"]) == ("scaling", "RoPE + SDPA", n))
    factor = unit * n * (n + 1) / 2 / (dense / 1e3) / (large["tflops"] * 1e12)
    assert H200.small_head_factor == pytest.approx(factor, rel=2e-3)
    seen = read_visibility("rerope:window=4096+retrieve:blocks=16,size=128,sinks=128")
    rate = next(rate for at, rate in H200.window_rates if at == 4 * 128 * 32 * 1024 * n)
    left = chosen / 1e3 - unit / factor * seen.count_pairs(0, n) / rate
    assert H200.choosing_rate == pytest.approx(unit / factor * seen.count_far_pairs(0, n) / 8 / left, rel=5e-3)


def test_linear_rates():
    """1 / rate = 1 / R + h₀ / (R h) through the passes of two models under a window, less their attention."""

    def rate(shape, tokens, window, weights, seconds):
        visibility = read_visibility(f"sink:sinks=4,size={window}")
        attention = compute_attention_seconds(shape, visibility, Setup(tokens, 1, "gather"), H200)
        return 2 * tokens * weights / (seconds - shape.layers * attention)

    wide = read_seconds(RESULTS / "share" / "tinyllama-8k", "sink:sinks=4,size=1020")
    weights = TINYLLAMA.layers * TINYLLAMA.layer_weights + 32000 * 2048  # logits of all tokens too
    fast = rate(TINYLLAMA, 8192, 1020, weights, wide)
    narrow = read_seconds(MILLION, "sink:sinks=4,size=4092")
    slow = rate(SMOLLM, 1048575, 4092, SMOLLM.layers * SMOLLM.layer_weights, narrow)
    slope = (1 / slow - 1 / fast) / (1 / 576 - 1 / 2048)
    inverse = 1 / fast - slope / 2048
    assert H200.linear_rate == pytest.approx(1 / inverse, rel=5e-3)
    assert H200.half_rate_hidden == pytest.approx(slope / inverse, rel=5e-3)


# passes that no rate was taken from; measured includes the logits of all tokens, but at a million
CHOSEN = "rerope:window=4096+retrieve:blocks=16,size=128"
PASSES = [
    (SMOLLM, "rerope:window=4096", 32768, "share/smollm2-32k"),
    (SMOLLM, "rerope:window=4096", 131072, "share/smollm2-131k"),
    (SMOLLM, "sink:sinks=4,size=4092", 131072, "share/smollm2-131k"),
    (SMOLLM, CHOSEN, 131072, "frontier/smollm2-131k"),
    (SMOLLM, CHOSEN, 1048574, "frontier/smollm2-1m"),
    (TINYLLAMA, "selfextend:window=1024,group=14", 8192, "share/tinyllama-8k"),
    (TINYLLAMA, "selfextend:window=1024,group=62", 32768, "share/tinyllama-32k"),
]


@pytest.mark.parametrize(("shape", "recipe", "tokens", "folder"), PASSES)
def test_whole_models_on_one_device(shape, recipe, tokens, folder):
    visibility = read_visibility(recipe)
    cost = predict(shape, visibility, Setup(tokens, 1, "gather"), H200, LINKS["nvlink"])
    assert cost.seconds == pytest.approx(read_seconds(RESULTS / folder, recipe), rel=0.25)


def test_memory_of_a_million_tokens():
    cells = json.loads((MILLION / "novels-filler" / "retrieval.json").read_text())["cells"]
    peak = max(cell["peak_bytes"] for cell in cells)
    cost = predict(SMOLLM, read_visibility("rerope:window=4096"), Setup(1048574, 1, "ring"), H200, LINKS["nvlink"])
    assert cost.weight_bytes + cost.activation_bytes == pytest.approx(peak, rel=0.15)  # that pass kept no cache
