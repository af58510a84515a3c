"""Retrieval from long texts by a causal model, under one recipe after another."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from isentrope.data.tasks import (
    DEPTH_TASKS,
    GROUPS,
    SENTENCES,
    TASKS,
    ExampleDraft,
    Haystack,
    choose_fillers,
    draft_example,
    expand_tasks,
    fill_to_length,
    load_filler,
)
from isentrope.data.tasks.registry import IDENTITY_TASKS
from isentrope.evaluation.answers import generate_answer, score_answer
from isentrope.evaluation.loading import identify_model
from isentrope.evaluation.perplexity import summarize_error
from isentrope.evaluation.prompts import Prompt, PromptFormat
from isentrope.evaluation.recipe_texts import PLAIN, check_recipes, under_recipe
from isentrope.evaluation.results import RETRIEVAL, ResultsStore
from isentrope.evaluation.retrieval_summary import summarize_retrieval
from isentrope.hf.introspection import introspect_once
from isentrope.utils.messages import suggest
from isentrope.utils.parsing import parse_numbers
from isentrope.utils.progress import track_progress
from isentrope.utils.provenance import collect_provenance

SCORES = ("both", "forced")
WRITING_INTERVAL = 10  # times as long as writing took, until results are written again
Cell = tuple[str, int, float | None, str]  # task, length, depth, filler
Haystacks = Mapping[str, Haystack]


@dataclass(frozen=True)
class RetrievalConfig:
    """What is measured.

    Args:
        recipes: texts of recipes; `plain` is the model as it is.
        tasks: some of TASKS.
        lengths: in tokens, with the question and the answer.
        depths: where in the text the answer is, in percent.
        examples: for each task, length and depth.
        seed: of the examples.
        score: `forced` takes the answer's likelihood and generates nothing; `both` also generates.
        fillers: names of the texts that answers are hidden in; tasks with a text of their own take that.
        ceiling: tokens at which the plain model is measured too, its own training length: what recipes could reach.
    """

    recipes: tuple[str, ...]
    tasks: tuple[str, ...]
    lengths: tuple[int, ...]
    depths: tuple[float, ...] = (0, 25, 50, 75, 100)
    examples: int = 4
    seed: int = 0
    score: str = "both"
    fillers: tuple[str, ...] = (SENTENCES,)
    ceiling: int | None = None

    def __post_init__(self) -> None:
        check_recipes(self.recipes)
        if unknown := [task for task in self.tasks if task not in TASKS]:
            raise ValueError(f"tasks: unknown {unknown[0]!r}{suggest(unknown[0], (*TASKS, *GROUPS))}")
        expected = f"some of {', '.join(TASKS)}, or of the groups {', '.join(GROUPS)}"
        _check("tasks", self.tasks, expected, lambda task: task in TASKS)
        _check("lengths", self.lengths, "positive numbers", lambda length: length > 0)
        _check("depths", self.depths, "numbers from 0 to 100", lambda depth: 0 <= depth <= 100)
        _check("fillers", self.fillers, "names of fillers", bool)
        if self.ceiling is not None and self.ceiling < 1:
            raise ValueError(f"ceiling: expected a positive number of tokens or None, got {self.ceiling}")
        if self.examples < 1:
            raise ValueError(f"examples: expected 1 or more, got {self.examples}")
        if self.score not in SCORES:
            raise ValueError(f"score: expected one of {', '.join(SCORES)}, got {self.score!r}")

    @classmethod
    def parse(cls, recipes: Sequence[str], tasks: str, lengths: str, depths: str, **others: Any) -> RetrievalConfig:
        """Build from command-line values: lists separated by commas; groups of tasks by their names."""
        numbers = parse_numbers("lengths", lengths), parse_numbers("depths", depths, float, "0,50,100")
        return cls(tuple(recipes), expand_tasks([task.strip() for task in tasks.split(",")]), *numbers, **others)

    @property
    def cells(self) -> list[Cell]:
        """All combinations of task, length, depth and filler, the short ones first."""
        return [cell for length in sorted(self.lengths) for cell in self._cells_at(length)]

    @property
    def ceiling_cells(self) -> list[Cell]:
        """The same tasks, depths and fillers at the ceiling's length."""
        return [] if self.ceiling is None else self._cells_at(self.ceiling)

    def _cells_at(self, length: int) -> list[Cell]:
        return [
            (task, length, depth, filler)
            for task in self.tasks
            for depth in (sorted(self.depths) if task in DEPTH_TASKS else (None,))
            for filler in choose_fillers(task, self.fillers)
        ]

    @property
    def work(self) -> dict[Cell, tuple[str, ...]]:
        """The recipes to be measured in each cell, those of the ceiling first."""
        cells: dict[Cell, tuple[str, ...]] = dict.fromkeys(self.ceiling_cells, (PLAIN,))
        for cell in self.cells:
            cells[cell] = tuple(dict.fromkeys((*cells.get(cell, ()), *self.recipes)))
        return cells


def _check(name: str, values: Sequence[Any], expected: str, good: Any) -> None:
    if not values or len(set(values)) != len(values) or not all(good(value) for value in values):
        raise ValueError(f"{name}: expected {expected}, each once, got {list(values)}")


def check_retrieval(
    model: PreTrainedModel, prompts: PromptFormat, haystacks: Haystack | Haystacks, config: RetrievalConfig
) -> None:
    """Raise a ValueError for what cannot be measured, before anything is.

    Args:
        model: a causal model.
        prompts: how examples are put to it.
        haystacks: the text of each filler, or of the only one.
        config: recipes, tasks, lengths and depths.
    """
    texts = _collect_haystacks(haystacks, config)
    drafts = {cell: _draft_examples(cell, texts, config) for cell in config.cells}
    _check_measurable(model, drafts, prompts, set(config.recipes))


@introspect_once()
def measure_retrieval(
    model: PreTrainedModel,
    name: str,
    prompts: PromptFormat,
    haystacks: Haystack | Haystacks,
    config: RetrievalConfig,
    out: Path,
) -> Path:
    """Ask a model under every recipe and write `retrieval.json`.

    A cell (recipe × task × length × depth × filler) that the file already has is kept and not measured again; one that
    failed is tried again.

    Args:
        model: a causal model.
        name: what the results call it.
        prompts: how examples are put to it.
        haystacks: the text of each filler, or of the only one.
        config: recipes, tasks, lengths and depths.
        out: the folder for the file.

    Returns:
        The path of the file.
    """
    texts = _collect_haystacks(haystacks, config)
    head = {
        "model": identify_model(model, name),
        "chat": prompts.chat,
        "fillers": {filler: _hash_examples(prompts, text, config.seed) for filler, text in texts.items()},
        "texts": {filler: text.sha256 for filler, text in texts.items()},
        "config": asdict(config),
    }
    store = ResultsStore(out, RETRIEVAL, head)
    if config.ceiling is None:  # that of an earlier run stays
        store.head["config"]["ceiling"] = store.earlier.get("config", {}).get("ceiling")
    todo = {
        cell: recipes
        for cell, wanted in config.work.items()
        if (recipes := [r for r in wanted if not _is_measured(store.cells.get((r, *cell)), config.score)])
    }
    drafts = {cell: _draft_examples(cell, texts, config) for cell in todo}
    too_short = _drop_short_ceilings(drafts, prompts, config)
    todo = {cell: recipes for cell, recipes in todo.items() if cell not in too_short}
    model.eval()
    _check_measurable(model, drafts, prompts, {recipe for recipes in todo.values() for recipe in recipes})
    out.mkdir(parents=True, exist_ok=True)
    writer = _Writer(store)
    try:
        for cell, recipes in track_progress(list(todo.items()), lambda item: f"{item[0][0]} {item[0][1]}"):
            drafted = drafts.pop(cell)
            examples = [prompts.build_prompt(fill_to_length(each, cell[1], prompts.count_tokens)) for each in drafted]
            for recipe in recipes:
                measured = _measure_cell(model, prompts.tokenizer, recipe, cell, examples, config.score)
                writer.add((recipe, *cell), measured)
    finally:
        writer.flush()
    return out / RETRIEVAL.file


class _Writer:
    """Writes results after a cell, but for at most a small share of the time."""

    def __init__(self, store: ResultsStore) -> None:
        self.store = store
        self.due = 0.0
        self.is_written = True

    def add(self, key: tuple[Any, ...], cell: dict[str, Any]) -> None:
        self.store.cells[key] = cell
        self.is_written = False
        if time.perf_counter() >= self.due:
            self.flush()

    def flush(self) -> None:
        if self.is_written:
            return
        start = time.perf_counter()
        self.store.head["run"] = collect_provenance() | {"transformers": transformers.__version__}
        self.store.write(summarize_retrieval(self.store.results()))
        end = time.perf_counter()
        self.due, self.is_written = end + WRITING_INTERVAL * (end - start), True


def _collect_haystacks(haystacks: Haystack | Haystacks, config: RetrievalConfig) -> dict[str, Haystack]:
    """Return the text of every filler that the tasks are hidden in, by name."""
    if isinstance(haystacks, Haystack):
        if len(config.fillers) > 1:
            raise ValueError(f"haystacks: expected a text for each of {', '.join(config.fillers)}, got one alone")
        haystacks = {config.fillers[0]: haystacks}
    names = dict.fromkeys(filler for task in config.tasks for filler in choose_fillers(task, config.fillers))
    return {name: haystacks[name] if name in haystacks else load_filler(name) for name in names}


def _draft_examples(cell: Cell, haystacks: Haystacks, config: RetrievalConfig) -> list[ExampleDraft]:
    task, length, depth, filler = cell
    text = haystacks[filler]
    return [draft_example(task, length, depth, config.seed, index, text) for index in range(config.examples)]


def _hash_examples(prompts: PromptFormat, haystack: Haystack, seed: int) -> str:
    """Hash all that examples depend on: generator, seed, text, template and tokenizer."""
    drafts = [draft_example(task, 0, 50 if task in DEPTH_TASKS else None, seed, 0, haystack) for task in IDENTITY_TASKS]
    tokens = [prompts.tokenize(prompts.format(each.shortest)) for each in drafts]
    return hashlib.sha256(json.dumps([haystack.sha256, tokens]).encode()).hexdigest()


def _drop_short_ceilings(
    drafts: dict[Cell, list[ExampleDraft]], prompts: PromptFormat, config: RetrievalConfig
) -> set[Cell]:
    """Remove, and return, cells of the ceiling alone whose task does not fit into the training length."""
    only_ceiling = set(config.ceiling_cells) - set(config.cells)
    short = {cell for cell in drafts if cell in only_ceiling and _count_least(drafts[cell], cell[1], prompts) > cell[1]}
    for cell in short:
        del drafts[cell]
    return short


def _count_least(drafts: Sequence[ExampleDraft], length: int, prompts: PromptFormat) -> int:
    """Count the tokens that all of these examples need; of the first alone where the length is far from it."""
    first = prompts.count_tokens(drafts[0].shortest)
    return first if 2 * first < length else max(prompts.count_tokens(each.shortest) for each in drafts)


def _check_measurable(
    model: PreTrainedModel, drafts: dict[Cell, list[ExampleDraft]], prompts: PromptFormat, recipes: set[str]
) -> None:
    for (task, length, *_), examples in drafts.items():
        if (need := _count_least(examples, length, prompts)) > length:
            raise ValueError(f"lengths: expected {need} tokens or more for {task}, got {length}")
    if not model._supports_logits_to_keep():  # type: ignore[operator]
        raise ValueError(f"{model.config.model_type}: expected a model that gives the last logits alone, got another")
    for recipe in sorted(recipes):
        with under_recipe(model, recipe):
            pass


def _measure_cell(
    model: PreTrainedModel, tokenizer: Any, recipe: str, cell: Cell, prompts: Sequence[Prompt], score: str
) -> dict[str, Any]:
    """Measure one cell, or record why it failed."""
    key: dict[str, Any] = dict(zip(RETRIEVAL.cell_key, (recipe, *cell), strict=True))
    key["sha256"] = hashlib.sha256("\0".join(prompt.text for prompt in prompts).encode()).hexdigest()
    failed, examples, seconds = None, list[dict[str, Any]](), {"forced": 0.0, "generated": 0.0}
    on_gpu = model.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    try:
        with under_recipe(model, recipe), torch.no_grad():
            for prompt in prompts:
                start = time.perf_counter()
                row = {"tokens": prompt.total, "prompt": len(prompt.tokens), "place": prompt.example.depth}
                row |= score_answer(model, prompt)
                middle = time.perf_counter()
                seconds["forced"] += middle - start
                if score == "both":
                    row |= generate_answer(model, tokenizer, prompt)
                    seconds["generated"] += time.perf_counter() - middle
                examples.append(row)
    except (RuntimeError, IndexError) as error:  # out of memory, mostly; past the last of learned positions
        failed = summarize_error(error)
    if on_gpu and failed:
        torch.cuda.empty_cache()
    peak = torch.cuda.max_memory_allocated() if on_gpu else None
    return key | {"failed": failed, "seconds": seconds, "peak_bytes": peak, "examples": [] if failed else examples}


def _is_measured(cell: dict[str, Any] | None, score: str) -> bool:
    """Whether a cell has the numbers wanted."""
    if cell is None or cell["failed"] is not None:
        return False
    return score == "forced" or all("share" in example for example in cell["examples"])
