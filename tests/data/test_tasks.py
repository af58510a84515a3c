"""RULER's tasks, facts and four needles: the answer follows from the text alone, whatever it is hidden in."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter

import pytest

from isentrope.data.tasks import (
    BUILT_IN,
    DEPTH_TASKS,
    GROUPS,
    TASKS,
    Haystack,
    choose_fillers,
    draft_example,
    expand_tasks,
    load_filler,
    load_fillers,
    parse_fillers,
)
from isentrope.data.tasks.fillers import TASK_FILLERS
from isentrope.data.tasks.registry import ALL, IDENTITY_TASKS
from isentrope.data.tasks.vocabulary import OBJECTS, PLACES
from isentrope.data.tasks.words import CWE_COMMON
from tests.fixtures.needles import made

NEW = [task for task in TASKS if task not in IDENTITY_TASKS]
# answers of an example, by RULER's definitions (Hsieh et al., 2024)
ANSWERS = {"niah_multivalue": 4, "niah_multiquery": 4, "vt": 5, "cwe": 10, "fwe": 3, "fourneedles": 4}
LENGTH = 6000  # characters


def solve(task, example):
    """The answers, from nothing but the text and the question."""
    text, question = example.text, example.question
    if task.startswith(("niah", "four")):
        codes = re.findall(r"The code for (?:the )?([\w -]+?) is (?:the number )?([\da-f-]+)\.", text)
        return [value for key, value in codes if re.search(rf"\b{key}\b", question)]
    if task == "vt":
        values = {re.search(r"\d{5}", question)[0]}
        steps = re.findall(r"Let (\w+) = (\w+)\.", text)
        return [name for name, value in steps if value in values and not values.add(name)]
    if task in ("cwe", "fwe"):
        counts = Counter(re.findall(r"[a-z]+(?:-[a-z]+)?", text))
        first = counts.most_common(ANSWERS[task] + 1)
        assert first[-2][1] > first[-1][1]  # no tie with the next
        return [word for word, _ in first[:-1]]
    places, owners = {}, {}
    for sentence in re.findall(r"[^.]+\.", text):
        if match := re.search(rf"([A-Z]\w+) (?:went|walked|moved|came) to the ({'|'.join(PLACES)})\.", sentence):
            places[match[1]] = match[2]
        if match := re.search(rf"([A-Z]\w+) took the ({'|'.join(OBJECTS)}) along", sentence):
            owners[match[2]] = match[1]
    subject = re.search(r"Where is (?:the )?(\w+) now", question)[1]
    return [places[owners.get(subject, subject)]]


@pytest.mark.parametrize("task", NEW)
@pytest.mark.parametrize("filler", ["sentences", "noise", "needles", "python"])
def test_the_answer_follows_from_the_text(task, filler):
    if filler != "sentences" and ALL[task].filler is not None:
        pytest.skip("has a text of its own")
    for index in range(3):
        example = made(task, LENGTH, index=index, haystack=load_filler(filler))
        assert sorted(solve(task, example)) == sorted(example.answers)
        assert len(example.answers) == ANSWERS.get(task, 1)
        assert example.count_answers(example.reply) == len(example.answers)
        assert not any(answer in example.question + example.lead for answer in example.answers)
        if task in DEPTH_TASKS:
            assert example.depth == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize("task", ["niah_single_2", "niah_multikey_2", "niah_multikey_3"])
@pytest.mark.parametrize("depth", [0, 30, 100])
def test_depth(task, depth):
    example = made(task, LENGTH, depth=depth)
    at = example.text.index(example.answers[0]) / len(example.text)
    assert at == pytest.approx(depth / 100, abs=0.06)


def test_a_haystack_of_needles_is_nothing_but_needles():
    for task, key in (("niah_multikey_2", r"the \w+ \w+ \w+"), ("niah_multikey_3", r"[\da-f-]{36}")):
        example = made(task, LENGTH)
        sentences = example.text.split(". ")[1:]  # the first may be cut
        assert len(sentences) > 30
        assert all(re.fullmatch(rf"The code for {key} is (the number )?[\da-f-]+\.?", each) for each in sentences)
        assert example.text.count(example.lead.removesuffix(" the number")) == 1


def test_common_and_frequent_words_come_up_as_defined():
    counts = Counter(re.findall(r"[a-z]+-[a-z]+", made("cwe", 12_000).text)).most_common()
    assert [count for _, count in counts[:CWE_COMMON]] == [30] * 10
    assert {count for _, count in counts[CWE_COMMON:-1]} == {3}
    assert re.match(r"1\. [a-z]+-[a-z]+ 2\. ", made("cwe", LENGTH).text)
    short = Counter(re.findall(r"[a-z]+-[a-z]+", made("cwe", 3500).text)).most_common()
    assert short[9][1] == 10 * short[CWE_COMMON][1]
    words = Counter(made("fwe", 20_000).text.split()).most_common()
    total = sum(count for _, count in words)
    assert words[0][0] == "..."
    for rank, (_, count) in enumerate(words[:4], 1):  # 6 / π² of the text over the square of the rank
        assert count == pytest.approx(0.608 * total / rank**2, rel=0.1)


def test_the_same_examples_everywhere():
    examples = [made(task, LENGTH, index=i) for task in NEW for i in (0, 1)]
    content = json.dumps([[x.user_message, x.lead, x.answers] for x in examples])
    assert hashlib.sha256(content.encode()).hexdigest()[:16] == "8a8d12b9c209aaae"


@pytest.mark.parametrize("task", NEW)
def test_examples_differ_by_seed_and_index(task):
    texts = {made(task, LENGTH, **other).user_message for other in ({}, {"seed": 1}, {"index": 1})}
    assert len(texts) == 3


def test_replies_are_matched_as_rulers_are():
    example = made("niah_multiquery", LENGTH)
    first, second, *_ = example.answers
    assert example.count_answers(f"well: {second} or x{first}7, maybe") == 2  # anywhere in the reply
    cautious = made("fourneedles", LENGTH)
    assert cautious.count_answers(f"x{cautious.answers[0]}7") == 0
    assert cautious.count_answers(" and ".join(cautious.answers[:2])) == 2
    assert ALL["fourneedles"].pass_share * 4 == 2
    fact = made("facts1", LENGTH)
    wrong = next(place for place in PLACES if place != fact.answers[0])
    assert fact.count_answers(f"{wrong}, no, {fact.answers[0]}") == 0  # the first place named counts


def test_facts_avoid_people_whom_the_text_names():
    crowded = Haystack.from_texts(["Agnes met Bertram, Cosima, Dexter and Edwina near the river. " * 9])
    for index in range(4):
        example = made("facts1", 3000, index=index, haystack=crowded)
        assert example.lead.split()[0] not in ("Agnes", "Bertram", "Cosima", "Dexter", "Edwina")
    everybody = "Agnes Bertram Cosima Dexter Edwina Florian Gideon Hester Imogen Jasper Konrad."
    with pytest.raises(ValueError, match="filler: names too many of Agnes"):
        draft_example("facts1", 1000, None, 0, 0, Haystack.from_texts([everybody]))


def test_groups_and_own_texts():
    assert expand_tasks(["passkey", "ruler", "vt"])[:2] == ("passkey", "niah_single_1")
    assert len(GROUPS["ruler"]) == 11 and expand_tasks(["all"]) == TASKS and expand_tasks(["hay"]) == ("hay",)
    assert choose_fillers("vt", ("python", "book")) == ("noise",)
    assert choose_fillers("niah_single_2", ("python", "book")) == ("python", "book")
    assert {task.filler for task in ALL.values()} - {None} <= set(TASK_FILLERS)


def test_fillers_are_long_or_repeat(tmp_path):
    book = tmp_path / "book.txt"
    book.write_text("It rained. Nobody came.")
    named = parse_fillers(["noise", f"book={book}"], lambda name: [tmp_path / name])
    assert list(load_fillers(named)) == ["noise", "book"] and load_fillers(named)["book"].text.startswith("It rained")
    assert len({load_filler(name).sha256 for name in BUILT_IN}) == len(BUILT_IN) == 4
    assert len(load_filler("needles").text) > 10**6 and len(load_filler("python").text) > 10**6


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["essays"], "filler: expected one of sentences, noise, needles, python or NAME=FILE, got 'essays'"),
        (["noise=a.txt"], "expected NAME=FILE with a name other than"),
        (["=a.txt"], "expected NAME=FILE"),
        (["noise", "noise"], "expected each name once, got 'noise' twice"),
    ],
)
def test_bad_fillers(texts, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_fillers(texts, lambda name: [])
