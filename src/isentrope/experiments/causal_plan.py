"""Plans for causal models: one of them under many recipes, read and questioned at lengths past its own."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from glob import glob
from itertools import count, takewhile
from pathlib import Path
from typing import Any

import yaml
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from isentrope.data.source import Source, find_text_files
from isentrope.evaluation import perplexity, retrieval
from isentrope.evaluation.perplexity import OPEN, PLAIN, read_held
from isentrope.hf.layer_plan import read_train_length
from isentrope.recipe import Recipe
from isentrope.utils.files import write_json

KEYS = ("title", "decoder", "texts", "documents", "edges", "recipes", "retrieval")
DECODER = ("model", "gguf_file", "dtype", "device", "chat")
RETRIEVAL = ("tasks", "lengths", "depths", "examples", "seed", "score", "text", "recipes")


@dataclass(frozen=True)
class Plan:
    """decoder: which model, and how it is loaded. haystack: files to hide needles in; none for plain sentences.

    usual: the recipes are those of `usual`, of which a model need not take all.
    """

    name: str
    title: str
    decoder: dict[str, Any]
    texts: tuple[Path, ...]
    documents: int
    perplexity: perplexity.Config
    retrieval: retrieval.Config | None
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
    asked: retrieval.Config | None = None
    haystack: tuple[Path, ...] = ()
    if (wanted := data.get("retrieval")) is not None:
        _check_keys(f"{where}: retrieval", wanted, RETRIEVAL, ("tasks", "lengths"))
        options = {"recipes": recipes} | {key: value for key, value in wanted.items() if key != "text"}
        kinds = {"recipes": str, "tasks": str, "lengths": int, "depths": (int, float)}
        options |= {key: _listed(f"{where}: retrieval", wanted, key, kinds[key]) for key in kinds if key in wanted}
        options |= {key: _whole(f"{where}: retrieval", wanted, key) for key in ("examples", "seed") if key in wanted}
        if others := [recipe for recipe in options["recipes"] if recipe not in recipes]:
            raise ValueError(f"{where}: retrieval: recipes: expected some of the plan's, got {others[0]!r}")
        asked, haystack = retrieval.Config(**options), _files(wanted.get("text", []), path.parent)
    config = perplexity.Config(recipes, _listed(where, data, "edges", int))
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
    # BLOOM and MPT name it otherwise
    trained = read_train_length(text := config.get_text_config())
    trained = trained or getattr(text, "seq_length", None) or getattr(text, "max_seq_len", None)
    if trained is None or trained < 4:
        raise ValueError(f"model: expected a config that tells the training length, got {trained} in {model}")
    tokens = _tokens(length, trained)
    asked = tuple(dict.fromkeys((PLAIN, *(recipes or usual(trained, tokens)))))
    where = Path(os.path.abspath(Path(model).expanduser())) if Path(model).expanduser().is_dir() else Path(model)
    gguf = loading.get("gguf_file")
    name = "-".join((*where.parts[-2:], *([Path(gguf).stem] if gguf else []), str(tokens))).replace("/", "")
    return Plan(
        name=name,
        title=f"{where.name} at {tokens} tokens",
        decoder={"model": str(where)} | {key: value for key, value in loading.items() if value is not None},
        texts=tuple(path for word in data for path in find_text_files(word)),
        documents=documents,
        perplexity=perplexity.Config(asked, _edges(trained, tokens)),
        retrieval=retrieval.Config(asked, ("passkey",), (tokens,), (0, 50, 100)) if passkeys else None,
        haystack=(),
        usual=not recipes,
    )


def usual(trained: int, length: int) -> tuple[str, ...]:
    """What is worth trying on a rotary model: windows within its training length, factors that the length asks for."""
    half, most, factor = trained // 2, max(1, trained - 5), f"{length / trained:g}"
    # the smallest with which no distance is farther than three quarters of what the model has seen, whose end is weak
    group = next(g for g in count(1) if (length - 1) // g + half - half // g <= 3 * trained // 4)
    return (
        "infoscale",
        f"yarn:factor={factor}+yarntemperature:factor={factor}",
        f"rerope:window={half}",
        f"rerope:window={half}+infoscale",
        f"selfextend:window={half},group={group}",
        f"selfextend:window={half},group={group}+infoscale",
        f"sink:sinks=4,size={max(1, trained - 4)}",
        f"rerope:window={most}+lambda:sinks=5,window={most}",
    )


def forgets(recipe: str) -> bool:
    """Whether a recipe lets attention see only a part of the text."""
    return Recipe.parse(recipe, **OPEN).mask is not None


def _tokens(text: str, trained: int) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)[x×](?:train)?|(\d+)", text.strip())
    if found is None:
        raise ValueError(f"length: expected tokens such as 8192, or 4x the training length, got {text!r}")
    tokens = int(found[2]) if found[2] else int(float(found[1]) * trained)
    if tokens <= trained:
        raise ValueError(f"length: expected more than the training length of {trained} tokens, got {tokens}")
    return tokens


def _edges(trained: int, length: int) -> tuple[int, ...]:
    """Two buckets inside the training length, then doublings of it; the last is never a mere rest."""
    doubled = takewhile(lambda edge: 1.5 * edge <= length, (trained << n for n in count(1)))
    return tuple(sorted({0, trained // 2, trained, *doubled, length}))


def run(plan: Plan, out: Path, say: Callable[[str], None] = lambda words: None) -> tuple[Path, int]:
    """Measure what is missing in the folder `out`/NAME; returns it, and how many cells failed."""
    folder = out / plan.name
    name, gguf = str(plan.decoder["model"]), plan.decoder.get("gguf_file")
    texts = perplexity.read(plan.texts, name, gguf, plan.perplexity.length, plan.documents)  # then load a model
    model = perplexity.load(name, plan.decoder.get("device", "auto"), plan.decoder.get("dtype", "auto"), gguf)
    _check_reach(model, plan.perplexity.length)
    plan = _taken(plan, model, say)
    shown = Path(name).name
    if plan.retrieval is not None:  # what it cannot ask is refused before anything is measured
        prompts = retrieval.Prompts.of(perplexity.load_tokenizer(name, gguf), plan.decoder.get("chat"))
        haystack = retrieval.read(plan.haystack)
        retrieval.check(model, prompts, haystack, plan.retrieval)
    results = perplexity.run(model, shown, texts, plan.perplexity, folder)
    for words in dict.fromkeys(lost := perplexity.failures(results, plan.perplexity.recipes)):
        say(words)
    if plan.retrieval is not None:
        found = retrieval.run(model, shown, prompts, haystack, plan.retrieval, folder)
        for words in dict.fromkeys(missed := retrieval.failures(found, plan.retrieval)):
            say(words)
        lost += missed
    told = {"name": plan.name, "title": plan.title, "model": shown, "recipes": list(plan.perplexity.recipes)}
    forgetful = [recipe for recipe in plan.perplexity.recipes if forgets(recipe)]
    write_json(folder / "decoder.json", told | {"forgetful": forgetful})
    return folder, len(lost)


def status(plan: Plan, out: Path) -> dict[str, Any]:
    """How many cells there are, and how many of them `out` holds; texts that may be too short are not looked into."""
    done, failed = 0, 0
    cells = len(plan.perplexity.recipes) * plan.documents
    results = out / plan.name / "perplexity.json"
    if (data := read_held(results, "texts", "cells")) is not None:
        cells = len(plan.perplexity.recipes) * len(data["texts"])
        done += sum(cell["recipe"] in plan.perplexity.recipes for cell in perplexity.asked(data))
        failed += len(perplexity.failures(results, plan.perplexity.recipes))
    if plan.retrieval is not None:
        cells += len(plan.retrieval.recipes) * len(plan.retrieval.cells)
        if (data := read_held(out / plan.name / "retrieval.json", "cells")) is not None:
            asked = {(recipe, *cell) for recipe in plan.retrieval.recipes for cell in plan.retrieval.cells}
            for cell in data["cells"]:
                if tuple(cell[key] for key in retrieval.KEY) in asked:
                    done += cell["failed"] is None
                    failed += cell["failed"] is not None
    return {"plan": plan.name, "cells": cells, "done": done, "failed": failed}


def _check_reach(model: PreTrainedModel, length: int) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and re.search("pos|wpe", name) and module.num_embeddings < length:
            most, kind = module.num_embeddings, model.config.model_type
            raise ValueError(f"{kind}: expected a model that can read {length} tokens, got {most} learned positions")


def _taken(plan: Plan, model: PreTrainedModel, say: Callable[[str], None]) -> Plan:
    """The plan with the recipes that the model takes; one that somebody chose and it refuses is an error."""
    taken, left, error = list[str](), list[str](), None
    for recipe in plan.perplexity.recipes:
        try:
            with perplexity.under(model, recipe):
                taken.append(recipe)
        except ValueError as refusal:
            if not plan.usual:
                raise
            error = refusal
            left.append(f"left out {recipe}: {refusal}")
    if error is not None and taken == [PLAIN]:
        raise error
    for words in left:
        say(words)
    config, asked = replace(plan.perplexity, recipes=tuple(taken)), plan.retrieval
    if asked is not None:
        asked = replace(asked, recipes=tuple(recipe for recipe in asked.recipes if recipe in taken))
    return replace(plan, perplexity=config, retrieval=asked)


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
