"""Retrieval: examples that are the same everywhere and exactly as long as asked, what is scored, and what is kept."""

from __future__ import annotations

import copy
import hashlib
import json
import re
from collections import Counter
from itertools import pairwise

import pytest
import torch
from isentrope.study.causal import retrieval
from isentrope.study.causal.perplexity import under
from isentrope.study.causal.retrieval import Config, Prompt, Prompts, failures, forced, generated, run, wilson
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from typer.testing import CliRunner

from isentrope.cli import app
from isentrope.data.filler import FILLER, QUALITIES, THINGS
from isentrope.data.needles import COMMON, LINKS, PLACED, TASKS, VALUES, Haystack, draft, filled
from isentrope.models.tokenizer import character_tokenizer, without_marks
from isentrope.report import retrieval as report
from tests.hf.tiny import llama

FILLED = Haystack.of()
RECIPES = ("plain", "rerope:window=16")
CHAT = "{{ bos_token }}{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<assistant>"


@pytest.fixture(scope="module")
def letters():
    """A token a character."""
    return without_marks(character_tokenizer([FILLER + "".join(map(chr, range(32, 127)))]))


@pytest.fixture(scope="module")
def merges():
    """Bytes merged into words, after a token that begins every text."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    backend.train_from_iterator([FILLER, " ".join(THINGS + QUALITIES)], trainer)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


def made(task, length=600, depth=50, seed=0, index=0, haystack=FILLED, measure=lambda x: len(x.asked + x.reply)):
    place = depth if task in PLACED else None
    return filled(draft(task, length, place, seed, index, haystack), length, measure)


def with_chat(tokenizer, template):
    found = copy.deepcopy(tokenizer)
    found.chat_template = template
    return found


def tiny(tokenizer):
    return llama(vocab_size=len(tokenizer), initializer_range=0.1)


def small(tasks=("passkey", "variables"), **others):
    return Config(RECIPES, tasks, **({"lengths": (600, 700), "depths": (0, 100), "examples": 2} | others))


def solved(prompt):
    """The answers, from nothing but the text and how the reply begins."""
    text, lead = prompt.rsplit("\n", 1)
    if lead.startswith("The codes for"):
        return re.findall(rf"A code for the {lead[18:-16]} is the number (\d+)\.", text)
    if lead.startswith("The variables"):
        held = {re.search(r"\d+", lead)[0]}
        steps = re.findall(r"Let (\w+) = (\w+)\.", text)
        return [name for name, value in steps if value in held and not held.add(name)]
    if lead.startswith(f"The {COMMON} most frequent"):
        counts = Counter(re.findall(r"\w+", text.split("\n\n")[1])).most_common(COMMON + 1)
        assert counts[COMMON - 1][1] >= 3 * counts[COMMON][1]
        return [word for word, _ in counts[:COMMON]]
    return re.findall(rf"{lead} (\d+)\.", text)


# examples


def test_the_same_examples_everywhere():
    told = json.dumps([[x.asked, x.lead, x.answers] for x in (made(task, index=i) for task in TASKS for i in (0, 1))])
    assert hashlib.sha256(told.encode()).hexdigest()[:16] == "87987b370e687a50"


@pytest.mark.parametrize("task", TASKS)
def test_examples_differ_by_seed_index_length_and_depth(task):
    others = [{}, {"seed": 1}, {"index": 1}, {"length": 601}] + [{"depth": 51}] * (task in PLACED)
    texts = {made(task, **other).asked for other in others}
    assert len(texts) == len(others)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("index", range(3))
def test_the_answer_follows_from_the_text(task, index):
    example = made(task, length=1500, index=index)
    assert sorted(solved(f"{example.asked}\n{example.lead}")) == sorted(example.answers)
    assert len(example.answers) == {"multivalue": VALUES, "variables": LINKS, "words": COMMON}.get(task, 1)


@pytest.mark.parametrize("task", TASKS)
def test_how_often_answers_are_in_the_text(task):
    example = made(task, length=1500)
    counts = [example.text.count(answer) for answer in example.answers]
    if task == "variables":  # each but the last is given to the next
        assert counts == [2] * (LINKS - 1) + [1]
    elif task == "words":
        others = Counter(example.text.split(", "))
        assert min(counts) >= 3 * max(count for word, count in others.items() if word not in example.answers)
    else:
        assert set(counts) == {1}
    assert not any(answer in example.question + example.lead for answer in example.answers)


def test_numbers_of_the_text_are_not_used():
    taken = made("passkey").answers[0]
    assert made("passkey", haystack=Haystack.of([f"{FILLER} It was {taken} then."])).answers[0] != taken


@pytest.mark.parametrize("depth", [0, 10, 37.5, 50, 90, 100])
@pytest.mark.parametrize("text", [FILLER, "河水流过山谷。" * 40 + "鸟在树上。" * 30, "no sentence ends here " * 50])
def test_depth(depth, text):
    example = made("needle", length=2000, depth=depth, haystack=Haystack.of([text]))
    before, after = example.text.split(f"{example.lead} {example.answers[0]}.")
    share = len(before) / len(before + after)
    assert example.place == pytest.approx(share, abs=0.01)
    assert share == pytest.approx(depth / 100, abs=0.1)
    if text is FILLER:
        assert before == "" or before.rstrip().endswith(".")


@pytest.mark.parametrize("text", [FILLER, "  a\n\n b。c\td！！ " + "x" * 100, "one"])
def test_pieces_are_the_text(text):
    haystack = Haystack.of([text])
    assert "".join(haystack.pieces).strip() == text.strip()
    pieces, between = haystack.before(haystack.ends[-1], 3 * len(haystack.pieces) + 1)
    assert between[0] == 0 and between[-1] == len(pieces) == 3 * len(haystack.pieces) + 1
    assert all(a < b for a, b in pairwise(between))


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("task", TASKS)
def test_as_long_as_asked_and_never_longer(task, chat, merges, letters):
    for tokenizer, off in ((merges, 12), (letters, 25)):
        prompts = Prompts.of(with_chat(tokenizer, CHAT) if chat else tokenizer)
        assert prompts.chat == chat
        for length in (700, 1201, 2000):
            prompt = prompts.prompt(made(task, length, measure=prompts.measure))
            assert length - off <= prompt.total <= length
            assert prompt.total == len(prompt.tokens) + len(prompt.answer) + 8 * len(prompt.example.answers)


def test_too_short(letters, tmp_path):
    with pytest.raises(ValueError, match=r"length: expected \d+ tokens or more"):
        made("variables", length=200)
    with pytest.raises(ValueError, match=r"lengths: expected \d+ tokens or more for variables, got 450"):
        run(tiny(letters), "tiny", Prompts.of(letters), FILLED, small(lengths=(450, 900)), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (lambda: draft("haystack", 100, 50, 0, 0, FILLED), "task: expected one of passkey"),
        (lambda: draft("passkey", 100, None, 0, 0, FILLED), "depth: expected 0 … 100 for passkey, got None"),
        (lambda: draft("passkey", 100, 101, 0, 0, FILLED), "depth: expected 0 … 100"),
        (lambda: draft("words", 100, 50, 0, 0, FILLED), "depth: expected None for words, got 50"),
        (lambda: Haystack.of([" \n"]), "text: expected some"),
    ],
)
def test_bad_examples(action, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        action()


# prompts


def test_a_plain_prompt(merges):
    prompts, example = Prompts.of(merges), made("passkey")
    prompt = prompts.prompt(example)
    assert prompt.tokens[0] == 0 and 0 not in prompt.tokens[1:]
    assert merges.decode(prompt.tokens[1:]) == f"{example.asked}\nThe pass key is the number"
    assert merges.decode(prompt.answer) == f" {example.answers[0]}"
    with pytest.raises(ValueError, match="chat template, got one without"):
        Prompts.of(merges, chat=True)


def test_a_chat_prompt(merges):
    chatty = with_chat(merges, CHAT.replace("<assistant>", "{{ strftime_now('%Y') }}<assistant>"))
    prompts, example = Prompts.of(chatty), made("words")
    prompt = prompts.prompt(example)
    assert prompts.chat and not Prompts.of(chatty, chat=False).chat
    # the template has the first token already, and no day of the year
    assert prompt.text == f"<s><user>{example.asked}01 January 2025<assistant>The 3 most frequent words are"
    assert prompt.tokens.count(0) == 1 and merges.decode(prompt.tokens) == prompt.text


def test_tokenizers_that_cannot_say_it(letters):
    without_digits = without_marks(character_tokenizer([re.sub(r"\d", "", FILLER)]))
    with pytest.raises(ValueError, match="expected it to spell"):
        Prompts.of(without_digits).prompt(made("passkey"))

    class Joins(Prompts):
        def tokens(self, text):
            asks = text.endswith("number")
            return super().tokens(text)[: -1 if asks else None] + ((1,) if asks else ())

    with pytest.raises(ValueError, match="same tokens when its answer follows"):
        Joins(letters, False).prompt(made("passkey"))


def test_what_is_found_in_a_reply():
    example = made("passkey")
    answer = example.answers[0]
    assert example.found(f" {answer}. Or 1") == example.found(f"it:{answer}") == 1
    assert example.found(f"{answer}7") == example.found("") == example.found(f"x{answer}") == 0
    example = made("variables")
    right, wrong = example.answers, example.decoys
    assert example.found(" and ".join(right[::-1]).lower()) == LINKS
    assert example.found(f"{right[2]}, {right[2]}, {right[0]}") == 2
    assert example.found(" ".join(wrong + right)) == 0  # all there is, the wrong ones first
    assert made("multikey").found(made("multikey").decoys[0] + made("multikey").answers[0]) == 0


# scores


@pytest.mark.parametrize("recipe", RECIPES)
def test_forced_and_generated_agree(recipe, letters):
    model, prompt = tiny(letters), Prompts.of(letters).prompt(made("passkey", length=400))
    ids = torch.tensor([prompt.tokens])
    with under(model, recipe), torch.inference_mode():
        said = ids
        for _ in range(6):
            said = torch.cat((said, model(said).logits[:, -1:].argmax(-1)), 1)
        told = Prompt(prompt.example, prompt.text, prompt.tokens, tuple(said[0, -6:].tolist()))
        found, reply = forced(model, told), generated(model, letters, told)["reply"]
        expected = model(said).logits[0, -7:-1].log_softmax(-1).gather(1, said[0, -6:, None]).sum()
        assert reply.startswith(letters.decode(said[0, -6:], skip_special_tokens=True))
        assert found["likeliest"] == found["answer"] == 6
        assert found["logprob"] == pytest.approx(expected.item(), rel=1e-4)
        wrong = Prompt(prompt.example, prompt.text, prompt.tokens, (*told.answer[:-1], (told.answer[-1] + 1) % 90))
        assert forced(model, wrong)["likeliest"] == 5


def test_generation_is_greedy_whatever_the_model_prefers(letters):
    prompt, plain, liking = Prompts.of(letters).prompt(made("passkey", length=400)), tiny(letters), tiny(letters)
    liking.generation_config.update(do_sample=True, temperature=9.0, repetition_penalty=5.0, num_beams=3)
    assert generated(plain, letters, prompt) == generated(liking, letters, prompt)


@pytest.mark.parametrize("kept", [0, 1, VALUES])
def test_hits_and_shares(kept, letters, tmp_path):
    model = tiny(letters)

    def says(ids, **options):
        answers = solved(letters.decode(ids[0]))[:kept]
        reply = letters(f" {', '.join(answers)}.")["input_ids"]
        assert len(reply) <= options["max_new_tokens"] and not options["do_sample"]
        return torch.cat((ids, torch.tensor([reply])), 1)

    model.generate = says
    config = Config(("plain",), ("needle", "multivalue"), (800,), (0, 100), 2)
    results = run(model, "oracle", Prompts.of(letters), FILLED, config, tmp_path)
    rows = {row["task"]: row for row in json.loads(results.read_text())["rows"]}
    assert failures(results, config) == []
    assert rows["needle"]["hits"] == (4 if kept else 0) and rows["needle"]["count"] == 4
    assert rows["needle"]["share"] == (1 if kept else 0)
    assert rows["multivalue"]["hits"] == (2 if kept == VALUES else 0)
    assert rows["multivalue"]["share"] == kept / VALUES
    assert (rows["needle"]["low"], rows["needle"]["high"]) == pytest.approx(wilson(rows["needle"]["hits"], 4))


@pytest.mark.parametrize(
    ("hits", "count", "low", "high"),
    [(0, 10, 0, 0.27753), (10, 10, 0.72247, 1), (5, 10, 0.23659, 0.76341), (1, 4, 0.04559, 0.69936)],
)
def test_wilson(hits, count, low, high):
    assert wilson(hits, count) == pytest.approx((low, high), abs=1e-5)


# runs


def test_what_is_kept_of_a_cell(letters, tmp_path):
    model = tiny(letters)
    before = [x.clone() for x in model.parameters()]
    results = run(model, "tiny", Prompts.of(letters), FILLED, small(lengths=(600,)), tmp_path)
    data = json.loads(results.read_text())
    assert not failures(results, small(lengths=(600,))) and len(data["cells"]) == 2 * (2 + 1) and len(data["rows"]) == 4
    for cell in data["cells"]:
        assert cell["count"] == len(cell["examples"]) == 2 and cell["failed"] is None
        assert cell["length"] - 25 <= cell["tokens"][0] <= cell["tokens"][1] <= cell["length"]
        assert cell["depth"] in ((0, 100) if cell["task"] == "passkey" else (None,))
        assert [x["place"] for x in cell["examples"]] == [None if cell["depth"] is None else cell["depth"] / 100] * 2
        assert cell["logprob"] < 0 <= cell["likeliest"] <= 1 and cell["seconds"]["generated"] > 0
    hashes = {(cell["task"], cell["length"], cell["depth"]): set() for cell in data["cells"]}
    for cell in data["cells"]:
        hashes[cell["task"], cell["length"], cell["depth"]].add(cell["sha256"])
    assert all(len(found) == 1 for found in hashes.values())  # every recipe is asked the same
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert data["run"]["torch"] == torch.__version__


def test_an_interrupted_run_goes_on(letters, tmp_path, monkeypatch):
    real, asked, last = retrieval._cell, [], 5

    def counted(*args):
        asked.append(args[2:4])
        if len(asked) == last:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(retrieval, "_cell", counted)

    def measured(config, out=tmp_path):
        return json.loads(run(tiny(letters), "tiny", Prompts.of(letters), FILLED, config, out).read_text())

    config = small(score="forced")
    with pytest.raises(KeyboardInterrupt):
        measured(config, tmp_path / "cut")
    assert len(json.loads((tmp_path / "cut" / "retrieval.json").read_text())["cells"]) == 4
    cut = measured(config, tmp_path / "cut")
    assert len(asked) == 13 and asked[4] == asked[5]
    whole = measured(config)
    assert cut["rows"] == whole["rows"] and cut["config"] == whole["config"]
    # more of it: what is there stays, and what was not generated is
    asked, last = [], None
    data = measured(small(("words",), lengths=(550,), score="forced"))
    assert len(asked) == 2 and data["config"]["lengths"] == [550, 600, 700]
    assert data["config"]["tasks"] == ["passkey", "variables", "words"] and len(data["cells"]) == 14
    data = measured(small(("passkey",), lengths=(600,), depths=(0,)))
    assert len(asked) == 4 and sum(cell["share"] is not None for cell in data["cells"]) == 2
    assert not list(tmp_path.rglob("*.partial"))


def test_results_of_something_else(letters, tmp_path):
    config = Config(("plain",), ("passkey",), (400,), (50,), 1, score="forced")
    plain = Prompts.of(letters)
    run(tiny(letters), "tiny", plain, FILLED, config, tmp_path)
    others = [
        ("other", plain, FILLED, {}),
        ("tiny", plain, Haystack.of(["Other words. " * 9]), {}),
        ("tiny", Prompts.of(with_chat(letters, CHAT)), FILLED, {}),
        ("tiny", plain, FILLED, {"seed": 1}),
        ("tiny", plain, FILLED, {"examples": 2}),
    ]
    for name, prompts, haystack, changed in others:
        with pytest.raises(ValueError, match="choose another folder"):
            run(tiny(letters), name, prompts, haystack, Config(**(vars(config) | changed)), tmp_path)


@pytest.mark.parametrize("content", ["", '{"model": {', "{}"])
def test_broken_results_are_named_and_measured_again(letters, tmp_path, caplog, content):
    config = Config(("plain",), ("passkey",), (400,), (50,), 1, score="forced")
    path = run(tiny(letters), "tiny", Prompts.of(letters), FILLED, config, tmp_path)
    whole = json.loads(path.read_text())
    path.write_text(content)
    run(tiny(letters), "tiny", Prompts.of(letters), FILLED, config, tmp_path)
    assert json.loads(path.read_text())["rows"] == whole["rows"]
    assert f"{path}: expected " in caplog.messages[0] and caplog.messages[0].endswith("all is measured again")


def test_a_cell_that_fails_is_told_and_tried_again(letters, tmp_path, monkeypatch):
    real, model = retrieval.forced, tiny(letters)

    def tight(model, prompt):
        if prompt.total > 650 and hasattr(model, "_isentrope"):
            raise torch.OutOfMemoryError("no room\nat all")
        return real(model, prompt)

    monkeypatch.setattr(retrieval, "forced", tight)
    results = run(model, "tiny", Prompts.of(letters), FILLED, small(score="forced"), tmp_path)
    data = json.loads(results.read_text())
    wrong = [cell for cell in data["cells"] if cell["failed"]]
    lost = failures(results, small(score="forced"))
    assert len(lost) == len(wrong) == 3 and all(words.endswith(": out of memory: no room") for words in lost)
    assert {cell["failed"] for cell in wrong} == {"out of memory: no room"}
    assert {(cell["recipe"], cell["length"]) for cell in wrong} == {(RECIPES[1], 700)}
    assert all(cell["likeliest"] is None and cell["count"] == 0 for cell in wrong) and len(data["cells"]) == 12
    assert any("failed" in str(column._cells) for column in report.table(results).columns)
    assert report.heatmaps(results)
    monkeypatch.setattr(retrieval, "forced", real)
    run(model, "tiny", Prompts.of(letters), FILLED, small(score="forced"), tmp_path)
    assert failures(results, small(score="forced")) == []


def test_numbers_that_are_none_and_positions_that_end(letters, tmp_path):
    config = Config(("plain",), ("passkey",), (400,), (50,), 1, score="forced")
    model = tiny(letters)
    model.lm_head.weight = torch.nn.Parameter(torch.full_like(model.lm_head.weight, torch.nan))
    results = run(model, "tiny", Prompts.of(letters), FILLED, config, tmp_path / "nan")
    assert len(failures(results, config)) == 1
    sizes = {"n_positions": 64, "n_embd": 16, "n_layer": 1, "n_head": 2}
    ended = GPT2LMHeadModel(GPT2Config(vocab_size=len(letters), bos_token_id=None, eos_token_id=None, **sizes))
    results = run(ended, "tiny", Prompts.of(letters), FILLED, config, tmp_path / "end")
    assert len(failures(results, config)) == 1 and "index" in json.loads(results.read_text())["cells"][0]["failed"]


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (lambda: small(()), "tasks: expected some of passkey"),
        (lambda: small(("passkey", "hay")), "got ['passkey', 'hay']"),
        (lambda: small(lengths=(512, 512)), "lengths: expected positive numbers, each once"),
        (lambda: small(lengths=(0,)), "lengths"),
        (lambda: small(depths=(0, 101)), "depths: expected numbers from 0 to 100"),
        (lambda: small(examples=0), "examples: expected 1 or more, got 0"),
        (lambda: small(score="loud"), "score: expected one of both, forced, got 'loud'"),
        (lambda: Config((), ("words",), (512,)), "recipes"),
        (lambda: Config(("rerop:window=3",), ("words",), (512,)), "did you mean"),
        (lambda: Config.read(["plain"], "words", "1k", "0"), "expected numbers as in 512,1024, got '1k'"),
    ],
)
def test_bad_settings(action, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        action()


def test_recipes_that_a_model_refuses_are_refused_first(letters, tmp_path):
    config = Config(("plain", "cosine:alpha=16"), ("passkey",), (400,), (50,), 1)
    with pytest.raises(ValueError, match="was not trained with"):
        run(tiny(letters), "tiny", Prompts.of(letters), FILLED, config, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_command(letters, tmp_path, monkeypatch):
    folder, out = tmp_path / "model", tmp_path / "out"
    tiny(letters).save_pretrained(folder)
    letters.save_pretrained(folder)
    (tmp_path / "book.txt").write_text("It rained. Nobody came. " * 20)
    words = f"retrieval {folder} --recipe plain --recipe rerope:window=16 --lengths 500 --depths 0,100 --examples 1"
    words += f" --tasks passkey,words --text {tmp_path / 'book.txt'} --out {out}"
    done = CliRunner().invoke(app, words.split())
    assert done.exit_code == 0, done.output
    assert "rerope:window=16" in done.output and "answers found" in done.output
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

    monkeypatch.setattr(retrieval, "forced", breaks)
    broken = CliRunner().invoke(app, [*words.split()[:-1], str(tmp_path / "broken")])
    assert broken.exit_code == 1 and "6 cells failed" in broken.output
    refused = CliRunner().invoke(app, [*words.split(), "--tasks", "passkeys"])
    assert refused.exit_code == 2 and "tasks: expected some of" in refused.output
