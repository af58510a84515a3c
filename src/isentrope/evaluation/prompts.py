"""Retrieval examples as prompts: chat templates, tokens, and the answer's tokens."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

from isentrope.data.tasks import Example

# put before a chat template, so that those that print the date make the same prompts on every day
FIXED_DATE = "{%- macro strftime_now(format) -%}01 January 2025{%- endmacro -%}"
EXTRA_TOKENS = 8  # that a reply may have for each answer, beyond the answer's own
SPACES = " Ġ▁"  # how vocabularies write a space
MIN_CACHED_CHARACTERS = 4096  # shorter texts are tokenized whole
MAX_CACHED_WORDS = 1 << 20


@dataclass(frozen=True)
class Prompt:
    """An example in tokens.

    Args:
        example: The example.
        text: The prompt as text.
        tokens: The prompt.
        answer: The correct reply.
        part_ends: Where each answer ends in the correct reply; empty if that is not known.
    """

    example: Example
    text: str
    tokens: tuple[int, ...]
    answer: tuple[int, ...]
    part_ends: tuple[int, ...] = ()

    @property
    def max_new_tokens(self) -> int:
        return len(self.answer) + _extra_tokens(self.example)

    @property
    def total(self) -> int:
        return len(self.tokens) + self.max_new_tokens


def _extra_tokens(example: Example) -> int:
    return EXTRA_TOKENS * len(example.answers)


class WordTokens:
    """Tokens of a long text, put together from those of its words, which are kept.

    A text is split before a space only where no token of the vocabulary has a space after the character before it.
    No token spans such a place, so the tokens on either side are those of the whole text. The first long text is
    compared with its tokens as a whole, and where they differ nothing is split.

    Args:
        tokenizer: A transformers tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.words: dict[str, tuple[int, ...]] = {}
        self.anchor = self.tokenize_whole("a")
        self.split = _compile_split(tokenizer.get_vocab())
        self.checked = False

    def tokenize(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a text, without special ones around it."""
        if len(text) < MIN_CACHED_CHARACTERS or self.split is None:
            return self.tokenize_whole(text)
        first, *words = self.split.split(text)
        if len(self.words) > MAX_CACHED_WORDS:
            self.words.clear()
        if missing := [word for word in dict.fromkeys(words) if word not in self.words]:
            if (new := self._tokenize_words(missing)) is None:
                self.split = None
                return self.tokenize_whole(text)
            self.words.update(zip(missing, new, strict=True))
        tokens = (*self.tokenize_whole(first), *chain.from_iterable(map(self.words.__getitem__, words)))
        if not self.checked:
            self.checked = True
            if (whole := self.tokenize_whole(text)) != tokens:
                self.split = None
                return whole
        return tokens

    def tokenize_whole(self, text: str) -> tuple[int, ...]:
        encoded = self.tokenizer(text, add_special_tokens=False, truncation=False, verbose=False)
        return tuple(encoded["input_ids"])

    def _tokenize_words(self, words: Iterable[str]) -> list[tuple[int, ...]] | None:
        """Tokenize words after a space and another word; None if they change the tokens of that."""
        after = [f"a {word}" for word in words]
        encoded = self.tokenizer(after, add_special_tokens=False, truncation=False, verbose=False)["input_ids"]
        size = len(self.anchor)
        if any(tuple(ids[:size]) != self.anchor for ids in encoded):
            return None
        return [tuple(ids[size:]) for ids in encoded]


def _compile_split(vocabulary: Iterable[str]) -> re.Pattern[str] | None:
    """Compile the places where a text may be split: single spaces after ASCII that no token has a space after."""
    crossing = re.compile(rf"([^{SPACES}\s])[{SPACES}]")
    before = {character for token in vocabulary for character in crossing.findall(token)}
    allowed = "".join(map(chr, range(33, 127)))
    characters = [re.escape(c) for c in allowed if c not in before]
    if "a" not in characters:
        return None
    return re.compile(rf"(?<=[{''.join(characters)}]) (?=\S)")


@dataclass(frozen=True)
class PromptFormat:
    """How examples become prompts: as a text to continue, or as a chat whose reply is begun for the model."""

    tokenizer: Any
    chat: bool

    @classmethod
    def from_tokenizer(cls, tokenizer: Any, chat: bool | None = None) -> PromptFormat:
        """Choose a chat where the tokenizer has a template for one, unless `chat` decides."""
        has_template = getattr(tokenizer, "chat_template", None) is not None
        if chat and not has_template:
            raise ValueError("chat: expected a tokenizer with a chat template, got one without")
        return cls(tokenizer, has_template if chat is None else chat)

    def format(self, example: Example) -> str:
        """Write the prompt of an example, up to where the model's reply continues."""
        if not self.chat:
            return f"{example.user_message}\n{example.lead}"
        messages = [{"role": "user", "content": example.user_message}]
        template = FIXED_DATE + self.tokenizer.get_chat_template()
        opened: str = self.tokenizer.apply_chat_template(
            messages, chat_template=template, tokenize=False, add_generation_prompt=True
        )
        return opened + example.lead

    def tokenize(self, text: str) -> tuple[int, ...]:
        """Tokenize a text, after what the tokenizer puts before every text; a chat's template has that already."""
        return (() if self.chat else self._prefix) + self._words.tokenize(text)

    def count_tokens(self, example: Example) -> int:
        """Count the tokens of prompt and reply."""
        return len(self.tokenize(self.format(example) + example.reply)) + _extra_tokens(example)

    def build_prompt(self, example: Example) -> Prompt:
        """Tokenize an example.

        Raises:
            ValueError: The tokenizer cannot spell the answer, or joins it to the prompt.
        """
        text = self.format(example)
        tokens, whole = self.tokenize(text), self.tokenize(text + example.reply)
        if whole[: len(tokens)] != tokens:
            raise ValueError("tokenizer: expected a prompt to have the same tokens when its answer follows, got others")
        answer = whole[len(tokens) :]
        if example.count_answers(decoded := self.tokenizer.decode(answer)) < len(example.answers):
            raise ValueError(f"tokenizer: expected it to spell {example.reply.strip()!r}, got {decoded!r}")
        return Prompt(example, text, tokens, answer, self._find_parts(example, answer))

    def _find_parts(self, example: Example, answer: tuple[int, ...]) -> tuple[int, ...]:
        """Find where each answer ends among the tokens of the reply."""
        lead = self._words.tokenize_whole(example.lead)
        ends, text = list[int](), example.lead
        for part in example.reply_parts:
            text += part
            tokens = self._words.tokenize_whole(text)[len(lead) :]
            if tokens != answer[: len(tokens)]:
                return ()
            ends.append(len(tokens))
        return tuple(ends) if ends[-1] == len(answer) else ()

    @cached_property
    def _words(self) -> WordTokens:
        return WordTokens(self.tokenizer)

    @cached_property
    def _prefix(self) -> tuple[int, ...]:
        marked, bare = tuple(self.tokenizer("a", verbose=False)["input_ids"]), self._words.tokenize_whole("a")
        starts = [i for i in range(len(marked)) if marked[i : i + len(bare)] == bare]
        return marked[: starts[0]] if starts else ()
