"""Carrying a plan out: train what is missing, evaluate what is missing, put the results together.

Every cell (checkpoint × recipe × length × protocol) is a file of its own, named by a hash of all that its numbers
depend on, complete or absent. So a run may be killed and resumed, plans share cells, and processes work side by side.
"""

from __future__ import annotations

import hashlib
import json
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from importlib.resources import files
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from isentrope.analysis.observe import layer_entropies
from isentrope.calibration.masked_lm import fit_masked_temperature
from isentrope.data.prepare import PrepareOptions, prepare
from isentrope.data.prepared import PreparedCorpus
from isentrope.data.source import Source
from isentrope.evaluation.masked_lm import UnmeasurableError, score_documents, summarize_scores
from isentrope.evaluation.results import MASKED_METRICS, cell_path, is_done, read_cell, write_cell
from isentrope.experiments.plan import Checkpoint, Plan, Row
from isentrope.models import GAUAlphaConfig, GAUAlphaForMaskedLM
from isentrope.models.gau.config import gau_recipe
from isentrope.pretrained import (
    check_same_tokens,
    check_tensors,
    load_pretrained,
    read_config_as,
    read_tokenizer,
    resolve_device,
)
from isentrope.training.checkpoint import read_log
from isentrope.training.config import HOW, configured
from isentrope.training.trainer import Diverged, train
from isentrope.utils.files import BrokenFileError, lock_file, read_fields, read_json, write_atomically, write_json
from isentrope.utils.progress import track_progress
from isentrope.utils.provenance import collect_provenance

FORMAT = 1  # of cells: raised when a change of the code changes their numbers
SHIPPED = files("isentrope.models") / "shipped"
LOOKED_AT = 2  # documents whose attention entropy is measured


@dataclass(frozen=True)
class Trained:
    """A checkpoint on disk. identity: a hash of its weights, or of how they come about. why: it could not be had."""

    name: str
    seed: int
    folder: Path
    identity: str
    why: str | None = None


@dataclass(frozen=True)
class Cell:
    """One number of PPL and one of ACC."""

    row: Row
    length: int
    trained: Trained
    key: str


def run(
    plan: Plan,
    out: Path,
    data: str | Path | None = None,
    say: Callable[[str], None] = print,
    compile: bool | None = None,
    helps: bool = False,
) -> dict[str, Any]:
    """Do what is missing of a plan and write `out/PLAN/results.jsonl`; returns how many cells are there and failed.

    helps: leave to another process what it is at, and the writing.
    """
    state = PartialState()
    prepared = _corpus(plan, out, data)
    trained = checkpoints(plan, prepared, out, say, compile)
    dtype = resolve_device(state.device.type)[1]
    cells = list(_cells(plan, prepared, trained, dtype))
    if state.is_main_process:
        (out / plan.name).mkdir(parents=True, exist_ok=True)
        write_json(out / plan.name / "cells.json", [cell.key for cell in cells])
    study = _Evaluation(plan, prepared, out, state.device, dtype)
    groups = _groups(cells)
    # shared out before looking what is there: processes may look at different moments
    mine = _in_turn(groups[state.process_index :: state.num_processes], out, helps)
    for cell in track_progress(mine, lambda cell: f"{cell.row.method} {cell.row.variant} at {cell.length}", len(cells)):
        if not is_done(out, cell.key):
            study.measure(cell)
    state.wait_for_everyone()
    if state.is_main_process and not helps:
        _assemble(plan, prepared, trained, cells, out)
    state.wait_for_everyone()
    return status(plan, out)


def status(plan: Plan, out: Path) -> dict[str, Any]:
    """How far a plan has come in the folder `out`, with the lengths and seeds it was last run with."""
    path = out / plan.name / "cells.json"
    if not path.exists():
        return {"plan": plan.name, "cells": plan.size, "done": 0, "failed": 0}
    keys = read_json(path, "run the plan again, which writes it anew")
    cells = [cell for key in keys if (cell := read_cell(out, key)) is not None]
    failed = sum(cell["result"]["failed"] is not None for cell in cells)
    return {"plan": plan.name, "cells": len(keys), "done": len(cells) - failed, "failed": failed}


def _corpus(plan: Plan, out: Path, data: str | Path | None) -> PreparedCorpus:
    """The corpus given, or the one the plan names, prepared here with the tokenizer of the models that ship."""
    if data is not None:
        return PreparedCorpus.open(data)
    if plan.data is None:
        raise ValueError(f"data: the plan {plan.name} needs a corpus: isentrope data prepare …, then --data FOLDER")
    folder = out / "data" / plan.data
    state = PartialState()
    if state.is_main_process:
        shipped = next((c.shipped for c in plan.needed() if c.shipped), None)
        options = PrepareOptions(tokenizer=str(SHIPPED / shipped)) if shipped else PrepareOptions()
        with lock_file(out / "locks" / plan.data, wait=True):
            prepare(Source(plan.data), folder, options)
    state.wait_for_everyone()
    return PreparedCorpus.open(folder)


def checkpoints(
    plan: Plan, prepared: PreparedCorpus, out: Path, say: Callable[[str], None], compile: bool | None = None
) -> dict[tuple[str, int], Trained]:
    """Every checkpoint of the plan for every seed, trained where it is not there yet.

    What another process trains meanwhile is left to it; one that waits for nothing else waits for that.
    """
    found: dict[tuple[str, int], Trained] = {}
    left = [(checkpoint, seed) for checkpoint in plan.needed() for seed in plan.seeds_of(checkpoint.name)]
    alone = PartialState().num_processes == 1  # of several that train together, none may part from the others
    wait = False
    while left:
        before = len(left)
        for checkpoint, seed in list(left):
            start = (checkpoint.train or {}).get("model")
            if start in plan.checkpoints and (start, seed) not in found:
                continue
            # by what it is trained with: a plan of other seeds may want the same
            name = f"{checkpoint.name}-{seed if checkpoint.seeded else 0}"
            with lock_file(out / "locks" / name, wait) if alone else nullcontext(True) as mine:
                if not mine:
                    continue
                model = _checkpoint(checkpoint, seed, found, prepared, out, say, compile)
            left.remove((checkpoint, seed))
            wait = False
            for other in (seed, *(plan.seeds if len(plan.seeds_of(checkpoint.name)) == 1 else ())):
                found[checkpoint.name, other] = model
        wait = len(left) == before
    return found


def _checkpoint(
    checkpoint: Checkpoint,
    seed: int,
    found: dict[tuple[str, int], Trained],
    prepared: PreparedCorpus,
    out: Path,
    say: Callable[[str], None],
    compile: bool | None,
) -> Trained:
    if checkpoint.train is None:
        folder = Path(str(SHIPPED / checkpoint.shipped)) if checkpoint.shipped else Path(str(checkpoint.path))
        content = hashlib.sha256()
        for file in (folder / "config.json", folder / "model.safetensors"):
            if not file.is_file():
                raise ValueError(f"checkpoint {checkpoint.name}: expected {file}, got no such file")
            content.update(file.read_bytes())
        check_tensors(folder / "model.safetensors")
        read_config_as(GAUAlphaConfig, folder)
        check_same_tokens(folder, read_tokenizer(prepared.tokenizer_path))
        return Trained(checkpoint.name, seed, folder, content.hexdigest()[:16])
    options = dict(checkpoint.train)
    start = found.get((str(options.get("model")), seed))
    if start is not None:
        if start.why:
            return Trained(checkpoint.name, seed, out, f"without {start.identity}", start.why)
        options["model"] = str(start.folder)
    options |= {"seed": seed if checkpoint.seeded else 0, "compile": compile}
    config = configured(options.pop("preset", "train"), **options)
    # named by how it comes about, with its start by content and not by place
    told = {key: value for key, value in asdict(config).items() if key not in HOW}
    recipe = json.dumps([told | {"model": start.identity if start else config.model}, _data(prepared)])
    identity = hashlib.sha256(recipe.encode()).hexdigest()[:16]
    folder = out / "checkpoints" / f"{checkpoint.name}-{identity}"
    if not (folder / "final" / "model.safetensors").exists():
        say(f"training {checkpoint.name}, seed {seed}")
    _clear_broken(folder / "train.json", say)
    try:
        train(prepared.folder, config, folder)
    except Diverged as error:
        return Trained(checkpoint.name, seed, folder, identity, f"checkpoint {checkpoint.name}: {error}")
    return Trained(checkpoint.name, seed, folder / "best", identity)


def _clear_broken(path: Path, say: Callable[[str], None]) -> None:
    """Remove a broken train.json: its folder is named by the configuration, so that nothing else can lie there."""
    state = PartialState()
    if state.is_main_process and path.exists():
        try:
            read_fields(path, "training goes on from the last state saved, or begins again", "identity", "config")
        except BrokenFileError as error:
            say(str(error))
            path.unlink()
    state.wait_for_everyone()


def _data(prepared: PreparedCorpus) -> str:
    """A hash of which documents are in which set, and of the tokens they became."""
    rows = [(row["sha256"], row["set"]) for row in prepared.manifest["documents"]]
    return hashlib.sha256(json.dumps([rows, prepared.manifest["tokens"]]).encode()).hexdigest()[:16]


def _cells(
    plan: Plan, prepared: PreparedCorpus, trained: dict[tuple[str, int], Trained], dtype: torch.dtype
) -> Iterator[Cell]:
    data = _data(prepared)
    protocol = {key: value for key, value in asdict(plan.protocol).items() if key != "batch"}
    for row in plan.rows:
        for length in plan.lengths:
            for seed in plan.seeds_of(row.checkpoint):
                model = trained[row.checkpoint, seed]
                told = [FORMAT, model.identity, row.recipe, length, plan.train_length, protocol, data, str(dtype)]
                told += [LOOKED_AT if plan.entropy else 0, *(["fit"] if row.fit else [])]
                key = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]
                yield Cell(row, length, replace(model, seed=seed), key)


def _groups(cells: list[Cell]) -> list[list[Cell]]:
    """Cells of the same model under the same recipe, together."""
    found: dict[tuple[str, str, bool], list[Cell]] = {}
    for cell in cells:
        found.setdefault((cell.trained.identity, cell.row.recipe, cell.row.fit), []).append(cell)
    return list(found.values())


def _in_turn(groups: list[list[Cell]], out: Path, helps: bool) -> Iterator[Cell]:
    """Every cell, group by group; those that another process is at come last, once it has done or left them."""
    busy: list[list[Cell]] = []
    for round, wait in ((groups, False),) if helps else ((groups, False), (busy, True)):
        for group in round:
            with lock_file(out / "locks" / group[0].key, wait) as mine:
                if mine:
                    yield from group
                else:
                    busy.append(group)


def _hashes(prepared: PreparedCorpus, which: str) -> list[str]:
    return [row["sha256"] for row in prepared.manifest["documents"] if row["set"] == which]


class _Evaluation:
    """Cells one after another; neighbours share their model."""

    def __init__(
        self, plan: Plan, prepared: PreparedCorpus, out: Path, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.plan, self.out, self.device, self.dtype = plan, out, device, dtype
        self.documents, self.hashes = prepared.documents("test"), _hashes(prepared, "test")
        self.others = prepared.documents("validation"), _hashes(prepared, "validation")
        self.mask_token: int = read_tokenizer(prepared.tokenizer_path).mask_token_id
        self.loaded: tuple[Any, Any] = (None, None)
        self.machine = {key: value for key, value in collect_provenance().items() if key != "date"}

    def measure(self, cell: Cell) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        numbers: dict[str, Any] = dict.fromkeys(MASKED_METRICS)
        numbers |= {"documents": [], "skipped": 0, "entropy": None, "entropy_ratio": None}
        failed, seconds = cell.trained.why, 0.0
        if failed is None:
            try:
                measured, seconds = self._numbers(cell)
                numbers |= measured
            except RuntimeError as error:  # out of memory, mostly
                kind = "out of memory: " if isinstance(error, torch.OutOfMemoryError) else ""
                failed = kind + str(error).strip().partition("\n")[0]
        rows = sum(len(self.plan.protocol.draw_positions(cell.length, d["sha256"])) for d in numbers["documents"])
        speed = rows * cell.length / seconds if seconds else None
        timing = {"seconds": seconds, "tokens_per_second": speed, "peak_bytes": _peak(self.device)}
        result = numbers | {"failed": failed, "run": self.machine}
        write_cell(self.out, cell.key, {"result": result, "timing": timing})

    def _numbers(self, cell: Cell) -> tuple[dict[str, Any], float]:
        """What is measured, and the seconds that the predictions took."""
        model = self._model(cell)
        found: dict[str, Any] = {}
        if cell.row.fit:
            self.loaded = (None, None)  # it is changed: nobody's neighbour
            fitted = fit_masked_temperature(model, *self.others, cell.length, self.plan.train_length, self.mask_token)
            found["recipe"] = f"{cell.row.recipe}+{fitted}" if fitted else cell.row.recipe
        begun = time.perf_counter()
        scores = score_documents(model, self.documents, self.hashes, cell.length, self.mask_token, self.plan.protocol)
        seconds = time.perf_counter() - begun
        skipped = len(self.hashes) - len(scores)
        if not scores:
            raise UnmeasurableError(f"no test document has {cell.length} tokens")
        if not all(isfinite(score.loss) for score in scores):
            raise UnmeasurableError("the loss is not a number")
        found |= {"documents": [asdict(score) for score in scores], "skipped": skipped} | summarize_scores(scores)
        if self.plan.entropy:
            long = [i for i in range(len(self.documents)) if self.documents.lengths[i] >= cell.length][:LOOKED_AT]
            ids = torch.stack([torch.from_numpy(self.documents[i][: cell.length].astype("int64")) for i in long])
            now = layer_entropies(model, ids.to(self.device))
            then = layer_entropies(model, ids[:, : self.plan.train_length].to(self.device))
            found |= {"entropy": now.tolist(), "entropy_ratio": (now / then).tolist()}
        return found, seconds

    def _model(self, cell: Cell) -> Any:
        wanted = cell.trained.folder, cell.row.recipe
        if self.loaded[0] != wanted:
            self.loaded = (None, None)  # not two at a time
            sizes = read_config_as(GAUAlphaConfig, cell.trained.folder)
            # what the text leaves open is the plan's training length, whatever the model's config says
            recipe = gau_recipe(cell.row.recipe, self.plan.train_length, sizes.attention_key_size).to_dict()
            options: dict[str, Any] = {"recipe": recipe, "dtype": self.dtype}
            model: Any = load_pretrained(GAUAlphaForMaskedLM, cell.trained.folder, **options)
            self.loaded = wanted, model.to(self.device).eval()
        return self.loaded[1]


def _assemble(
    plan: Plan, prepared: PreparedCorpus, trained: dict[tuple[str, int], Trained], cells: list[Cell], out: Path
) -> None:
    """results.jsonl, timings.jsonl and plan.json, in the plan's order, from the cells that are there."""
    results, timings = [], []
    for cell in cells:
        held = read_fields(cell_path(out, cell.key), "run the plan again, which measures it anew", "result", "timing")
        told = {"key": cell.key} | asdict(cell.row) | {"seed": cell.trained.seed, "length": cell.length}
        results.append(told | {"protocol": plan.protocol.name} | held["result"])
        timings.append({"key": cell.key} | held["timing"])
    folder = out / plan.name
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (("results.jsonl", results), ("timings.jsonl", timings)):
        with write_atomically(folder / name) as partial:
            partial.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    manifest = prepared.manifest
    write_json(folder / "plan.json", {
        "name": plan.name, "title": plan.title, "label": plan.label, "lengths": plan.lengths,
        "train_length": plan.train_length, "protocol": plan.protocol.name, "positions": plan.protocol.positions,
        "seeds": plan.seeds, "metrics": ["ppl", "acc"], "layout": "methods", "rows": [asdict(row) for row in plan.rows],
        "claims": plan.claims, "notes": plan.notes,
        "data": {
            "name": _name(manifest["source"]), "fingerprint": manifest["source"]["fingerprint"],
            "partition": _data(prepared), "documents": len(manifest["documents"]), "statistics": manifest["statistics"],
        },
        "checkpoints": _told(trained), "run": collect_provenance(),
    })  # fmt: skip


def _name(source: dict[str, Any]) -> str:
    """A corpus' name: of files, without where they lie."""
    return Path(source["name"]).name if source["kind"] == "files" else str(source["name"])


def _peak(device: torch.device) -> int:
    """Bytes at the worst moment: of this cell on a GPU, of the whole process so far elsewhere."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _told(trained: dict[tuple[str, int], Trained]) -> dict[str, Any]:
    """What is known of how each checkpoint was trained; nothing of those that ship or were given."""
    found: dict[str, Any] = {}
    for (name, seed), model in trained.items():
        if seed != model.seed:
            continue
        label = name if seed == 0 else f"{name}, seed {seed}"
        path = (model.folder if model.why else model.folder.parent) / "train.json"
        row: dict[str, Any] = {"identity": model.identity, "failed": model.why}
        if path.exists():
            told = read_fields(path, "run the plan again", "config", "best", "seconds")
            row |= {key: told[key] for key in ("config", "best", "seconds")}
            if (start := Path(told["config"]["model"] or "")).is_absolute():  # whose place means nothing elsewhere
                row["config"]["model"] = start.parent.name
            row["log"] = read_log(path.with_name("log.jsonl"))
            found[label] = row
    return found
