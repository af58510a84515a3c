"""Retrieval examples: a text with something hidden in it, a question, its answers, and how a reply is scored.

An example is a function of (task, length, depth, seed, index) and of the text around it, the same on every machine. The
caller, who can count tokens, fills it up to `length`; it is never truncated.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

MIN_FILLER_WORDS = 32  # with fewer, depth would mean nothing
SECANT_ROUNDS = 8  # searches by slope before bisection


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
        anywhere: Whether an answer counts wherever a reply has it, as a part of a word too (RULER's string match);
            otherwise only as many candidates as there are answers count, the first ones, each as a separate word.
    """

    intro: str
    text: str
    question: str
    lead: str
    answers: tuple[str, ...]
    decoys: tuple[str, ...] = ()
    depth: float | None = None
    anywhere: bool = False

    @property
    def user_message(self) -> str:
        """The prompt without the lead: a chat user's message."""
        return f"{self.intro}\n\n{self.text}\n\n{self.question}"

    @property
    def reply(self) -> str:
        """The correct reply after the lead."""
        return "".join(self.reply_parts)

    @property
    def reply_parts(self) -> tuple[str, ...]:
        """The correct reply, split into one part for each answer."""
        return tuple(f"{', ' if i else ' '}{answer}" for i, answer in enumerate(self.answers))

    def count_answers(self, reply: str) -> int:
        """Count the answers that a reply names.

        Args:
            reply: What the model wrote after the lead.
        """
        text = reply.casefold()
        if self.anywhere:
            return sum(answer.casefold() in text for answer in self.answers)
        candidates = [(_find_word(x.casefold(), text), x in self.answers) for x in (*self.answers, *self.decoys)]
        named = sorted((at, correct) for at, correct in candidates if at >= 0)
        # only as many as there are answers count, so that listing everything scores little
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
    anywhere: bool = False

    @property
    def shortest(self) -> Example:
        return self.build(self.min_words)

    def build(self, words: int) -> Example:
        """Build the example with this much filler.

        Args:
            words: Words of filler.
        """
        text, depth = self.fill(words)
        answers, decoys = self.answers, self.decoys
        return Example(self.intro, text, self.question, self.lead, answers, decoys, depth, self.anywhere)


def fill_to_length(draft: ExampleDraft, length: int, count_tokens: Callable[[Example], int]) -> Example:
    """Return the longest example of a draft with at most `length` tokens; one more word would exceed it.

    Args:
        draft: The example of open length.
        length: Tokens at most.
        count_tokens: Counts the tokens of an example with its answer.

    Raises:
        ValueError: Even the shortest example is longer.
    """
    low, fits = draft.min_words, count_tokens(draft.shortest)
    if fits > length:
        raise ValueError(f"length: expected {fits} tokens or more to ask {draft.question!r}, got {length}")
    high, over = low + MIN_FILLER_WORDS, count_tokens(draft.build(low + MIN_FILLER_WORDS))
    while over <= length:
        # Tokens grow almost linearly with words, so the slope so far tells where the length is reached.
        slope = max((over - fits) / (high - low), 1e-3)
        step = max(2, min(round(1.02 * (length - over) / slope), 64 * high))
        low, fits, high = high, over, high + step
        over = count_tokens(draft.build(high))
    rounds = 0
    while high - low > 1:
        share = (length - fits) / (over - fits) if rounds < SECANT_ROUNDS else 0.5
        middle = low + min(max(round(share * (high - low)), 1), high - low - 1)
        count, rounds = count_tokens(draft.build(middle)), rounds + 1
        if count <= length:
            low, fits = middle, count
        else:
            high, over = middle, count
    return draft.build(low)
