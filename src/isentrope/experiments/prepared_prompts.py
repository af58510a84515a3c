"""Prompts of retrieval made by other processes, since counting their tokens takes longer than a GPU needs to answer."""

from __future__ import annotations

import hashlib
import multiprocessing
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from isentrope.data.tasks import Example, Haystack, draft_example, fill_to_length
from isentrope.evaluation.prompts import Prompt, PromptFormat
from isentrope.evaluation.retrieval import Cell

_inherited: list[Any] = []  # by a forked process: tokenizer, whether prompts are a chat, texts around the facts


@dataclass(frozen=True)
class PreparedPrompts(PromptFormat):
    """Prompts that keep the tokens they have counted, under a hash of the example."""

    counts: dict[bytes, int] = field(default_factory=dict)
    prompts: dict[bytes, Prompt] = field(default_factory=dict)

    def count_tokens(self, example: Example) -> int:
        if (key := _hash_example(example)) not in self.counts:
            self.counts[key] = super().count_tokens(example)
        return self.counts[key]

    def build_prompt(self, example: Example) -> Prompt:
        if (key := _hash_example(example)) not in self.prompts:
            self.prompts[key] = super().build_prompt(example)
        return self.prompts[key]


def _hash_example(example: Example) -> bytes:
    return hashlib.blake2b("\0".join((example.user_message, example.lead, example.reply)).encode()).digest()


class PromptWorkers:
    """Processes that prepare the prompts of cells ahead of their use; with none, prompts are made where used.

    They are forked, so that they start before a GPU is used: a process that uses one cannot be.

    Args:
        prompts: The format, which receives what the processes prepare.
        haystacks: Texts around the facts, by kind.
        cells: To prepare, in this order.
        examples: How many each cell has.
        seed: Of the examples.
        workers: Processes.
    """

    def __init__(
        self,
        prompts: PreparedPrompts,
        haystacks: Mapping[str, Haystack],
        cells: Iterable[Cell],
        examples: int,
        seed: int,
        workers: int,
    ) -> None:
        self.prompts = prompts
        self.current: tuple[str, Cell] | None = None
        self.pool: Any = None
        self.pending: dict[tuple[str, Cell], Any] = {}
        if not workers or sys.platform != "linux":  # Windows cannot fork, and macOS not safely
            return
        _inherited[:] = prompts.tokenizer, prompts.chat, haystacks
        self.pool = multiprocessing.get_context("fork").Pool(workers)
        for cell in cells:
            for kind in haystacks:
                self.pending[kind, cell] = self.pool.apply_async(_prepare_cell, (kind, cell, examples, seed))

    def receive(self, kind: str, cell: Cell) -> None:
        """Wait for the prompts of a cell, and give them to the format in place of those of the cell before."""
        if (kind, cell) == self.current:
            return
        self.current = kind, cell
        self.prompts.counts.clear()
        self.prompts.prompts.clear()
        if (pending := self.pending.pop((kind, cell), None)) is not None:
            counts, prompts = pending.get()
            self.prompts.counts.update(counts)
            self.prompts.prompts.update(prompts)

    def stop(self) -> None:
        """End the processes, whatever they have prepared."""
        if self.pool is not None:
            self.pool.terminate()


def _prepare_cell(kind: str, cell: Cell, examples: int, seed: int) -> tuple[dict[bytes, int], dict[bytes, Prompt]]:
    """Fill the examples of one cell up to its length; return what `PreparedPrompts` keeps."""
    tokenizer, chat, haystacks = _inherited
    prompts, (task, length, depth) = PreparedPrompts(tokenizer, chat), cell[:3]
    for index in range(examples):
        draft = draft_example(task, length, depth, seed, index, haystacks[kind])
        prompts.build_prompt(fill_to_length(draft, length, prompts.count_tokens))
    return prompts.counts, prompts.prompts
