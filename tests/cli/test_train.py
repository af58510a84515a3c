"""`isentrope train` and `isentrope losses`: what they write, and what they say when they cannot go on."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from isentrope.cli import app
from isentrope.training.trainer import train
from tests.fixtures.training import TINY, bad_loss, without

pytestmark = [pytest.mark.figures, pytest.mark.usefixtures("on_one_thread")]

runner = CliRunner()


def tell(*arguments):
    return runner.invoke(app, [str(word) for word in arguments])


SMALL = ("--layers", 2, "--sizes", "hidden_size=32,intermediate_size=48,attention_key_size=8", "--length", 16,
         "--batch", 32, "--steps", 4, "--evaluate-every", 2)  # fmt: skip


def test_help_has_an_example():
    shown = tell("train", "--help")
    assert shown.exit_code == 0
    words = " ".join(shown.output.split())
    assert (
        "isentrope train --data data/laws --out runs/base --preset pretrain" in words and "accelerate launch" in words
    )


def test_the_command_trains_and_draws_the_losses(corpus, tmp_path):
    out = tmp_path / "run"
    shown = tell("train", "--data", corpus, "--out", out, *SMALL, "--variant", "pi", "--cosscale", 128)
    assert shown.exit_code == 0, shown.output
    assert "lowest validation loss" in shown.stdout and "of 4" in shown.stdout
    assert (out / "loss.png").read_bytes()[:4] == b"\x89PNG" and "<svg" in (out / "loss.svg").read_text()
    for name in ("best", "final", "log.jsonl", "loss.png"):
        assert str(out / name) in shown.stdout.split()
    assert json.loads((out / "train.json").read_text())["config"]["recipe"] == "pi:factor=4+cosine:alpha=128"
    again = tell("train", "--data", corpus, "--out", out, *SMALL, "--variant", "pi", "--cosscale", 128)
    assert again.exit_code == 0 and again.stdout == shown.stdout


def assert_one_line(shown, code, *words):
    assert shown.exit_code == code and isinstance(shown.exception, SystemExit), shown
    last = shown.stderr.strip().splitlines()
    assert len(last) == 1 and last[0].startswith("isentrope: "), shown.stderr
    assert all(word in last[0] for word in words), shown.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--variant", "longrope"), ("variant", "longrope")),
        (("--variant", "pi", "--recipe", "rope"), ("variant", "recipe")),
        (("--preset", "trian"), ("preset", "trian")),
        (("--sizes", "hidden_size=big"), ("sizes", "big")),
        (("--precision", "fp8"), ("precision", "fp8")),
        (("--recipe", "rop"), ("did you mean 'rope'",)),
        (("--track", "tensorbord"), ("track", "tensorbord")),
        (("--track", "wandb"), ("wandb", "pip install wandb")),
        (("--accumulate", 3), ("batch", "3 parts")),
        (("--length", 4000), ("length", "4000")),
        (("--epochs", "inf"), ("epochs",)),
        (("--epochs", 2.0), ("steps", "epochs")),
        (("--dropout", 1.0), ("dropout",)),
        (("--crop", "last"), ("crop", "last")),
    ],
    ids=str,
)
def test_mistakes_end_in_one_line(corpus, tmp_path, monkeypatch, arguments, words):
    without(monkeypatch, "wandb")
    given = SMALL if "--epochs" not in arguments or 2.0 in arguments else SMALL[:8]
    assert_one_line(tell("train", "--data", corpus, "--out", tmp_path / "run", *given, *arguments), 2, *words)
    assert not (tmp_path / "run" / "train.json").exists()


def test_folders_that_are_not_there_end_in_one_line(corpus, tmp_path):
    missing = tmp_path / "nowhere"
    assert_one_line(
        tell("train", "--data", missing, "--out", tmp_path / "run", *SMALL), 2, str(missing), "data prepare"
    )
    model = ("--model", missing, "--steps", 4)
    assert_one_line(
        tell("train", "--data", corpus, "--out", tmp_path / "run", *model), 2, str(missing), "expected a folder"
    )
    assert_one_line(tell("losses", missing), 2, str(missing), "isentrope train")


def test_a_run_that_diverges_ends_in_one_line(corpus, tmp_path, monkeypatch):
    bad_loss(monkeypatch, 1, float("nan"))
    shown = tell("train", "--data", corpus, "--out", tmp_path, *SMALL)
    assert_one_line(shown, 1, "step 1: the loss is nan", "no state was saved")


# figures of several runs


@pytest.fixture(scope="module")
def four(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("four")
    for name, recipe in (("a", "rope"), ("b", "alibi"), ("c", "rope+cosine:alpha=16"), ("d", "alibi+cosine:alpha=16")):
        train(corpus, replace(TINY, recipe=recipe, steps=4), folder / name)
    return [folder / name for name in "abcd"]


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_losses_of_several_runs_in_one_figure(four, tmp_path, count):
    shown = tell("losses", *four[:count], "--out", tmp_path / "figures" / "losses")
    assert shown.exit_code == 0, shown.output
    assert (tmp_path / "figures" / "losses.png").read_bytes()[:4] == b"\x89PNG"
    drawn = (tmp_path / "figures" / "losses.svg").read_text()
    # text is drawn as text
    assert ("with CosScale" in drawn) == (count == 4) and ("epoch" in drawn) == (count in (2, 3))
    assert "rope" in drawn and ("validation" in drawn) == (count == 1)


def test_losses_of_a_run_that_is_being_written(four, tmp_path):
    for name in ("train.json", "log.jsonl"):
        (tmp_path / name).write_text((four[0] / name).read_text())
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')
    shown = tell("losses", tmp_path, "--out", tmp_path / "losses")
    assert shown.exit_code == 0, shown.output


def test_losses_of_a_run_whose_files_are_broken(four, tmp_path):
    for name in ("train.json", "log.jsonl"):
        (tmp_path / name).write_text((four[0] / name).read_text())
    with (tmp_path / "log.jsonl").open("ab") as file:
        file.write(b"\xff\n")
    drawn = tell("losses", tmp_path, "--out", tmp_path / "losses")
    assert_one_line(drawn, 2, "log.jsonl, line")
    (tmp_path / "train.json").write_text("")
    drawn = tell("losses", tmp_path, "--out", tmp_path / "losses")
    assert_one_line(drawn, 2, "train.json: expected JSON, got a broken file (it is empty)")


def test_losses_of_a_run_that_has_not_begun(four, tmp_path):
    (tmp_path / "train.json").write_text((four[0] / "train.json").read_text())
    (tmp_path / "log.jsonl").touch()
    assert_one_line(tell("losses", tmp_path, "--out", tmp_path / "losses"), 2, "expected losses, got none yet")
