"""What a causal model finds again in long texts, under one recipe after another."""

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
from transformers import PreTrainedModel

from isentrope.data.corpus import read_documents
from isentrope.data.needles import DEPTH_TASKS, TASKS, Example, ExampleDraft, Haystack, draft_example, fill_to_length
from isentrope.evaluation.masked_lm import UnmeasurableError
from isentrope.evaluation.metrics import wilson_interval
from isentrope.evaluation.perplexity import AGAIN, check_recipes, described, read_held, reason, same_model, under
from isentrope.utils.files import read_fields, write_json
from isentrope.utils.progress import progress
from isentrope.utils.provenance import provenance

SCORES = ("both", "forced")
# before a chat template: those that tell the date make the same prompts on every day
ONE_DAY = "{%- macro strftime_now(format) -%}01 January 2025{%- endmacro -%}"
SLACK = 8  # tokens a reply may have beyond those of each answer
Cell = tuple[str, int, float | None]  # task, length, depth
Key = tuple[str, str, int, float | None]  # recipe and cell
KEY = ("recipe", "task", "length", "depth")


@dataclass(frozen=True)
class Config:
    """lengths: in tokens, with the question and the answer. depths: in percent. score: `forced` generates nothing."""

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
    def read(cls, recipes: Sequence[str], tasks: str, lengths: str, depths: str, **others: Any) -> Config:
        """From words of a command line: lists with commas between."""
        try:
            numbers = tuple(int(word) for word in lengths.split(","))
            places = tuple(float(word) for word in depths.split(","))
        except ValueError:
            raise ValueError(f"lengths, depths: expected numbers as in 512,1024, got {lengths!r}, {depths!r}") from None
        return cls(tuple(recipes), tuple(task.strip() for task in tasks.split(",")), numbers, places, **others)

    @property
    def cells(self) -> list[Cell]:
        """The short ones first."""
        return [
            (task, length, depth)
            for length in sorted(self.lengths)
            for task in self.tasks
            for depth in (sorted(self.depths) if task in DEPTH_TASKS else (None,))
        ]


def _check(name: str, values: Sequence[Any], expected: str, good: Any) -> None:
    if not values or len(set(values)) != len(values) or not all(good(value) for value in values):
        raise ValueError(f"{name}: expected {expected}, each once, got {list(values)}")


def read(paths: Sequence[Path]) -> Haystack:
    """The texts of these files as one; a few plain sentences where there are none."""
    if not paths:
        return Haystack.from_texts()
    found = list(read_documents(paths))
    if any(document.text is None for document in found):
        raise ValueError("text: expected documents with text, got some with tokens alone")
    return Haystack.from_texts(document.text or "" for document in found)


@dataclass(frozen=True)
class Prompt:
    """An example in tokens. room: how many may be generated."""

    example: Example
    text: str
    tokens: tuple[int, ...]
    answer: tuple[int, ...]

    @property
    def room(self) -> int:
        return len(self.answer) + _slack(self.example)

    @property
    def total(self) -> int:
        return len(self.tokens) + self.room


def _slack(example: Example) -> int:
    return SLACK * len(example.answers)


@dataclass(frozen=True)
class Prompts:
    """How examples are put to a model: as a text to go on with, or in a chat, whose reply is begun for it."""

    tokenizer: Any
    chat: bool

    @classmethod
    def of(cls, tokenizer: Any, chat: bool | None = None) -> Prompts:
        """chat: None for a chat where the tokenizer has a template for one."""
        has = getattr(tokenizer, "chat_template", None) is not None
        if chat and not has:
            raise ValueError("chat: expected a tokenizer with a chat template, got one without")
        return cls(tokenizer, has if chat is None else chat)

    def text(self, example: Example) -> str:
        if not self.chat:
            return f"{example.user_message}\n{example.lead}"
        messages = [{"role": "user", "content": example.user_message}]
        template = ONE_DAY + self.tokenizer.get_chat_template()
        opened: str = self.tokenizer.apply_chat_template(
            messages, chat_template=template, tokenize=False, add_generation_prompt=True
        )
        return opened + example.lead

    def tokens(self, text: str) -> tuple[int, ...]:
        """All of a text, after what the tokenizer puts before every text; a chat's template has that already."""
        return (() if self.chat else self._first) + self._bare(text)

    def measure(self, example: Example) -> int:
        return len(self.tokens(self.text(example) + example.reply)) + _slack(example)

    def prompt(self, example: Example) -> Prompt:
        text = self.text(example)
        tokens, whole = self.tokens(text), self.tokens(text + example.reply)
        if whole[: len(tokens)] != tokens:
            raise ValueError("tokenizer: expected a prompt to have the same tokens when its answer follows, got others")
        answer = whole[len(tokens) :]
        if example.count_answers(said := self.tokenizer.decode(answer)) < len(example.answers):
            raise ValueError(f"tokenizer: expected it to spell {example.reply.strip()!r}, got {said!r}")
        return Prompt(example, text, tokens, answer)

    def _bare(self, text: str) -> tuple[int, ...]:
        found = self.tokenizer(text, add_special_tokens=False, truncation=False, verbose=False)
        return tuple(found["input_ids"])

    @cached_property
    def _first(self) -> tuple[int, ...]:
        marked, bare = tuple(self.tokenizer("a", verbose=False)["input_ids"]), self._bare("a")
        starts = [i for i in range(len(marked)) if marked[i : i + len(bare)] == bare]
        return marked[: starts[0]] if starts else ()


def check(model: PreTrainedModel, prompts: Prompts, haystack: Haystack, config: Config) -> None:
    """Refuse what cannot be carried out."""
    _refuse(model, {cell: _drafts(cell, haystack, config) for cell in config.cells}, prompts, set(config.recipes))


def run(model: PreTrainedModel, name: str, prompts: Prompts, haystack: Haystack, config: Config, out: Path) -> Path:
    """Ask a model under every recipe and write `retrieval.json` into the folder `out`.

    A cell (recipe × task × length × depth) that the file already holds is not measured again, and stays there; one
    that failed is tried again.
    """
    results = out / "retrieval.json"
    head = {
        "model": described(model, name),
        "text": haystack.sha256,
        "chat": prompts.chat,
        "examples": _fingerprint(prompts, haystack, config.seed),
        "config": asdict(config),
    }
    head = json.loads(json.dumps(head))
    cells = _held(results, head)
    todo = {
        cell: recipes
        for cell in config.cells
        if (recipes := [recipe for recipe in config.recipes if not _measured(cells.get((recipe, *cell)), config.score)])
    }
    drafts = {cell: _drafts(cell, haystack, config) for cell in todo}
    model.eval()
    _refuse(model, drafts, prompts, {recipe for recipes in todo.values() for recipe in recipes})
    out.mkdir(parents=True, exist_ok=True)
    for cell, recipes in progress(list(todo.items()), lambda item: f"{item[0][0]} {item[0][1]}"):
        asked = [prompts.prompt(fill_to_length(each, cell[1], prompts.measure)) for each in drafts[cell]]
        for recipe in recipes:
            cells[recipe, *cell] = _cell(model, prompts.tokenizer, recipe, cell, asked, config.score)
            head["run"] = provenance() | {"transformers": transformers.__version__}
            write_json(results, summary(head | {"cells": list(cells.values())}))
    return results


def failures(results: Path, config: Config) -> list[str]:
    """Why cells that are asked for failed, each in a line."""
    asked = {(recipe, *cell) for recipe in config.recipes for cell in config.cells}
    cells = read_fields(results, AGAIN, "cells")["cells"]
    lost = [cell for cell in cells if cell["failed"] and tuple(cell[key] for key in KEY) in asked]
    return [f"{cell['recipe']}: {cell['task']} at {cell['length']}: {cell['failed']}" for cell in lost]


def _drafts(cell: Cell, haystack: Haystack, config: Config) -> list[ExampleDraft]:
    task, length, depth = cell
    return [draft_example(task, length, depth, config.seed, index, haystack) for index in range(config.examples)]


def _fingerprint(prompts: Prompts, haystack: Haystack, seed: int) -> str:
    """Of all that examples depend on: generator, seed, text, template and tokenizer."""
    drafts = [draft_example(task, 0, 50 if task in DEPTH_TASKS else None, seed, 0, haystack) for task in TASKS]
    tokens = [prompts.tokens(prompts.text(each.shortest)) for each in drafts]
    return hashlib.sha256(json.dumps([haystack.sha256, tokens]).encode()).hexdigest()


def _refuse(
    model: PreTrainedModel, drafts: dict[Cell, list[ExampleDraft]], prompts: Prompts, recipes: set[str]
) -> None:
    """What cannot be carried out, before anything is measured."""
    for (task, length, _), found in drafts.items():
        need = max(prompts.measure(each.shortest) for each in found)
        if need > length:
            raise ValueError(f"lengths: expected {need} tokens or more for {task}, got {length}")
    if not model._supports_logits_to_keep():  # type: ignore[operator]
        raise ValueError(f"{model.config.model_type}: expected a model that gives the last logits alone, got another")
    for recipe in sorted(recipes):
        with under(model, recipe):
            pass


def _cell(
    model: PreTrainedModel, tokenizer: Any, recipe: str, cell: Cell, prompts: Sequence[Prompt], score: str
) -> dict[str, Any]:
    """Numbers of one cell, or why there are none."""
    found: dict[str, Any] = dict(zip(KEY, (recipe, *cell), strict=True))
    found["sha256"] = hashlib.sha256("\0".join(prompt.text for prompt in prompts).encode()).hexdigest()
    failed, examples, seconds = None, list[dict[str, Any]](), {"forced": 0.0, "generated": 0.0}
    on_gpu = model.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    try:
        with under(model, recipe), torch.no_grad():
            for prompt in prompts:
                start = time.perf_counter()
                row = {"tokens": prompt.total, "prompt": len(prompt.tokens), "place": prompt.example.depth}
                row |= forced(model, prompt)
                middle = time.perf_counter()
                seconds["forced"] += middle - start
                if score == "both":
                    row |= generated(model, tokenizer, prompt)
                    seconds["generated"] += time.perf_counter() - middle
                examples.append(row)
    except (RuntimeError, IndexError) as error:  # out of memory, mostly; past the last of learned positions
        failed = reason(error)
    if on_gpu and failed:
        torch.cuda.empty_cache()
    peak = torch.cuda.max_memory_allocated() if on_gpu else None
    return found | {"failed": failed, "seconds": seconds, "peak_bytes": peak, "examples": [] if failed else examples}


def forced(model: PreTrainedModel, prompt: Prompt) -> dict[str, Any]:
    """ln p of the answer's tokens after the prompt and one another, and how many of them are the likeliest.

    Greedy decoding gives the answer word for word where all are.
    """
    ids = torch.tensor([prompt.tokens + prompt.answer[:-1]], device=model.device)
    answer = torch.tensor(prompt.answer, device=model.device)
    logits = model(input_ids=ids, use_cache=False, logits_to_keep=len(answer)).logits[0].float()
    if len(logits) != len(answer):
        raise ValueError(f"logits: expected those of the last {len(answer)} tokens, got {len(logits)}")
    logprob = float(logits.log_softmax(-1).gather(1, answer[:, None]).double().sum())
    if not isfinite(logprob):
        raise UnmeasurableError("no probability: the model's logits are not finite")
    return {"answer": len(answer), "likeliest": int((logits.argmax(-1) == answer).sum()), "logprob": logprob}


def generated(model: PreTrainedModel, tokenizer: Any, prompt: Prompt) -> dict[str, Any]:
    """Greedy decoding with a cache: what the model says, and the share of the answers in it."""
    ids = torch.tensor([prompt.tokens], device=model.device)
    end = getattr(model.generation_config, "eos_token_id", None)
    pad = next((x for x in (tokenizer.pad_token_id, *(end if isinstance(end, list) else [end])) if x is not None), 0)
    out: Any = model.generate(  # type: ignore[operator]
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=prompt.room,
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


def summary(data: dict[str, Any]) -> dict[str, Any]:
    """Results with the numbers of each cell, and `rows`, the same over all depths of a recipe, task and length."""
    together: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    cells = [cell | _numbers(cell["examples"]) for cell in data["cells"]]
    for cell in cells:
        together.setdefault((cell["recipe"], cell["task"], cell["length"]), []).append(cell)
    rows = [
        {"recipe": recipe, "task": task, "length": length, "failed": sum(cell["failed"] is not None for cell in found)}
        | _numbers([example for cell in found for example in cell["examples"]])
        for (recipe, task, length), found in together.items()
    ]
    return data | {"cells": cells, "rows": rows}


def _numbers(examples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """count, of which hits name all that was asked, with a 95 % interval of their share; share: of the answers named.

    forced: examples whose answer greedy decoding would give word for word. likeliest: share of the answer's tokens;
    logprob: the mean of them. tokens: the real lengths, from the shortest to the longest.
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


def _measured(cell: dict[str, Any] | None, score: str) -> bool:
    """Whether a cell has what is asked for."""
    if cell is None or cell["failed"] is not None:
        return False
    return score == "forced" or all("share" in example for example in cell["examples"])


def _held(results: Path, head: dict[str, Any]) -> dict[Key, dict[str, Any]]:
    """Cells of an earlier run of the same model on the same examples; what it asked for is taken into `head`."""
    data = read_held(results, "model", "examples", "config", "cells")
    if data is None:
        return {}
    same = same_model(data["model"], head["model"]) and data["examples"] == head["examples"]
    if not same or data["config"]["examples"] != head["config"]["examples"]:
        raise ValueError(f"{results}: holds another model, or other examples or more or fewer; choose another folder")
    for key in ("recipes", "tasks"):
        head["config"][key] = list(dict.fromkeys((*data["config"][key], *head["config"][key])))
    for key in ("lengths", "depths"):
        head["config"][key] = sorted({*data["config"][key], *head["config"][key]})
    return {(cell["recipe"], cell["task"], cell["length"], cell["depth"]): cell for cell in data["cells"]}
