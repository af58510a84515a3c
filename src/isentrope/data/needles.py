"""Retrieval examples: needles hidden in a long text, and a question about them.

An example is a function of (task, length, depth, seed, index) and of the text around it, the same on every machine. The
caller, who can count tokens, fills it up to `length`; it is never truncated.
"""

from __future__ import annotations

import hashlib
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil
from random import Random
from string import ascii_uppercase
from typing import TypeVar

from isentrope.data.filler import ADJECTIVES, FILLER, NOUNS

T = TypeVar("T")
DEPTH_TASKS = ("passkey", "needle", "multikey")  # the answer lies at one depth
SPREAD_TASKS = ("multivalue", "variables", "words")  # the answers lie all over the text
TASKS = DEPTH_TASKS + SPREAD_TASKS
MULTIKEY_NEEDLES = MULTIVALUE_NEEDLES = 4  # one of the first, all of the second are the answer
VARIABLE_CHAINS, CHAIN_LENGTH = 2, 4  # one of the chains is the answer
COMMON_WORDS, MIN_REPEATS = 3, 6  # words that are the answer, and their occurrences at least
CODES = "The text below gives codes, numbers of seven digits. Keep them in mind."
MIN_FILLER_WORDS = 32  # with fewer, depth would mean nothing
MAX_DEPTH_ERROR = 0.1  # a needle may move this far to be between sentences
# words with the space before them, so that they join up to the text; long runs without spaces are split
WORD = re.compile(r"\s*(?:[^\s。！？]{1,24}[。！？]*|[。！？]+)")
SENTENCE_END = re.compile(r"[.!?。！？]+[\"'”’)\]]*$")
PARAGRAPH_BREAK = re.compile(r"[^\S\n]*\n[^\S\n]*\n")


@dataclass(frozen=True)
class Haystack:
    """A text split into words and repeated cyclically. `ends`: indices of words that end a sentence or paragraph."""

    sha256: str
    words: tuple[str, ...]
    ends: tuple[int, ...]
    text: str

    @classmethod
    def from_texts(cls, texts: Iterable[str] = (FILLER,)) -> Haystack:
        text = "\n\n".join(stripped for item in texts if (stripped := item.strip()))
        if not text:
            raise ValueError("text: expected some, got none")
        words = tuple(WORD.findall("\n\n" + text))
        following = (*words[1:], words[0])
        ends = tuple(
            i
            for i, (word, after) in enumerate(zip(words, following, strict=True))
            if SENTENCE_END.search(word) or PARAGRAPH_BREAK.match(after)
        )
        return cls(hashlib.sha256(text.encode()).hexdigest(), words, ends, text)

    def words_up_to(self, end: int, count: int) -> tuple[list[str], list[int]]:
        """Return the `count` words up to number `end`, and the indices between them where no sentence is cut."""
        size = len(self.words)
        start = end + 1 - count
        rounds = range(start // size, end // size + 1)
        boundaries = [at - start + 1 for r in rounds for i in self.ends if start <= (at := r * size + i) <= end]
        return [self.words[i % size] for i in range(start, end + 1)], [0, *boundaries]


@dataclass(frozen=True)
class Example:
    """A text with needles, a question, and the answers.

    Args:
        intro: Announces what the text contains.
        text: The filler with the needles.
        question: Follows the text.
        lead: How the reply begins.
        answers: What the reply must name.
        decoys: What it might name instead.
        depth: The share of the filler before the needle; None if the answers are spread over the text.
    """

    intro: str
    text: str
    question: str
    lead: str
    answers: tuple[str, ...]
    decoys: tuple[str, ...] = ()
    depth: float | None = None

    @property
    def user_message(self) -> str:
        """The prompt without the lead: a chat user's message."""
        return f"{self.intro}\n\n{self.text}\n\n{self.question}"

    @property
    def reply(self) -> str:
        """The correct reply after the lead."""
        return " " + ", ".join(self.answers)

    def count_answers(self, reply: str) -> int:
        """Count the answers among the first candidates that a reply names, each as a separate word.

        Only as many candidates as there are answers count, so that listing everything scores little.
        """
        text = reply.casefold()
        candidates = [(_find_word(x.casefold(), text), x in self.answers) for x in (*self.answers, *self.decoys)]
        named = sorted((at, correct) for at, correct in candidates if at >= 0)
        return sum(correct for _, correct in named[: len(self.answers)])


def _find_word(word: str, text: str) -> int:
    match = re.search(rf"(?<![0-9a-z]){re.escape(word)}(?![0-9a-z])", text)
    return match.start() if match else -1


Fill = Callable[[int], tuple[str, float | None]]


@dataclass(frozen=True)
class ExampleDraft:
    """An example of open length: `fill` builds its text from so many words, `min_words` at least."""

    intro: str
    question: str
    lead: str
    answers: tuple[str, ...]
    decoys: tuple[str, ...]
    fill: Fill
    min_words: int = MIN_FILLER_WORDS

    @property
    def shortest(self) -> Example:
        return self.build(self.min_words)

    def build(self, words: int) -> Example:
        text, depth = self.fill(words)
        return Example(self.intro, text, self.question, self.lead, self.answers, self.decoys, depth)


def draft_example(
    task: str, length: int, depth: float | None, seed: int, index: int, haystack: Haystack
) -> ExampleDraft:
    """Draw the needles and the question of an example.

    Args:
        task: One of `TASKS`.
        length: Tokens that the example will be filled up to.
        depth: Of the needle, in percent of the text, for `DEPTH_TASKS`; None for the others.
        seed: Seed of the draw.
        index: Number of the example.
        haystack: The text around the needles.
    """
    if task not in TASKS:
        raise ValueError(f"task: expected one of {', '.join(TASKS)}, got {task!r}")
    if (task in DEPTH_TASKS) == (depth is None) or not 0 <= (depth or 0) <= 100:
        raise ValueError(f"depth: expected {'0 … 100' if task in DEPTH_TASKS else 'None'} for {task}, got {depth}")
    percent = "" if depth is None else f"{depth:g}"
    random = Random(f"{task} {length} {percent} {seed} {index}")
    if task == "words":
        return _draft_words(random)
    drafters = {
        "passkey": _draft_passkey, "needle": _draft_keys, "multikey": _draft_keys,
        "multivalue": _draft_values, "variables": _draft_variables,
    }  # fmt: skip
    return drafters[task](random, haystack, task, (depth or 0) / 100)


def fill_to_length(draft: ExampleDraft, length: int, count_tokens: Callable[[Example], int]) -> Example:
    """Return the longest example of a draft with at most `length` tokens; one more word would exceed it.

    Args:
        draft: The example of open length.
        length: Tokens at most.
        count_tokens: Counts the tokens of an example with its answer.

    Raises:
        ValueError: Even the shortest example is longer.
    """
    low, fits, step = draft.min_words, count_tokens(draft.shortest), MIN_FILLER_WORDS
    if fits > length:
        raise ValueError(f"length: expected {fits} tokens or more to ask {draft.question!r}, got {length}")
    while (over := count_tokens(draft.build(low + step))) <= length:
        low, fits, step = low + step, over, 2 * step
    high, rounds = low + step, 0
    while high - low > 1:
        # Tokens grow almost linearly with words; bisection ends the search where they do not.
        share = (length - fits) / (over - fits) if rounds < 8 else 0.5
        middle = low + min(max(round(share * (high - low)), 1), high - low - 1)
        count, rounds = count_tokens(draft.build(middle)), rounds + 1
        if count <= length:
            low, fits = middle, count
        else:
            high, over = middle, count
    return draft.build(low)


# Only Random.random() is guaranteed to draw the same numbers in every version of Python.


def _pick(random: Random, items: Sequence[T]) -> T:
    return items[int(random.random() * len(items))]


def _shuffle(random: Random, items: Iterable[T]) -> list[T]:
    return [item for _, _, item in sorted((random.random(), i, item) for i, item in enumerate(items))]


def _draw_unused(haystack: Haystack, draw: Callable[[], str], count: int) -> list[str]:
    """Draw `count` different strings that the text does not contain."""
    drawn: list[str] = []
    while len(drawn) < count:
        if (new := draw()) not in drawn and new not in haystack.text:
            drawn.append(new)
    return drawn


def _draw_numbers(random: Random, haystack: Haystack, digits: int, count: int = 1) -> list[str]:
    first = 10 ** (digits - 1)
    return _draw_unused(haystack, lambda: str(first + int(random.random() * 9 * first)), count)


def _draw_names(random: Random, haystack: Haystack, count: int) -> list[str]:
    return _draw_unused(haystack, lambda: f"{_pick(random, ADJECTIVES)} {_pick(random, NOUNS)}", count)


def _spread_depths(random: Random, count: int) -> list[float]:
    """Draw increasing depths, one in each of `count` equal parts of the text."""
    return [(i + random.random()) / count for i in range(count)]


def _hide(random: Random, haystack: Haystack, needles: Sequence[tuple[float, str]], at_depth: bool) -> Fill:
    """Return a function that writes filler around needles at their depths; `at_depth`: the first is the answer."""
    end = _pick(random, haystack.ends)

    def fill(amount: int) -> tuple[str, float | None]:
        words, boundaries = haystack.words_up_to(end, amount)
        offsets = [0, *accumulate(map(len, words))]
        at = [_insertion_index(depth * offsets[-1], offsets, boundaries) for depth, _ in needles]
        parts, last = [], 0
        for i in sorted(range(len(needles)), key=at.__getitem__):  # stable, so that chains stay in order
            parts += [*words[last : at[i]], f" {needles[i][1]}"]
            last = at[i]
        return "".join((*parts, *words[last:])).strip(), offsets[at[0]] / offsets[-1] if at_depth else None

    return fill


def _insertion_index(target: float, offsets: Sequence[int], boundaries: Sequence[int]) -> int:
    """Return the sentence boundary nearest to a character offset, or the word boundary if that is too far away."""
    nearest = _nearest(target, boundaries, offsets)
    close = abs(offsets[nearest] - target) <= MAX_DEPTH_ERROR * offsets[-1]
    return nearest if close else _nearest(target, range(len(offsets)), offsets)


def _nearest(target: float, indices: Sequence[int], offsets: Sequence[int]) -> int:
    after = bisect_left(indices, target, key=lambda index: offsets[index])
    return min(indices[max(after - 1, 0) : after + 1], key=lambda index: abs(offsets[index] - target))


def _draft_passkey(random: Random, haystack: Haystack, task: str, depth: float) -> ExampleDraft:
    answers = tuple(_draw_numbers(random, haystack, 5))
    fill = _hide(random, haystack, [(depth, f"The pass key is the number {answers[0]}.")], True)
    intro = "The text below gives a pass key, a number of five digits. Keep it in mind."
    return ExampleDraft(intro, "What is the pass key?", "The pass key is the number", answers, (), fill)


def _draft_keys(random: Random, haystack: Haystack, task: str, depth: float) -> ExampleDraft:
    count = MULTIKEY_NEEDLES if task == "multikey" else 1
    names, values = _draw_names(random, haystack, count), _draw_numbers(random, haystack, 7, count)
    depths = [depth, *(random.random() for _ in range(count - 1))]
    needles = [
        (d, f"The code for the {name} is the number {value}.")
        for d, name, value in zip(depths, names, values, strict=True)
    ]
    return ExampleDraft(
        CODES if count > 1 else "The text below gives a code, a number of seven digits. Keep it in mind.",
        f"What is the code for the {names[0]}?",
        f"The code for the {names[0]} is the number",
        (values[0],),
        tuple(values[1:]),
        _hide(random, haystack, needles, True),
    )


def _draft_values(random: Random, haystack: Haystack, task: str, depth: float) -> ExampleDraft:
    name, values = _draw_names(random, haystack, 1)[0], _draw_numbers(random, haystack, 7, MULTIVALUE_NEEDLES)
    needles = [
        (d, f"A code for the {name} is the number {x}.")
        for d, x in zip(_spread_depths(random, MULTIVALUE_NEEDLES), values, strict=True)
    ]
    return ExampleDraft(
        CODES,
        f"What are all {MULTIVALUE_NEEDLES} codes for the {name}?",
        f"The codes for the {name} are the numbers",
        tuple(values),
        (),
        _hide(random, haystack, needles, False),
    )


def _draft_variables(random: Random, haystack: Haystack, task: str, depth: float) -> ExampleDraft:
    spell = lambda: "".join(_pick(random, ascii_uppercase) for _ in range(5))  # noqa: E731
    names = _draw_unused(haystack, spell, VARIABLE_CHAINS * CHAIN_LENGTH)
    chains = [names[i * CHAIN_LENGTH : (i + 1) * CHAIN_LENGTH] for i in range(VARIABLE_CHAINS)]
    values = _draw_numbers(random, haystack, 5, VARIABLE_CHAINS)
    needles = [
        (d, f"Let {name} = {before}.")
        for chain, value in zip(chains, values, strict=True)
        for d, name, before in zip(_spread_depths(random, CHAIN_LENGTH), chain, (value, *chain), strict=False)
    ]
    return ExampleDraft(
        "The text below gives values to variables. Keep track of them.",
        f"Which {CHAIN_LENGTH} variables have the value {values[0]}, directly or through others?",
        f"The variables with the value {values[0]} are",
        tuple(chains[0]),
        tuple(names[CHAIN_LENGTH:]),
        _hide(random, haystack, needles, False),
    )


def _draft_words(random: Random) -> ExampleDraft:
    words = _shuffle(random, NOUNS)
    common, others = words[:COMMON_WORDS], words[COMMON_WORDS:]
    order = random.random()

    def fill(amount: int) -> tuple[str, None]:
        repeats = max(MIN_REPEATS, amount // 10)
        rest = amount - COMMON_WORDS * repeats
        repeated = (others * ceil(rest / len(others)))[:rest]
        return ", ".join(_shuffle(Random(f"{order} {amount}"), common * repeats + repeated)), None

    return ExampleDraft(
        "In the list of words below some come up often and the others seldom.",
        f"Which {COMMON_WORDS} words come up most often in the list?",
        f"The {COMMON_WORDS} most frequent words are",
        tuple(common),
        tuple(others),
        fill,
        (COMMON_WORDS + 1) * MIN_REPEATS,
    )
