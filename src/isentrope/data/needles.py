"""Examples of retrieval: something hidden in a long text, and a question about it.

An example is a function of (task, length, depth, seed, index) and of the text around it, the same on every machine. It
is filled up to `length` by whoever can count its tokens, and never cut.
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

from isentrope.data.filler import FILLER, QUALITIES, THINGS

T = TypeVar("T")
PLACED = ("passkey", "needle", "multikey")  # what is asked for lies at one depth
SPREAD = ("multivalue", "variables", "words")  # what is asked for lies all over the text
TASKS = PLACED + SPREAD
KEYS = VALUES = 4  # needles of multikey, one of them asked for; of multivalue, all asked for
CHAINS, LINKS = 2, 4  # chains of variables, one of them asked for; variables of each
COMMON, OFTEN = 3, 6  # words asked for, and how often each comes up at least
CODES = "The text below gives codes, numbers of seven digits. Keep them in mind."
LEAST = 32  # pieces of filler without which depth would mean nothing
OFF = 0.1  # how far from its depth a needle may lie to stand between sentences
# words and the space before them, so that all of them together are the text; long runs without space in parts
PIECE = re.compile(r"\s*(?:[^\s。！？]{1,24}[。！？]*|[。！？]+)")
END = re.compile(r"[.!?。！？]+[\"'”’)\]]*$")
PARAGRAPH = re.compile(r"[^\S\n]*\n[^\S\n]*\n")


@dataclass(frozen=True)
class Haystack:
    """A text in pieces, read round and round. ends: indices of those after which a sentence or a paragraph is over."""

    sha256: str
    pieces: tuple[str, ...]
    ends: tuple[int, ...]
    text: str

    @classmethod
    def of(cls, texts: Iterable[str] = (FILLER,)) -> Haystack:
        text = "\n\n".join(stripped for each in texts if (stripped := each.strip()))
        if not text:
            raise ValueError("text: expected some, got none")
        pieces = tuple(PIECE.findall("\n\n" + text))
        follows = (*pieces[1:], pieces[0])
        ends = tuple(
            i
            for i, (piece, after) in enumerate(zip(pieces, follows, strict=True))
            if END.search(piece) or PARAGRAPH.match(after)
        )
        return cls(hashlib.sha256(text.encode()).hexdigest(), pieces, ends, text)

    def before(self, end: int, count: int) -> tuple[list[str], list[int]]:
        """So many pieces, the last of them number `end`, and the places between them where no sentence is cut."""
        size = len(self.pieces)
        start = end + 1 - count
        rounds = range(start // size, end // size + 1)
        places = [at - start + 1 for r in rounds for i in self.ends if start <= (at := r * size + i) <= end]
        return [self.pieces[i % size] for i in range(start, end + 1)], [0, *places]


@dataclass(frozen=True)
class Example:
    """What is read, what is asked, how the answer begins, what it must name, and what it might name instead.

    place: the share of the filler that lies before what is asked for; None where that is spread over the text.
    """

    intro: str
    text: str
    question: str
    lead: str
    answers: tuple[str, ...]
    decoys: tuple[str, ...] = ()
    place: float | None = None

    @property
    def asked(self) -> str:
        """All but the beginning of the answer: what a chat's user says."""
        return f"{self.intro}\n\n{self.text}\n\n{self.question}"

    @property
    def reply(self) -> str:
        """What follows the lead."""
        return " " + ", ".join(self.answers)

    def found(self, reply: str) -> int:
        """How many of the answers are among the first that a reply names, each as a word of its own.

        What it names after as many as there are answers does not count: listing all that was read earns little.
        """
        said = reply.casefold()
        firsts = [(_first(x.casefold(), said), x in self.answers) for x in (*self.answers, *self.decoys)]
        named = sorted((at, right) for at, right in firsts if at >= 0)
        return sum(right for _, right in named[: len(self.answers)])


def _first(word: str, text: str) -> int:
    found = re.search(rf"(?<![0-9a-z]){re.escape(word)}(?![0-9a-z])", text)
    return found.start() if found else -1


Fill = Callable[[int], tuple[str, float | None]]


@dataclass(frozen=True)
class Draft:
    """An example whose text is still to be given its length. fill: so many pieces of it; least: that it needs."""

    intro: str
    question: str
    lead: str
    answers: tuple[str, ...]
    decoys: tuple[str, ...]
    fill: Fill
    least: int = LEAST

    @property
    def shortest(self) -> Example:
        return self.example(self.least)

    def example(self, amount: int) -> Example:
        text, place = self.fill(amount)
        return Example(self.intro, text, self.question, self.lead, self.answers, self.decoys, place)


def draft(task: str, length: int, depth: float | None, seed: int, index: int, haystack: Haystack) -> Draft:
    """depth: in percent of the text, of the tasks PLACED; None for the others."""
    if task not in TASKS:
        raise ValueError(f"task: expected one of {', '.join(TASKS)}, got {task!r}")
    if (task in PLACED) == (depth is None) or not 0 <= (depth or 0) <= 100:
        raise ValueError(f"depth: expected {'0 … 100' if task in PLACED else 'None'} for {task}, got {depth}")
    place = "" if depth is None else f"{depth:g}"
    random = Random(f"{task} {length} {place} {seed} {index}")
    if task == "words":
        return _words(random)
    make = {"passkey": _passkey, "needle": _keys, "multikey": _keys, "multivalue": _values, "variables": _variables}
    return make[task](random, haystack, task, (depth or 0) / 100)


def filled(draft: Draft, length: int, measure: Callable[[Example], int]) -> Example:
    """The longest example of a draft with at most `length` tokens; one piece of filler more would be too many."""
    low, fits, step = draft.least, measure(draft.shortest), LEAST
    if fits > length:
        raise ValueError(f"length: expected {fits} tokens or more to ask {draft.question!r}, got {length}")
    while (over := measure(draft.example(low + step))) <= length:
        low, fits, step = low + step, over, 2 * step
    high, rounds = low + step, 0
    while high - low > 1:
        # tokens grow nearly evenly with pieces; where they do not, halving ends it
        share = (length - fits) / (over - fits) if rounds < 8 else 0.5
        middle = low + min(max(round(share * (high - low)), 1), high - low - 1)
        count, rounds = measure(draft.example(middle)), rounds + 1
        if count <= length:
            low, fits = middle, count
        else:
            high, over = middle, count
    return draft.example(low)


# Random.random() alone is promised to stay the same in every version of Python


def _pick(random: Random, items: Sequence[T]) -> T:
    return items[int(random.random() * len(items))]


def _shuffled(random: Random, items: Iterable[T]) -> list[T]:
    return [item for _, _, item in sorted((random.random(), i, item) for i, item in enumerate(items))]


def _fresh(haystack: Haystack, make: Callable[[], str], count: int) -> list[str]:
    """So many different ones that the text does not hold already."""
    found: list[str] = []
    while len(found) < count:
        if (new := make()) not in found and new not in haystack.text:
            found.append(new)
    return found


def _numbers(random: Random, haystack: Haystack, digits: int, count: int = 1) -> list[str]:
    first = 10 ** (digits - 1)
    return _fresh(haystack, lambda: str(first + int(random.random() * 9 * first)), count)


def _names(random: Random, haystack: Haystack, count: int) -> list[str]:
    return _fresh(haystack, lambda: f"{_pick(random, QUALITIES)} {_pick(random, THINGS)}", count)


def _throughout(random: Random, count: int) -> list[float]:
    """Increasing depths, one in each of as many equal parts of the text."""
    return [(i + random.random()) / count for i in range(count)]


def _hidden(random: Random, haystack: Haystack, needles: Sequence[tuple[float, str]], placed: bool) -> Fill:
    """Filler around needles at their depths, the first the one asked for where it is `placed`."""
    end = _pick(random, haystack.ends)

    def fill(amount: int) -> tuple[str, float | None]:
        pieces, between = haystack.before(end, amount)
        upto = [0, *accumulate(map(len, pieces))]
        at = [_place(depth * upto[-1], upto, between) for depth, _ in needles]
        parts, last = [], 0
        for i in sorted(range(len(needles)), key=at.__getitem__):  # stable: links of a chain stay in order
            parts += [*pieces[last : at[i]], f" {needles[i][1]}"]
            last = at[i]
        return "".join((*parts, *pieces[last:])).strip(), upto[at[0]] / upto[-1] if placed else None

    return fill


def _place(wanted: float, upto: Sequence[int], between: Sequence[int]) -> int:
    """The end of a sentence nearest to so many characters, or of a word where that is too far away."""
    near = _nearest(wanted, between, upto)
    return near if abs(upto[near] - wanted) <= OFF * upto[-1] else _nearest(wanted, range(len(upto)), upto)


def _nearest(wanted: float, places: Sequence[int], upto: Sequence[int]) -> int:
    after = bisect_left(places, wanted, key=lambda place: upto[place])
    return min(places[max(after - 1, 0) : after + 1], key=lambda place: abs(upto[place] - wanted))


def _passkey(random: Random, haystack: Haystack, task: str, depth: float) -> Draft:
    answers = tuple(_numbers(random, haystack, 5))
    fill = _hidden(random, haystack, [(depth, f"The pass key is the number {answers[0]}.")], True)
    intro = "The text below gives a pass key, a number of five digits. Keep it in mind."
    return Draft(intro, "What is the pass key?", "The pass key is the number", answers, (), fill)


def _keys(random: Random, haystack: Haystack, task: str, depth: float) -> Draft:
    count = KEYS if task == "multikey" else 1
    names, values = _names(random, haystack, count), _numbers(random, haystack, 7, count)
    depths = [depth, *(random.random() for _ in range(count - 1))]
    needles = [
        (d, f"The code for the {name} is the number {value}.")
        for d, name, value in zip(depths, names, values, strict=True)
    ]
    return Draft(
        CODES if count > 1 else "The text below gives a code, a number of seven digits. Keep it in mind.",
        f"What is the code for the {names[0]}?",
        f"The code for the {names[0]} is the number",
        (values[0],),
        tuple(values[1:]),
        _hidden(random, haystack, needles, True),
    )


def _values(random: Random, haystack: Haystack, task: str, depth: float) -> Draft:
    name, values = _names(random, haystack, 1)[0], _numbers(random, haystack, 7, VALUES)
    needles = [
        (d, f"A code for the {name} is the number {x}.")
        for d, x in zip(_throughout(random, VALUES), values, strict=True)
    ]
    return Draft(
        CODES,
        f"What are all {VALUES} codes for the {name}?",
        f"The codes for the {name} are the numbers",
        tuple(values),
        (),
        _hidden(random, haystack, needles, False),
    )


def _variables(random: Random, haystack: Haystack, task: str, depth: float) -> Draft:
    spell = lambda: "".join(_pick(random, ascii_uppercase) for _ in range(5))  # noqa: E731
    names = _fresh(haystack, spell, CHAINS * LINKS)
    chains = [names[i * LINKS : (i + 1) * LINKS] for i in range(CHAINS)]
    values = _numbers(random, haystack, 5, CHAINS)
    needles = [
        (d, f"Let {name} = {before}.")
        for chain, value in zip(chains, values, strict=True)
        for d, name, before in zip(_throughout(random, LINKS), chain, (value, *chain), strict=False)
    ]
    return Draft(
        "The text below gives values to variables. Keep track of them.",
        f"Which {LINKS} variables have the value {values[0]}, directly or through others?",
        f"The variables with the value {values[0]} are",
        tuple(chains[0]),
        tuple(names[LINKS:]),
        _hidden(random, haystack, needles, False),
    )


def _words(random: Random) -> Draft:
    words = _shuffled(random, THINGS)
    common, others = words[:COMMON], words[COMMON:]
    order = random.random()

    def fill(amount: int) -> tuple[str, None]:
        often = max(OFTEN, amount // 10)
        rest = amount - COMMON * often
        repeated = (others * ceil(rest / len(others)))[:rest]
        return ", ".join(_shuffled(Random(f"{order} {amount}"), common * often + repeated)), None

    return Draft(
        "In the list of words below some come up often and the others seldom.",
        f"Which {COMMON} words come up most often in the list?",
        f"The {COMMON} most frequent words are",
        tuple(common),
        tuple(others),
        fill,
        (COMMON + 1) * OFTEN,
    )
