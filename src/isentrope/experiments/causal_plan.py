"""Plans for causal models: one of them under many recipes, read and questioned at lengths past its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import Any

import yaml
from transformers import PreTrainedConfig

from isentrope.data.source import Source, find_text_files
from isentrope.evaluation.compare import Comparison, Inputs, compare_recipes, plan_comparison
from isentrope.evaluation.loading import load_on_device, load_tokenizer
from isentrope.evaluation.perplexity import PerplexityConfig, select_cells
from isentrope.evaluation.results import PERPLEXITY, list_failures, read_if_whole
from isentrope.evaluation.results import RETRIEVAL as RETRIEVAL_SCHEMA
from isentrope.evaluation.retrieval import PromptFormat, RetrievalConfig, load_haystack
from isentrope.evaluation.texts import load_texts

KEYS = ("title", "decoder", "texts", "documents", "edges", "recipes", "retrieval")
DECODER = ("model", "gguf_file", "dtype", "device", "chat")
RETRIEVAL = ("tasks", "lengths", "depths", "examples", "seed", "score", "text", "recipes")


@dataclass(frozen=True)
class Plan:
    """decoder: which model, and how it is loaded. haystack: files to hide needles in; none for plain sentences.

    usual: the recipes are those of `usual_recipes`, of which a model need not take all.
    """

    name: str
    title: str
    decoder: dict[str, Any]
    texts: tuple[Path, ...]
    documents: int
    perplexity: PerplexityConfig
    retrieval: RetrievalConfig | None
    haystack: tuple[Path, ...]
    usual: bool = False


def load(path: Path) -> Plan | None:
    """The plan in a YAML file; None where it is one of another kind.

    $NAME in a model's or a text's name stands for what the environment says. A folder beside the plan comes before one
    of that name elsewhere.
    """
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: expected YAML, got {error}") from None
    if not isinstance(data, dict) or "decoder" not in data:
        return None
    where = f"plan {path.stem}"
    _check_keys(where, data, KEYS, ("decoder", "texts", "edges", "recipes"))
    _check_keys(f"{where}: decoder", data["decoder"], DECODER, ("model",))
    recipes = _listed(where, data, "recipes", str)
    asked: RetrievalConfig | None = None
    haystack: tuple[Path, ...] = ()
    if (wanted := data.get("retrieval")) is not None:
        _check_keys(f"{where}: retrieval", wanted, RETRIEVAL, ("tasks", "lengths"))
        options = {"recipes": recipes} | {key: value for key, value in wanted.items() if key != "text"}
        kinds = {"recipes": str, "tasks": str, "lengths": int, "depths": (int, float)}
        options |= {key: _listed(f"{where}: retrieval", wanted, key, kinds[key]) for key in kinds if key in wanted}
        options |= {key: _whole(f"{where}: retrieval", wanted, key) for key in ("examples", "seed") if key in wanted}
        if others := [recipe for recipe in options["recipes"] if recipe not in recipes]:
            raise ValueError(f"{where}: retrieval: recipes: expected some of the plan's, got {others[0]!r}")
        asked, haystack = RetrievalConfig(**options), _files(wanted.get("text", []), path.parent)
    config = PerplexityConfig(recipes, _listed(where, data, "edges", int))
    texts = _files(data["texts"], path.parent)
    title = str(data.get("title", path.stem))
    model = _filled(str(data["decoder"]["model"]))
    decoder = data["decoder"] | {"model": str(beside) if (beside := path.parent / model).is_dir() else model}
    documents = _whole(where, data, "documents") if "documents" in data else 8
    return Plan(path.stem, title, decoder, texts, documents, config, asked, haystack)


def single(
    model: str,
    config: PreTrainedConfig,
    data: Sequence[str],
    recipes: Sequence[str],
    length: str,
    documents: int = 8,
    passkeys: bool = False,
    **loading: str | None,
) -> Plan:
    """One model, as it is and under these recipes, or the usual ones where there are none.

    data: files, folders and globs. length: tokens, or 4x for four times the training length. loading: as in DECODER.
    """
    where = Path(os.path.abspath(Path(model).expanduser())) if Path(model).expanduser().is_dir() else Path(model)
    comparison = plan_comparison(config, where.name, recipes, length, passkeys)
    gguf, tokens = loading.get("gguf_file"), comparison.perplexity.length
    name = "-".join((*where.parts[-2:], *([Path(gguf).stem] if gguf else []), str(tokens))).replace("/", "")
    return Plan(
        name=name,
        title=comparison.title,
        decoder={"model": str(where)} | {key: value for key, value in loading.items() if value is not None},
        texts=tuple(path for word in data for path in find_text_files(word)),
        documents=documents,
        perplexity=comparison.perplexity,
        retrieval=comparison.retrieval,
        haystack=(),
        usual=comparison.skip_unsupported,
    )


def run(plan: Plan, out: Path, say: Callable[[str], None] = lambda words: None) -> tuple[Path, int]:
    """Measure what is missing in the folder `out`/NAME; returns it, and how many cells failed."""
    name, gguf = str(plan.decoder["model"]), plan.decoder.get("gguf_file")
    texts = load_texts(plan.texts, name, gguf, plan.perplexity.length, plan.documents)  # then load a model
    model = load_on_device(name, plan.decoder.get("device", "auto"), plan.decoder.get("dtype", "auto"), gguf)
    inputs = Inputs(texts)
    if plan.retrieval is not None:
        prompts = PromptFormat.from_tokenizer(load_tokenizer(name, gguf), plan.decoder.get("chat"))
        inputs = Inputs(texts, prompts, load_haystack(plan.haystack))
    comparison = Comparison(plan.name, plan.title, plan.perplexity, plan.retrieval, plan.usual)
    _, failures = compare_recipes(model, Path(name).name, inputs, comparison, out / plan.name, say)
    return out / plan.name, len(failures)


def status(plan: Plan, out: Path) -> dict[str, Any]:
    """How many cells there are, and how many of them `out` holds; texts that may be too short are not looked into."""
    done, failed = 0, 0
    cells = len(plan.perplexity.recipes) * plan.documents
    results = out / plan.name / PERPLEXITY.file
    if (data := read_if_whole(results, "texts", "cells")) is not None:
        cells = len(plan.perplexity.recipes) * len(data["texts"])
        done += sum(cell["recipe"] in plan.perplexity.recipes for cell in select_cells(data))
        failed += len(list_failures(results, plan.perplexity.recipes))
    if plan.retrieval is not None:
        cells += len(plan.retrieval.recipes) * len(plan.retrieval.cells)
        if (data := read_if_whole(out / plan.name / RETRIEVAL_SCHEMA.file, "cells")) is not None:
            asked = {(recipe, *cell) for recipe in plan.retrieval.recipes for cell in plan.retrieval.cells}
            for cell in data["cells"]:
                if tuple(cell[key] for key in RETRIEVAL_SCHEMA.cell_key) in asked:
                    done += cell["failed"] is None
                    failed += cell["failed"] is not None
    return {"plan": plan.name, "cells": cells, "done": done, "failed": failed}


def _check_keys(where: str, data: Any, known: tuple[str, ...], needed: tuple[str, ...]) -> None:
    if not isinstance(data, dict):
        raise ValueError(f"{where}: expected keys and values, got {data!r}")
    for key in data:
        if key not in known:
            raise ValueError(f"{where}: expected {', '.join(known)}, got {key!r}")
    if missing := [key for key in needed if not data.get(key)]:
        raise ValueError(f"{where}: missing {', '.join(missing)}")


def _listed(where: str, data: dict[str, Any], key: str, kind: Any) -> tuple[Any, ...]:
    found = data[key]
    if not isinstance(found, list) or not all(isinstance(x, kind) and not isinstance(x, bool) for x in found):
        raise ValueError(f"{where}: {key}: expected a list of {'words' if kind is str else 'numbers'}, got {found!r}")
    return tuple(found)


def _whole(where: str, data: dict[str, Any], key: str) -> int:
    if type(found := data[key]) is not int:
        raise ValueError(f"{where}: {key}: expected a whole number, got {found!r}")
    return found


def _filled(name: str) -> str:
    """A name with what the environment says in place of $NAME."""
    found = os.path.expandvars(name)
    if "$" in found:
        raise ValueError(f"{name}: expected the environment to say what it stands for")
    return found


def _files(words: Any, beside: Path) -> tuple[Path, ...]:
    """Files by names of them and of folders and by globs, from the plan's own folder on."""
    found: list[Path] = []
    for word in [words] if isinstance(words, str) else words:
        here = sorted(glob(str(beside / _filled(str(word))), recursive=True))
        if not here:
            raise ValueError(f"texts: expected files, got none like {word}")
        found += [path for name in here for path in Source(name).paths]
    return tuple(found)
