"""lm-evaluation-harness: its numbers under a recipe are those worked out by hand, and its results have its shape."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from importlib.metadata import entry_points
from math import exp
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import isentrope as ise
from isentrope import models

lm_eval = pytest.importorskip("lm_eval", reason="needs lm-eval: pip install 'isentrope[harness]'")
from lm_eval._cli import HarnessCLI  # noqa: E402
from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from isentrope.evaluation.lm_eval import Isentrope, _parse_argument  # noqa: E402

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "lm-eval.md"
LLAMA = str(Path(models.__file__).parent / "shipped" / "llama")  # trained at 256 characters
FIRST = 2  # the token before a text: this model has none of its own
ARGUMENTS = {"pretrained": LLAMA, "dtype": "float32", "prefix_token_id": FIRST, "max_length": 2048}
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
"""
CHOICE = """
output_type: multiple_choice
doc_to_text: "{{context}}"
doc_to_choice: choices
doc_to_target: right
target_delimiter: ""
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
ROLLING = """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: byte_perplexity, aggregation: weighted_perplexity, higher_is_better: false}]
"""


def source(at: int, length: int) -> str:
    import sympy.core.expr

    return Path(sympy.core.expr.__file__).read_text(encoding="utf-8")[at : at + length].strip()


@pytest.fixture(scope="module")
def questions():
    """How a text goes on, two to three times the training length from its beginning."""
    texts = [source(3000 * i, 520 + 90 * i) for i in range(4)]
    return [{"context": text[:-9], "choices": ["zzzz", text[-9:], "def f("], "right": 1} for text in texts]


@pytest.fixture(scope="module")
def texts():
    return [{"text": source(5000 * i, 700 + 150 * i)} for i in range(3)]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory, questions, texts):
    """A folder with two tasks."""
    folder = tmp_path_factory.mktemp("tasks")
    for name, rows, task in (("choice", questions, CHOICE), ("rolling", texts, ROLLING)):
        file = folder / f"{name}.jsonl"
        file.write_text("\n".join(json.dumps(row) for row in rows))
        (folder / f"{name}.yaml").write_text(TASK.format(name=f"local_{name}", file=file) + task)
    return folder


def evaluate(tasks, model="isentrope", **arguments):
    return lm_eval.simple_evaluate(
        model=model,
        model_args=ARGUMENTS | arguments,
        tasks=["local_choice", "local_rolling"],
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        device="cpu",
        batch_size=3,
        bootstrap_iters=0,
    )


def by_hand(recipe, questions, texts):
    """Log-likelihoods of every choice, and of the texts."""
    tokenizer = AutoTokenizer.from_pretrained(LLAMA)
    model = AutoModelForCausalLM.from_pretrained(LLAMA, dtype=torch.float32).eval()
    if recipe != "plain":
        ise.extend(model, recipe)

    def likelihood(before: list[int], after: list[int]) -> float:
        ids = torch.tensor([before + after])
        with torch.no_grad():
            logs = model(ids[:, :-1]).logits[0, -len(after) :].log_softmax(-1)
        return logs.gather(1, ids[0, -len(after) :, None]).sum().item()

    read = tokenizer.encode
    choices = [[likelihood(read(row["context"]), read(c)) for c in row["choices"]] for row in questions]
    return choices, [likelihood([FIRST], read(row["text"])) for row in texts]


@pytest.mark.parametrize(
    "recipe", ["plain", "rerope:window=128+infoscale", "selfextend:window=128,group=8+infoscale", "yarn:factor=8"]
)
def test_the_numbers_are_those_by_hand(recipe, tasks, questions, texts):
    actual = evaluate(tasks, recipe=recipe.replace(",", ";"))
    choices, rolling = by_hand(recipe, questions, texts)
    for sample in actual["samples"]["local_choice"]:
        told = [float(answer[0][0]) for answer in sample["resps"]]
        assert told == pytest.approx(choices[sample["doc_id"]], abs=1e-3)
    right = [max(range(3), key=row.__getitem__) == 1 for row in choices]
    assert actual["results"]["local_choice"]["acc,none"] == pytest.approx(sum(right) / len(right))
    length = sum(len(row["text"].encode()) for row in texts)
    perplexity = exp(-sum(rolling) / length)
    assert actual["results"]["local_rolling"]["byte_perplexity,none"] == pytest.approx(perplexity, rel=1e-5)
    # this model cannot read on past its training length by itself
    assert (perplexity > 4) == (recipe == "plain")


def test_without_a_recipe_it_is_the_type_hf(tasks):
    plain = evaluate(tasks, max_length=None)
    assert plain["config"]["model_recipe"] == "plain"
    assert plain["results"] == evaluate(tasks, model="hf", max_length=None)["results"]


def test_the_guides_command_writes_the_harness_own_results(tasks, tmp_path):
    (command,) = re.findall(
        r"^python -m isentrope.evaluation.lm_eval .*$", GUIDE.read_text(encoding="utf-8"), re.MULTILINE
    )
    model = f"{LLAMA},dtype=float32,prefix_token_id={FIRST}"
    for word, meant in (("MODEL", model), ("window=4096", "window=128"), ("32768", "2048"), ("TASK", "local_rolling")):
        assert word in command
        command = command.replace(word, meant)
    program, *words = shlex.split(command)
    assert program == "python"
    words += ["--include_path", str(tasks), "--device", "cpu"]
    subprocess.run([sys.executable, *words], cwd=tmp_path, check=True, capture_output=True)
    (file,) = tmp_path.glob("results/*/results_*.json")
    data = json.loads(file.read_text())
    assert {"results", "configs", "versions", "n-shot", "n-samples", "higher_is_better", "config"} <= set(data)
    assert data["config"]["model"] == "isentrope"
    assert data["config"]["model_recipe"] == "selfextend:window=128,group=8+infoscale:train_length=256"
    assert data["config"]["isentrope_version"] == ise.__version__
    assert data["max_length"] == 2048
    same = evaluate(tasks, recipe="selfextend:window=128,group=8+infoscale")["results"]["local_rolling"]
    assert data["results"]["local_rolling"]["byte_perplexity,none"] == pytest.approx(same["byte_perplexity,none"])


def test_the_guides_other_way_to_write_a_recipe(monkeypatch):
    (words,) = re.findall(r"`(--model_args '.*?')`", GUIDE.read_text(encoding="utf-8"))
    monkeypatch.setattr(sys, "argv", ["lm_eval", "run", *shlex.split(words)])
    given = HarnessCLI().parse_args().model_args
    assert given == {"pretrained": "MODEL", "recipe": "selfextend:window=4096,group=8+infoscale"}


def test_replies_are_those_of_the_extended_model(tasks):
    """RULER's tasks are of this kind. The model has no token that ends a text."""
    prompt, recipe = source(3000, 700), "rerope:window=128+infoscale"
    request = Instance("generate_until", {}, (prompt, {"until": ["\n\n\n"], "max_gen_toks": 24, "do_sample": False}), 0)
    (reply,) = Isentrope(**ARGUMENTS, recipe=recipe, device="cpu").generate_until([request])
    tokenizer = AutoTokenizer.from_pretrained(LLAMA)
    model = AutoModelForCausalLM.from_pretrained(LLAMA, dtype=torch.float32).eval()
    ids = torch.tensor([tokenizer.encode(prompt)])
    told = ise.extend(model, recipe).generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False
    )
    assert len(reply) > 0 and tokenizer.decode(told[0, ids.shape[1] :]).startswith(reply)


def test_a_model_saved_with_a_recipe_brings_it(tasks, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(LLAMA, dtype=torch.float32)
    ise.extend(model, "rerope:window=128").save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(LLAMA).save_pretrained(tmp_path)
    saved = evaluate(tasks, pretrained=str(tmp_path))
    assert saved["config"]["model_recipe"] == "rerope:window=128"
    assert saved["results"] == evaluate(tasks, recipe="rerope:window=128")["results"]
    with pytest.raises(ValueError, match="expected none for a model saved with 'rerope:window=128', got 'plain'"):
        Isentrope(str(tmp_path), recipe="plain", device="cpu")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"recipe": "rerop:window=64"}, "unknown part 'rerop'; did you mean 'rerope'"),
        ({"recipe": "rerope:windw=64"}, "unknown option 'windw'; did you mean 'window'"),
        ({"recipe": "selfextend:window=64", "group": 8}, "expected ; in place of , .* and group apart from it"),
        ({"recipe": 4}, "recipe: expected its text, got 4"),
        ({"recipe": ""}, "recipe: expected text such as"),
    ],
)
def test_a_wrong_recipe_is_refused_before_a_model_is_loaded(arguments, message):
    with pytest.raises(ValueError, match=message):
        Isentrope("no/such/model", **arguments)


@pytest.mark.parametrize("recipe", ["infoscale:count=sequence", "ntk:factor=2,dynamic=true", "clex"])
def test_padded_rows_are_refused_where_their_length_counts(recipe):
    with pytest.raises(ValueError, match=r"batch_size: expected 1 under .*, got 2"):
        Isentrope(LLAMA, recipe=recipe, device="cpu", batch_size=2)


def test_inputs_cut_to_the_models_own_length_are_told_of(caplog):
    assert Isentrope(LLAMA, recipe="infoscale", device="cpu").max_length == 256
    assert "inputs are cut to 256 tokens" in caplog.text


def test_versions_with_plugins_find_it():
    (actual,) = entry_points(group="lm_eval.models", name="isentrope")
    assert actual.load() is Isentrope


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("selfextend:window=64;group=8+infoscale", "selfextend:window=64,group=8+infoscale"),
        (
            "layers:0;2=rope;1;3-=selfextend:window=64;group=8+power:gamma=(1;2;);keys=far;count=position",
            "layers:0,2=rope;1,3-=selfextend:window=64,group=8+power:gamma=(1,2,),keys=far,count=position",
        ),
        ("layers:0=sink:sinks=2;size=8;*=plain", "layers:0=sink:sinks=2,size=8;*=plain"),
    ],
)
def test_semicolons_stand_for_commas_but_between_layers(given, text):
    assert _parse_argument(given, {}) == text
    assert _parse_argument(text, {}) == text
