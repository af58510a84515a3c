"""Temperatures fitted to text: gradients, an optimum that is known, the choice, resuming, saving, the command."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import isentrope as ise
from isentrope.calibration import calibrate as study
from isentrope.calibration import optimize as descent
from isentrope.calibration.calibrate import CalibrationResult, calibrate, fit_laws
from isentrope.calibration.config import CalibrationConfig, parse_seconds
from isentrope.calibration.laws import make_laws
from isentrope.calibration.optimize import FitProblem
from isentrope.calibration.select import split_texts
from isentrope.cli import app
from isentrope.data.corpus import Document, read_sympy_documents
from isentrope.evaluation.loading import load_on_device, load_tokenizer
from isentrope.evaluation.perplexity import token_losses
from isentrope.evaluation.texts import Text
from isentrope.experiments.checkpoints import SHIPPED_MODELS
from isentrope.hf.learned_laws import LearnedTemperature, checkpoint_layers
from isentrope.recipe import Recipe
from isentrope.report.figures.calibration import draw_calibration
from isentrope.report.tables.calibration import build_calibration_table
from isentrope.temperatures import Fitted
from tests.fixtures.models import llama, tokens

SMALL = {"max_position_embeddings": 16}
CONFIG = CalibrationConfig(64, "rerope:window=8")
pytestmark = pytest.mark.usefixtures("on_one_thread")


def silent(words):
    pass


def texts(count=4, length=64, rows=None):
    rows = (tokens(count, length) if rows is None else rows).tolist()
    return [Text(f"t{i}", Document(f"t{i}", tokens=tuple(row)).sha256, tuple(row)) for i, row in enumerate(rows)]


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (2, 4)])
def test_the_law_that_learns_is_the_one_that_is_kept(shape):
    logs = torch.randn(*shape, 2, dtype=torch.float64) / 3
    rows = torch.cat((torch.zeros(*shape, 1), logs), -1).exp()
    kept = Fitted((16, 32, 64), rows[0, 0] if shape == (1, 1) else rows).for_layer(shape[0] - 1)
    n = torch.arange(2, 200, dtype=torch.float64)[None, None]
    learned = LearnedTemperature((16, 32, 64), logs, 1)
    torch.testing.assert_close(learned.scale(n, 8), kept.scale(n, 8))
    assert torch.equal(learned.scale(n[..., :15], 8).flatten(), torch.ones(15 * shape[1]))


@pytest.mark.parametrize("content", ["", '{"model": {', "{}"])
def test_broken_results_are_named_and_measured_again(tmp_path, caplog, content):
    (tmp_path / "calibrate.json").write_text(content)
    begun = study._Calibration(llama(), texts(length=100), CalibrationConfig(100), tmp_path, "tiny", silent)
    assert begun.data["cells"] == [] and begun.data["seconds"] == 0
    assert f"{tmp_path / 'calibrate.json'}: expected " in caplog.messages[0]
    assert caplog.messages[0].endswith("all is measured again")


def exact(model):
    """In fp64 throughout: Llama's own norms are fp32 in any dtype."""
    for layer in model.model.layers:
        layer.input_layernorm, layer.post_attention_layernorm = nn.RMSNorm(32, 1e-6), nn.RMSNorm(32, 1e-6)
    model.model.norm = nn.RMSNorm(32, 1e-6)
    return model.double()


@pytest.mark.parametrize(("recipe", "count"), [("ntk:factor=4", 2), ("rerope:window=8", 3)])
def test_gradients_are_those_of_finite_differences(recipe, count):
    model, rows = exact(llama(**SMALL)), list(tokens(2, 48))
    values = (torch.randn(2, 4, count, dtype=torch.float64) / 3).requires_grad_()
    laws = make_laws(recipe, (16, 32, 48), 2, 8)
    problem = FitProblem(model, laws, rows, values.detach().numpy())
    with laws.learn(model, values):
        assert not any(parameter.requires_grad for parameter in model.parameters())
        loss, retrieval, gradient = descent.loss_and_gradient(problem, values)
        with checkpoint_layers(model):
            again = descent.loss_and_gradient(problem, values).gradient
        differences = np.zeros(values.shape)
        for at in np.ndindex(*values.shape):
            for sign in (1, -1):
                with torch.no_grad():
                    values[at] += sign * 1e-5
                    shifted = sum(descent.mean_bucket_loss(token_losses(model, row), laws.knots) for row in rows) / 2
                    values[at] -= sign * 1e-5
                differences[at] += sign * shifted / 2e-5
    np.testing.assert_allclose(gradient, differences, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(again, gradient, rtol=1e-10)
    assert abs(gradient).min() > 0 and retrieval == 0
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not any("forward" in vars(module) for module in model.modules())
    with ise.extended(model, laws.build(values.detach().numpy())):  # what is kept is what was fitted, but for digits
        kept = sum(descent.mean_bucket_loss(token_losses(model, row), laws.knots) for row in rows) / 2
    assert float(kept) == pytest.approx(loss, abs=1e-3)


@pytest.fixture(scope="module")
def written():
    """Texts that a model wrote itself, with temperatures: no others make them likelier."""
    model = llama(**SMALL)
    law = Fitted((16, 32, 64), (((1.0, 3.0, 3.0),), ((1.0, 1.0, 1.0),)))
    torch.manual_seed(0)
    with ise.extended(model, Recipe(temperature=law)):
        prompt = torch.randint(1, 97, (48, 1))
        rows = model.generate(prompt, do_sample=True, top_k=0, max_length=64)
    return texts(rows=rows)


@pytest.mark.parametrize(
    "levels", [("scalar", "layer"), pytest.param(("scalar", "layer", "head"), marks=pytest.mark.slow)]
)
def test_a_known_optimum_is_found(written, monkeypatch, levels):
    monkeypatch.setattr(descent, "PRIOR_SPREAD", 100.0)  # the texts alone shall speak
    model = llama(**SMALL)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    actual = fit_laws(model, written, CalibrationConfig(64, levels=levels), notify=silent)
    assert actual.chosen == "layer", actual.reason
    tau = np.array(actual.recipe.temperature.table)
    np.testing.assert_allclose(tau[:, 0], [[1, 3, 3, 3], [1, 1, 1, 1]], rtol=0.25)
    at_the_end, far = actual.recipe.temperature.for_layer(0).scale(torch.tensor([[[64, 4096]]]), 8)[0, 0]
    assert at_the_end == far  # held where no text has shown more
    by_name = {row["name"]: row["perplexity"] for row in actual.data["candidates"]}
    assert len({values[0] for values in by_name.values()}) == 1  # inside the training length nothing changes
    assert by_name["layer"][-1] < by_name["scalar"][-1] < by_name["infoscale"][-1]
    # the model is as it was
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert (
        Recipe.from_dict(next(r["recipe"] for r in actual.data["candidates"] if r["name"] == "layer")) == actual.recipe
    )
    assert [len(layer["entropy"]) for layer in actual.data["entropy"]["after"]] == [4, 4]


@pytest.mark.parametrize("recipe", ["plain", "rerope:window=8", "yarn:factor=4"])
def test_inside_the_training_length_nothing_changes(recipe):
    model, ids = llama(), tokens(2, 100)
    base = Recipe.parse(recipe, train_length=64)
    law = Fitted((64, 128), torch.cat((torch.ones(2, 4, 1), torch.rand(2, 4, 1) + 1), -1))
    with torch.no_grad():
        with ise.extended(model, base):
            short, long = model(ids[:, :64]).logits, model(ids).logits
        with ise.extended(model, replace(base, temperature=law)):
            assert torch.equal(model(ids[:, :64]).logits, short)
            actual = model(ids).logits
    torch.testing.assert_close(actual[:, :64], long[:, :64])
    assert (actual[:, 64:] - long[:, 64:]).abs().amax() > 1e-3


def test_little_text_moves_a_law_little(written):
    model, edges, start = llama(**SMALL), (16, 32, 64), np.full((2, 1, 2), 0.5)
    away = []
    for count in (1, 16):
        history = []
        rows = [torch.tensor(text.tokens) for text in written[:count]]
        laws = make_laws("plain", edges, 2, 8)
        descent.fit_law(FitProblem(model, laws, rows, start), history, lambda: None)
        best = min(history, key=lambda row: row["objective"])
        away.append(np.linalg.norm(np.array(best["values"]) - start))
    assert 0 < away[0] < away[1] / 2


def test_an_interrupted_run_goes_on_to_the_same_numbers(tmp_path, monkeypatch):
    monkeypatch.setattr(descent, "MAX_EVALUATIONS", 4)  # of each level
    whole = fit_laws(llama(**SMALL), texts(), CONFIG, tmp_path / "whole", notify=silent)
    real, count = descent.loss_and_gradient, 0

    def interrupted(*args):
        nonlocal count
        count += 1
        if count in (3, 9):
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(descent, "loss_and_gradient", interrupted)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            fit_laws(llama(**SMALL), texts(), CONFIG, tmp_path / "cut", notify=silent)
    actual = fit_laws(llama(**SMALL), texts(), CONFIG, tmp_path / "cut", notify=silent)
    assert actual.data["candidates"] == whole.data["candidates"] and actual.reason == whole.reason
    done = sum(len(fit["losses"]) for fit in whole.data["fits"].values())
    assert count == done + 2
    fit_laws(llama(**SMALL), texts(), CONFIG, tmp_path / "cut", notify=silent)
    assert count == done + 2  # nothing is left to do
    assert not list(tmp_path.rglob("*.partial"))
    with pytest.raises(ValueError, match="holds another model, recipe, length or other texts"):
        fit_laws(llama(**SMALL), texts(6), CONFIG, tmp_path / "cut", notify=silent)


def test_a_budget_ends_the_fit_and_a_larger_one_goes_on(tmp_path, monkeypatch):
    clock = 0.0
    monkeypatch.setattr(study.time, "monotonic", lambda: clock)
    real = descent.loss_and_gradient

    def slow(*args):
        nonlocal clock
        clock += 60
        return real(*args)

    monkeypatch.setattr(descent, "loss_and_gradient", slow)

    def fit(budget, **options):
        config = CalibrationConfig(64, "rerope:window=8", budget=parse_seconds(budget), **options)
        return fit_laws(llama(**SMALL), texts(), config, tmp_path, notify=silent)

    assert fit("1s", levels=()).data["fits"] == {}
    first = fit("2m", levels=("scalar",))
    assert first.data["fits"]["scalar"]["ended"] == "budget"
    assert len(first.data["fits"]["scalar"]["losses"]) == 2
    assert fit("2m", levels=("scalar",)).data["fits"]["scalar"]["losses"] == first.data["fits"]["scalar"]["losses"]
    then = fit("2h", levels=("scalar",)).data["fits"]["scalar"]
    assert then["ended"] == "converged" and then["losses"][:2] == first.data["fits"]["scalar"]["losses"]


def test_a_level_begins_anew_where_the_one_before_has_moved_on(tmp_path, monkeypatch):
    """A larger budget: points that were counted from the earlier start are none of this fit's."""
    clock, begun = 0.0, []
    monkeypatch.setattr(study.time, "monotonic", lambda: clock)
    gradients, fit_law = descent.loss_and_gradient, study.fit_law

    def slow(*args):
        nonlocal clock
        clock += 60
        return gradients(*args)

    def watched(problem, history, on_evaluation):
        begun.append((problem.start.tolist(), history[0]["values"] if history else None))
        return fit_law(problem, history, on_evaluation)

    monkeypatch.setattr(descent, "loss_and_gradient", slow)
    monkeypatch.setattr(study, "fit_law", watched)
    for budget in ("4m", "2h"):
        config = replace(CONFIG, levels=("scalar", "layer"), budget=parse_seconds(budget))
        actual = fit_laws(llama(**SMALL), texts(), config, tmp_path, notify=silent)
    assert [fit["ended"] for fit in actual.data["fits"].values()] == ["converged", "converged"]
    (_, none), (first, _), (again, kept), (then, dropped) = begun
    assert none is None and kept == again and dropped is None and then != first


def test_held_out_text_decides_against_a_bad_fit(monkeypatch, written):
    def bad(problem, history, on_evaluation):
        history.append({"values": np.full(problem.start.shape, -3.0).tolist(), "loss": 0.0, "objective": 0.0})
        return "converged"

    monkeypatch.setattr(study, "fit_law", bad)
    actual = fit_laws(llama(**SMALL), written[:16], CalibrationConfig(64), notify=silent)
    assert actual.chosen in ("none", "infoscale", "logn", "power")
    assert actual.reason.startswith("no fitted law is clearly better than") and actual.reason.endswith("is kept")
    rows = {row["name"]: row["perplexity"][-1] for row in actual.data["candidates"]}
    assert rows[actual.chosen] <= rows["infoscale"] < rows["scalar"]


def test_the_best_of_several_recipes_gets_the_temperature():
    config = CalibrationConfig(64, "rerope:window={window}", windows=(4, 12), levels=("scalar",))
    actual = fit_laws(llama(**SMALL), texts(), config, notify=silent)
    tried = {row["recipe"]: row["loss"] for row in actual.data["tried"]}
    assert list(tried) == ["rerope:window=4", "rerope:window=12"]
    assert actual.data["recipe"] == min(tried, key=tried.get)


def test_halves_are_the_same_for_the_same_texts_and_copies_count_once():
    given = texts(7)
    fitting, held = split_texts([*reversed(given), *given[:3]], 64)
    assert (len(fitting), len(held)) == (3, 4)
    assert (fitting, held) == split_texts(given, 64) != split_texts(given, 64, seed=1)
    with pytest.raises(ValueError, match="2 or more different documents of 64 tokens"):
        split_texts([given[0], given[0], *texts(3, 63)], 64)


@pytest.mark.parametrize(("train", "length", "expected"), [(256, 1024, (256, 512, 1024)), (100, 110, (100, 110))])
def test_knots(train, length, expected):
    assert descent.choose_knots(train, length) == expected
    assert descent.choose_knots(64, 300) == (64, 139, 300)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CalibrationConfig(64, "infoscale"), "without a temperature"),
        (lambda: CalibrationConfig(64, "rerop:window=3"), "did you mean"),
        (lambda: CalibrationConfig(64, "rerope:window={window}"), "windows: expected numbers if, and only if"),
        (lambda: CalibrationConfig(64, "plain", factors=(4,)), "factors: expected numbers if, and only if"),
        (lambda: CalibrationConfig(64, levels=("layers",)), "levels: expected some of scalar, layer, head"),
        (lambda: CalibrationConfig.parse(64, "plain", windows="4,x"), "windows: expected numbers"),
        (lambda: parse_seconds("10"), "budget: expected a time such as"),
        (lambda: parse_seconds("-1m"), "budget"),
        (lambda: parse_seconds("m"), "budget"),
        (lambda: fit_laws(llama(**SMALL), texts(), CalibrationConfig(16)), "length: expected more than 16"),
        (lambda: fit_laws(llama(**SMALL), texts(), CalibrationConfig(65)), "texts: expected 2 or more"),
        (
            lambda: fit_laws(llama(**SMALL), texts(), CalibrationConfig(64, "alibi"), notify=silent),
            "was not trained with",
        ),
    ],
)
def test_bad_settings(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_times():
    assert [parse_seconds(text) for text in ("90s", "10m", "1.5h", None)] == [90, 600, 5400, None]


def test_the_command_saves_a_model_that_reproduces_its_numbers(tmp_path, monkeypatch):
    monkeypatch.setattr(descent, "MAX_EVALUATIONS", 4)  # the law that is saved, not how good it becomes
    model, documents = str(SHIPPED_MODELS / "llama"), [d.text for d in read_sympy_documents() if d.group == "holonomic"]
    lines = [json.dumps({"text": text[:400]}) for text in documents[:4]]
    (tmp_path / "texts.jsonl").write_text("\n".join(lines))
    out, saved = tmp_path / "out", tmp_path / "saved"
    arguments = ["calibrate", model, "--data", str(tmp_path / "texts.jsonl"), "--recipe", "rerope:window=128"]
    arguments += ["--levels", "scalar", "--out", str(out), "--save", str(saved), "--device", "cpu"]
    done = CliRunner().invoke(app, [*arguments, "--length", "320"])
    assert done.exit_code == 0, done.output
    assert "fitted, one for all" in done.output
    assert sorted(path.name for path in out.iterdir()) == [
        "calibrate.json", "calibrate.png", "calibrate.svg", "recipe.txt",
    ]  # fmt: skip
    data = json.loads((out / "calibrate.json").read_text())
    assert build_calibration_table(out / "calibrate.json").row_count == 6
    assert draw_calibration(out / "calibrate.json")
    assert "(saved) |" in (saved / "README.md").read_text()

    plain, loaded = load_on_device(model, "cpu", "float32"), ise.load(saved, dtype=torch.float32)
    assert str(ise.hf.capture.get_recipe(loaded)) == (out / "recipe.txt").read_text().strip()
    chosen = next(row for row in data["candidates"] if row["name"] == data["chosen"])
    tokenizer = load_tokenizer(str(saved))
    held = [text["name"] for text in data["texts"] if text["part"] == "held-out"]
    losses = []
    for name in held:
        ids = torch.tensor(tokenizer(json.loads(lines[int(name.rpartition(":")[2]) - 1])["text"])["input_ids"][:320])
        losses.append(token_losses(loaded, ids)[255:].double().mean())
        assert torch.equal(loaded(ids[None, :128]).logits, plain(ids[None, :128]).logits)
    assert chosen["perplexity"][-1] == pytest.approx(float(torch.stack(losses).mean().exp()), rel=1e-6)

    assert "Warning" not in (saved / "README.md").read_text()
    warning = "Answers are clearly worse than under the closed law: fit with --with-retrieval."
    monkeypatch.setattr(CalibrationResult, "warning", warning)
    warned = [tmp_path / "warned" if word == str(saved) else word for word in arguments]
    done = CliRunner().invoke(app, [*map(str, warned), "--length", "320"])
    assert done.exit_code == 0 and f"\n\n**Warning.** {warning}\n" in (tmp_path / "warned" / "README.md").read_text()
    ise.load(tmp_path / "warned").save_pretrained(tmp_path / "again")
    assert warning in (tmp_path / "again" / "README.md").read_text()

    refused = CliRunner().invoke(app, [*arguments, "--length", "320"])
    assert refused.exit_code == 2 and "save: expected a folder that is not there yet" in refused.output
    other = CliRunner().invoke(app, [*arguments[:-4], "--device", "cpu", "--length", "300"])
    assert other.exit_code == 2 and "choose another folder" in other.output


def test_from_python(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = tokens(4, 64).tolist()
    actual = calibrate(llama(**SMALL), rows, 64, "rerope:window=8", levels=("scalar",))
    assert not list(tmp_path.iterdir()) and actual.path is None
    assert [row["name"] for row in actual.rows] == ["none", "infoscale", "logn", "power", "closed", "scalar"]
    kept = calibrate(llama(**SMALL), rows, 64, "rerope:window=8", levels=("scalar",), out=tmp_path / "out")
    assert kept.recipe == actual.recipe and kept.path == tmp_path / "out" / "calibrate.json"
    assert Recipe.parse((tmp_path / "out" / "recipe.txt").read_text()) == actual.recipe
    with pytest.raises(TypeError, match="level"):
        calibrate(llama(**SMALL), rows, 64, level="scalar")


def test_python_takes_what_the_command_takes(monkeypatch):
    monkeypatch.setattr(study, "fit_laws", lambda model, texts, config, *more, **options: config)
    model, rows = llama(**SMALL), tokens(4, 64).tolist()
    written = {"windows": "4,8", "factors": "2", "levels": "scalar,near", "budget": "5m"}
    values = {"windows": [4, 8], "factors": [2.0], "levels": ("scalar", "near"), "budget": 300}
    recipe = "selfextend:window={window},group={factor}"
    expected = CalibrationConfig(64, recipe, (4, 8), (2.0,), ("scalar", "near"), 300)
    assert [calibrate(model, rows, "4x", recipe, **given) for given in (written, values)] == [expected] * 2
    assert calibrate(model, rows, "2x", train_length=32).length == calibrate(model, rows, "64").length == 64
    for message, length, settings in (
        ("length: expected tokens such as 8192, or 4x", "4y", {}),
        ("length: expected more than the training length", "1x", {}),
        ("budget: expected a time such as", 64, {"budget": -1}),
        ("levels: expected some of", 64, {"levels": "scalar,layers"}),
    ):
        with pytest.raises(ValueError, match=message):
            calibrate(model, rows, length, **settings)
