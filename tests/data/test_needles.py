"""Retrieval examples: the same everywhere, answers that follow from the text, depths."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from itertools import pairwise

import pytest

from isentrope.data.tasks import DEPTH_TASKS, Haystack, draft_example
from isentrope.data.tasks.needles import MULTIVALUE_NEEDLES
from isentrope.data.tasks.registry import IDENTITY_TASKS as TASKS
from isentrope.data.tasks.variables import CHAIN_LENGTH
from isentrope.data.tasks.vocabulary import FILLER
from isentrope.data.tasks.words import COMMON_WORDS
from tests.fixtures.needles import FILLED, made, solved


def test_the_same_examples_everywhere():
    told = json.dumps(
        [[x.user_message, x.lead, x.answers] for x in (made(task, index=i) for task in TASKS for i in (0, 1))]
    )
    assert hashlib.sha256(told.encode()).hexdigest()[:16] == "87987b370e687a50"


@pytest.mark.parametrize("task", TASKS)
def test_examples_differ_by_seed_index_length_and_depth(task):
    others = [{}, {"seed": 1}, {"index": 1}, {"length": 601}] + [{"depth": 51}] * (task in DEPTH_TASKS)
    texts = {made(task, **other).user_message for other in others}
    assert len(texts) == len(others)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("index", range(3))
def test_the_answer_follows_from_the_text(task, index):
    example = made(task, length=1500, index=index)
    assert sorted(solved(f"{example.user_message}\n{example.lead}")) == sorted(example.answers)
    assert len(example.answers) == {
        "multivalue": MULTIVALUE_NEEDLES,
        "variables": CHAIN_LENGTH,
        "words": COMMON_WORDS,
    }.get(task, 1)


@pytest.mark.parametrize("task", TASKS)
def test_how_often_answers_are_in_the_text(task):
    example = made(task, length=1500)
    counts = [example.text.count(answer) for answer in example.answers]
    if task == "variables":  # each but the last is given to the next
        assert counts == [2] * (CHAIN_LENGTH - 1) + [1]
    elif task == "words":
        others = Counter(example.text.split(", "))
        assert min(counts) >= 3 * max(count for word, count in others.items() if word not in example.answers)
    else:
        assert set(counts) == {1}
    assert not any(answer in example.question + example.lead for answer in example.answers)


def test_numbers_of_the_text_are_not_used():
    taken = made("passkey").answers[0]
    assert made("passkey", haystack=Haystack.from_texts([f"{FILLER} It was {taken} then."])).answers[0] != taken


@pytest.mark.parametrize("depth", [0, 10, 37.5, 50, 90, 100])
@pytest.mark.parametrize("text", [FILLER, "河水流过山谷。" * 40 + "鸟在树上。" * 30, "no sentence ends here " * 50])
def test_depth(depth, text):
    example = made("needle", length=2000, depth=depth, haystack=Haystack.from_texts([text]))
    before, after = example.text.split(f"{example.lead} {example.answers[0]}.")
    share = len(before) / len(before + after)
    assert example.depth == pytest.approx(share, abs=0.01)
    assert share == pytest.approx(depth / 100, abs=0.1)
    if text is FILLER:
        assert before == "" or before.rstrip().endswith(".")


@pytest.mark.parametrize("text", [FILLER, "  a\n\n b。c\td！！ " + "x" * 100, "one"])
def test_words_are_the_text(text):
    haystack = Haystack.from_texts([text])
    assert "".join(haystack.words).strip() == text.strip()
    count, end = len(haystack.words), haystack.ends[-1]
    cut = haystack.cut(end, 3 * count + 1)
    rounds = [haystack.words[i % count] for i in range(cut.start, cut.stop)]
    assert cut.text(cut.start, cut.stop) == "".join(rounds) and len(rounds) == 3 * count + 1
    for start in range(cut.start, cut.stop, 2):  # every part of it, over the ends of rounds
        for stop in (start, start + 1, cut.stop):
            words = [haystack.words[i % count] for i in range(start, stop)]
            assert cut.text(start, stop) == "".join(words)
    gaps = [cut.nearest_gap(depth) for depth in (0, 0.2, 0.5, 0.8, 1)]
    assert gaps[0] == cut.start and gaps[-1] == cut.stop and all(a <= b for a, b in pairwise(gaps))


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (lambda: draft_example("haystack", 100, 50, 0, 0, FILLED), "task: expected one of passkey"),
        (lambda: draft_example("passkey", 100, None, 0, 0, FILLED), "depth: expected 0 … 100 for passkey, got None"),
        (lambda: draft_example("passkey", 100, 101, 0, 0, FILLED), "depth: expected 0 … 100"),
        (lambda: draft_example("words", 100, 50, 0, 0, FILLED), "depth: expected None for words, got 50"),
        (lambda: Haystack.from_texts([" \n"]), "text: expected some"),
    ],
)
def test_bad_examples(action, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        action()
