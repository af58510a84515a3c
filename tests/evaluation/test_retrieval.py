"""Retrieval: prompts exactly as long as requested, what is scored, and what is kept."""

from __future__ import annotations

import copy
import json
import re

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from typer.testing import CliRunner

from isentrope.cli import app
from isentrope.data.tasks import Haystack
from isentrope.data.tasks.needles import MULTIVALUE_NEEDLES
from isentrope.data.tasks.registry import IDENTITY_TASKS
from isentrope.data.tasks.variables import CHAIN_LENGTH
from isentrope.data.tasks.vocabulary import ADJECTIVES, FILLER, NOUNS
from isentrope.evaluation import retrieval
from isentrope.evaluation.answers import generate_answer, score_answer
from isentrope.evaluation.metrics import wilson_interval
from isentrope.evaluation.prompts import Prompt, PromptFormat
from isentrope.evaluation.recipe_texts import under_recipe
from isentrope.evaluation.results import list_failures
from isentrope.evaluation.retrieval import RetrievalConfig, measure_retrieval
from isentrope.models.tokenizer import build_character_tokenizer, make_causal_tokenizer
from isentrope.report.figures.retrieval import draw_heatmaps
from isentrope.report.tables.retrieval import build_retrieval_table
from tests.fixtures.models import llama
from tests.fixtures.needles import FILLED, made, solved

RECIPES = ("plain", "rerope:window=16")
CHAT = "{{ bos_token }}{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<assistant>"


@pytest.fixture(scope="module")
def letters():
    """A token a character."""
    return make_causal_tokenizer(build_character_tokenizer([FILLER + "".join(map(chr, range(32, 127)))]))


@pytest.fixture(scope="module")
def merges():
    """Bytes merged into words, after a token that begins every text."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    backend.train_from_iterator([FILLER, " ".join(NOUNS + ADJECTIVES)], trainer)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


def with_chat(tokenizer, template):
    copied = copy.deepcopy(tokenizer)
    copied.chat_template = template
    return copied


def tiny(tokenizer):
    return llama(vocab_size=len(tokenizer), initializer_range=0.1)


def small(tasks=("passkey", "variables"), **others):
    return RetrievalConfig(RECIPES, tasks, **({"lengths": (600, 700), "depths": (0, 100), "examples": 2} | others))


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("task", IDENTITY_TASKS)
def test_as_long_as_asked_and_never_longer(task, chat, merges, letters):
    for tokenizer, off in ((merges, 12), (letters, 25)):
        prompts = PromptFormat.from_tokenizer(with_chat(tokenizer, CHAT) if chat else tokenizer)
        assert prompts.chat == chat
        for length in (700, 1201, 2000):
            prompt = prompts.build_prompt(made(task, length, measure=prompts.count_tokens))
            assert length - off <= prompt.total <= length
            assert prompt.total == len(prompt.tokens) + len(prompt.answer) + 8 * len(prompt.example.answers)


def test_too_short(letters, tmp_path):
    with pytest.raises(ValueError, match=r"length: expected \d+ tokens or more"):
        made("variables", length=200)
    with pytest.raises(ValueError, match=r"lengths: expected \d+ tokens or more for variables, got 450"):
        measure_retrieval(
            tiny(letters),
            "tiny",
            PromptFormat.from_tokenizer(letters),
            FILLED,
            small(lengths=(450, 900)),
            tmp_path / "out",
        )
    assert not (tmp_path / "out").exists()


# prompts


def test_a_plain_prompt(merges):
    prompts, example = PromptFormat.from_tokenizer(merges), made("passkey")
    prompt = prompts.build_prompt(example)
    assert prompt.tokens[0] == 0 and 0 not in prompt.tokens[1:]
    assert merges.decode(prompt.tokens[1:]) == f"{example.user_message}\nThe pass key is the number"
    assert merges.decode(prompt.answer) == f" {example.answers[0]}"
    with pytest.raises(ValueError, match="chat template, got one without"):
        PromptFormat.from_tokenizer(merges, chat=True)


def test_a_chat_prompt(merges):
    chatty = with_chat(merges, CHAT.replace("<assistant>", "{{ strftime_now('%Y') }}<assistant>"))
    prompts, example = PromptFormat.from_tokenizer(chatty), made("words")
    prompt = prompts.build_prompt(example)
    assert prompts.chat and not PromptFormat.from_tokenizer(chatty, chat=False).chat
    # the template has the first token already, and no day of the year
    assert prompt.text == f"<s><user>{example.user_message}01 January 2025<assistant>The 3 most frequent words are"
    assert prompt.tokens.count(0) == 1 and merges.decode(prompt.tokens) == prompt.text


def test_tokenizers_that_cannot_say_it(letters):
    without_digits = make_causal_tokenizer(build_character_tokenizer([re.sub(r"\d", "", FILLER)]))
    with pytest.raises(ValueError, match="expected it to spell"):
        PromptFormat.from_tokenizer(without_digits).build_prompt(made("passkey"))

    class Joins(PromptFormat):
        def tokenize(self, text):
            asks = text.endswith("number")
            return super().tokenize(text)[: -1 if asks else None] + ((1,) if asks else ())

    with pytest.raises(ValueError, match="same tokens when its answer follows"):
        Joins(letters, False).build_prompt(made("passkey"))


def test_what_is_found_in_a_reply():
    example = made("passkey")
    answer = example.answers[0]
    assert example.count_answers(f" {answer}. Or 1") == example.count_answers(f"it:{answer}") == 1
    assert example.count_answers(f"{answer}7") == example.count_answers("") == example.count_answers(f"x{answer}") == 0
    example = made("variables")
    right, wrong = example.answers, example.decoys
    assert example.count_answers(" and ".join(right[::-1]).lower()) == CHAIN_LENGTH
    assert example.count_answers(f"{right[2]}, {right[2]}, {right[0]}") == 2
    assert example.count_answers(" ".join(wrong + right)) == 0  # all there is, the wrong ones first
    assert made("multikey").count_answers(made("multikey").decoys[0] + made("multikey").answers[0]) == 0


# scores


@pytest.mark.parametrize("recipe", RECIPES)
def test_forced_and_generated_agree(recipe, letters):
    model, prompt = tiny(letters), PromptFormat.from_tokenizer(letters).build_prompt(made("passkey", length=400))
    ids = torch.tensor([prompt.tokens])
    with under_recipe(model, recipe), torch.inference_mode():
        said = ids
        for _ in range(6):
            said = torch.cat((said, model(said).logits[:, -1:].argmax(-1)), 1)
        told = Prompt(prompt.example, prompt.text, prompt.tokens, tuple(said[0, -6:].tolist()))
        actual, reply = score_answer(model, told), generate_answer(model, letters, told)["reply"]
        expected = model(said).logits[0, -7:-1].log_softmax(-1).gather(1, said[0, -6:, None]).sum()
        assert reply.startswith(letters.decode(said[0, -6:], skip_special_tokens=True))
        assert actual["likeliest"] == actual["answer"] == 6
        assert actual["logprob"] == pytest.approx(expected.item(), rel=1e-4)
        wrong = Prompt(prompt.example, prompt.text, prompt.tokens, (*told.answer[:-1], (told.answer[-1] + 1) % 90))
        assert score_answer(model, wrong)["likeliest"] == 5


def test_generation_is_greedy_whatever_the_model_prefers(letters):
    prompt, plain, liking = (
        PromptFormat.from_tokenizer(letters).build_prompt(made("passkey", length=400)),
        tiny(letters),
        tiny(letters),
    )
    liking.generation_config.update(do_sample=True, temperature=9.0, repetition_penalty=5.0, num_beams=3)
    assert generate_answer(plain, letters, prompt) == generate_answer(liking, letters, prompt)


@pytest.mark.parametrize("kept", [0, 1, MULTIVALUE_NEEDLES])
def test_hits_and_shares(kept, letters, tmp_path):
    model = tiny(letters)

    def says(ids, **options):
        answers = solved(letters.decode(ids[0]))[:kept]
        reply = letters(f" {', '.join(answers)}.")["input_ids"]
        assert len(reply) <= options["max_new_tokens"] and not options["do_sample"]
        return torch.cat((ids, torch.tensor([reply])), 1)

    model.generate = says
    config = RetrievalConfig(("plain",), ("needle", "multivalue"), (800,), (0, 100), 2)
    results = measure_retrieval(model, "oracle", PromptFormat.from_tokenizer(letters), FILLED, config, tmp_path)
    rows = {row["task"]: row for row in json.loads(results.read_text())["rows"]}
    assert list_failures(results, config.recipes, config.cells) == []
    assert rows["needle"]["hits"] == (4 if kept else 0) and rows["needle"]["count"] == 4
    assert rows["needle"]["share"] == (1 if kept else 0)
    assert rows["multivalue"]["hits"] == (2 if kept == MULTIVALUE_NEEDLES else 0)
    assert rows["multivalue"]["share"] == kept / MULTIVALUE_NEEDLES
    assert (rows["needle"]["low"], rows["needle"]["high"]) == pytest.approx(wilson_interval(rows["needle"]["hits"], 4))


@pytest.mark.parametrize(
    ("hits", "count", "low", "high"),
    [(0, 10, 0, 0.27753), (10, 10, 0.72247, 1), (5, 10, 0.23659, 0.76341), (1, 4, 0.04559, 0.69936)],
)
def test_wilson(hits, count, low, high):
    assert wilson_interval(hits, count) == pytest.approx((low, high), abs=1e-5)


# runs


def test_what_is_kept_of_a_cell(letters, tmp_path):
    model = tiny(letters)
    before = [x.clone() for x in model.parameters()]
    results = measure_retrieval(
        model, "tiny", PromptFormat.from_tokenizer(letters), FILLED, small(lengths=(600,)), tmp_path
    )
    data = json.loads(results.read_text())
    assert (
        not list_failures(results, small(lengths=(600,)).recipes, small(lengths=(600,)).cells)
        and len(data["cells"]) == 2 * (2 + 1)
        and len(data["rows"]) == 4
    )
    for cell in data["cells"]:
        assert cell["count"] == len(cell["examples"]) == 2 and cell["failed"] is None
        assert cell["length"] - 25 <= cell["tokens"][0] <= cell["tokens"][1] <= cell["length"]
        assert cell["depth"] in ((0, 100) if cell["task"] == "passkey" else (None,))
        assert [x["place"] for x in cell["examples"]] == [None if cell["depth"] is None else cell["depth"] / 100] * 2
        assert cell["logprob"] < 0 <= cell["likeliest"] <= 1 and cell["seconds"]["generated"] > 0
    hashes = {(cell["task"], cell["length"], cell["depth"]): set() for cell in data["cells"]}
    for cell in data["cells"]:
        hashes[cell["task"], cell["length"], cell["depth"]].add(cell["sha256"])
    assert all(len(each) == 1 for each in hashes.values())  # every recipe is asked the same
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert data["run"]["torch"] == torch.__version__


def test_an_interrupted_run_goes_on(letters, tmp_path, monkeypatch):
    real, asked, last = retrieval._measure_cell, [], 5

    def counted(*args):
        asked.append(args[2:4])
        if len(asked) == last:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(retrieval, "_measure_cell", counted)

    def measured(config, out=tmp_path):
        return json.loads(
            measure_retrieval(
                tiny(letters), "tiny", PromptFormat.from_tokenizer(letters), FILLED, config, out
            ).read_text()
        )

    config = small(score="forced", examples=1)
    with pytest.raises(KeyboardInterrupt):
        measured(config, tmp_path / "cut")
    assert len(json.loads((tmp_path / "cut" / "retrieval.json").read_text())["cells"]) == 4
    cut = measured(config, tmp_path / "cut")
    assert len(asked) == 13 and asked[4] == asked[5]
    whole = measured(config)
    assert cut["rows"] == whole["rows"] and cut["config"] == whole["config"]
    # more of it: what is there stays, and what was not generated is
    asked, last = [], None
    data = measured(small(("words",), lengths=(550,), score="forced", examples=1))
    assert len(asked) == 2 and data["config"]["lengths"] == [550, 600, 700]
    assert data["config"]["tasks"] == ["passkey", "variables", "words"] and len(data["cells"]) == 14
    data = measured(small(("passkey",), lengths=(600,), depths=(0,), examples=1))
    assert len(asked) == 4 and sum(cell["share"] is not None for cell in data["cells"]) == 2
    assert not list(tmp_path.rglob("*.partial"))


def test_results_of_something_else(letters, tmp_path):
    config = RetrievalConfig(("plain",), ("passkey",), (400,), (50,), 1, score="forced")
    plain = PromptFormat.from_tokenizer(letters)
    measure_retrieval(tiny(letters), "tiny", plain, FILLED, config, tmp_path)
    others = [
        ("other", plain, FILLED, {}),
        ("tiny", plain, Haystack.from_texts(["Other words. " * 9]), {}),
        ("tiny", PromptFormat.from_tokenizer(with_chat(letters, CHAT)), FILLED, {}),
        ("tiny", plain, FILLED, {"seed": 1}),
        ("tiny", plain, FILLED, {"examples": 2}),
    ]
    for name, prompts, haystack, changed in others:
        with pytest.raises(ValueError, match="choose another folder"):
            measure_retrieval(
                tiny(letters), name, prompts, haystack, RetrievalConfig(**(vars(config) | changed)), tmp_path
            )


@pytest.mark.parametrize("content", ["", '{"model": {', "{}"])
def test_broken_results_are_named_and_measured_again(letters, tmp_path, caplog, content):
    config = RetrievalConfig(("plain",), ("passkey",), (400,), (50,), 1, score="forced")
    path = measure_retrieval(tiny(letters), "tiny", PromptFormat.from_tokenizer(letters), FILLED, config, tmp_path)
    whole = json.loads(path.read_text())
    path.write_text(content)
    measure_retrieval(tiny(letters), "tiny", PromptFormat.from_tokenizer(letters), FILLED, config, tmp_path)
    assert json.loads(path.read_text())["rows"] == whole["rows"]
    assert f"{path}: expected " in caplog.messages[0] and caplog.messages[0].endswith("all is measured again")


def test_a_cell_that_fails_is_told_and_tried_again(letters, tmp_path, monkeypatch):
    real, model = retrieval.score_answer, tiny(letters)

    def tight(model, prompt):
        if prompt.total > 650 and hasattr(model, "_isentrope"):
            raise torch.OutOfMemoryError("no room\nat all")
        return real(model, prompt)

    monkeypatch.setattr(retrieval, "score_answer", tight)
    results = measure_retrieval(
        model, "tiny", PromptFormat.from_tokenizer(letters), FILLED, small(score="forced"), tmp_path
    )
    data = json.loads(results.read_text())
    wrong = [cell for cell in data["cells"] if cell["failed"]]
    lost = list_failures(results, small(score="forced").recipes, small(score="forced").cells)
    assert len(lost) == len(wrong) == 3 and all(words.endswith(": out of memory: no room") for words in lost)
    assert {cell["failed"] for cell in wrong} == {"out of memory: no room"}
    assert {(cell["recipe"], cell["length"]) for cell in wrong} == {(RECIPES[1], 700)}
    assert all(cell["likeliest"] is None and cell["count"] == 0 for cell in wrong) and len(data["cells"]) == 12
    assert any("failed" in str(column._cells) for column in build_retrieval_table(results).columns)
    assert draw_heatmaps(results)
    monkeypatch.setattr(retrieval, "score_answer", real)
    measure_retrieval(model, "tiny", PromptFormat.from_tokenizer(letters), FILLED, small(score="forced"), tmp_path)
    assert list_failures(results, small(score="forced").recipes, small(score="forced").cells) == []


def test_numbers_that_are_none_and_positions_that_end(letters, tmp_path):
    config = RetrievalConfig(("plain",), ("passkey",), (400,), (50,), 1, score="forced")
    model = tiny(letters)
    model.lm_head.weight = torch.nn.Parameter(torch.full_like(model.lm_head.weight, torch.nan))
    results = measure_retrieval(model, "tiny", PromptFormat.from_tokenizer(letters), FILLED, config, tmp_path / "nan")
    assert len(list_failures(results, config.recipes, config.cells)) == 1
    sizes = {"n_positions": 64, "n_embd": 16, "n_layer": 1, "n_head": 2}
    ended = GPT2LMHeadModel(GPT2Config(vocab_size=len(letters), bos_token_id=None, eos_token_id=None, **sizes))
    results = measure_retrieval(ended, "tiny", PromptFormat.from_tokenizer(letters), FILLED, config, tmp_path / "end")
    assert len(list_failures(results, config.recipes, config.cells)) == 1
    assert "index" in json.loads(results.read_text())["cells"][0]["failed"]


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (lambda: small(()), "tasks: expected some of passkey"),
        (lambda: small(("passkey", "hay")), "tasks: unknown 'hay'"),
        (lambda: small(lengths=(512, 512)), "lengths: expected positive numbers, each once"),
        (lambda: small(lengths=(0,)), "lengths"),
        (lambda: small(depths=(0, 101)), "depths: expected numbers from 0 to 100"),
        (lambda: small(examples=0), "examples: expected 1 or more, got 0"),
        (lambda: small(score="loud"), "score: expected one of both, forced, got 'loud'"),
        (lambda: RetrievalConfig((), ("words",), (512,)), "recipes"),
        (lambda: RetrievalConfig(("rerop:window=3",), ("words",), (512,)), "did you mean"),
        (lambda: RetrievalConfig.parse(["plain"], "words", "1k", "0"), "such as 512,1024, got '1k'"),
    ],
)
def test_bad_settings(action, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        action()


def test_recipes_that_a_model_refuses_are_refused_first(letters, tmp_path):
    config = RetrievalConfig(("plain", "cosine:alpha=16"), ("passkey",), (400,), (50,), 1)
    with pytest.raises(ValueError, match="was not trained with"):
        measure_retrieval(tiny(letters), "tiny", PromptFormat.from_tokenizer(letters), FILLED, config, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.figures
def test_the_command(letters, tmp_path, monkeypatch):
    folder, out = tmp_path / "model", tmp_path / "out"
    tiny(letters).save_pretrained(folder)
    letters.save_pretrained(folder)
    (tmp_path / "book.txt").write_text("It rained. Nobody came. " * 20)
    words = f"retrieval {folder} --recipe plain --recipe rerope:window=16 --lengths 500 --depths 0,100 --examples 1"
    words += f" --tasks passkey,words --data {tmp_path / 'book.txt'} --out {out}"
    done = CliRunner().invoke(app, words.split())
    assert done.exit_code == 0, done.output
    assert "rerope:window=16" in done.output and "Percent of the answers" in done.output
    pictures = {f"retrieval-{task}.{kind}" for task in ("passkey", "words") for kind in ("png", "svg")}
    assert {path.name for path in out.iterdir()} == pictures | {"retrieval.json"}
    assert all((out / name).stat().st_size > 1000 for name in pictures)
    then = (out / "retrieval.json").stat().st_mtime_ns
    assert CliRunner().invoke(app, [*words.split(), "--score", "forced"]).exit_code == 0
    assert (out / "retrieval.json").stat().st_mtime_ns == then  # nothing was missing
    helped = CliRunner().invoke(app, ["retrieval", "--help"]).output
    assert "isentrope retrieval MODEL --recipe plain" in helped

    def breaks(*args):
        raise RuntimeError("broken")

    monkeypatch.setattr(retrieval, "score_answer", breaks)
    broken = CliRunner().invoke(app, [*words.split()[:-1], str(tmp_path / "broken")])
    assert broken.exit_code == 1 and "6 cells failed" in broken.output
    refused = CliRunner().invoke(app, [*words.split(), "--tasks", "passkeys"])
    assert refused.exit_code == 2 and "unknown 'passkeys'; did you mean 'passkey'?" in refused.output
