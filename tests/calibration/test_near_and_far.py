"""Laws of near and far keys fitted to text: a law that is known, the start, retrieval, results of before."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

import isentrope as ise
from isentrope.calibration import calibrate as fitting
from isentrope.calibration import optimize as descent
from isentrope.calibration.calibrate import calibrate, fit_laws
from isentrope.calibration.config import CalibrationConfig
from isentrope.calibration.laws import make_laws
from isentrope.calibration.optimize import FitProblem
from isentrope.calibration.passkeys import RETRIEVAL_WEIGHT, hide_passkeys, judge_answers, load_prompt_format
from isentrope.data.corpus import read_sympy_documents
from isentrope.evaluation.answers import score_answer
from isentrope.evaluation.loading import load_on_device, load_tokenizer
from isentrope.evaluation.prompts import PromptFormat
from isentrope.evaluation.texts import collect_texts
from isentrope.experiments.checkpoints import SHIPPED_MODELS
from isentrope.recipe import Recipe
from isentrope.report.figures.calibration import draw_calibration
from isentrope.report.tables.calibration import build_calibration_table, build_card_rows
from isentrope.share import Share
from tests.calibration.test_calibrate import SMALL, texts
from tests.fixtures.models import llama, tokens

RISES = np.array([0.3, -0.3, 0.2, -0.2, 0.1, -0.1])
BEST = {"values": [[[0.75, -0.1]]], "loss": 1.0, "objective": 1.0}
RESULTS = Path(__file__).parents[2] / "docs" / "results"
LLAMA = str(SHIPPED_MODELS / "llama")
pytestmark = pytest.mark.usefixtures("on_one_thread")


def print_table(path):
    console = Console(width=200, record=True)
    console.print(build_calibration_table(path))
    return console.export_text()


def test_a_known_law_is_found(monkeypatch):
    """Texts that a model wrote itself under a law: no other makes them likelier."""
    monkeypatch.setattr(descent, "PRIOR_SPREAD", 100.0)  # the texts alone shall speak
    model = llama(**SMALL)
    with ise.extended(model, "rerope:window=8+power:gamma=-0.4,keys=far+share:beta=2"):
        rows = model.generate(torch.randint(1, 97, (16, 1)), do_sample=True, top_k=0, max_length=64)
    laws = make_laws("rerope:window=8+share:beta=0.5", (16, 32, 64), 2, 8)
    start, history = laws.choose_start(pytest.fail), []
    np.testing.assert_allclose(start, [[[0.5, 0]]])
    descent.fit_law(FitProblem(model, laws, list(rows), start), history, lambda: None)
    best = min(history, key=lambda row: row["objective"])
    beta, gamma = best["values"][0][0]
    assert 1.5 < beta < 2.5 and -0.55 < gamma < -0.25
    law = laws.build(np.array(best["values"]))
    assert law.temperature.keys == "far" and law.temperature.gamma < 0 and law.share.reference == 8


def test_the_fit_starts_from_the_law_in_the_recipe():
    given = make_laws("rerope:window=8+infoscale+share:beta=((0.5,),(1.5,))", (16, 64), 2, 8)
    tau = ise.InfoScale(16).scale(torch.tensor(64.0, dtype=torch.float64), 8)
    start = given.choose_start(pytest.fail)
    np.testing.assert_allclose(start, [[[1, np.log(tau.item()) / np.log(4)]]], rtol=1e-6)
    assert [*given.build_closed()][-2:] == ["closed", "given"]
    kept = given.build(start)  # near keys keep what they had
    assert [(law.name(), law.keys) for law in kept.temperatures] == [("infoscale", "near"), ("power", "far")]
    near = given.build(given.add_near(start))
    assert [law.name() for law in near.temperatures] == ["power", "power"]
    for law in near.temperatures:
        torch.testing.assert_close(law.scale(torch.tensor(64.0, dtype=torch.float64), 8), tau, rtol=1e-3, atol=0)
    assert make_laws("rerope:window=8+logn:keys=far", (16, 64), 2, 8).choose_start(pytest.fail)[0, 0, 0] == 0


def test_without_a_law_in_the_recipe_the_fit_starts_from_the_closed_one():
    laws, n = make_laws("rerope:window=8", (16, 64), 2, 8), torch.tensor(64.0)
    closed, start = laws.build_closed(), laws.build(laws.choose_start(pytest.fail))
    assert [*closed][-1] == "closed" and len(start.temperatures) == 1
    share = Share(reference=16 - 8)
    assert closed["closed"].share == share and closed["closed"].temperature is None
    torch.testing.assert_close(start.share.bias(n), share.bias(n), rtol=1e-3, atol=0)
    torch.testing.assert_close(start.temperature.scale(n, 8), torch.ones(()))


@pytest.mark.figures
def test_all_levels_and_their_results(tmp_path, monkeypatch):
    monkeypatch.setattr(descent, "MAX_EVALUATIONS", 3)  # which levels there are, not how good they become
    actual = fit_laws(llama(**SMALL), texts(11), CalibrationConfig(64, "rerope:window=8"), tmp_path, "tiny")
    names = [row["name"] for row in actual.rows]
    assert names == ["none", "infoscale", "logn", "power", "closed", "scalar", "layer", "head", "near"]
    rows = dict(zip(names, actual.rows, strict=True))
    assert len({row["perplexity"][0] for row in actual.rows}) == 1  # inside the training length nothing changes
    assert all(row["low"][-1] <= row["perplexity"][-1] <= row["high"][-1] for row in actual.rows)
    head = Recipe.from_dict(rows["head"]["recipe"])
    assert np.shape(head.share.beta) == np.shape(head.temperature.gamma) == (2, 4)
    assert Recipe.parse(str(head)) == head
    assert [law.keys for law in Recipe.from_dict(rows["near"]["recipe"]).temperatures] == ["near", "far"]
    assert len(rows["head"]["bias"]["rows"]) == len(rows["head"]["tau"]["rows"]) == 8
    assert set(map(tuple, rows["head"]["tau_near"]["rows"])) == {(1.0, 1.0, 1.0)}
    assert "fitted, near keys too" in print_table(tmp_path / "calibrate.json")
    assert draw_calibration(tmp_path / "calibrate.json")


@pytest.mark.filterwarnings("ignore:.*leaves distances up to:UserWarning")  # so that no key is far
def test_without_far_keys_nothing_is_fitted():
    lines = []
    config = CalibrationConfig(64, "rerope:window=64")
    actual = fit_laws(llama(**SMALL), texts(), config, notify=lines.append)
    assert lines[-1] == "scalar: not fitted (no key is far)"
    assert actual.chosen == "closed" and len({row["perplexity"][-1] for row in actual.rows[4:]}) == 1


def test_few_texts_give_no_interval(tmp_path):
    config = CalibrationConfig(64, "rerope:window=8", levels=("scalar",))
    actual = fit_laws(llama(**SMALL), texts(), config, tmp_path, "tiny")
    for row in actual.rows:
        assert row["low"] is row["high"] is row["against"]["closed"]["low"] is None
    assert "6 are needed, that is 11 documents" in actual.reason
    assert actual.chosen in ("closed", "scalar")
    table = print_table(tmp_path / "calibrate.json")
    assert "(—)" in table and "11 documents" in table
    assert draw_calibration(tmp_path / "calibrate.json") and build_card_rows(tmp_path / "calibrate.json")


@pytest.fixture(scope="module")
def modules():
    found = [document.text for document in read_sympy_documents() if document.group == "holonomic"]
    return collect_texts([text[:700] for text in found[:4]], LLAMA, 512, 4)


def test_retrieval_changes_what_is_fitted(modules, tmp_path):
    model, prompts = load_on_device(LLAMA, "cpu", "float32"), PromptFormat.from_tokenizer(load_tokenizer(LLAMA))
    passkeys = hide_passkeys(modules, prompts, 512, 0)
    assert passkeys[modules[0].sha256] == hide_passkeys(modules[:1], prompts, 512, 0)[modules[0].sha256]
    assert len({prompt.example.depth for prompt in passkeys.values()}) > 1
    assert all(400 < prompt.total <= 512 for prompt in passkeys.values())

    laws = make_laws("rerope:window=128", (256, 512), 2, 32)
    rows = [torch.tensor(text.tokens) for text in modules[:1]]
    hidden = [passkeys[text.sha256] for text in modules[:1]]
    values = torch.tensor([[[0.75, 0.1]]], requires_grad=True)
    with laws.learn(model, values):
        alone = descent.loss_and_gradient(FitProblem(model, laws, rows, values.detach().numpy()), values)
        both = descent.loss_and_gradient(FitProblem(model, laws, rows, values.detach().numpy(), hidden), values)
        answers = sum(descent.mean_answer_loss(model, prompt) for prompt in hidden)
        slope = torch.autograd.grad(answers, values)[0].numpy()
    assert both.loss == alone.loss and both.retrieval == pytest.approx(answers.item(), rel=1e-5)
    np.testing.assert_allclose(both.gradient - alone.gradient, RETRIEVAL_WEIGHT * slope, rtol=1e-3, atol=1e-7)

    config = CalibrationConfig(512, "rerope:window=128", levels=(), with_retrieval=True)
    with pytest.raises(ValueError, match="expected a PromptFormat"):
        fit_laws(model, modules, config)
    actual = fit_laws(model, modules, config, tmp_path, prompts=prompts)
    for row in actual.rows:
        assert row["retrieval"]["count"] == len(modules) // 2 and row["retrieval"]["loss"] > 0
    cell = actual.data["cells"][0]
    assert cell["passkey"]["answer"] == len(passkeys[cell["text"]].answer)
    assert "passkeys" in print_table(tmp_path / "calibrate.json")


def test_texts_to_fit_to_are_measured_only_where_that_decides():
    """Where a fit begins from the closed law and there is one recipe, their losses would tell nothing."""
    actual = fit_laws(llama(**SMALL), texts(4), CalibrationConfig(64, "rerope:window=8", levels=()))
    held_out = {text["sha256"] for text in actual.data["texts"] if text["part"] == "held-out"}
    assert {cell["text"] for cell in actual.data["cells"]} == held_out and actual.data["tried"] == []


def test_passkeys_under_a_law_fitted_to_the_loss_alone_are_compared(modules, tmp_path, monkeypatch):
    model, prompts = load_on_device(LLAMA, "cpu", "float32"), PromptFormat.from_tokenizer(load_tokenizer(LLAMA))
    monkeypatch.setattr(fitting, "select_law", lambda objectives, seed: ("scalar", "a test says so"))
    monkeypatch.setattr(fitting, "fit_law", lambda problem, history, on_evaluation: history.append(BEST) or "converged")
    config = CalibrationConfig(512, "rerope:window=128", levels=("scalar",))
    actual = fit_laws(model, modules, config, tmp_path, prompts=prompts)
    found, recipes = actual.data["passkeys"], {row["name"]: Recipe.from_dict(row["recipe"]) for row in actual.rows}
    names = {text["sha256"] for text in actual.data["texts"] if text["part"] == "held-out"}
    hidden = hide_passkeys([text for text in modules if text.sha256 in names], prompts, 512, 0)
    assert [*found["laws"]] == ["closed", "scalar"] and actual.warning is None
    for name, summary in found["laws"].items():
        with ise.extended(model, recipes[name]), torch.no_grad():
            scores = [score_answer(model, prompt) for prompt in hidden.values()]
        assert summary["hits"] == sum(score["likeliest"] == score["answer"] for score in scores)
        assert summary["count"] == len(hidden)
        assert summary["loss"] == pytest.approx(np.mean([-score["logprob"] / score["answer"] for score in scores]))
    rise = found["laws"]["scalar"]["loss"] - found["laws"]["closed"]["loss"]
    assert found["change"] == {"loss": pytest.approx(rise), "low": None, "high": None}  # two texts
    table = " ".join(print_table(actual.path).split())
    scores = [f"{score['hits']} of {len(hidden)}, {score['loss']:.3f}" for score in found["laws"].values()]
    assert f"closed law {scores[0]}; law selected {scores[1]}. --with-retrieval judges by these as well." in table

    lines = []
    monkeypatch.setattr(prompts.tokenizer, "decode", lambda *_, **__: "")  # nothing to hide one in
    actual = fit_laws(model, modules, config, notify=lines.append, prompts=prompts)
    assert actual.data["passkeys"] is None and lines[-1].startswith("passkeys are not counted: ")


@pytest.mark.parametrize(
    ("rises", "hits", "warns"),
    [
        (0.4 + RISES, 2, True),
        (0.4 + RISES, 0, False),  # nothing is found that could be lost
        (0.1 + RISES, 2, False),  # on four of six texts
        (0.02 + 0.01 * RISES, 2, False),  # sure, but too small
        (-0.4 + RISES, 2, False),
        ((0.4 + RISES)[:5], 2, False),  # too few for an interval
    ],
)
def test_a_law_that_answers_clearly_worse_is_warned_of(rises, hits, warns, tmp_path):
    judged = judge_answers(rises, hits, "closed")
    sure = len(rises) == 6
    assert judged["change"]["loss"] == pytest.approx(rises.mean()) and (judged["change"]["low"] is not None) == sure
    data = json.loads((RESULTS / "share" / "smollm2-selfextend-calibrate" / "calibrate.json").read_text())
    scores = {name: {"loss": 0.5, "hits": 2, "count": len(rises)} for name in ("closed", "scalar")}
    (path := tmp_path / "calibrate.json").write_text(json.dumps(data | {"passkeys": {"laws": scores} | judged}))
    table = " ".join(print_table(path).split())
    warning = "Answers are clearly worse than under the closed law, by 0.4 nats a token (95 %: 0.23 to 0.57)"
    assert (judged["warning"] is not None) == warns == (f"{warning}: fit with --with-retrieval." in table)
    assert warns != ("--with-retrieval judges by these as well" in table)


def test_counts_alone_of_an_earlier_version_are_left_out(tmp_path):
    data = json.loads((RESULTS / "share" / "smollm2-selfextend-calibrate" / "calibrate.json").read_text())
    (path := tmp_path / "calibrate.json").write_text(
        json.dumps(data | {"passkeys": {"closed": 2, "scalar": 1, "count": 6}})
    )
    assert "It may find fewer answers far back" in print_table(path)


def test_a_law_fitted_to_the_loss_alone_warns_of_lost_answers():
    warning = "It may find fewer answers far back"
    assert warning in print_table(RESULTS / "share" / "smollm2-selfextend-calibrate" / "calibrate.json")
    assert warning not in print_table(RESULTS / "smollm2" / "calibrate" / "calibrate.json")  # a temperature of all keys


def test_what_a_budget_stopped_and_what_no_temperature_repairs_is_said(tmp_path):
    stopped = RESULTS / "share" / "tinyllama-calibrate" / "calibrate.json"
    table = " ".join(print_table(stopped).split())
    assert "*: the budget stopped it, evaluations so far: fitted, one for all: 2;" in table
    assert "stopped by the budget after 2 evaluations" in build_card_rows(stopped)[5]["law"]
    assert "does not repair" not in table

    data = json.loads((RESULTS / "smollm2" / "calibrate" / "calibrate.json").read_text())
    for row in data["candidates"]:
        row["perplexity"][-2] = 2 * row["perplexity"][0]
    (path := tmp_path / "calibrate.json").write_text(json.dumps(data))
    expected = "Still 2 times the perplexity inside: a temperature does not repair distances"
    assert expected in (table := " ".join(print_table(path).split())) and "rerope:window=4096 instead" in table


def test_a_training_length_that_the_user_gives_is_not_warned_of():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        calibrate(llama(**SMALL), tokens(4, 64).tolist(), 64, train_length=8, levels="scalar", budget="1s")


def test_without_a_tokenizer_no_passkey_can_be_hidden():
    with pytest.raises(ValueError, match="token"):
        calibrate(llama(**SMALL), tokens(4, 64).tolist(), 64, "rerope:window=8", with_retrieval=True)
    lines = []
    assert load_prompt_format("", required=False, notify=lines.append) is None
    assert lines[0].startswith("passkeys are not counted: ")


KEPT = sorted(RESULTS.rglob("calibrate.json"))


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.parent.name)
def test_results_of_before_are_read(path):
    assert json.loads(path.read_text())["reason"].split()[0] in print_table(path)
    assert build_card_rows(path)[0]


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=pytest.mark.slow if n % 3 else ()) for n, path in enumerate(KEPT)],
    ids=lambda path: path.parent.name,
)
def test_results_of_before_are_drawn(path, tmp_path):
    copy = tmp_path / "calibrate.json"
    copy.write_bytes(path.read_bytes())
    assert len(draw_calibration(copy)) == 2
