"""Plans for causal models: one of them under many recipes, read and questioned at lengths past its own."""

from __future__ import annotations

from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import Any

import yaml

from isentrope.study.causal import perplexity, retrieval
from isentrope.study.checkpoint import write_json

KEYS = ("title", "decoder", "texts", "documents", "edges", "recipes", "retrieval")
DECODER = ("model", "gguf_file", "dtype", "device", "chat")
RETRIEVAL = ("tasks", "lengths", "depths", "examples", "seed", "score", "text")


@dataclass(frozen=True)
class Plan:
    """decoder: which model, and how it is loaded. haystack: files to hide needles in; none for plain sentences."""

    name: str
    title: str
    decoder: dict[str, Any]
    texts: tuple[Path, ...]
    documents: int
    perplexity: perplexity.Config
    retrieval: retrieval.Config | None
    haystack: tuple[Path, ...]


def load(path: Path) -> Plan | None:
    """The plan in a YAML file; None where it is one of another kind."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: expected YAML, got {error}") from None
    if not isinstance(data, dict) or "decoder" not in data:
        return None
    where = f"plan {path.stem}"
    _check_keys(where, data, KEYS, ("decoder", "texts", "edges", "recipes"))
    _check_keys(f"{where}: decoder", data["decoder"], DECODER, ("model",))
    recipes = tuple(map(str, data["recipes"]))
    asked: retrieval.Config | None = None
    haystack: tuple[Path, ...] = ()
    if (wanted := data.get("retrieval")) is not None:
        _check_keys(f"{where}: retrieval", wanted, RETRIEVAL, ("tasks", "lengths"))
        options = {key: value for key, value in wanted.items() if key != "text"}
        options |= {key: tuple(options[key]) for key in ("tasks", "lengths", "depths") if key in options}
        asked, haystack = retrieval.Config(recipes, **options), _files(wanted.get("text", []), path.parent)
    config = perplexity.Config(recipes, tuple(data["edges"]))
    texts = _files(data["texts"], path.parent)
    title = str(data.get("title", path.stem))
    return Plan(path.stem, title, data["decoder"], texts, int(data.get("documents", 8)), config, asked, haystack)


def run(plan: Plan, out: Path) -> tuple[Path, int]:
    """Measure what is missing in the folder `out`/NAME; returns it, and how many cells failed."""
    folder, failed = out / plan.name, 0
    name, gguf = str(plan.decoder["model"]), plan.decoder.get("gguf_file")
    model = perplexity.load(name, plan.decoder.get("device", "auto"), plan.decoder.get("dtype", "auto"), gguf)
    texts = perplexity.read(plan.texts, name, gguf, plan.perplexity.length, plan.documents)
    shown = Path(name).name
    perplexity.run(model, shown, texts, plan.perplexity, folder)
    if plan.retrieval is not None:
        prompts = retrieval.Prompts.of(perplexity.load_tokenizer(name, gguf), plan.decoder.get("chat"))
        haystack = retrieval.read(plan.haystack)
        failed = retrieval.run(model, shown, prompts, haystack, plan.retrieval, folder)[1]
    write_json(folder / "decoder.json", {"name": plan.name, "title": plan.title, "model": shown})
    return folder, failed


def _check_keys(where: str, data: Any, known: tuple[str, ...], needed: tuple[str, ...]) -> None:
    if not isinstance(data, dict):
        raise ValueError(f"{where}: expected keys and values, got {data!r}")
    for key in data:
        if key not in known:
            raise ValueError(f"{where}: expected {', '.join(known)}, got {key!r}")
    if missing := [key for key in needed if not data.get(key)]:
        raise ValueError(f"{where}: missing {', '.join(missing)}")


def _files(words: Any, beside: Path) -> tuple[Path, ...]:
    """Files by names and globs, from the plan's own folder on."""
    found: list[Path] = []
    for word in [words] if isinstance(words, str) else words:
        here = sorted(glob(str(beside / str(word)), recursive=True))
        if not here:
            raise ValueError(f"texts: expected files, got none like {word}")
        found += map(Path, here)
    return tuple(found)
