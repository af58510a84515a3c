"""`isentrope demo`: a text beyond the training length, plain and extended, side by side."""

from __future__ import annotations

import json
from math import exp
from pathlib import Path

import pytest
import torch
from typer.main import get_command
from typer.testing import CliRunner

from isentrope.cli import app
from isentrope.evaluation.loading import load_on_device
from isentrope.evaluation.perplexity import token_losses
from isentrope.evaluation.side_by_side import SideBySideConfig, bucket_edges
from isentrope.experiments import opening
from isentrope.hf.extend import extended
from isentrope.report.figures.side_by_side import wrap_text
from tests.fixtures.commands import assert_one_line

pytestmark = pytest.mark.figures

runner = CliRunner()
RECIPE = "rerope:window=64+share"
OPTIONS = ["--length", "600", "--new-tokens", "12", "--recipe", RECIPE]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    out = tmp_path_factory.mktemp("demo")
    result = runner.invoke(app, ["demo", *OPTIONS, "--out", str(out)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output, out


def test_it_scores_as_perplexity_does_and_continues_as_generate_does(written: tuple[str, Path]) -> None:
    data = json.loads((written[1] / "side_by_side.json").read_text())
    plain, extended_row = data["rows"]
    assert [plain["recipe"], extended_row["recipe"]] == ["plain", RECIPE]
    assert data["train_length"] == 256 and data["edges"] == [0, 256, 512, 600]
    assert exp(plain["loss"][-1]) > 3 * exp(extended_row["loss"][-1])
    model = load_on_device(str(opening.SHIPPED_MODELS / opening.SHIPPED_LLAMA), "cpu", "float32").eval()
    tokenizer = opening.load_tokenizer(str(opening.SHIPPED_MODELS / opening.SHIPPED_LLAMA))
    document = opening.read_sympy_module(opening.MODULE).text or ""
    ids = torch.tensor(tokenizer(document)["input_ids"][:612])
    assert data["written_by_author"] == tokenizer.decode(ids[600:].tolist())
    with extended(model, RECIPE):
        assert token_losses(model, ids[:600])[511:].mean().item() == pytest.approx(extended_row["loss"][-1], abs=1e-4)
        # without a cache: the likeliest token after the whole text
        with torch.inference_mode():
            first = model(input_ids=ids[None, :600], use_cache=False).logits[0, -1].argmax()
    assert extended_row["continuation"].startswith(tokenizer.decode([int(first)]))
    assert len(extended_row["continuation"]) == 12


def test_what_it_prints_and_draws(written: tuple[str, Path]) -> None:
    output, out = written
    assert "llama reads 600 tokens of geometry/point.py" in output and "the author" in output
    assert {path.name for path in out.iterdir()} == {"side_by_side.json", "side_by_side.png", "side_by_side.svg"}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["FOLDER"], "--data TEXT: expected one with a model of your own"),
        (["--length", "10"], "length: expected 128 tokens or more, got 10"),
        (["--recipe", "plain"], "recipes: expected one or more, each once"),
    ],
)
def test_mistakes(options: list[str], expected: str, tmp_path: Path) -> None:
    assert_one_line(runner.invoke(app, ["demo", *options, "--out", str(tmp_path)]), expected)


def test_a_model_and_a_text_are_enough() -> None:
    own = opening.prepare_opening(str(opening.SHIPPED_MODELS / opening.SHIPPED_LLAMA), "book.txt", None, None, 8)
    assert own.config.length == 4 * 256 and own.config.recipes[1].startswith("rerope:window=128+share")
    assert opening.prepare_opening(None, None, None, "2x", 8).config.length == 512


def test_the_help_names_the_recipe_of_each_case() -> None:
    shown = next(each for each in get_command(app).commands["demo"].params if each.name == "recipe").show_default
    assert shown == f"auto; {opening.RECIPE} for the small Llama"
    assert opening.prepare_opening(None, None, None, None, 8).config.recipes == ("plain", opening.RECIPE)


def test_auto_is_replaced_by_what_it_stands_for() -> None:
    recipes = opening.prepare_opening(None, None, ["auto"], None, 8).config.recipes
    assert recipes[0] == "plain" and recipes[1].startswith("rerope:window=128+share+retrieve")


def test_weights_that_are_not_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(opening, "SHIPPED_MODELS", tmp_path)
    with pytest.raises(ValueError, match="the small Llama is not part of this installation"):
        opening.prepare_opening(None, None, None, None, 8)


def test_buckets_double_and_lines_keep_their_breaks() -> None:
    assert bucket_edges(256, 4096) == [0, 256, 512, 1024, 2048, 4096]
    assert bucket_edges(None, 500) == [0, 500] and bucket_edges(1000, 500) == [0, 500]
    assert wrap_text("abcd\n\n  ef", columns=3) == ["abc", "d", "", "  e", "f"]
    with pytest.raises(ValueError, match="new tokens: expected 1 or more"):
        SideBySideConfig(("plain",), 256, 0)
