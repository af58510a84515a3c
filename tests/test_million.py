"""`benchmarks/million.py`: reading in chunks gives the losses of one pass; results resume; targets are for a GPU."""

from __future__ import annotations

import importlib
import json
import math
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import isentrope as ise
from isentrope.evaluation.perplexity import token_losses
from isentrope.utils.shipped import find_shipped_model

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
WINDOW, TOKENS = 16, 150


@pytest.fixture
def suite(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return {name: importlib.import_module(name) for name in ("million", "prefill")}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 97}
    config = LlamaConfig(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=2 * WINDOW, **sizes)
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def tokens():
    return torch.randint(97, (TOKENS,), generator=torch.Generator().manual_seed(1))


RECIPES = {
    "plain": None,
    "dense": f"rerope:window={WINDOW}",
    "windowed": f"sink:sinks=4,size={WINDOW - 4}",
    "retrieve": f"rerope:window={WINDOW}+retrieve:blocks=2,size=8,queries=8",
}


@pytest.mark.parametrize("chunk", [40, 64, 1000])
@pytest.mark.parametrize("name", RECIPES)
def test_chunks_give_the_losses_of_one_pass(suite, model, tokens, name, chunk):
    prefill, recipe = suite["prefill"], RECIPES[name]
    with nullcontext() if recipe is None else ise.extended(model, recipe):
        expected = token_losses(model, tokens)
    with prefill.plain_attention(model) if recipe is None else ise.extended(model, recipe):
        streaming = name == "windowed"
        cache = ise.StreamingCache(model) if streaming else prefill.AllocatedCache(model, TOKENS + 8)
        reading = prefill.read_in_chunks(model, tokens, cache, chunk)
        losses = torch.cat(reading.losses)
        assert len(losses) == TOKENS - 1
        torch.testing.assert_close(losses, expected.double(), atol=2e-5, rtol=2e-5)
        assert losses.mean().item() == pytest.approx(expected.mean().item(), abs=1e-5)
        kept = WINDOW - 1 if streaming else TOKENS  # tokens; keys and values, two layers, two heads of eight, fp32
        assert prefill.count_cache_bytes(cache) == kept * 2 * 2 * 2 * 8 * 4
        generated, _ = prefill.generate_greedily(model, reading, cache, 3)
    if recipe is None:
        with torch.inference_mode():
            written = model.generate(tokens[None], max_new_tokens=3, do_sample=False, eos_token_id=-1)
        assert generated == written[0, TOKENS:].tolist()


def test_a_full_cache_is_refused(suite, model, tokens):
    prefill = suite["prefill"]
    with prefill.plain_attention(model), pytest.raises(ValueError, match="at most 100 tokens, got 120"):
        prefill.read_in_chunks(model, tokens, prefill.AllocatedCache(model, 100), 40)
    assert model.config._attn_implementation == "sdpa"


def make_run(suite, model, tokens, seconds=math.inf):
    return suite["million"].Run(model, tokens, 64, 2, time.monotonic() + seconds)


def test_ways_are_saved_and_not_measured_again(suite, model, tokens, tmp_path, monkeypatch):
    million, out = suite["million"], tmp_path / "million.json"
    ways = million.list_ways(WINDOW)
    late = million.measure(make_run(suite, model, tokens, -1), ways[:1], out, "tiny")
    assert "no time" in late["ways"]["plain"]["failed"]
    results = million.measure(make_run(suite, model, tokens), ways, out, "tiny")
    assert json.loads(out.read_text()) == results and list(results["ways"]) == [way.name for way in ways]
    for row in results["ways"].values():
        assert row["failed"] is None and row["ratios"]["time"] > 0 and len(row["continuation"]) == 2
        assert [place["to"] for place in row["positions"]] == [TOKENS]
        assert row["positions"][0]["loss"] == pytest.approx(row["loss"])
        assert row["targets"] == {}  # those of a GPU
    assert len(list(million.summarize(results))) == 5
    monkeypatch.setattr(million, "measure_way", None)  # it would be called in vain
    assert million.measure(make_run(suite, model, tokens), ways, out, "tiny")["ways"] == results["ways"]
    with pytest.raises(ValueError, match="other options"):
        million.measure(make_run(suite, model, tokens[:-1]), ways, out, "tiny")


def test_a_way_that_runs_out_of_time_or_memory(suite, model, tokens, tmp_path, monkeypatch):
    million = suite["million"]
    run = make_run(suite, model, tokens, 3600)
    clock = iter([0.0])
    monkeypatch.setattr(million.time, "monotonic", lambda: next(clock, math.inf))
    assert (
        "after 64 tokens"
        in million.measure(run, million.list_ways(WINDOW)[:1], tmp_path / "a.json", "t")["ways"]["plain"]["failed"]
    )

    def fail(*args):
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried")

    monkeypatch.setattr(million, "measure_way", fail)
    ways = million.measure(run, million.list_ways(WINDOW)[:2], tmp_path / "b.json", "t")["ways"]
    assert [row["failed"] for row in ways.values()] == ["CUDA out of memory."] * 2


def test_targets(suite):
    row = {"failed": None, "seconds": 1.2, "processor_seconds": 3.0, "peak_bytes": 105, "cache_bytes": 100}
    ways = {"plain": row | {"seconds": 1.0}, "dense": dict(row)}
    suite["million"].add_ratios(ways, "cuda")
    assert ways["plain"]["targets"] == {} and ways["dense"]["ratios"] == {
        "time": 1.2,
        "processor_time": 1.0,
        "memory": 1.05,
    }
    assert [target["met"] for target in ways["dense"]["targets"].values()] == [False, True]


def test_positions(suite):
    losses = torch.arange(1, 3000).double()
    rows = suite["million"].by_position(losses, 3000)
    assert [(row["from"], row["to"]) for row in rows] == [(0, 1024), (1024, 2048), (2048, 3000)]
    assert rows[0]["loss"] == sum(range(1, 1024)) / 1023 and rows[2]["loss"] == sum(range(2048, 3000)) / 952


def test_the_command(suite, tmp_path, monkeypatch, capsys):
    (tmp_path / "text.txt").write_text("def f(x):\n    return x\n" * 40)
    out = tmp_path / "results" / "m.json"
    words = ["--model", str(find_shipped_model("llama")), "--data", str(tmp_path / "text.txt"), "--out", str(out)]
    sizes = ["--tokens", "96", "--chunk", "64", "--window", "16", "--generate", "1", "--only", "plain,windowed"]
    monkeypatch.setattr(sys, "argv", ["million.py", *words, *sizes])
    suite["million"].main()
    printed = capsys.readouterr().out
    assert "windowed: 96 of 96 tokens" in printed and f"written to {out}" in printed
    assert set(json.loads(out.read_text())["ways"]) == {"plain", "windowed"}
    monkeypatch.setattr(sys, "argv", ["million.py", *words, "--tokens", "100000"])
    with pytest.raises(SystemExit, match="expected at most"):
        suite["million"].main()
