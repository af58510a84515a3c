"""Run a comparison plan: every recipe on one document of each kind, then on the next, until the time is up."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from textwrap import shorten
from typing import Any

from transformers import PreTrainedModel

from isentrope.data.source import find_text_files
from isentrope.data.tasks import load_haystack
from isentrope.evaluation.frontier import COMPARISON_FILE, FILLER_SUFFIX
from isentrope.evaluation.loading import identify_model, load_on_device, load_tokenizer
from isentrope.evaluation.perplexity import PerplexityConfig, measure_perplexity
from isentrope.evaluation.prompts import PromptFormat
from isentrope.evaluation.ranking import forgets
from isentrope.evaluation.recipe_texts import under_recipe
from isentrope.evaluation.results import (
    PERPLEXITY,
    RETRIEVAL,
    TIMES,
    ModelRecord,
    Schema,
    describe_difference,
    find_conflicts,
    hash_parts,
    list_differences,
    read_if_whole,
    write_results,
)
from isentrope.evaluation.retrieval import Cell, measure_retrieval
from isentrope.evaluation.texts import Text, load_texts
from isentrope.evaluation.timing import measure_times, open_times
from isentrope.experiments.comparison_plan import PLAIN, TIME, ComparisonPlan
from isentrope.experiments.prepared_prompts import PreparedPrompts, PromptWorkers
from isentrope.hf.introspection import introspect_once

MAX_MESSAGE_CHARACTERS = 200
GIB = 2**30
GROUP_SECONDS = 8.0  # that recipes measured in one call should take together
Notify = Callable[[str], None]


class Outcome(Enum):
    """How a run ended: everything is measured, the time given is over, or recipes failed."""

    COMPLETE = "complete"
    STOPPED = "incomplete: stopped at the time given; run again to resume"
    FAILED = "incomplete: failures above"


@dataclass
class Step:
    """All recipes on one document, or in one place of a filler.

    Args:
        label: What is printed before a recipe.
        place: Where among the steps of its kind it is, from 0 to 1.
        cost: Steps of the same cost take about the same time.
        recipes: To be measured.
        path: The results file.
        schema: Of that file.
        key: Of its cells beside the recipe.
        measure: Measures some of the recipes.
        describe: Formats the numbers of a cell.
    """

    label: str
    place: float
    cost: tuple[str, int]
    recipes: tuple[str, ...]
    path: Path
    schema: Schema
    key: tuple[Any, ...]
    measure: Callable[[tuple[str, ...]], object]
    describe: Callable[[dict[str, Any]], str]

    def read(self) -> dict[str, dict[str, Any]]:
        """Read the cells of this step by recipe, those that failed too."""
        results = read_if_whole(self.path, "cells", schema=self.schema) or {"cells": []}
        cells = {self.schema.key(cell): cell for cell in results["cells"]}
        return {recipe: cells[recipe, *self.key] for recipe in self.recipes if (recipe, *self.key) in cells}

    def missing(self) -> list[str]:
        done = {recipe for recipe, cell in self.read().items() if cell.get("failed") is None}
        return [recipe for recipe in self.recipes if recipe not in done]


@introspect_once()
def run_comparison(
    plan: ComparisonPlan,
    model: str,
    texts: Path,
    out: Path,
    seconds: float = math.inf,
    workers: int = 0,
    notify: Notify = print,
) -> Outcome:
    """Measure what is missing of a plan in `out`/NAME.

    Perplexity goes to KIND/perplexity.json, retrieval to KIND-filler/retrieval.json, times to times.json, and what was
    compared to comparison.json. A file is complete at any time, so that a run may be stopped and resumed. Every recipe
    is measured on the first document of every kind before any is on the second. A recipe that the model or this version
    cannot take is left out; one that fails is not tried again at that length in the same run.

    Args:
        plan: The plan.
        model: The folder of a causal model, or its name on the hub.
        texts: The folder of the plan's files.
        out: The folder that plans share.
        seconds: Stop before so many have passed.
        workers: Processes that prepare prompts meanwhile.
        notify: Receives a line for each recipe measured, left out or failed.

    Returns:
        How the run ended.
    """
    start = time.monotonic()

    def report(line: str) -> None:
        notify(f"{time.monotonic() - start:7.1f} s  {line}")

    _check_parts(plan, out / plan.name)
    inputs = ComparisonInputs(plan, model, texts, workers)
    try:
        loaded = load_on_device(model, dtype=plan.dtype).eval()
        report(f"{Path(model).name} on {loaded.device}, {loaded.dtype}")
        reasons = {recipe: _explain_refusal(loaded, recipe) for recipe in plan.recipes}
        for recipe, reason in reasons.items():
            if reason:
                report(f"LEFT OUT {recipe}: {reason}")
        recipes = tuple(recipe for recipe, reason in reasons.items() if reason is None)
        inputs.check_results(identify_model(loaded, inputs.name), out / plan.name)
        _write_comparison(plan, reasons, out / plan.name)
        steps = sorted(inputs.iterate_steps(loaded, recipes, out / plan.name), key=lambda step: step.place)
        failed = run_steps(steps, start + seconds, report)
    finally:
        inputs.workers.stop()
    outcome = Outcome.FAILED if failed else Outcome.STOPPED
    if not any(step.missing() for step in steps):
        outcome = Outcome.COMPLETE
    report(outcome.value)
    return outcome


def has_results(folder: Path) -> bool:
    """Return whether anything of a comparison is measured."""
    files = (f"*/{PERPLEXITY.file}", f"*/{RETRIEVAL.file}", TIMES.file)
    results = (read_if_whole(path, "cells") for pattern in files for path in folder.glob(pattern))
    return any(each and each["cells"] for each in results)


def _explain_refusal(model: PreTrainedModel, recipe: str) -> str | None:
    """Say why a model cannot be extended with a recipe; None where it can."""
    try:
        with under_recipe(model, recipe):
            return None
    except (ValueError, NotImplementedError) as error:
        return shorten(str(error), MAX_MESSAGE_CHARACTERS, placeholder=" …")


def _check_parts(plan: ComparisonPlan, folder: Path) -> None:
    """Refuse to add to results that were measured under other versions of a user's own parts."""
    path = folder / COMPARISON_FILE
    earlier = read_if_whole(path, "recipes") or {}
    if conflicts := find_conflicts(earlier, hash_parts({"recipes": plan.recipes}), ("parts",)):
        raise ValueError(f"{path}: holds another comparison {describe_difference(conflicts)}")


def _check_results(path: Path, schema: Schema, now: dict[str, Any], texts: Collection[str]) -> None:
    """Refuse a results file of another run, or with cells of other texts, which would be averaged with these.

    Args:
        now: The head of this run: model, config, and the hash of the text of all fillers.
        texts: Hashes of the texts; empty for retrieval.
    """
    earlier = read_if_whole(path, "model", "config", "cells", schema=schema)
    if not earlier:
        return
    if "text" in now:
        now = now | {"texts": dict.fromkeys(earlier.get("texts", {}), now["text"])}
    differing = list_differences(schema, earlier, json.loads(json.dumps(now)))
    if texts and not {cell["text"] for cell in earlier["cells"]} <= set(texts):
        differing.append("texts")
    if differing:
        raise ValueError(f"{path}: holds {schema.mismatch}, or other texts {describe_difference(differing)}")


def _write_comparison(plan: ComparisonPlan, reasons: dict[str, str | None], folder: Path) -> None:
    """Write what is compared; what an earlier run of the same plan had is kept, and timing it changes nothing."""
    path = folder / COMPARISON_FILE
    folder.mkdir(parents=True, exist_ok=True)
    earlier = read_if_whole(path, "recipes")
    if plan.timed and earlier:
        return
    earlier = earlier or {"recipes": []}
    known = [recipe for recipe, reason in reasons.items() if reason is None]
    recipes = list(dict.fromkeys((*earlier["recipes"], *known)))
    record = {
        "title": plan.title,
        "recipes": recipes,
        "forgetful": [recipe for recipe in recipes if recipe != PLAIN and forgets(recipe)],
        "left_out": {recipe: reason for recipe, reason in reasons.items() if reason},
        "ceiling": plan.retrieval.ceiling if plan.retrieval else earlier.get("ceiling"),
        "plan": asdict(plan),
    }
    if parts := earlier.get("parts", {}) | hash_parts({"recipes": plan.recipes}).get("parts", {}):
        record["parts"] = parts
    write_results(path, record)


class ComparisonInputs:
    """Texts and prompts of a plan, read before the model is on a GPU.

    Args:
        plan: The plan.
        model: The model whose tokenizer is used.
        folder: The folder of the plan's files.
        workers: Processes that prepare prompts.
    """

    def __init__(self, plan: ComparisonPlan, model: str, folder: Path, workers: int) -> None:
        self.plan = plan
        self.name = Path(model).name
        self.texts: dict[str, list[Text]] = {}
        self.haystacks: dict[str, Any] = {}
        if (part := plan.perplexity) is not None:
            for kind, name in part.texts.items():
                files = find_text_files(str(folder / name))
                self.texts[kind] = load_texts(files, model, None, part.edges[-1], part.documents)
        cells: list[Cell] = []
        tokenizer, chat, examples, seed = None, False, 0, 0
        if (questions := plan.retrieval) is not None:
            self.haystacks = {
                kind: load_haystack(find_text_files(str(folder / name)) if name else [])
                for kind, name in questions.texts.items()
            }
            prompts = PromptFormat.from_tokenizer(load_tokenizer(model))
            tokenizer, chat, cells = prompts.tokenizer, prompts.chat, questions.cells()
            examples, seed = questions.config.examples, questions.config.seed
        self.prompts = PreparedPrompts(tokenizer, chat)
        self.workers = PromptWorkers(self.prompts, self.haystacks, cells, examples, seed, workers if cells else 0)

    def check_results(self, model: ModelRecord, out: Path) -> None:
        """Refuse results of another model, other buckets, examples or texts, also where nothing is missing."""
        if (part := self.plan.perplexity) is not None and not self.plan.timed:
            head: dict[str, Any] = {"model": model, "config": asdict(PerplexityConfig(self.plan.recipes, part.edges))}
            for kind, texts in self.texts.items():
                _check_results(out / kind / PERPLEXITY.file, PERPLEXITY, head, [text.sha256 for text in texts])
        if (questions := self.plan.retrieval) is not None:
            for kind, haystack in self.haystacks.items():
                head = {"model": model, "config": asdict(questions.config), "text": haystack.sha256}
                _check_results(out / f"{kind}{FILLER_SUFFIX}" / RETRIEVAL.file, RETRIEVAL, head, ())

    def iterate_steps(self, model: PreTrainedModel, recipes: tuple[str, ...], out: Path) -> Iterator[Step]:
        """Yield the steps of each kind of text, then of each filler."""
        edges = self.plan.perplexity.edges if self.plan.perplexity else ()
        if self.plan.timed:
            ((text,),) = self.texts.values()
            yield Step(
                label=TIME,
                place=0.0,
                cost=(TIME, edges[-1]),
                recipes=recipes,
                path=out / TIMES.file,
                schema=TIMES,
                key=(),
                measure=partial(measure_times, model, text, open_times(model, self.name, text, edges[-1], out)),
                describe=_describe_passes,
            )
            return
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
                    measure=partial(self._measure_perplexity, model, texts[: index + 1], edges, out / kind),
                    describe=partial(_describe_losses, edges),
                )
        part = self.plan.retrieval
        cells = part.cells() if part else []
        for index, cell in enumerate(cells):
            for kind in self.haystacks:
                if part is None or (placed := part.place(cell, kind)) is None:
                    continue
                folder = out / f"{kind}{FILLER_SUFFIX}"
                yield Step(
                    label=f"{kind} filler {' '.join(map(str, cell[:3]))}",
                    place=index / len(cells),
                    cost=("prompt", cell[1]),
                    recipes=part.select_recipes(cell, recipes),
                    path=folder / RETRIEVAL.file,
                    schema=RETRIEVAL,
                    key=placed,
                    measure=partial(self._measure_retrieval, model, kind, cell, folder),
                    describe=_describe_answers,
                )

    def _measure_perplexity(
        self, model: PreTrainedModel, texts: Sequence[Text], edges: tuple[int, ...], out: Path, recipes: tuple[str, ...]
    ) -> None:
        measure_perplexity(model, self.name, texts, PerplexityConfig(recipes, edges), out)

    def _measure_retrieval(
        self, model: PreTrainedModel, kind: str, cell: Cell, out: Path, recipes: tuple[str, ...]
    ) -> None:
        assert self.plan.retrieval is not None  # it has cells
        self.workers.receive(kind, cell)
        config = self.plan.retrieval.configure(self.plan.retrieval.place(cell, kind) or cell, recipes)
        measure_retrieval(model, self.name, self.prompts, self.haystacks[kind], config, out)


def run_steps(steps: Iterable[Step], end: float, report: Notify) -> int:
    """Measure what is missing of every step, some recipes at a time, before the end.

    Args:
        steps: In their order.
        end: Of `time.monotonic`.
        report: Receives a line for each recipe.

    Returns:
        How many recipes failed, each counted once for a length.
    """
    costs: dict[tuple[str, int], float] = {}  # seconds for one recipe
    failed: set[tuple[str, tuple[str, int]]] = set()  # recipes with the cost of the step
    for step in steps:
        missing = [recipe for recipe in step.missing() if (recipe, step.cost) not in failed]
        while missing:
            cost = costs.get(step.cost, 0.0)
            if time.monotonic() + cost > end:
                return len(failed)
            size = max(1, int(min(GROUP_SECONDS, end - time.monotonic()) / cost)) if cost else 1
            group, missing = tuple(missing[:size]), missing[size:]
            before = time.monotonic()
            try:
                step.measure(group)
            except Exception as error:  # a recipe that fails in any way must not end the run of the others
                message = shorten(f"{type(error).__name__}: {error}", MAX_MESSAGE_CHARACTERS, placeholder=" …")
                report(f"FAILED {step.label} {', '.join(group)}: {message}")
                if len(group) > 1:  # one of them: each is tried by itself
                    costs[step.cost] = GROUP_SECONDS
                    missing = [*group, *missing]
                    continue
            costs[step.cost] = (time.monotonic() - before) / len(group)
            failed |= {(recipe, step.cost) for recipe in _report_cells(step, group, report)}
    return len(failed)


def _report_cells(step: Step, recipes: Iterable[str], report: Notify) -> set[str]:
    """Report the numbers of recipes; return those that have none."""
    cells, failed = step.read(), set()
    for recipe in recipes:
        cell = cells.get(recipe)
        if cell is None or cell.get("failed") is not None:
            reason = f"{cell['failed']}; " if cell else ""
            report(f"FAILED {step.label} {recipe}: {reason}not tried again in this run")
            failed.add(recipe)
        else:
            report(f"{step.label} {recipe}: {step.describe(cell)}")
    return failed


def _describe_losses(edges: Sequence[int], cell: dict[str, Any]) -> str:
    sizes = [b - max(a, 1) for a, b in pairwise(edges)]
    numbers = " ".join(f"{math.exp(x / n):.2f}" for x, n in zip(cell["loss"], sizes, strict=True))
    return f"{numbers} ({cell['seconds']:.2f} s)"


def _describe_passes(cell: dict[str, Any]) -> str:
    passes = " ".join(f"{seconds:.3f}" for seconds in cell["seconds"])
    peak = f", {cell['peak_bytes'] / GIB:.2f} GiB" if cell["peak_bytes"] is not None else ""
    return f"{median(cell['seconds']):.3f} s ({passes}){peak}"


def _describe_answers(cell: dict[str, Any]) -> str:
    seconds = sum(cell["seconds"].values())
    return f"{cell['forced']} of {cell['count']}, {cell['likeliest']:.0%} of tokens ({seconds:.2f} s)"
