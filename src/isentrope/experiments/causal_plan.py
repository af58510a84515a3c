"""Plans for causal models: one model under several recipes, at lengths past its training length."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from glob import glob
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from isentrope.data.source import Source, find_text_files
from isentrope.data.tasks import SENTENCES, expand_tasks, parse_fillers
from isentrope.data.tasks.fillers import TEXT
from isentrope.evaluation.evaluate import name_filler, plan_comparison
from isentrope.evaluation.perplexity import PerplexityConfig
from isentrope.evaluation.retrieval import RetrievalConfig
from isentrope.experiments.plan_checks import check_keys, check_list, check_whole

PLAN_KEYS = ("title", "decoder", "texts", "documents", "edges", "recipes", "retrieval")
DECODER_KEYS = ("model", "gguf_file", "dtype", "device", "chat")
RETRIEVAL_KEYS = ("tasks", "lengths", "depths", "examples", "seed", "score", "text", "recipes", "fillers", "ceiling")
RETRIEVAL_LISTS = {"recipes": str, "tasks": str, "lengths": int, "depths": float, "fillers": str}
DEFAULT_DOCUMENTS = 8


@dataclass(frozen=True)
class CausalPlan:
    """A comparison of recipes on one causal model.

    Args:
        name: Of the plan, and of its folder of results.
        title: Of the report.
        decoder: The model and how it is loaded, by `DECODER_KEYS`.
        texts: Files to read.
        documents: Documents read of them, at most.
        perplexity: Recipes and buckets of positions.
        retrieval: Tasks and lengths; None for none.
        fillers: Files to hide needles in by the filler's name; None for built-in ones.
        skip_unsupported: Leave out recipes that the model cannot be extended with, instead of raising.
        optional_retrieval: Leave retrieval out where it cannot be measured, instead of raising.
    """

    name: str
    title: str
    decoder: dict[str, Any]
    texts: tuple[Path, ...]
    documents: int
    perplexity: PerplexityConfig
    retrieval: RetrievalConfig | None
    fillers: dict[str, tuple[Path, ...] | None]
    skip_unsupported: bool = False
    optional_retrieval: bool = False


def parse_causal_plan(name: str, data: dict[str, Any], folder: Path) -> CausalPlan:
    """Build a plan from the content of its YAML file.

    Args:
        name: Of the plan.
        data: The content; $NAME in a model's or text's name is read from the environment.
        folder: The plan's own, where its files, and first its model, are looked for.
    """
    where = f"plan {name}"
    check_keys(where, data, PLAN_KEYS, ("decoder", "texts", "edges", "recipes"))
    check_keys(f"{where}: decoder", data["decoder"], DECODER_KEYS, ("model",))
    recipes = check_list(where, data, "recipes", str)
    retrieval_config, fillers = None, dict[str, tuple[Path, ...] | None]()
    if (entry := data.get("retrieval")) is not None:
        fillers = _parse_fillers(f"{where}: retrieval", entry, folder)
        retrieval_config = _parse_retrieval(f"{where}: retrieval", entry, recipes, tuple(fillers))
    texts = _find_files(data["texts"], folder)
    model = _expand_variables(str(data["decoder"]["model"]))
    local_model = folder / model
    return CausalPlan(
        name=name,
        title=str(data.get("title", name)),
        decoder=data["decoder"] | {"model": str(local_model) if local_model.is_dir() else model},
        texts=texts,
        documents=check_whole(where, data, "documents") if "documents" in data else DEFAULT_DOCUMENTS,
        perplexity=PerplexityConfig(recipes, check_list(where, data, "edges", int)),
        retrieval=retrieval_config,
        fillers=fillers,
    )


def _parse_fillers(where: str, data: Any, folder: Path) -> dict[str, tuple[Path, ...] | None]:
    """Read the names of fillers, with files as NAME=FILE; `text` has files of the one named so."""
    check_keys(where, data, RETRIEVAL_KEYS, ("tasks", "lengths"))
    names = check_list(where, data, "fillers", str) if "fillers" in data else ()
    fillers = parse_fillers(names, lambda name: _find_files(name, folder))
    if data.get("text"):
        fillers[TEXT] = _find_files(data["text"], folder)
    return fillers or {SENTENCES: None}


def _parse_retrieval(where: str, data: Any, recipes: tuple[str, ...], fillers: tuple[str, ...]) -> RetrievalConfig:
    options = {"recipes": recipes} | {key: value for key, value in data.items() if key != "text"}
    options |= {key: check_list(where, data, key, kind) for key, kind in RETRIEVAL_LISTS.items() if key in data}
    options |= {key: check_whole(where, data, key) for key in ("examples", "seed", "ceiling") if key in data}
    options |= {"tasks": expand_tasks(options["tasks"]), "fillers": fillers}
    if others := [recipe for recipe in options["recipes"] if recipe not in recipes]:
        raise ValueError(f"{where}: recipes: expected some of the plan's, got {others[0]!r}")
    return RetrievalConfig(**options)


def plan_causal_evaluation(
    decoder: dict[str, Any],
    config: PreTrainedConfig,
    data: Sequence[str],
    recipes: Sequence[str],
    length: str,
    documents: int = DEFAULT_DOCUMENTS,
    passkeys: bool | None = None,
) -> CausalPlan:
    """Plan the comparison of one causal model as it is and under several recipes.

    Args:
        decoder: "model", and how it is loaded by the other `DECODER_KEYS`; None values are ignored.
        config: The model's.
        data: Files, folders and globs of text.
        recipes: Texts of recipes; those of `usual_recipes` if empty.
        length: Tokens, or such as "4x" times the training length.
        documents: Documents read, at most.
        passkeys: Also test the retrieval of passkeys from the texts at that length; None where that is possible.
    """
    model, gguf_file = str(decoder["model"]), decoder.get("gguf_file")
    path = Path(os.path.abspath(Path(model).expanduser())) if Path(model).expanduser().is_dir() else Path(model)
    comparison = plan_comparison(config, path.name, recipes, length, passkeys)
    tokens = str(comparison.perplexity.length)
    texts = tuple(file for location in data for file in find_text_files(location))
    filler = name_filler(" ".join(f"{file.resolve()} {file.stat().st_size}" for file in texts))
    retrieval = comparison.retrieval
    return CausalPlan(
        name="-".join((*path.parts[-2:], *([Path(gguf_file).stem] if gguf_file else []), tokens)).replace("/", ""),
        title=comparison.title,
        decoder={key: value for key, value in decoder.items() if value is not None} | {"model": str(path)},
        texts=texts,
        documents=documents,
        perplexity=comparison.perplexity,
        retrieval=None if retrieval is None else replace(retrieval, fillers=(filler,)),
        fillers={filler: texts},
        skip_unsupported=comparison.skip_unsupported,
        optional_retrieval=comparison.optional_retrieval,
    )


def _expand_variables(name: str) -> str:
    """Replace $NAME by the environment's value."""
    expanded = os.path.expandvars(name)
    if "$" in expanded:
        raise ValueError(f"{name}: environment variable not set; set it and run again")
    return expanded


def _find_files(names: Any, folder: Path) -> tuple[Path, ...]:
    """Find the files of names, folders and globs, relative to the plan's folder."""
    paths: list[Path] = []
    for name in [names] if isinstance(names, str) else names:
        matches = sorted(glob(str(folder / _expand_variables(str(name))), recursive=True))
        if not matches:
            raise ValueError(f"texts: expected files, got none like {name}")
        paths += [path for match in matches for path in Source(match).paths]
    return tuple(paths)
