"""The text that facts are hidden in: any text, repeated cyclically and cut between words."""

from __future__ import annotations

import hashlib
import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from isentrope.data.tasks.vocabulary import FILLER

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
        """Build from texts, one after another; by default a few paragraphs of plain sentences.

        Args:
            texts: The texts.

        Raises:
            ValueError: They are empty.
        """
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

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each word begins in one round of the text, and the characters of a round."""
        return (0, *accumulate(map(len, self.words)))

    @cached_property
    def _round(self) -> str:
        return "".join(self.words)

    def cut(self, end: int, count: int) -> HaystackCut:
        """Return the `count` words up to number `end`."""
        return HaystackCut(self, end + 1 - count, end + 1)

    def offset(self, word: int) -> int:
        """Return where a word begins, counting from the first round; negative in the rounds before it."""
        rounds, index = divmod(word, len(self.words))
        return rounds * self.offsets[-1] + self.offsets[index]

    def join(self, start: int, stop: int) -> str:
        """Join the words from `start` up to, but without, `stop`."""
        size = self.offsets[-1]
        first, last = self.offset(start), self.offset(stop)
        rounds, begin = divmod(first, size)
        copies = -(-(last - rounds * size) // size)
        return (self._round * max(copies, 1))[begin : begin + last - first]


@dataclass(frozen=True)
class HaystackCut:
    """Words `start` up to `stop` of the rounds of a haystack."""

    haystack: Haystack
    start: int
    stop: int

    @property
    def characters(self) -> int:
        return self.haystack.offset(self.stop) - self.haystack.offset(self.start)

    def text(self, start: int, stop: int) -> str:
        return self.haystack.join(start, stop)

    def share_before(self, word: int) -> float:
        """Return the share of characters before a word."""
        return (self.haystack.offset(word) - self.haystack.offset(self.start)) / self.characters

    def nearest_gap(self, depth: float) -> int:
        """Return the word before which a sentence put in at this depth cuts none, or the nearest word if that is far.

        Args:
            depth: Share of the text before it.
        """
        first = self.haystack.offset(self.start)
        target = first + depth * self.characters
        gap = self._nearest(target, self._sentence_gaps(target))
        if abs(self.haystack.offset(gap) - target) <= MAX_DEPTH_ERROR * self.characters:
            return gap
        return self._nearest(target, self._word_gaps(target))

    def _sentence_gaps(self, target: float) -> list[int]:
        """Return the sentence boundaries on both sides of a character, and the beginning of the cut."""
        ends, size = self.haystack.ends, len(self.haystack.words)
        if not ends:
            return [self.start]
        rounds = int(target // self.haystack.offsets[-1])
        inside = target - rounds * self.haystack.offsets[-1]
        after = bisect_left(ends, inside, key=lambda index: self.haystack.offsets[index + 1])
        numbers = (rounds * len(ends) + after + step for step in (-1, 0))
        gaps = [(n // len(ends)) * size + ends[n % len(ends)] + 1 for n in numbers]
        return [self.start, *(gap for gap in gaps if self.start < gap <= self.stop)]

    def _word_gaps(self, target: float) -> list[int]:
        size = len(self.haystack.words)
        rounds = int(target // self.haystack.offsets[-1])
        after = bisect_left(self.haystack.offsets, target - rounds * self.haystack.offsets[-1])
        return [gap for step in (-1, 0) if self.start <= (gap := rounds * size + after + step) <= self.stop]

    def _nearest(self, target: float, gaps: Sequence[int]) -> int:
        return min(gaps, key=lambda gap: (abs(self.haystack.offset(gap) - target), gap))
