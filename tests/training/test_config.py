"""Training settings: schedules, presets, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from isentrope.training.config import PRESETS, TrainingConfig, build_config, parse_sizes
from isentrope.training.trainer import train
from tests.fixtures.training import SIZES, TINY

pytestmark = pytest.mark.usefixtures("on_one_thread")


@pytest.mark.parametrize("steps", [1, 2, 3, 7, 10, 99, 100, 1500])
@pytest.mark.parametrize("warmup", [0.0, 0.1, 0.5, 0.99])
def test_the_rate_rises_over_its_share_and_falls(steps, warmup):
    config = TrainingConfig(steps=steps, rate=2e-4, warmup=warmup)
    rates = np.array([config.learning_rate(step, steps) for step in range(steps)])
    top = int(rates.argmax())
    assert rates.max() == pytest.approx(2e-4) and (rates > 0).all()
    assert abs(top + 1 - max(1, warmup * steps)) <= 0.5
    assert (np.diff(rates[: top + 1]) > 0).all() and (np.diff(rates[top:]) < 0).all()
    # straight lines
    assert np.diff(rates[: top + 1], 2) == pytest.approx(0, abs=1e-12)
    assert np.diff(rates[top:], 2) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("preset", PRESETS)
def test_presets(preset):
    config = build_config(preset)
    for name, value in PRESETS[preset].items():
        assert getattr(config, name) == value
    assert build_config(preset, epochs=3.0).steps == 0 and build_config(preset, steps=5).epochs == 0


@pytest.mark.parametrize("preset", [name for name in PRESETS if name != "causal"])
def test_presets_with_a_variant(preset):
    config = build_config(preset)
    assert build_config(preset, "pose", 128.0, rate=0.5, crop=None) == replace(
        config, recipe="rope+cosine:alpha=128", pose=4096, rate=0.5
    )


def test_sizes_are_read():
    assert parse_sizes("hidden_size=64, attention_key_size=16") == {"hidden_size": 64, "attention_key_size": 16}
    assert parse_sizes(None) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preset": "trian"}, "preset: expected one of pretrain, train"),
        ({"variant": "longrope"}, "variant: expected one of plain, pi"),
        ({"variant": "pi", "recipe": "rope"}, "variant: expected a variant, or recipe and pose, got both"),
        ({"variant": "pi", "pose": 64}, "variant: expected a variant, or recipe and pose, got both"),
        ({"precision": "fp16"}, "precision: expected one of auto, bf16, fp32, got 'fp16'"),
        ({"steps": 5, "epochs": 2.0}, "steps, epochs: expected exactly one above 0, got 5 and 2.0"),
        ({"steps": 0}, "steps, epochs"),
        ({"steps": -3, "epochs": 2.0}, "steps"),
        ({"epochs": float("inf")}, "epochs"),
        ({"layers": 0}, "layers: expected 1 or more, got 0"),
        ({"length": 0}, "length: expected 1 or more, got 0"),
        ({"batch": 0}, "batch: expected 1 or more, got 0"),
        ({"accumulate": 0}, "accumulate: expected 1 or more, got 0"),
        ({"log_every": 0}, "log_every: expected 1 or more, got 0"),
        ({"validation": 0}, "validation: expected 1 or more, got 0"),
        ({"save_every": -1}, "save_every"),
        ({"evaluate_every": -1}, "evaluate_every"),
        ({"rate": 0.0}, "rate"),
        ({"rate": float("inf")}, "rate"),
        ({"rate": float("nan")}, "rate"),
        ({"warmup": 1.0}, "warmup"),
        ({"dropout": 1.0}, "dropout"),
        ({"dropout": -0.1}, "dropout"),
        ({"clip": -1.0}, "clip"),
        ({"decay": -1.0}, "decay"),
        ({"seed": 1 << 64}, "seed"),
        ({"sizes": {"num_hidden_layers": 2}}, "sizes: expected hidden_size, .*, got 'num_hidden_layers'"),
        ({"sizes": {"hidden_size": 0}}, "sizes"),
        ({"sizes": {"hidden_size": -4}}, "sizes"),
        ({"sizes": {"hidden_size": 32}, "model": "runs/base"}, "sizes: expected none where a model is given"),
        ({"sizes": {"num_attention_heads": 2}}, "sizes: expected .*attention_key_size, got 'num_attention_heads'"),
        ({"objective": "next"}, "objective: expected one of masked, causal, got 'next'"),
    ],
    ids=str,
)
def test_bad_settings(options, message):
    with pytest.raises(ValueError, match=message):
        build_config(**({"preset": "train"} | options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"variant": "pi"}, "recipe: expected rope with the objective causal, got 'pi:factor=4'"),
        ({"cosscale": 128.0}, r"recipe: expected rope .*, got 'rope\+cosine:alpha=128'"),
        ({"variant": "pose"}, "pose: expected None with the objective causal, got 4096"),
        ({"share": 0.3}, "share: expected 0.15 with the objective causal, got 0.3"),
        ({"sizes": {"attention_key_size": 8}}, "sizes: expected .*num_attention_heads, got 'attention_key_size'"),
        ({"sizes": {"num_attention_heads": 0}}, "sizes: expected 1 or more, got num_attention_heads=0"),
        ({"sizes": {"hidden_size": 36}}, "sizes: expected heads of an even size, got hidden_size=36 for 4 heads"),
    ],
    ids=str,
)
def test_bad_settings_of_a_causal_model(options, message):
    with pytest.raises(ValueError, match=message):
        build_config("causal", **options)


@pytest.mark.parametrize("text", ["hidden_size", "hidden_size=", "hidden_size=big", "", "=3,"])
def test_bad_sizes(text):
    with pytest.raises(ValueError, match="sizes: expected"):
        build_config("train", sizes=parse_sizes(text))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"crop": "last"}, "crop: expected one of random, first, got 'last'"),
        ({"share": 0.0}, "share"),
        ({"length": 301}, "length: expected at most the shortest document's 300 tokens, got 301"),
        ({"pose": 8}, "pose: expected at least the length 16, got 8"),
        ({"batch": 7, "accumulate": 2}, "batch: expected a multiple of 1 process.* 2 parts, got 7"),
        ({"recipe": "rop"}, "unknown part 'rop'; did you mean 'rope'"),
        ({"recipe": "rope+cosine:alpha=-1"}, "alpha"),
        ({"sizes": SIZES | {"attention_key_size": 7}}, "even"),
    ],
    ids=str,
)
def test_settings_that_do_not_fit_the_corpus(corpus, tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        train(corpus, replace(TINY, **options), tmp_path / "out")


def test_a_folder_without_a_corpus(tmp_path):
    with pytest.raises(ValueError, match=r"manifest.json: expected a prepared corpus.*isentrope data prepare"):
        train(tmp_path, TINY, tmp_path / "out")
