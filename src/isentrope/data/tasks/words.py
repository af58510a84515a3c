"""Lists of words: the most frequent ones are asked for, which no single place of the text shows."""

from __future__ import annotations

from functools import cache
from math import ceil, pi
from random import Random

from isentrope.data.tasks.draw import Draw, shuffle
from isentrope.data.tasks.example import ExampleDraft
from isentrope.data.tasks.vocabulary import ADJECTIVES, NOUNS

COMMON_WORDS, MIN_REPEATS = 3, 6  # words that are the answer, and their occurrences at least
CWE_COMMON, CWE_COMMON_REPEATS, CWE_RARE_REPEATS = 10, 30, 3
CWE_RATIO = CWE_COMMON_REPEATS // CWE_RARE_REPEATS
CWE_STEP = CWE_COMMON * (CWE_RATIO + 1)  # words of the shortest list: common ones ten times, as many others once
FWE_ANSWERS, FWE_EXPONENT = 3, 2.0
FWE_NOISE = "..."  # the most frequent of all, and never the answer
FWE_MIN_WORDS = 160  # so that the third answer comes up more often than the next word
FWE_WORDS_PER_CODE = 16  # words of the text for each different one


def draft_words(draw: Draw) -> ExampleDraft:
    """List words of which three come up often."""
    words = shuffle(draw.random, NOUNS)
    common, others = words[:COMMON_WORDS], words[COMMON_WORDS:]
    order = draw.random.random()

    def fill(amount: int) -> tuple[str, None]:
        repeats = max(MIN_REPEATS, amount // 10)
        rest = amount - COMMON_WORDS * repeats
        repeated = (others * ceil(rest / len(others)))[:rest]
        return ", ".join(shuffle(Random(f"{order} {amount}"), common * repeats + repeated)), None

    return ExampleDraft(
        "In the list of words below some come up often and the others seldom.",
        f"Which {COMMON_WORDS} words come up most often in the list?",
        f"The {COMMON_WORDS} most frequent words are",
        tuple(common),
        tuple(others),
        fill,
        (COMMON_WORDS + 1) * MIN_REPEATS,
    )


@cache
def _compounds() -> tuple[str, ...]:
    """List words such as silver-anchor and anchor-bridge: enough different ones for a long list."""
    firsts = (*ADJECTIVES, *NOUNS)
    return tuple(f"{first}-{second}" for first in firsts for second in NOUNS if first != second)


def draft_common_words(draw: Draw) -> ExampleDraft:
    """List ten words 30 times each among others 3 times each: RULER's common words (Hsieh et al., 2024).

    Lists that are too short for that have 20 and 2, or 10 and 1. Where there are no more words to add, all come up more
    often.
    """
    words = shuffle(draw.random, _compounds())
    common, others = words[:CWE_COMMON], words[CWE_COMMON:]
    order = draw.random.random()

    def fill(amount: int) -> tuple[str, None]:
        most = ceil(amount / (CWE_COMMON * CWE_RATIO + len(others)))
        repeats = max(min(CWE_RARE_REPEATS, amount // CWE_STEP), most)
        rest = amount - CWE_COMMON * CWE_RATIO * repeats
        # one more word in the list is one more occurrence, of the last of the rare words
        rare = [word for word in others[: ceil(rest / repeats)] for _ in range(repeats)][:rest]
        mixed = shuffle(Random(f"{order}"), common * CWE_RATIO * repeats + rare)
        return " ".join(f"{i}. {word}" for i, word in enumerate(mixed, 1)), None

    return ExampleDraft(
        "In the numbered list of words below some come up often and the others seldom. Keep the frequent ones in mind.",
        f"Which {CWE_COMMON} words come up most often in the list?",
        f"The {CWE_COMMON} most frequent words are",
        tuple(common),
        (),
        fill,
        CWE_STEP,
        anywhere=True,
    )


def draft_frequent_words(draw: Draw) -> ExampleDraft:
    """Write coded words whose frequency falls as rank⁻², after dots: RULER's frequent words (Hsieh et al., 2024)."""
    first = draw.coded_words(FWE_ANSWERS)
    seed = f"{draw.random.random()}"

    def fill(amount: int) -> tuple[str, None]:
        random = Random(seed)
        ranked, rest = Draw(random, draw.haystack).coded_words(max(8, amount // FWE_WORDS_PER_CODE)), amount
        counts: dict[str, int] = {}
        for rank, word in enumerate((FWE_NOISE, *first, *(w for w in ranked if w not in first)), 1):
            counts[word] = min(rest, max(1, round(amount * 6 / pi**2 / rank**FWE_EXPONENT)))
            rest -= counts[word]
        counts[FWE_NOISE] += rest
        return " ".join(shuffle(random, [word for word, n in counts.items() for _ in range(n)])), None

    return ExampleDraft(
        "The text below is in code: words without a meaning, and dots to be ignored. Count how often words come up.",
        f"Which {FWE_ANSWERS} coded words come up most often?",
        f"The {FWE_ANSWERS} most frequent coded words are",
        tuple(first),
        (),
        fill,
        FWE_MIN_WORDS,
        anywhere=True,
    )
