"""Perplexity by position: the scorer, resuming, the table and the figure."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO
from math import exp, log
from unittest.mock import patch

import pytest
import torch
from matplotlib.figure import Figure
from rich.console import Console
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from torch.nn import functional as F
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

import isentrope as ise
from isentrope.cli import app
from isentrope.data.corpus import Document
from isentrope.evaluation import loading, perplexity
from isentrope.evaluation import texts as texts_module
from isentrope.evaluation.perplexity import PerplexityConfig, measure_perplexity, summarize_perplexity, token_losses
from isentrope.evaluation.ranking import rank_recipes
from isentrope.evaluation.results import list_failures
from isentrope.evaluation.texts import Text, load_texts
from isentrope.models.tokenizer import build_character_tokenizer, make_causal_tokenizer
from isentrope.report.figures.perplexity import draw_perplexity
from isentrope.report.tables.perplexity import build_perplexity_table
from tests.fixtures.generation import gemma, mistral
from tests.fixtures.models import llama, tokens

RECIPES = ("plain", "rerope:window=16", "rerope:window=16+infoscale:train_length=32")
CONFIG = PerplexityConfig(RECIPES, (0, 32, 64, 100))


def texts(count=3, length=120):
    rows = tokens(count, length).tolist()
    return [Text(f"t{i}", Document(f"t{i}", tokens=tuple(row)).sha256, tuple(row)) for i, row in enumerate(rows)]


def test_losses_are_those_of_the_logits(monkeypatch):
    model, ids = llama(), tokens(1, 50)[0]
    with torch.no_grad():
        expected = F.cross_entropy(model(ids[None]).logits[0, :-1], ids[1:], reduction="none")
    for entries in (1 << 26, 97 * 7, 1):  # logits of all tokens, of seven, of one at a time
        monkeypatch.setattr(perplexity, "MAX_LOGITS", entries)
        torch.testing.assert_close(token_losses(model, ids), expected)


@pytest.mark.parametrize("make", [gemma, mistral])
def test_a_plain_model_with_windows_reads_long_texts_without_a_mask_of_all_pairs(make, monkeypatch):
    model, ids = make(), tokens(1, 100)[0] % 60
    expected = token_losses(model, ids)
    monkeypatch.setattr(perplexity, "MAX_MASK", 700)  # seven tokens at a time
    assert perplexity.builds_mask(model, len(ids)) and not perplexity.builds_mask(llama(), len(ids))
    assert [perplexity.count_chunks(x, len(ids)) for x in (model, llama())] == [15, 1]
    with patch.object(perplexity, "read_in_chunks", wraps=perplexity.read_in_chunks) as read:
        torch.testing.assert_close(token_losses(model, ids), expected, atol=1e-4, rtol=1e-4)
        ise.extend(model, "rerope:window=16")
        token_losses(model, ids)
    assert read.call_count == 1  # extended models build none


def test_a_model_that_changes_its_logits_is_refused(tmp_path):
    model = llama()
    model.lm_head.register_forward_hook(lambda module, args, out: out)
    original = model.forward
    model.forward = lambda *args, **kwargs: _halved(original(*args, **kwargs))
    with pytest.raises(ValueError, match="not its output embedding alone"):
        measure_perplexity(model, "tiny", texts(), CONFIG, tmp_path)


def _halved(output):
    output.logits = output.logits / 2
    return output


def test_rows_are_means_over_texts_and_buckets(tmp_path):
    model, given = llama(), texts()
    data = json.loads(measure_perplexity(model, "tiny", given, CONFIG, tmp_path).read_text())
    with ise.extended(model, RECIPES[2]):
        losses = [token_losses(model, torch.tensor(text.tokens[:100])) for text in given]
    row = next(row for row in data["rows"] if row["recipe"] == RECIPES[2])
    assert row["texts"] == 3
    for (low, high), actual in zip(((1, 32), (32, 64), (64, 100)), row["perplexity"], strict=True):
        mean = sum(loss[low - 1 : high - 1].double().mean() for loss in losses) / 3
        assert actual == pytest.approx(exp(mean), rel=1e-6)
    assert all(a <= b <= c for a, b, c in zip(row["low"], row["perplexity"], row["high"], strict=True))
    assert [(pair["recipe"], pair["against"]) for pair in data["paired"]] == [(RECIPES[2], RECIPES[1])]
    assert data["run"]["torch"] == torch.__version__


def test_an_interrupted_run_resumes_to_the_same_numbers(tmp_path, monkeypatch):
    whole = json.loads(measure_perplexity(llama(), "tiny", texts(), CONFIG, tmp_path / "whole").read_text())
    real, count = perplexity.measure_text, 0

    def fails_at_the_fifth(*args):
        nonlocal count
        count += 1
        if count == 5:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(perplexity, "measure_text", fails_at_the_fifth)
    with pytest.raises(KeyboardInterrupt):
        measure_perplexity(llama(), "tiny", texts(), CONFIG, tmp_path / "cut")
    assert len(json.loads((tmp_path / "cut" / "perplexity.json").read_text())["cells"]) == 4
    data = json.loads(measure_perplexity(llama(), "tiny", texts(), CONFIG, tmp_path / "cut").read_text())
    assert count == 10  # the fifth again, and the four after it
    assert data["rows"] == whole["rows"] and data["paired"] == whole["paired"]
    assert not list(tmp_path.rglob("*.partial"))


@pytest.mark.parametrize("content", ["", '{"model": {', "{}", "[]"])
def test_broken_results_are_named_and_measured_again(tmp_path, caplog, content):
    config = PerplexityConfig(("plain",), (0, 32))
    path = measure_perplexity(llama(), "tiny", texts(1), config, tmp_path)
    whole = json.loads(path.read_text())
    path.write_text(content)
    assert (
        json.loads(measure_perplexity(llama(), "tiny", texts(1), config, tmp_path).read_text())["rows"] == whole["rows"]
    )
    assert f"{path}: expected " in caplog.messages[0] and caplog.messages[0].endswith("all is measured again")


@pytest.mark.parametrize("content", ["", "{}"])
def test_broken_results_are_not_drawn(tmp_path, content):
    (tmp_path / "perplexity.json").write_text(content)
    with pytest.raises(ValueError, match=r"perplexity\.json: expected .*; run the same command again"):
        list_failures(tmp_path / "perplexity.json", ["plain"])
    with pytest.raises(ValueError, match=r"perplexity\.json: expected .*; run the command that wrote it again"):
        rank_recipes(tmp_path)


def test_logits_that_are_no_numbers_are_no_other_models_fault(tmp_path):
    model = llama()
    with torch.no_grad():
        model.model.norm.weight.fill_(3e38)  # finite, but what it makes is not
    with pytest.raises(ValueError, match="llama: its logits are NaN or infinite in float32"):
        measure_perplexity(model, "tiny", texts(1), CONFIG, tmp_path)


def test_what_was_measured_stays_when_another_recipe_is_asked_for(tmp_path):
    measure_perplexity(llama(), "tiny", texts(), CONFIG, tmp_path)
    data = json.loads(
        measure_perplexity(
            llama(), "tiny", texts(2), PerplexityConfig(("yarn:factor=2",), CONFIG.edges), tmp_path
        ).read_text()
    )
    assert [row["recipe"] for row in data["rows"]] == [*RECIPES, "yarn:factor=2"]
    with pytest.raises(ValueError, match="another model or other buckets"):
        measure_perplexity(llama(), "other", texts(), CONFIG, tmp_path)


def test_models_of_one_name_are_told_apart_by_their_weights(tmp_path):
    """As those of two runs, RUN/best."""
    path = measure_perplexity(llama(), "best", texts(), CONFIG, tmp_path)
    other = llama()
    with torch.no_grad():
        other.model.layers[1].mlp.up_proj.weight *= 1.01
    with pytest.raises(ValueError, match="another model or other buckets"):
        measure_perplexity(other, "best", texts(), CONFIG, tmp_path)
    data = json.loads(path.read_text())
    del data["model"]["weights"]  # as of a file from before they were told
    path.write_text(json.dumps(data))
    measure_perplexity(llama(), "best", texts(), CONFIG, tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (lambda: PerplexityConfig((), (0, 8)), "recipes"),
        (lambda: PerplexityConfig(("plain", "plain"), (0, 8)), "each once"),
        (lambda: PerplexityConfig(("plain",), (8, 16)), "edges"),
        (lambda: PerplexityConfig(("plain",), (0, 8, 8)), "edges"),
        (lambda: PerplexityConfig(("plain", "rerop:window=3"), (0, 8)), "did you mean"),
        (
            lambda: PerplexityConfig.parse(["plain"], "0,abc"),
            "edges: expected numbers separated by commas",
        ),
        (lambda: loading.load_on_device("./nowhere", "cpu", "auto"), "expected a folder with a model"),
        (lambda: loading.load_on_device("x", "cpu", "int8"), "dtype"),
        (lambda: load_texts([], "x", None, 8, 0), "documents: expected 1 or more"),
    ],
)
def test_bad_settings(config, message):
    with pytest.raises(ValueError, match=message):
        config()


def test_texts_that_are_too_short(tmp_path):
    with pytest.raises(ValueError, match="100 tokens or more"):
        measure_perplexity(llama(), "tiny", texts(length=99), CONFIG, tmp_path)


def test_intervals_of_one_text_are_its_value():
    data = {"config": {"edges": [0, 11], "seed": 0}, "cells": [{"recipe": "plain", "text": "a", "loss": [20.0]}]}
    data["texts"] = [{"sha256": "a"}]
    row = summarize_perplexity(data)["rows"][0]
    assert row["low"] == row["perplexity"] == row["high"] == [pytest.approx(exp(2))]


def test_the_command(tmp_path):
    llama().save_pretrained(tmp_path / "model")
    lines = [json.dumps({"input_ids": row}) for row in tokens(3, 120).tolist()]
    (tmp_path / "texts.jsonl").write_text("\n".join(lines))
    arguments = ["perplexity", str(tmp_path / "model"), "--data", str(tmp_path / "texts.jsonl")]
    arguments += ["--edges", "0,32,64,100"]
    recipes = [word for recipe in RECIPES for word in ("--recipe", recipe)]
    done = CliRunner().invoke(app, [*arguments, *recipes, "--out", str(tmp_path / "out"), "--documents", "2"])
    assert done.exit_code == 0, done.output
    assert "rerope:window=16" in done.output
    written = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert written == ["perplexity.json", "perplexity.png", "perplexity.svg"]
    assert json.loads((tmp_path / "out" / "perplexity.json").read_text())["rows"][0]["texts"] == 2
    refused = CliRunner().invoke(app, [*arguments, "--recipe", "rerop:window=16", "--out", str(tmp_path / "no")])
    assert refused.exit_code == 2 and "did you mean" in refused.output


@pytest.mark.figures
def test_table_and_figure(tmp_path):
    results = measure_perplexity(llama(), "tiny", texts(), CONFIG, tmp_path)
    assert build_perplexity_table(results).row_count == 3
    assert all(path.stat().st_size > 1000 for path in draw_perplexity(results))


def test_a_figure_compares_recipes_on_the_texts_that_all_have_read(tmp_path, monkeypatch):
    results = measure_perplexity(llama(), "tiny", texts(), CONFIG, tmp_path)
    stored = json.loads(results.read_text())
    last = stored["cells"][-1]
    stored["cells"] = [each for each in stored["cells"] if each != last]
    results.write_text(json.dumps(summarize_perplexity(stored)))
    titles = []
    monkeypatch.setattr(Figure, "suptitle", lambda self, text, **style: titles.append(text))
    assert draw_perplexity(results)
    results.write_text(json.dumps(stored | {"rows": [], "cells": []}))
    assert not draw_perplexity(results)
    count = len(stored["texts"]) - 1
    assert titles == [f"Perplexity by position: tiny, {count} text{'s' if count > 1 else ''}"]


def test_bits_a_byte_and_what_a_recipe_costs_inside(tmp_path):
    """The text is "é" and others in turn, a token each: three bytes for two tokens."""
    model = llama()
    model.config.max_position_embeddings = 64
    given = [replace(text, ends=tuple((3 * i + 3) // 2 for i in range(120))) for text in texts()]
    recipes = ("plain", "rerope:window=8", "rerope:window=64")
    data = json.loads(
        measure_perplexity(model, "tiny", given, PerplexityConfig(recipes, (0, 32, 64, 100)), tmp_path).read_text()
    )
    plain = data["rows"][0]
    losses = [token_losses(model, torch.tensor(text.tokens[:100])) for text in given]
    expected = sum(loss[31:63].double().sum() for loss in losses) / log(2) / (3 * 48)
    assert plain["bits_per_byte"][1] == pytest.approx(float(expected), rel=1e-6)
    changed, same = data["inside"]
    with ise.extended(model, recipes[1]):
        other = [token_losses(model, torch.tensor(text.tokens[:100])) for text in given]
    mean = sum((a - b)[:63].double().mean() for a, b in zip(other, losses, strict=True)) / 3
    assert changed["percent"] == pytest.approx(100 * (exp(mean) - 1), rel=1e-3) and same["percent"] == 0
    shown = Console(width=120, force_terminal=True, file=StringIO())
    shown.print(build_perplexity_table(tmp_path / "perplexity.json"))
    assert ("\x1b[31m" in shown.file.getvalue()) == (changed["percent"] > 0.5)


def test_where_tokens_end_in_bytes(tmp_path):
    text = "aé漢😀b" * 20
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    folder = tmp_path / "tokenizer"
    make_causal_tokenizer(build_character_tokenizer([text], 20)).save_pretrained(folder)
    (actual,) = load_texts([tmp_path / "a.txt"], str(folder), None, 50, 1)
    assert actual.ends[:5] == (1, 3, 6, 10, 11) and actual.ends[-1] == len(text[:50].encode())


def test_a_text_may_have_more_tokens_than_characters(tmp_path):
    (tmp_path / "a.txt").write_text("漢字" * 20, encoding="utf-8")
    vocab = {symbol: i for i, symbol in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Tokenizer(BPE(vocab, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path / "bytes")
    (actual,) = load_texts([tmp_path / "a.txt"], str(tmp_path / "bytes"), None, 120, 1)
    assert len(actual.tokens) == 120 and actual.ends[::3] == tuple(range(3, 121, 3))


def test_a_mark_after_the_text_takes_no_bytes():
    assert texts_module._byte_ends("aé漢", [(0, 0), (0, 1), (1, 3), (0, 0)]) == (0, 1, 6, 6)


def test_a_cell_that_fails_is_told_and_tried_again(tmp_path, monkeypatch):
    measure = perplexity.measure_text

    def short_of_room(model, recipe, text, edges):
        if recipe == RECIPES[1] and text.name != "t0":
            raise torch.OutOfMemoryError("no room\nfor it")
        return measure(model, recipe, text, edges)

    monkeypatch.setattr(perplexity, "measure_text", short_of_room)
    results = measure_perplexity(llama(), "tiny", texts(), CONFIG, tmp_path)
    data = json.loads(results.read_text())
    assert len(data["cells"]) == 3 * 3 - 2 and [row["texts"] for row in data["rows"]] == [3, 1, 3]
    assert list_failures(results, RECIPES) == [f"{RECIPES[1]}: out of memory: no room"] * 2
    assert list_failures(results, ["plain"]) == []
    monkeypatch.undo()
    assert list_failures(measure_perplexity(llama(), "tiny", texts(), CONFIG, tmp_path), RECIPES) == []
    assert len(json.loads(results.read_text())["cells"]) == 3 * 3


def test_the_command_says_what_failed(tmp_path, monkeypatch):
    llama().save_pretrained(tmp_path / "model")
    rows = [json.dumps({"input_ids": row}) for row in tokens(2, 100).tolist()]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    words = ["perplexity", str(tmp_path / "model"), "--data", str(tmp_path / "rows.jsonl"), "--edges", "0,64,100"]
    words += ["--out", str(tmp_path / "out")]
    measure = perplexity.measure_text

    def breaks(model, recipe, text, edges):
        if recipe != "plain":
            raise RuntimeError("broken")
        return measure(model, recipe, text, edges)

    monkeypatch.setattr(perplexity, "measure_text", breaks)
    result = CliRunner().invoke(app, [*words, "--recipe", "plain", "--recipe", "infoscale"])
    assert result.exit_code == 1 and "2 cells failed" in result.stderr
    assert result.stderr.count("infoscale: broken") == 1
    result = CliRunner().invoke(app, [*words[:-1], str(tmp_path / "none"), "--recipe", "infoscale"])
    assert result.exit_code == 2 and "every cell failed: broken" in result.stderr


def test_texts_are_looked_at_before_a_model_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "load_on_device", None)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"input_ids": [1, 2, 3]}))
    for words in ("perplexity --recipe plain --edges 0,8", "calibrate --recipe plain --length 8"):
        command, *options = words.split()
        result = CliRunner().invoke(app, [command, str(tmp_path), "--data", str(tmp_path / "rows.jsonl"), *options])
        assert result.exit_code == 2 and "of 8 tokens" in result.stderr, result.output
