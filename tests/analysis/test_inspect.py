"""Looking inside a model: against dense fp64 attention, without a table of n × n, from the command line."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from math import log
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import isentrope as ise
from isentrope.analysis import attention_statistics as weights
from isentrope.analysis import inspect as looking
from isentrope.analysis.attention_statistics import COSINE_BINS, HeatmapWindow
from isentrope.analysis.observe import entropy_rows, head_entropies, layer_entropies, run_observed
from isentrope.backends import reference
from isentrope.builder import Inputs, build_call
from isentrope.cli import app
from isentrope.dispatch import REFERENCE
from isentrope.entropy import set_entropy_tau
from isentrope.evaluation.texts import Text
from isentrope.models import GAUAlphaConfig, GAUAlphaForMaskedLM, GAUAlphaModel
from isentrope.models.tokenizer import build_character_tokenizer
from isentrope.report.figures import inspect as figures
from isentrope.theory import peak_cosine
from tests.fixtures.commands import assert_one_line
from tests.fixtures.memory import Largest
from tests.fixtures.models import llama, tokens

RECIPES = (
    "rope",
    "rerope:window=16+infoscale:train_length=24",
    "rerope:window=16+logn:train_length=24,keys=near+power:train_length=24,keys=far+share:beta=2",
    "cosine:alpha=16",
    "rope+window:size=12",
    "alibi",
    "rope+scaleinvariant:distance=3",
    "cosine:alpha=600+selfextend:window=8,group=4",
)


def gau(recipe="rope", kind=GAUAlphaForMaskedLM, **sizes):
    small = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "attention_key_size": 16}
    config = GAUAlphaConfig(**(small | {"num_hidden_layers": 3, "initializer_range": 0.4} | sizes), recipe=recipe)
    return kind(config).eval()


def watched(model, ids):
    """What every layer was asked for."""
    seen = []
    run_observed(model, ids, seen.append)
    return seen


def dense(seen, position=True):
    """The weights by the oracle, in fp64: (batch, heads, queries, keys)."""
    recipe = seen.recipe if position else replace(seen.recipe, position=None)
    q, k, options = seen.q.double(), seen.k.double(), seen.options
    mask, causal, scale = options.get("mask"), options.get("causal", False), options.get("scale")
    inputs = Inputs(q, k, k, mask, causal, layout=seen.layout, scale=scale)
    return reference.compute_weights(set_entropy_tau(REFERENCE, build_call(inputs, recipe.resolve())))[0]


EXTENDED = (
    "rerope:window=16+logn:train_length=32,keys=far+share:beta=(1,2,0,-1)",
    "yarn:factor=4",
    "sink:sinks=2,size=20",
    "rerope:window=16+adaptive:keys=far+logn:train_length=24,keys=near",
)
MODELS = (
    *(pytest.param(lambda recipe=recipe: gau(recipe), id=f"gau {recipe}") for recipe in RECIPES),
    pytest.param(llama, id="llama"),
    *(pytest.param(lambda recipe=recipe: ise.extend(llama(), recipe), id=f"llama {recipe}") for recipe in EXTENDED),
)


@pytest.mark.parametrize("make", MODELS)
def test_entropies_are_those_of_a_dense_softmax(make):
    model, ids = make(), tokens(2, 50)
    expected = [torch.special.entr(dense(seen)).sum(-1).mean((0, 2)) for seen in watched(model, ids)]
    actual = head_entropies(model, ids)
    assert len(actual) == len(expected) == model.config.num_hidden_layers
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=2e-5)
    layers = torch.stack([heads.mean() for heads in expected])
    torch.testing.assert_close(layer_entropies(model, ids), layers, atol=2e-5, rtol=2e-5)


def test_what_is_seen_is_what_the_model_computes():
    """Dense weights on the values give the output of the model's own attention module."""
    model, ids = llama(attn_implementation="eager"), tokens(1, 40)
    with torch.no_grad():
        expected = model(ids, output_attentions=True).attentions
    for seen, weights_ in zip(watched(model, ids), expected, strict=True):
        torch.testing.assert_close(dense(seen).float(), weights_, atol=1e-5, rtol=1e-4)


def test_looking_changes_nothing():
    ids = tokens(1, 40)
    for model in (gau(), llama(), ise.extend(llama(), "rerope:window=16")):
        before, hooks = model(ids).logits, hooks_of(model)
        model.train()
        layer_entropies(model, ids)
        assert model.training
        assert torch.equal(model.eval()(ids).logits, before)
        assert hooks_of(model) == hooks


def hooks_of(model):
    return [hook for module in model.modules() for hook in (*module._forward_hooks, *module._forward_pre_hooks)]


def test_a_failure_in_between_leaves_no_hooks():
    model = gau()
    with pytest.raises(ZeroDivisionError):
        run_observed(model, tokens(1, 8), lambda seen: 1 / 0)
    assert hooks_of(model) == []


def test_low_precision_and_the_encoder_alone():
    ids = tokens(2, 80)
    wide = layer_entropies(model := gau("cosine:alpha=16", GAUAlphaModel), ids)
    torch.testing.assert_close(layer_entropies(model.bfloat16(), ids), wide, atol=0.05, rtol=0.02)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("recipe", RECIPES)
def test_entropies_in_bf16(recipe, device):
    model, ids = gau(recipe, attention_key_size=64).to(device).bfloat16(), tokens(2, 200).to(device)
    expected = torch.stack([torch.special.entr(dense(seen)).sum(-1).mean() for seen in watched(model, ids)])
    torch.testing.assert_close(layer_entropies(model, ids), expected, atol=1e-3, rtol=1e-3)
    own = torch.tensor([row["entropy"] for row in entropy_rows(model, ids, exact=False)])  # rotated ones in bf16
    torch.testing.assert_close(own.mean(1), expected.float().cpu(), atol=0.05, rtol=0.05)


@pytest.mark.parametrize("make", MODELS)
def test_before_positions_queries_and_keys_are_unturned(make):
    model, ids = make(), tokens(1, 50)
    for seen in watched(model, ids):
        raw = seen.without_position()
        assert raw.recipe.position is None and raw.applied_rope is None
        if seen.applied_rope is None:
            assert raw.q is seen.q
        else:  # turned back once more it is what it was
            again = seen.applied_rope.rotate(raw.q, seen.layout.query) / seen.applied_rope.scaling
            torch.testing.assert_close(again, seen.q, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("make", MODELS)
def test_histograms_count_every_pair_once(make, monkeypatch):
    monkeypatch.setitem(weights.MAX_PAIRS, "cpu", 1000)  # several chunks
    seen = watched(make(), tokens(1, 50))[-1]
    p = dense(seen)
    pairs, attended = weights.cosine_histograms(seen)
    assert len(pairs) == len(attended) == COSINE_BINS
    assert pairs.sum() == (p > 0).sum() or float(p.min()) < 1e-300  # what underflows is seen all the same
    assert attended.sum().item() == pytest.approx(p.shape[1] * 50, rel=1e-5)


def test_histograms_are_those_of_the_cosines():
    seen = watched(gau("cosine:alpha=16+nope"), tokens(1, 50))[-1]
    cosine = torch.nn.functional.cosine_similarity(seen.q[0, 0, :, None].double(), seen.k[0, 0, None].double(), dim=-1)
    cosine = cosine.clamp(-1, 1)
    pairs, attended = weights.cosine_histograms(seen)
    expected, _ = np.histogram(cosine, COSINE_BINS, (-1, 1))
    moved = np.abs(np.cumsum(expected) - np.cumsum(pairs.numpy()))
    assert moved.max() <= 2  # a cosine on an edge may fall to either side
    weighted, _ = np.histogram(cosine, COSINE_BINS, (-1, 1), weights=torch.softmax(16 * cosine, -1))
    assert np.abs(np.cumsum(weighted) - np.cumsum(attended.numpy())).max() < 0.5


def test_a_share_law_moves_weights_and_no_cosines():
    seen = watched(gau("rerope:window=16"), tokens(1, 50))[0]
    pairs, attended = weights.cosine_histograms(seen)
    law = replace(seen, recipe=replace(seen.recipe, share=ise.Share(3.0, 1)))
    biased_pairs, biased = weights.cosine_histograms(law)
    assert torch.equal(biased_pairs, pairs) and not torch.allclose(biased, attended)
    expected, _, _ = weights.score_map(seen, HeatmapWindow(0, 50, 0, 50))
    assert torch.equal(weights.score_map(law, HeatmapWindow(0, 50, 0, 50))[0], expected)


@pytest.mark.parametrize("make", MODELS)
def test_heatmaps_are_the_logarithm_of_dense_attention(make, monkeypatch):
    monkeypatch.setitem(weights.MAX_PAIRS, "cpu", 3000)
    seen = watched(make(), tokens(1, 50))[-1]
    p = dense(seen)[0]
    window = HeatmapWindow(5, 45, 3, 50)
    actual = weights.log_attention_map(seen, window)
    _same_logs(actual, p.mean(0)[5:45, 3:50])
    _same_logs(weights.log_attention_map(seen, window, head=0), p[0, 5:45, 3:50])
    monkeypatch.setattr(weights, "MAX_CELLS", 10)  # four rows and five columns share a cell, fewer at the end
    blocks = [[p.mean(0)[a : min(a + 4, 45), b : min(b + 5, 50)] for b in range(3, 50, 5)] for a in range(5, 45, 4)]
    for pool, by in (("mean", torch.mean), ("max", torch.max)):
        expected = torch.stack([torch.stack([by(block) for block in row]) for row in blocks])
        _same_logs(weights.log_attention_map(seen, window, pool=pool), expected)
    with pytest.raises(ValueError, match="pool: expected 'mean' or 'max', got 'sum'"):
        weights.log_attention_map(seen, window, pool="sum")


def _same_logs(actual, expected):
    assert actual.shape == expected.shape
    seen = expected > 1e-300
    torch.testing.assert_close(actual[seen].double(), expected[seen].log(), atol=2e-3, rtol=1e-4)
    assert bool((actual[~seen] < -600).all())


def test_weights_too_small_for_fp32_are_told_apart():
    seen = watched(gau("cosine:alpha=600"), tokens(1, 50))[-1]
    actual = weights.log_attention_map(seen, HeatmapWindow(0, 50, 0, 50))
    assert actual.isfinite().all() and actual.min() < -150


def test_scores_before_and_after(monkeypatch):
    seen = watched(gau("rope+infoscale:train_length=8,count=sequence"), tokens(1, 50))[-1]
    q, k = seen.q[0, 0].double(), seen.k[0, 0].double()
    actual, least, largest = weights.score_map(seen.without_position(), HeatmapWindow(0, 50, 0, 50))
    expected = q @ k.T / 4  # 1/√16, no temperature
    torch.testing.assert_close(actual.double(), expected, atol=1e-4, rtol=1e-4)
    assert (least, largest) == pytest.approx((expected.min().item(), expected.max().item()), rel=1e-4)
    after, _, _ = weights.score_map(seen, HeatmapWindow(0, 50, 0, 50))
    torch.testing.assert_close(after.diagonal(), actual.diagonal(), atol=1e-4, rtol=1e-4)  # distance 0
    assert not torch.allclose(after, actual, atol=0.1)
    monkeypatch.setattr(weights, "MAX_CELLS", 25)
    pooled, low, high = weights.score_map(seen.without_position(), HeatmapWindow(0, 50, 0, 50))
    torch.testing.assert_close(pooled.double(), expected.view(25, 2, 25, 2).mean((1, 3)), atol=1e-4, rtol=1e-4)
    assert (low, high) == (least, largest)


def test_what_is_not_seen_has_no_score():
    seen = watched(llama(), tokens(1, 50))[0]
    actual, least, largest = weights.score_map(seen, HeatmapWindow(0, 10, 20, 30))
    assert actual.isnan().all() and least is None and largest is None
    assert (weights.log_attention_map(seen, HeatmapWindow(0, 10, 20, 30)) == -torch.inf).all()
    assert weights.uniform_entropy(seen) == pytest.approx(sum(log(n) for n in range(1, 51)) / 50)


@pytest.mark.parametrize("make", [lambda: gau("rerope:window=64+infoscale", num_hidden_layers=1), lambda: llama(
    num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1)], ids=["gau", "llama"])  # fmt: skip
def test_no_table_of_all_pairs_is_ever_made(make, tmp_path):
    n, model = 2560, make()
    text = Text("t", "0", tuple(tokens(1, n)[0].tolist()))
    with Largest() as largest:
        looking.measure_attention(
            model, "tiny", text, looking.InspectConfig((n,), inset=HeatmapWindow(1516, 1536, 1516, 1536)), tmp_path
        )
    assert 1 << 19 < largest.numel < n * n / 4
    assert np.load(tmp_path / "attention.npy", allow_pickle=False).shape == (512, 512)
    assert np.load(tmp_path / "inset.npy", allow_pickle=False).shape == (20, 20)


TEXT = "the quick brown fox jumps over the lazy dog; " * 12


def saved(tmp_path, model):
    folder = tmp_path / "model"
    model.save_pretrained(folder)
    build_character_tokenizer([TEXT]).save_pretrained(folder)
    (tmp_path / "text.txt").write_text(TEXT)
    return str(folder), str(tmp_path / "text.txt")


def command(*words):
    return CliRunner().invoke(app, ["inspect", *map(str, words), "--device", "cpu"])


@pytest.mark.figures
def test_gau_from_the_command_line(tmp_path):
    model, text = saved(tmp_path, gau(max_position_embeddings=48))
    out = tmp_path / "out"
    words = ("--lengths", "16,64", "--region", "0:40,0:64", "--inset", "4:8,4:8", "--out", out)
    result = command(model, "--data", text, *words, "--recipe", "cosine:alpha=32")
    assert result.exit_code == 0, result.output
    data = json.loads((out / "inspect.json").read_text())
    assert data["lengths"] == [16, 48, 64] and data["train_length"] == 48  # where it was trained is measured too
    assert np.shape(data["entropy"]) == (3, 3, 1) and np.allclose(data["entropy_ratio"][1], 1)
    assert data["uniform"][0][0] == pytest.approx(log(16))
    assert sum(data["angles"]["after"]["pairs"]) == sum(data["angles"]["before"]["pairs"]) == 64 * 64
    assert np.load(out / "attention.npy", allow_pickle=False).shape == (40, 64)
    assert len(data["text"]["sha256"]) == len(data["weights"]) == 64 and "torch" in data["run"]
    assert data["theory"]["peak_cosine"] == pytest.approx(float(peak_cosine(32, 16)))
    for name in ("entropy", "focus", "angles", "attention", "rope"):
        assert (out / f"{name}.png").stat().st_size > 5000 and (out / f"{name}.svg").stat().st_size > 5000
        assert str(out / f"{name}.png") in result.output.replace("\n", "")


@pytest.mark.parametrize("recipe", [None, "rerope:window=16+infoscale"])
def test_llama_from_the_command_line(tmp_path, recipe):
    folder, _ = saved(tmp_path, llama())
    (tmp_path / "texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in ("short", TEXT)))
    options = [] if recipe is None else ["--recipe", recipe]
    words = ("--lengths", "32,100", "--layer", "0", "--out", tmp_path / "out")
    result = command(folder, "--data", tmp_path / "texts.jsonl", *words, *options)
    assert result.exit_code == 0, result.output
    data = json.loads((tmp_path / "out" / "inspect.json").read_text())
    assert np.shape(data["entropy"]) == (3, 2, 4) and data["layer"] == 0 and data["text"]["name"] == "texts.jsonl:2"
    assert data["recipe"]["text"] == ("plain" if recipe is None else "rerope:window=16+infoscale:train_length=64")
    assert data["uniform"][2][0] < log(100) - 0.9  # half of the keys are ahead


def test_several_recipes_have_one_table_and_one_page(tmp_path):
    folder, text = saved(tmp_path, llama())
    words = ("--lengths", "32,1.5x", "--recipe", "plain", "--recipe", "rerope:window=16", "--out", tmp_path / "out")
    result = command(folder, "--data", text, *words)
    assert result.exit_code == 0, result.output
    assert re.search(r"plain +\d", result.stdout) and re.search(r"rerope:window=16 +\d", result.stdout)
    page = (tmp_path / "out" / "inspect.html").read_text()
    assert "<h2>plain</h2>" in page and "<h2>rerope:window=16</h2>" in page and page.count("<figure>") == 10


def test_a_model_that_was_saved_extended(tmp_path):
    folder, _ = saved(tmp_path, ise.extend(llama(), "rerope:window=16"))
    assert str(looking.get_recipe(looking.load_model(folder, None, "cpu"))) == "rerope:window=16"
    assert str(looking.get_recipe(looking.load_model(folder, "infoscale", "cpu"))) == "infoscale:train_length=64"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--lengths", "64,100000"), "expected a text of 100000 tokens, the longest of lengths, got 540"),
        (("--lengths", "64,32"), "lengths: expected increasing numbers of tokens from 2 on, got [64, 32]"),
        (("--lengths", "many"), "lengths: expected tokens such as 8192, or 4x the training length, got 'many'"),
        (("--lengths", "64", "--region", "0:65,0:10"), "region: expected rows within 0:64, the longest text, got 0:65"),
        (("--lengths", "64", "--region", "0:65"), "region: expected rows and columns such as 0:512,0:512, got '0:65'"),
        (("--lengths", "64", "--layer", "3"), "layer: expected -3 … 2, got 3"),
        (("--lengths", "64", "--dtype", "int8"), "dtype: expected bfloat16, float16, float32 or auto, got 'int8'"),
        (("--lengths", "64", "--recipe", "rerpoe"), "did you mean 'rerope'?"),
    ],
)
def test_mistakes_are_told_in_one_line(tmp_path, words, told):
    model, text = saved(tmp_path, gau())
    result = command(model, "--data", text, *words, "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert told in result.stderr.strip().splitlines()[-1]
    assert not (tmp_path / "out" / "inspect.json").exists()


def test_heads_and_training_lengths_that_cannot_be(tmp_path):
    text = Text("t", "0", tuple(tokens(1, 20)[0].tolist()))
    with pytest.raises(ValueError, match="head: expected 0 … 3, got 4"):
        looking.measure_attention(llama(), "tiny", text, looking.InspectConfig((16,), head=4), tmp_path)
    with pytest.raises(ValueError, match="train_length: expected 2 or more, got 1"):
        looking.InspectConfig((16,), train_length=1)
    with pytest.raises(ValueError, match="t: expected 64 tokens, the longest of lengths, got 20"):
        looking.measure_attention(llama(), "tiny", text, looking.InspectConfig((64,)), tmp_path)


def test_a_folder_that_is_not_there(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    result = command(tmp_path / "nothing", "--data", tmp_path / "text.txt")
    assert result.exit_code == 2 and "expected a folder with a model" in result.stderr
    result = command(saved(tmp_path, gau())[0], "--data", tmp_path / "nothing.txt")
    assert_one_line(result, "data: expected a file", "nothing.txt")
    with pytest.raises(ValueError, match=r"expected a folder that isentrope inspect wrote, with inspect\.json"):
        figures.draw_inspection(tmp_path)
    with pytest.raises(ValueError, match="folders: expected one or more"):
        figures.draw_peak_angles([], tmp_path / "f6")


@pytest.mark.figures
def test_several_models_side_by_side(tmp_path):
    text = Text("t", "0", tuple(tokens(1, 64)[0].tolist()))
    folders = []
    for alpha in (8, 128, 32):
        folders.append(tmp_path / str(alpha))
        config = looking.InspectConfig((64,), inset=HeatmapWindow(8, 16, 8, 16) if alpha == 8 else None)
        looking.measure_attention(gau(f"cosine:alpha={alpha}"), "tiny", text, config, folders[-1])
    told = looking.measure_attention(gau(), "tiny", text, looking.InspectConfig((64,)), plain := tmp_path / "plain")
    assert json.loads(told.read_text())["theory"] is None
    made = figures.draw_cosscale_panels(folders, tmp_path / "f1.of.paper")
    made += figures.draw_scores_before_and_after_rope([*folders, plain], tmp_path / "f7")
    made += figures.draw_peak_angles(folders, tmp_path / "f6") + figures.draw_attention(folders, tmp_path / "f2")
    assert [path.name for path in made[:2]] == ["f1.of.paper.png", "f1.of.paper.svg"]
    assert all(path.stat().st_size > 5000 for path in made)
    with pytest.raises(ValueError, match=r"plain: expected a model with CosScale \(cosine scores\), got rope"):
        figures.draw_peak_angles([*folders, plain], tmp_path / "f6")


def test_the_guide_runs():
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "inspect.md").read_text(encoding="utf-8")
    for block in re.findall(r"```python\n(.*?)```", guide, re.DOTALL):
        exec(compile(block, "docs/guides/inspect.md", "exec"), {})


def test_from_python(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, row = llama(), tokens(1, 100)[0].tolist()
    actual = looking.inspect(model, row, (32, 100), "rerope:window=16", layer=0)
    assert not list(tmp_path.iterdir()) and actual.path is None and actual.recipe == "rerope:window=16"
    assert [(each["length"], each["layer"]) for each in actual.rows] == [(n, i) for n in (32, 64, 100) for i in (0, 1)]
    assert actual.heatmaps["attention"].shape == (100, 100)
    with ise.extended(model, "rerope:window=16"):
        expected = head_entropies(model, torch.tensor([row]))
    assert [each["entropy"] for each in actual.rows[-2:]] == [heads.tolist() for heads in expected]
    kept = looking.inspect(model, row, (32, 100), out=tmp_path / "out")
    assert kept.path == tmp_path / "out" / "inspect.json" and kept.recipe != actual.recipe
