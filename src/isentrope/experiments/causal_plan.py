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
from isentrope.experiments.plan_schema import CausalFile, Retrieval

DEFAULT_DOCUMENTS = 8


@dataclass(frozen=True)
class CausalPlan:
    """A comparison of recipes on one causal model.

    Args:
        name: Of the plan, and of its folder of results.
        title: Of the report.
        decoder: The model and how it is loaded, by the keys of `plan_schema.Decoder`.
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
    file = CausalFile.read(where, data)
    retrieval_config, fillers = None, dict[str, tuple[Path, ...] | None]()
    if file.retrieval is not None:
        fillers = _parse_fillers(file.retrieval, folder)
        retrieval_config = _parse_retrieval(f"{where}: retrieval", file.retrieval, file.recipes, tuple(fillers))
    texts = _find_files(file.texts, folder)
    model = _expand_variables(file.decoder.model)
    local_model = folder / model
    return CausalPlan(
        name=name,
        title=file.title or name,
        decoder=file.decoder.given() | {"model": str(local_model) if local_model.is_dir() else model},
        texts=texts,
        documents=file.documents,
        perplexity=PerplexityConfig(file.recipes, file.edges),
        retrieval=retrieval_config,
        fillers=fillers,
    )


def _parse_fillers(entry: Retrieval, folder: Path) -> dict[str, tuple[Path, ...] | None]:
    """Read the names of fillers, with files as NAME=FILE; `text` has files of the one named so."""
    fillers = parse_fillers(entry.fillers, lambda name: _find_files((name,), folder))
    if entry.text:
        fillers[TEXT] = _find_files(entry.text, folder)
    return fillers or {SENTENCES: None}


def _parse_retrieval(
    where: str, entry: Retrieval, recipes: tuple[str, ...], fillers: tuple[str, ...]
) -> RetrievalConfig:
    options = {"recipes": recipes} | entry.given("text")
    options |= {"tasks": expand_tasks(entry.tasks), "fillers": fillers}
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
        decoder: "model", and how it is loaded by the other keys of `plan_schema.Decoder`; None values are ignored.
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


def _find_files(names: Sequence[str], folder: Path) -> tuple[Path, ...]:
    """Find the files of names, folders and globs, relative to the plan's folder."""
    paths: list[Path] = []
    for name in names:
        matches = sorted(glob(str(folder / _expand_variables(name)), recursive=True))
        if not matches:
            raise ValueError(f"texts: expected files, got none like {name}")
        paths += [path for match in matches for path in Source(match).paths]
    return tuple(paths)
