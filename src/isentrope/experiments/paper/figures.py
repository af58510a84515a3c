"""Measure what the paper's figures show: attention by CosScale, at 512, 1024 and 4096 tokens, and training losses."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from isentrope.analysis import inspect
from isentrope.analysis.inspect import InspectConfig
from isentrope.data.prepared import PreparedCorpus
from isentrope.evaluation.texts import Text
from isentrope.experiments.checkpoints import prepare_checkpoints
from isentrope.experiments.masked_plan import MaskedPlan
from isentrope.experiments.plan import load_plan
from isentrope.utils.files import read_fields, read_json, write_json

INSET = "3516:3536,3516:3536"  # the paper's 20 × 20


def inspect_models(
    corpus: PreparedCorpus,
    out: Path,
    notify: Callable[[str], None] = print,
    plan: str = "cosscale-sweep",
    seed: int = 0,
) -> dict[str, list[Path]]:
    """Inspect the attention of each figure's models, training and inspecting what is missing.

    f1, f6: CosScale 8 … 600 at 512 tokens. f7: the same at 1024. f2: windowed attention with CosScale 16, and cosine
    attention with 128, at 4096.

    Args:
        corpus: What to train on and to read.
        out: The folder that plans share.
        notify: Receives a message for each training and inspection.
        plan: Its models have each CosScale.
        seed: Of the trainings.

    Returns:
        The folders of inspections, by figure.
    """
    sweep = replace(_load_masked_plan(plan), seeds=(seed,))
    trained = prepare_checkpoints(sweep, corpus, out, notify)
    row = next(row for row in corpus.manifest["documents"] if row["set"] == "test" and row["tokens"] >= 4096)
    index = corpus.store.sha256.index(row["sha256"])
    text = Text(row["name"], row["sha256"], tuple(corpus.store[index][:4096].tolist()))
    folders: dict[str, list[Path]] = {"f1": [], "f2": [], "f7": []}
    wanted = [("f1", line.checkpoint, line.recipe, InspectConfig((512,))) for line in sweep.rows]
    wanted += [("f7", line.checkpoint, line.recipe, InspectConfig((1024,))) for line in sweep.rows]
    wanted += [
        ("f2", "cosine16", "rope+window:size=64+cosine:alpha=16", InspectConfig.parse("4096", inset=INSET)),
        ("f2", "cosine128", "rope+cosine:alpha=128", InspectConfig((4096,))),
    ]
    for figure, name, recipe, config in wanted:
        model = trained[name, seed]
        folder = out / "looks" / f"{figure}-{name}-{model.identity}"
        folders[figure].append(folder)
        if model.failure:
            raise ValueError(model.failure)
        if not _is_inspected(folder, text, recipe, config):
            notify(f"inspecting {name}, {config.lengths[-1]} tokens")
            loaded = inspect.load_model(str(model.folder), recipe)
            inspect.measure_attention(loaded, str(model.folder), text, config, folder)
    return folders


def training_folders(
    corpus: PreparedCorpus, out: Path, notify: Callable[[str], None] = print, plan: str = "main", seed: int = 0
) -> dict[str, list[Path]]:
    """Return the folders of trainings by figure: f4 with CosScale 128 and without; f5 all trained for a method."""
    trained = prepare_checkpoints(replace(_load_masked_plan(plan), seeds=(seed,)), corpus, out, notify)
    folders = {name: model.folder.parent for (name, _), model in trained.items() if model.failure is None}
    methods = [name for name in folders if name not in ("base", "dot", "cosine16", "cosine128")]
    both = [folders[name] for name in ("cosine128", "dot") if name in folders]
    return {"f4": both, "f5": [folders[name] for name in methods]}


def _load_masked_plan(name: str) -> MaskedPlan:
    plan = load_plan(name)
    assert isinstance(plan, MaskedPlan)
    return plan


def _is_inspected(folder: Path, text: Text, recipe: str, config: InspectConfig) -> bool:
    """Return whether the same was inspected before, by the request stored beside the results; record it if not."""
    results, request_file = folder / "inspect.json", folder / "asked.json"
    request = json.loads(json.dumps([text.sha256, recipe, asdict(config)]))
    remedy = "delete it to inspect again"
    if results.exists() and request_file.exists() and read_json(request_file, remedy) == request:
        read_fields(results, remedy, "entropy", "heatmaps")
        return True
    results.unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(request_file, request)
    return False
