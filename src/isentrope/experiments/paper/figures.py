"""What the paper's figures show of its models, measured: attention by CosScale, at 512, 1024 and 4096 tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from isentrope.analysis import inspect
from isentrope.analysis.inspect import InspectConfig
from isentrope.data.prepared import PreparedCorpus
from isentrope.evaluation.texts import Text
from isentrope.experiments.plan import load
from isentrope.experiments.runner import checkpoints
from isentrope.utils.files import read_fields, read_json, write_json

INSET = "3516:3536,3516:3536"  # the paper's 20 × 20


def looks(prepared: PreparedCorpus, out: Path, say: Callable[[str], None] = print) -> dict[str, list[Path]]:
    """Folders of inspections for each figure; models are trained and looked at where that has not been done.

    f1, f6: CosScale 8 … 600 at 512 tokens. f7: the same at 1024. f2: windowed attention with CosScale 16, and cosine
    attention with 128, at 4096.
    """
    sweep = replace(load("cosscale-sweep"), seeds=(0,))
    trained = checkpoints(sweep, prepared, out, say)
    row = next(row for row in prepared.manifest["documents"] if row["set"] == "test" and row["tokens"] >= 4096)
    index = prepared.store.sha256.index(row["sha256"])
    text = Text(row["name"], row["sha256"], tuple(prepared.store[index][:4096].tolist()))
    found: dict[str, list[Path]] = {"f1": [], "f2": [], "f7": []}
    wanted = [("f1", line.checkpoint, line.recipe, InspectConfig((512,))) for line in sweep.rows]
    wanted += [("f7", line.checkpoint, line.recipe, InspectConfig((1024,))) for line in sweep.rows]
    wanted += [
        ("f2", "cosine16", "rope+window:size=64+cosine:alpha=16", InspectConfig.parse("4096", inset=INSET)),
        ("f2", "cosine128", "rope+cosine:alpha=128", InspectConfig((4096,))),
    ]
    for figure, name, recipe, config in wanted:
        model = trained[name, 0]
        folder = out / "looks" / f"{figure}-{name}-{model.identity}"
        found[figure].append(folder)
        if model.why:
            raise ValueError(model.why)
        if not _looked(folder, text, recipe, config):
            say(f"looking at {name}, {config.lengths[-1]} tokens")
            inspect.measure_attention(
                inspect.load_model(str(model.folder), recipe), str(model.folder), text, config, folder
            )
    return found


def trainings(prepared: PreparedCorpus, out: Path, say: Callable[[str], None] = print) -> dict[str, list[Path]]:
    """Folders of training runs: f4, with CosScale 128 and without; f5, all that are trained for a method."""
    plan = load("main")
    trained = checkpoints(plan, prepared, out, say)
    folders = {name: model.folder.parent for (name, _), model in trained.items() if model.why is None}
    methods = [name for name in folders if name not in ("base", "dot", "cosine16", "cosine128")]
    both = [folders[name] for name in ("cosine128", "dot") if name in folders]
    return {"f4": both, "f5": [folders[name] for name in methods]}


def _looked(folder: Path, text: Text, recipe: str, config: InspectConfig) -> bool:
    """Whether the same was looked at before; the recipe's text is kept beside what was found."""
    path, asked = folder / "inspect.json", folder / "asked.json"
    wanted = json.loads(json.dumps([text.sha256, recipe, asdict(config)]))
    again = "delete it to look again"
    if path.exists() and asked.exists() and read_json(asked, again) == wanted:
        read_fields(path, again, "entropy", "heatmaps")
        return True
    path.unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(asked, wanted)
    return False
