"""Measure one model under many recipes: perplexity on several kinds of text, retrieval from several kinds of filler.

    python docs/results/share/measure.py docs/results/share/smollm2-32k.yaml --model SmolLM2-135M-Instruct \
        --texts texts --out results/share --seconds 900
    python docs/results/share/measure.py docs/results/share/llama.yaml --model src/isentrope/models/shipped/llama \
        --texts texts --out results/share --only perplexity --kinds modules

A plan (YAML) has `recipes`, and one or both of

- `perplexity`: `edges`, `documents` of each kind at most, `texts` (kind: file in the folder of --texts);
- `retrieval`: `tasks`, `lengths`, `depths`, `examples`, `texts` (kind: file, or null for plain sentences, repeated),
  `recipes` where not all of the plan's are wanted;

and `dtype` where the model's own is not wanted. Results go to OUT/PLAN/KIND/perplexity.json and
OUT/PLAN/KIND-filler/retrieval.json. What a file has is kept and not measured again, and a file is complete at any
time, so that a run may be stopped and resumed. Every recipe is measured on the first document of
every kind before any is measured on the second, and in the first place of a filler before the second.

Other processes count the tokens of prompts meanwhile (--workers), which takes longer than a GPU needs to answer them.
Several models, or several kinds of one, may be measured at a time by as many processes. texts.py makes the texts.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # processes are forked below

import yaml
from transformers import PreTrainedModel
from transformers.utils import logging

from isentrope.data.tasks import SENTENCES, Example, Haystack, draft_example, fill_to_length, load_haystack
from isentrope.data.tasks.fillers import TEXT
from isentrope.evaluation.loading import load_on_device, load_tokenizer
from isentrope.evaluation.perplexity import PerplexityConfig, measure_perplexity
from isentrope.evaluation.prompts import Prompt, PromptFormat
from isentrope.evaluation.recipe_texts import under_recipe
from isentrope.evaluation.results import PERPLEXITY, RETRIEVAL, Schema, read_if_whole
from isentrope.evaluation.retrieval import Cell, RetrievalConfig, measure_retrieval
from isentrope.evaluation.texts import Text, load_texts

GROUP_SECONDS = 8.0  # that recipes measured in one call should take together
DEPTH_ORDER = (50, 0, 25, 75, 100)
Measured = dict[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class PreparedPrompts(PromptFormat):
    """Prompts that keep the tokens they have counted, under a hash of the example."""

    counts: dict[bytes, int] = field(default_factory=dict)
    prompts: dict[bytes, Prompt] = field(default_factory=dict)

    def count_tokens(self, example: Example) -> int:
        if (key := hash_example(example)) not in self.counts:
            self.counts[key] = super().count_tokens(example)
        return self.counts[key]

    def build_prompt(self, example: Example) -> Prompt:
        if (key := hash_example(example)) not in self.prompts:
            self.prompts[key] = super().build_prompt(example)
        return self.prompts[key]


def hash_example(example: Example) -> bytes:
    return hashlib.blake2b("\0".join((example.user_message, example.lead, example.reply)).encode()).digest()


@dataclass
class Step:
    """All recipes on one document, or in one place of a filler.

    Args:
        label: what is printed before a recipe.
        place: where among the steps of its kind it is, from 0 to 1.
        cost: steps of the same cost take about the same time.
        recipes: to be measured.
        path: the results file.
        schema: of that file.
        key: of its cells beside the recipe.
        measure: measures some of the recipes.
        describe: formats the numbers of a cell.
    """

    label: str
    place: float
    cost: tuple[str, int]
    recipes: tuple[str, ...]
    path: Path
    schema: Schema
    key: tuple[Any, ...]
    measure: Callable[[tuple[str, ...]], None]
    describe: Callable[[dict[str, Any]], str]

    def read(self) -> Measured:
        """Read the cells that are measured, by recipe and key."""
        results = read_if_whole(self.path, "cells", schema=self.schema) or {"cells": []}
        cells = {self.schema.key(cell): cell for cell in results["cells"]}
        return {key: cell for key, cell in cells.items() if cell.get("failed") is None}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path)
    parser.add_argument("--model", required=True, help="folder of the model")
    parser.add_argument("--texts", type=Path, default=Path("texts"), help="folder of the texts")
    parser.add_argument("--out", type=Path, default=Path("results/share"))
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop before so many have passed")
    parser.add_argument("--only", choices=("perplexity", "retrieval"))
    parser.add_argument("--kinds", help="kinds of text to measure on, separated by commas; all by default")
    parser.add_argument("--workers", type=int, default=4, help="processes that prepare prompts")
    options = parser.parse_args()
    start = time.monotonic()
    plan = yaml.safe_load(options.plan.read_text(encoding="utf-8"))
    parts = [part for part in ("perplexity", "retrieval") if part in plan and options.only in (None, part)]
    for part in parts:
        kinds = plan[part]["texts"].items()
        plan[part]["texts"] = {k: v for k, v in kinds if options.kinds is None or k in options.kinds.split(",")}
    out = options.out / options.plan.stem
    logging.disable_progress_bar()
    preparation = Preparation(plan, options.model, options.texts, parts, options.workers)
    model = load_on_device(options.model, dtype=plan.get("dtype", "auto")).eval()
    report(start, f"{Path(options.model).name} on {model.device}, {model.dtype}")
    recipes = [recipe for recipe in plan["recipes"] if is_supported(model, recipe, start)]
    steps = list(preparation.iterate_steps(model, Path(options.model).name, tuple(recipes), out))
    steps.sort(key=lambda step: step.place)  # stable, so that kinds alternate
    complete = run(steps, start, start + options.seconds)
    preparation.stop()
    report(start, "complete" if complete else "stopped at the time given; run again to resume")


def report(start: float, line: str) -> None:
    print(f"{time.monotonic() - start:7.1f} s  {line}", flush=True)


def is_supported(model: PreTrainedModel, recipe: str, start: float) -> bool:
    """Whether the model can be extended with a recipe; say why where it cannot."""
    try:
        with under_recipe(model, recipe):
            return True
    except ValueError as error:
        report(start, f"LEFT OUT {recipe}: {error}")
        return False


class Preparation:
    """Texts and prompts, made before the model is on a GPU, since a process that uses one cannot be forked."""

    def __init__(self, plan: dict[str, Any], model: str, folder: Path, parts: Sequence[str], workers: int) -> None:
        self.plan = plan
        self.texts: dict[str, list[Text]] = {}
        self.haystacks: dict[str, Haystack] = {}
        self.pool: Any = None
        self.pending: dict[tuple[str, Cell], Any] = {}
        if "perplexity" in parts:
            entry = plan["perplexity"]
            for kind, name in entry["texts"].items():
                self.texts[kind] = load_texts([folder / name], model, None, entry["edges"][-1], entry["documents"])
        if "retrieval" in parts:
            plain = PromptFormat.from_tokenizer(load_tokenizer(model))
            self.prompts = PreparedPrompts(plain.tokenizer, plain.chat)
            for kind, name in plan["retrieval"]["texts"].items():
                self.haystacks[kind] = load_haystack([folder / name] if name else [])
            if workers:
                self._start(workers)

    def retrieval_config(self, recipes: Sequence[str], kind: str) -> RetrievalConfig:
        entry = self.plan["retrieval"]
        lists = {name: tuple(entry[name]) for name in ("tasks", "lengths", "depths")}
        lists["fillers"] = (TEXT if entry["texts"][kind] else SENTENCES,)
        return RetrievalConfig(tuple(recipes), **lists, examples=entry["examples"], score="forced")

    def cells(self, kind: str) -> list[Cell]:
        """Tasks, lengths and depths, the longest and the middle of the text first."""
        order = {depth: index for index, depth in enumerate(DEPTH_ORDER)}
        cells = self.retrieval_config(("plain",), kind).cells
        return sorted(cells, key=lambda cell: (order.get(cell[2] or 0, len(order)), -cell[1]))

    def _start(self, workers: int) -> None:
        _inherited[:] = self.prompts.tokenizer, self.prompts.chat, self.haystacks
        self.pool = multiprocessing.get_context("fork").Pool(workers)
        for cells in zip(*(self.cells(kind) for kind in self.haystacks), strict=True):
            for kind, cell in zip(self.haystacks, cells, strict=True):
                config = self.retrieval_config(("plain",), kind)
                self.pending[kind, cell] = self.pool.apply_async(prepare_prompts, (kind, cell, config))

    def stop(self) -> None:
        if self.pool is not None:
            self.pool.terminate()

    def iterate_steps(self, model: PreTrainedModel, name: str, recipes: tuple[str, ...], out: Path) -> Iterator[Step]:
        edges = tuple(self.plan["perplexity"]["edges"]) if self.texts else ()
        for kind, texts in self.texts.items():
            for index, text in enumerate(texts):
                yield Step(
                    label=f"{kind} {index + 1}",
                    place=index / len(texts),
                    cost=("tokens", edges[-1]),
                    recipes=recipes,
                    path=out / kind / PERPLEXITY.file,
                    schema=PERPLEXITY,
                    key=(text.sha256,),
                    measure=partial(_measure_perplexity, model, name, texts[: index + 1], edges, out / kind),
                    describe=partial(describe_losses, edges),
                )
        wanted = self.plan["retrieval"].get("recipes", recipes) if self.haystacks else ()
        for kind in self.haystacks:
            cells = self.cells(kind)
            for index, cell in enumerate(cells):
                folder = out / f"{kind}-filler"
                yield Step(
                    label=f"{kind} filler {' '.join(map(str, cell))}",
                    place=index / len(cells),
                    cost=("prompt", cell[1]),
                    recipes=tuple(recipe for recipe in wanted if recipe in recipes),
                    path=folder / RETRIEVAL.file,
                    schema=RETRIEVAL,
                    key=cell,
                    measure=partial(self._measure_retrieval, model, name, kind, cell, folder),
                    describe=describe_answers,
                )

    def _measure_retrieval(
        self, model: PreTrainedModel, name: str, kind: str, cell: Cell, out: Path, recipes: tuple[str, ...]
    ) -> None:
        if (pending := self.pending.get((kind, cell))) is not None:
            counts, prompts = pending.get()
            self.prompts.counts.update(counts)
            self.prompts.prompts.update(prompts)
        task, length, depth, _ = cell
        config = replace(self.retrieval_config(recipes, kind), tasks=(task,), lengths=(length,))
        config = config if depth is None else replace(config, depths=(depth,))
        measure_retrieval(model, name, self.prompts, self.haystacks[kind], config, out)
        self.prompts.counts.clear()
        self.prompts.prompts.clear()


def _measure_perplexity(
    model: PreTrainedModel,
    name: str,
    texts: Sequence[Text],
    edges: tuple[int, ...],
    out: Path,
    recipes: tuple[str, ...],
) -> None:
    measure_perplexity(model, name, texts, PerplexityConfig(recipes, edges), out)


_inherited: list[Any] = []  # of a forked process: tokenizer, whether to ask in a chat, texts around the facts


def prepare_prompts(kind: str, cell: Cell, config: RetrievalConfig) -> tuple[dict[bytes, int], dict[bytes, Prompt]]:
    """Fill the examples of one cell up to its length; return what `PreparedPrompts` keeps."""
    tokenizer, chat, haystacks = _inherited
    prompts, (task, length, depth, _) = PreparedPrompts(tokenizer, chat), cell
    for index in range(config.examples):
        draft = draft_example(task, length, depth, config.seed, index, haystacks[kind])
        prompts.build_prompt(fill_to_length(draft, length, prompts.count_tokens))
    return prompts.counts, prompts.prompts


def run(steps: Iterable[Step], start: float, end: float) -> bool:
    """Measure what is missing of every step, some recipes at a time; return whether all was, before the end."""
    costs: dict[tuple[str, int], float] = {}  # seconds for one recipe
    for step in steps:
        done = step.read()
        missing = [recipe for recipe in step.recipes if (recipe, *step.key) not in done]
        while missing:
            cost = costs.get(step.cost, 0.0)
            if time.monotonic() + cost > end:
                return False
            size = max(1, int(min(GROUP_SECONDS, end - time.monotonic()) / cost)) if cost else 1
            group, missing = tuple(missing[:size]), missing[size:]
            before = time.monotonic()
            try:
                step.measure(group)
            except (ValueError, RuntimeError) as error:
                report(start, f"FAILED {step.label} {', '.join(group)}: {error}")
            costs[step.cost] = (time.monotonic() - before) / len(group)
            print_cells(step, group, start)
    return True


def print_cells(step: Step, recipes: Iterable[str], start: float) -> None:
    cells = step.read()
    for recipe in recipes:
        if (cell := cells.get((recipe, *step.key))) is None:
            report(start, f"FAILED {step.label} {recipe}")
        else:
            report(start, f"{step.label} {recipe}: {step.describe(cell)}")


def describe_losses(edges: Sequence[int], cell: dict[str, Any]) -> str:
    sizes = [b - max(a, 1) for a, b in pairwise(edges)]
    numbers = " ".join(f"{math.exp(x / n):.2f}" for x, n in zip(cell["loss"], sizes, strict=True))
    return f"{numbers} ({cell['seconds']:.2f} s)"


def describe_answers(cell: dict[str, Any]) -> str:
    seconds = sum(cell["seconds"].values())
    return f"{cell['forced']} of {cell['count']}, {cell['likeliest']:.0%} of tokens ({seconds:.2f} s)"


if __name__ == "__main__":
    main()
