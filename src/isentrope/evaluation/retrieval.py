"""Retrieval from long texts by a causal model, under one recipe after another."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from math import isfinite
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from isentrope.data.corpus import read_documents
from isentrope.data.needles import DEPTH_TASKS, TASKS, Example, ExampleDraft, Haystack, draft_example, fill_to_length
from isentrope.evaluation.loading import identify_model
from isentrope.evaluation.masked_lm import UnmeasurableError
from isentrope.evaluation.metrics import wilson_interval
from isentrope.evaluation.perplexity import summarize_error
from isentrope.evaluation.recipe_texts import check_recipes, under_recipe
from isentrope.evaluation.results import RETRIEVAL, ResultsStore
from isentrope.utils.parsing import parse_numbers
from isentrope.utils.progress import track_progress
from isentrope.utils.provenance import collect_provenance

SCORES = ("both", "forced")
# put before a chat template, so that those that print the date make the same prompts on every day
FIXED_DATE = "{%- macro strftime_now(format) -%}01 January 2025{%- endmacro -%}"
EXTRA_TOKENS = 8  # that a reply may have for each answer, beyond the answer's own
Cell = tuple[str, int, float | None]  # task, length, depth


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
    """

    recipes: tuple[str, ...]
    tasks: tuple[str, ...]
    lengths: tuple[int, ...]
    depths: tuple[float, ...] = (0, 25, 50, 75, 100)
    examples: int = 4
    seed: int = 0
    score: str = "both"

    def __post_init__(self) -> None:
        check_recipes(self.recipes)
        _check("tasks", self.tasks, f"some of {', '.join(TASKS)}", lambda task: task in TASKS)
        _check("lengths", self.lengths, "positive numbers", lambda length: length > 0)
        _check("depths", self.depths, "numbers from 0 to 100", lambda depth: 0 <= depth <= 100)
        if self.examples < 1:
            raise ValueError(f"examples: expected 1 or more, got {self.examples}")
        if self.score not in SCORES:
            raise ValueError(f"score: expected one of {', '.join(SCORES)}, got {self.score!r}")

    @classmethod
    def parse(cls, recipes: Sequence[str], tasks: str, lengths: str, depths: str, **others: Any) -> RetrievalConfig:
        """Build from command-line values: lists separated by commas."""
        numbers = parse_numbers("lengths", lengths), parse_numbers("depths", depths, float, "0,50,100")
        return cls(tuple(recipes), tuple(task.strip() for task in tasks.split(",")), *numbers, **others)

    @property
    def cells(self) -> list[Cell]:
        """All combinations of task, length and depth, the short ones first."""
        return [
            (task, length, depth)
            for length in sorted(self.lengths)
            for task in self.tasks
            for depth in (sorted(self.depths) if task in DEPTH_TASKS else (None,))
        ]


def _check(name: str, values: Sequence[Any], expected: str, good: Any) -> None:
    if not values or len(set(values)) != len(values) or not all(good(value) for value in values):
        raise ValueError(f"{name}: expected {expected}, each once, got {list(values)}")


def load_haystack(paths: Sequence[Path]) -> Haystack:
    """Read the texts of these files as one; a few plain sentences where there are none."""
    if not paths:
        return Haystack.from_texts()
    documents = list(read_documents(paths))
    if any(document.text is None for document in documents):
        raise ValueError("text: expected documents with text, got some with tokens alone")
    return Haystack.from_texts(document.text or "" for document in documents)


@dataclass(frozen=True)
class Prompt:
    """An example in tokens."""

    example: Example
    text: str
    tokens: tuple[int, ...]
    answer: tuple[int, ...]

    @property
    def max_new_tokens(self) -> int:
        return len(self.answer) + _extra_tokens(self.example)

    @property
    def total(self) -> int:
        return len(self.tokens) + self.max_new_tokens


def _extra_tokens(example: Example) -> int:
    return EXTRA_TOKENS * len(example.answers)


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
        return (() if self.chat else self._prefix) + self._tokenize_bare(text)

    def count_tokens(self, example: Example) -> int:
        """Count the tokens of prompt and reply."""
        return len(self.tokenize(self.format(example) + example.reply)) + _extra_tokens(example)

    def build_prompt(self, example: Example) -> Prompt:
        text = self.format(example)
        tokens, whole = self.tokenize(text), self.tokenize(text + example.reply)
        if whole[: len(tokens)] != tokens:
            raise ValueError("tokenizer: expected a prompt to have the same tokens when its answer follows, got others")
        answer = whole[len(tokens) :]
        if example.count_answers(decoded := self.tokenizer.decode(answer)) < len(example.answers):
            raise ValueError(f"tokenizer: expected it to spell {example.reply.strip()!r}, got {decoded!r}")
        return Prompt(example, text, tokens, answer)

    def _tokenize_bare(self, text: str) -> tuple[int, ...]:
        encoded = self.tokenizer(text, add_special_tokens=False, truncation=False, verbose=False)
        return tuple(encoded["input_ids"])

    @cached_property
    def _prefix(self) -> tuple[int, ...]:
        marked, bare = tuple(self.tokenizer("a", verbose=False)["input_ids"]), self._tokenize_bare("a")
        starts = [i for i in range(len(marked)) if marked[i : i + len(bare)] == bare]
        return marked[: starts[0]] if starts else ()


def check_retrieval(model: PreTrainedModel, prompts: PromptFormat, haystack: Haystack, config: RetrievalConfig) -> None:
    """Raise a ValueError for what cannot be measured, before anything is."""
    drafts = {cell: _draft_examples(cell, haystack, config) for cell in config.cells}
    _check_measurable(model, drafts, prompts, set(config.recipes))


def measure_retrieval(
    model: PreTrainedModel, name: str, prompts: PromptFormat, haystack: Haystack, config: RetrievalConfig, out: Path
) -> Path:
    """Ask a model under every recipe and write `retrieval.json`.

    A cell (recipe × task × length × depth) that the file already has is kept and not measured again; one that failed
    is tried again.

    Args:
        model: a causal model.
        name: what the results call it.
        prompts: how examples are put to it.
        haystack: the text that answers are hidden in.
        config: recipes, tasks, lengths and depths.
        out: the folder for the file.

    Returns:
        The path of the file.
    """
    head = {
        "model": identify_model(model, name),
        "text": haystack.sha256,
        "chat": prompts.chat,
        "examples": _hash_examples(prompts, haystack, config.seed),
        "config": asdict(config),
    }
    store = ResultsStore(out, RETRIEVAL, head)
    todo = {
        cell: recipes
        for cell in config.cells
        if (recipes := [r for r in config.recipes if not _is_measured(store.cells.get((r, *cell)), config.score)])
    }
    drafts = {cell: _draft_examples(cell, haystack, config) for cell in todo}
    model.eval()
    _check_measurable(model, drafts, prompts, {recipe for recipes in todo.values() for recipe in recipes})
    out.mkdir(parents=True, exist_ok=True)
    for cell, recipes in track_progress(list(todo.items()), lambda item: f"{item[0][0]} {item[0][1]}"):
        examples = [prompts.build_prompt(fill_to_length(each, cell[1], prompts.count_tokens)) for each in drafts[cell]]
        for recipe in recipes:
            store.cells[recipe, *cell] = _measure_cell(model, prompts.tokenizer, recipe, cell, examples, config.score)
            store.head["run"] = collect_provenance() | {"transformers": transformers.__version__}
            store.write(summarize_retrieval(store.results()))
    return out / RETRIEVAL.file


def _draft_examples(cell: Cell, haystack: Haystack, config: RetrievalConfig) -> list[ExampleDraft]:
    task, length, depth = cell
    return [draft_example(task, length, depth, config.seed, index, haystack) for index in range(config.examples)]


def _hash_examples(prompts: PromptFormat, haystack: Haystack, seed: int) -> str:
    """Hash all that examples depend on: generator, seed, text, template and tokenizer."""
    drafts = [draft_example(task, 0, 50 if task in DEPTH_TASKS else None, seed, 0, haystack) for task in TASKS]
    tokens = [prompts.tokenize(prompts.format(each.shortest)) for each in drafts]
    return hashlib.sha256(json.dumps([haystack.sha256, tokens]).encode()).hexdigest()


def _check_measurable(
    model: PreTrainedModel, drafts: dict[Cell, list[ExampleDraft]], prompts: PromptFormat, recipes: set[str]
) -> None:
    for (task, length, _), examples in drafts.items():
        need = max(prompts.count_tokens(each.shortest) for each in examples)
        if need > length:
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


def score_answer(model: PreTrainedModel, prompt: Prompt) -> dict[str, Any]:
    """Compute ln p of the answer's tokens after the prompt and one another, and count those that are the likeliest.

    Greedy decoding gives the answer word for word where all are.
    """
    logits, answer = compute_answer_logits(model, prompt)
    logprob = float(logits.log_softmax(-1).gather(1, answer[:, None]).double().sum())
    if not isfinite(logprob):
        raise UnmeasurableError("no probability: the model's logits are not finite")
    return {"answer": len(answer), "likeliest": int((logits.argmax(-1) == answer).sum()), "logprob": logprob}


def compute_answer_logits(model: PreTrainedModel, prompt: Prompt) -> tuple[Tensor, Tensor]:
    """Compute the logits of the answer's tokens in fp32, (tokens, vocabulary), and return them with these tokens."""
    ids = torch.tensor([prompt.tokens + prompt.answer[:-1]], device=model.device)
    answer = torch.tensor(prompt.answer, device=model.device)
    logits = model(input_ids=ids, use_cache=False, logits_to_keep=len(answer)).logits[0].float()
    if len(logits) != len(answer):
        raise ValueError(f"logits: expected those of the last {len(answer)} tokens, got {len(logits)}")
    return logits, answer


def generate_answer(model: PreTrainedModel, tokenizer: Any, prompt: Prompt) -> dict[str, Any]:
    """Decode greedily with a cache; return the reply, and the share of the answers in it."""
    ids = torch.tensor([prompt.tokens], device=model.device)
    end = getattr(model.generation_config, "eos_token_id", None)
    pad = next((x for x in (tokenizer.pad_token_id, *(end if isinstance(end, list) else [end])) if x is not None), 0)
    out: Any = model.generate(  # type: ignore[operator]
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=prompt.max_new_tokens,
        pad_token_id=pad,
        use_cache=True,
        # greedy, whatever the model's own settings are
        do_sample=False,
        num_beams=1,
        repetition_penalty=1.0,
        no_repeat_ngram_size=0,
    )
    if not torch.equal(out[0, : ids.shape[1]], ids[0]):
        raise ValueError("generate: expected the whole prompt before the reply, got another")
    reply = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    return {"reply": reply, "share": prompt.example.count_answers(reply) / len(prompt.example.answers)}


def summarize_retrieval(results: dict[str, Any]) -> dict[str, Any]:
    """Add the numbers of each cell, and `rows`, the same over all depths of a recipe, task and length."""
    by_row: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    cells = [cell | _summarize_examples(cell["examples"]) for cell in results["cells"]]
    for cell in cells:
        by_row.setdefault((cell["recipe"], cell["task"], cell["length"]), []).append(cell)
    rows = [
        {"recipe": recipe, "task": task, "length": length, "failed": sum(cell["failed"] is not None for cell in group)}
        | _summarize_examples([example for cell in group for example in cell["examples"]])
        for (recipe, task, length), group in by_row.items()
    ]
    return results | {"cells": cells, "rows": rows}


def _summarize_examples(examples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Count examples, and hits, which give all answers, with a 95 % interval of their share.

    share: of all answers given. forced: examples whose answer greedy decoding would give word for word. likeliest:
    share of the answer's tokens; logprob: the mean of them. tokens: the real lengths, the shortest and the longest.
    """
    count = len(examples)
    shares = [example["share"] for example in examples if "share" in example]
    generated = count > 0 and len(shares) == count
    hits = sum(share == 1 for share in shares) if generated else None
    low, high = (None, None) if hits is None else wilson_interval(hits, count)
    answer = sum(example["answer"] for example in examples)
    return {
        "count": count,
        "hits": hits,
        "low": low,
        "high": high,
        "share": sum(shares) / count if generated else None,
        "forced": sum(example["likeliest"] == example["answer"] for example in examples) if count else None,
        "likeliest": sum(example["likeliest"] for example in examples) / answer if count else None,
        "logprob": sum(example["logprob"] for example in examples) / answer if count else None,
        "tokens": [pick(example["tokens"] for example in examples) for pick in (min, max)] if count else None,
    }


def _is_measured(cell: dict[str, Any] | None, score: str) -> bool:
    """Whether a cell has the numbers wanted."""
    if cell is None or cell["failed"] is not None:
        return False
    return score == "forced" or all("share" in example for example in cell["examples"])
