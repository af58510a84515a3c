"""Run plans for masked models: train and evaluate what is missing, then assemble the results.

Every cell (checkpoint × recipe × length × protocol) is a file, named by a hash of all that its numbers depend on and
written atomically. So a run may be killed and resumed, plans share cells, and processes work side by side.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from isentrope.analysis.observe import layer_entropies
from isentrope.calibration.masked_lm import fit_masked_law
from isentrope.data.prepare import PrepareOptions, prepare
from isentrope.data.prepared import PreparedCorpus
from isentrope.data.source import Source
from isentrope.evaluation.masked_lm import UnmeasurableError, score_documents, summarize_scores
from isentrope.evaluation.results import MASKED_METRICS, cell_path, is_done, read_cell, write_cell
from isentrope.experiments.checkpoints import (
    POLL_SECONDS,
    Trained,
    TrainedCheckpoint,
    describe_trainings,
    hash_partition,
    identify_checkpoints,
    train_checkpoints,
)
from isentrope.experiments.masked_plan import MaskedPlan, PlanRow
from isentrope.models import GAUAlphaConfig, GAUAlphaForMaskedLM
from isentrope.models.gau.config import build_gau_recipe
from isentrope.pretrained import load_pretrained, read_config_as, read_tokenizer, resolve_device
from isentrope.recipe import hash_own_parts
from isentrope.utils.files import lock_file, read_fields, read_json, write_atomically, write_json
from isentrope.utils.progress import track_progress
from isentrope.utils.provenance import collect_provenance
from isentrope.utils.shipped import find_shipped_model

CELL_FORMAT = 1  # raised when a change of the code changes the numbers of cells
FIT_FORMAT = 2  # the same for what is fitted
ENTROPY_DOCUMENTS = 2  # whose attention entropy is measured


@dataclass(frozen=True)
class MaskedCell:
    """One checkpoint under one recipe at one length, with the key of its results file."""

    row: PlanRow
    length: int
    trained: TrainedCheckpoint
    key: str

    @property
    def label(self) -> str:
        return f"{self.row.method} {self.row.variant} at {self.length}"


def run_masked_plans(
    plans: Sequence[MaskedPlan],
    out: Path,
    corpus: str | Path | None = None,
    notify: Callable[[str], None] = print,
    compile: bool | None = None,
    is_helper: bool = False,
) -> Iterator[tuple[MaskedPlan, dict[str, Any]]]:
    """Train and evaluate what is missing of plans, and write `out/NAME/results.jsonl`; arguments as in `run_plan`.

    Plans come in their order; while other processes hold all that is left of one, the next is worked on.

    Yields:
        Each plan once its results are complete, with its counts.
    """
    pending = [(plan, _work_on(plan, out, corpus, notify, compile, is_helper)) for plan in plans]
    together = PartialState().num_processes > 1  # processes that train together must do the same plan
    while pending:
        for plan, work in pending[:1] if together else pending:
            if (progress := next(work, None)) is None:
                pending.remove((plan, work))
                yield plan, masked_plan_status(plan, out)
            if progress is not False:
                break  # the plans before this one may have become free
        else:
            time.sleep(POLL_SECONDS)


def _work_on(
    plan: MaskedPlan,
    out: Path,
    corpus: str | Path | None,
    notify: Callable[[str], None],
    compile: bool | None,
    is_helper: bool,
) -> Iterator[bool]:
    """Run one plan in steps: yield True after each, and False while other processes hold all that is left."""
    state = PartialState()
    prepared = _open_corpus(plan, out, corpus)
    dtype = resolve_device(state.device.type)[1]
    evaluator = _CellEvaluator(plan, prepared, out, state.device, dtype)

    def list_cells(trained: Trained) -> list[MaskedCell]:
        return list(_list_cells(plan, prepared, trained, dtype))

    planned = list_cells(identify_checkpoints(plan, prepared, out))
    _write_keys(plan, planned, out)
    skip = _find_measured(plan, planned, out)
    trained: Trained = {}
    for ready in train_checkpoints(plan, prepared, out, notify, compile, skip):
        trained |= ready
        # a run cut off should have numbers of every checkpoint it trained; processes that train together measure later
        if state.num_processes == 1 and not ready.keys() <= skip:
            evaluator.measure_free(_group_by_model(list_cells(ready)))
        yield bool(ready)
    cells = list_cells(trained)
    _write_keys(plan, cells, out)
    # split before checking which cells exist: processes may check at different times
    groups = _group_by_model(cells)[state.process_index :: state.num_processes]
    while (groups := evaluator.measure_free(groups)) and not is_helper:
        yield False
    state.wait_for_everyone()
    if state.is_main_process and not is_helper:
        _write_results(plan, prepared, trained, cells, out)
    state.wait_for_everyone()


def collect_masked_plan(plan: MaskedPlan, out: Path, corpus: str | Path | None = None) -> dict[str, Any]:
    """Write `out/NAME/results.jsonl` of the cells that are measured; nothing is trained or measured.

    Args:
        plan: The plan, with the lengths and seeds that it was run with.
        out: The folder that plans share.
        corpus: The corpus that it was run with; None for the one that the plan names.

    Returns:
        The counts of `masked_plan_status`.

    Raises:
        ValueError: if no cell is measured, or the plan was run with other lengths or seeds.
    """
    prepared = _open_corpus(plan, out, corpus)
    trained = identify_checkpoints(plan, prepared, out)
    cells = list(_list_cells(plan, prepared, trained, resolve_device(PartialState().device.type)[1]))
    path = out / plan.name / "cells.json"
    # by their order, as keys are other ones on a device with another precision
    keys = read_json(path, "run the plan, which writes it") if path.exists() else []
    if keys and len(keys) != len(cells):
        raise ValueError(f"{path}: expected {len(cells)} cells, got {len(keys)}; give the options of the run")
    cells = [replace(cell, key=key) for cell, key in zip(cells, keys, strict=False) if read_cell(out, key) is not None]
    if not cells:
        raise ValueError(f"{out}: expected results of the plan {plan.name}, got none; run it without --report-only")
    used = {name for cell in cells for name in (cell.trained.identity, cell.trained.root)}
    measured = {key: model for key, model in trained.items() if model.identity in used}
    _write_results(plan, prepared, measured, cells, out)
    return masked_plan_status(plan, out)


def masked_plan_status(plan: MaskedPlan, out: Path) -> dict[str, Any]:
    """Count a plan's cells, and those done and failed in `out`, with the lengths and seeds of the last run."""
    path = out / plan.name / "cells.json"
    if not path.exists():
        return {"plan": plan.name, "cells": plan.num_cells, "done": 0, "failed": 0}
    keys = read_json(path, "run the plan again, which writes it anew")
    cells = [cell for key in keys if (cell := read_cell(out, key)) is not None]
    failed = sum(cell["result"]["failed"] is not None for cell in cells)
    return {"plan": plan.name, "cells": len(keys), "done": len(cells) - failed, "failed": failed}


def _open_corpus(plan: MaskedPlan, out: Path, folder: str | Path | None) -> PreparedCorpus:
    """Open the corpus given, or prepare the one that the plan names with the tokenizer of its shipped models."""
    if folder is not None:
        return PreparedCorpus.open(folder)
    if plan.data is None:
        raise ValueError(f"data: the plan {plan.name} needs a corpus: isentrope data prepare …, then --data FOLDER")
    folder = out / "data" / plan.data
    state = PartialState()
    if state.is_main_process:
        shipped = next((spec.shipped for spec in plan.required_checkpoints() if spec.shipped), None)
        options = PrepareOptions(tokenizer=str(find_shipped_model(shipped))) if shipped else PrepareOptions()
        with lock_file(out / "locks" / plan.data, wait=True):
            prepare(Source(plan.data), folder, options)
    state.wait_for_everyone()
    return PreparedCorpus.open(folder)


def _list_cells(plan: MaskedPlan, corpus: PreparedCorpus, trained: Trained, dtype: torch.dtype) -> Iterator[MaskedCell]:
    """List the cells of some checkpoints, in the plan's order."""
    partition = hash_partition(corpus)
    protocol = {key: value for key, value in asdict(plan.protocol).items() if key != "batch"}
    for row in plan.rows:
        for length in plan.lengths:
            for seed in plan.seeds_of(row.checkpoint):
                if (model := trained.get((row.checkpoint, seed))) is None:
                    continue
                content = [CELL_FORMAT, model.identity, row.recipe, length, plan.train_length, protocol, partition]
                content += [str(dtype), ENTROPY_DOCUMENTS if plan.entropy else 0]
                content += [f"fit {FIT_FORMAT}"] if row.fit else []
                content += hash_own_parts(row.recipe).values()
                key = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
                yield MaskedCell(row, length, replace(model, seed=seed), key)


def _write_keys(plan: MaskedPlan, cells: list[MaskedCell], out: Path) -> None:
    """Write which cells are the plan's, for `masked_plan_status`."""
    if PartialState().is_main_process:
        (out / plan.name).mkdir(parents=True, exist_ok=True)
        write_json(out / plan.name / "cells.json", [cell.key for cell in cells])


def _find_measured(plan: MaskedPlan, cells: list[MaskedCell], out: Path) -> set[tuple[str, int]]:
    """Find the checkpoints, by name and seed, that all cells of a plan have been measured with: none need training."""
    missing = {(cell.row.checkpoint, cell.trained.seed) for cell in cells if not is_done(out, cell.key)}
    for spec in reversed(plan.required_checkpoints()):  # what a missing one starts from is missing too
        start = (spec.train or {}).get("model")
        if start in plan.checkpoints:
            missing |= {(start, seed) for seed in plan.seeds if (spec.name, seed) in missing}
            if len(plan.seeds_of(start)) == 1 and any(name == start for name, _ in missing):
                missing |= {(start, seed) for seed in plan.seeds}
    return {(name, seed) for name in plan.checkpoints for seed in plan.seeds} - missing


def _group_by_model(cells: list[MaskedCell]) -> list[list[MaskedCell]]:
    """Group the cells of the same model under the same recipe."""
    groups: dict[tuple[str, str, bool], list[MaskedCell]] = {}
    for cell in cells:
        groups.setdefault((cell.trained.identity, cell.row.recipe, cell.row.fit), []).append(cell)
    return list(groups.values())


class _CellEvaluator:
    """Measures cells one after another; consecutive cells share their model."""

    def __init__(
        self, plan: MaskedPlan, corpus: PreparedCorpus, out: Path, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.plan, self.out, self.device, self.dtype = plan, out, device, dtype
        self.documents, self.hashes = corpus.documents("test"), corpus.hashes("test")
        self.validation = corpus.documents("validation"), corpus.hashes("validation")
        self.mask_token: int = read_tokenizer(corpus.tokenizer_path).mask_token_id
        self.loaded: tuple[Any, Any] = (None, None)  # folder and recipe, model
        self.unmeasurable: set[str] = set()  # keys of cells that would fail again
        self.provenance = {key: value for key, value in collect_provenance().items() if key != "date"}

    def measure_free(self, groups: list[list[MaskedCell]]) -> list[list[MaskedCell]]:
        """Measure the groups of cells that no other process holds, and return the others."""
        busy: list[list[MaskedCell]] = []

        def claim_cells() -> Iterator[MaskedCell]:
            for group in groups:
                with lock_file(self.out / "locks" / group[0].key) as locked:
                    if locked:
                        yield from group
                    else:
                        busy.append(group)

        cells = claim_cells()
        if (first := next(cells, None)) is not None:  # else there is no progress to show
            total = sum(map(len, groups))
            for cell in track_progress(chain((first,), cells), lambda cell: cell.label, total):
                self.measure(cell)
            self.loaded = (None, None)
            torch.cuda.empty_cache()  # the next training needs the memory, here or in another process
        return busy

    def measure(self, cell: MaskedCell) -> None:
        """Write the numbers of a cell, or why there are none, unless it is done."""
        if cell.key in self.unmeasurable or is_done(self.out, cell.key):
            return
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        numbers: dict[str, Any] = dict.fromkeys(MASKED_METRICS)
        numbers |= {"documents": [], "skipped": 0, "entropy": None, "entropy_ratio": None}
        failed, seconds = cell.trained.failure, 0.0
        if failed is None:
            try:
                measured, seconds = self._evaluate(cell)
                numbers |= measured
            except RuntimeError as error:  # mostly out of memory, of which others may leave more later
                kind = "out of memory: " if isinstance(error, torch.OutOfMemoryError) else ""
                failed = kind + str(error).strip().partition("\n")[0]
                if isinstance(error, UnmeasurableError):
                    self.unmeasurable.add(cell.key)
        rows = sum(len(self.plan.protocol.draw_positions(cell.length, d["sha256"])) for d in numbers["documents"])
        speed = rows * cell.length / seconds if seconds else None
        timing = {"seconds": seconds, "tokens_per_second": speed, "peak_bytes": _peak_bytes(self.device)}
        result = numbers | {"failed": failed, "run": self.provenance}
        write_cell(self.out, cell.key, {"result": result, "timing": timing})

    def _evaluate(self, cell: MaskedCell) -> tuple[dict[str, Any], float]:
        """Return the numbers of a cell, and the seconds that the predictions took."""
        model = self._load_model(cell)
        numbers: dict[str, Any] = {}
        if cell.row.fit:
            self.loaded = (None, None)  # fitting changes the model, so no other cell may use it
            law = fit_masked_law(model, *self.validation, cell.length, self.plan.train_length, self.mask_token)
            numbers["recipe"] = "+".join([cell.row.recipe, *map(str, law)])
        start = time.perf_counter()
        scores = score_documents(model, self.documents, self.hashes, cell.length, self.mask_token, self.plan.protocol)
        seconds = time.perf_counter() - start
        if not scores:
            raise UnmeasurableError(f"no test document has {cell.length} tokens")
        if not all(isfinite(score.loss) for score in scores):
            raise UnmeasurableError("the loss is not a number")
        numbers |= {"documents": [asdict(score) for score in scores], "skipped": len(self.hashes) - len(scores)}
        numbers |= summarize_scores(scores)
        if self.plan.entropy:
            long = [i for i, length in enumerate(self.documents.lengths) if length >= cell.length][:ENTROPY_DOCUMENTS]
            ids = torch.stack([torch.from_numpy(self.documents[i][: cell.length].astype("int64")) for i in long])
            entropy = layer_entropies(model, ids.to(self.device))
            at_train_length = layer_entropies(model, ids[:, : self.plan.train_length].to(self.device))
            numbers |= {"entropy": entropy.tolist(), "entropy_ratio": (entropy / at_train_length).tolist()}
        return numbers, seconds

    def _load_model(self, cell: MaskedCell) -> Any:
        key = cell.trained.folder, cell.row.recipe
        if self.loaded[0] != key:
            self.loaded = (None, None)  # free the last model before loading the next
            key_size = read_config_as(GAUAlphaConfig, cell.trained.folder).attention_key_size
            # the plan's training length, not the model's, completes the recipe
            recipe = build_gau_recipe(cell.row.recipe, self.plan.train_length, key_size).to_dict()
            options: dict[str, Any] = {"recipe": recipe, "dtype": self.dtype}
            model: Any = load_pretrained(GAUAlphaForMaskedLM, cell.trained.folder, **options)
            self.loaded = key, model.to(self.device).eval()
        return self.loaded[1]


def _write_results(
    plan: MaskedPlan, corpus: PreparedCorpus, trained: Trained, cells: list[MaskedCell], out: Path
) -> None:
    """Write results.jsonl, timings.jsonl and plan.json, in the plan's order, from the cells' files."""
    results, timings = [], []
    for cell in cells:
        saved = read_fields(cell_path(out, cell.key), "run the plan again, which measures it anew", "result", "timing")
        head = {"key": cell.key} | asdict(cell.row) | {"seed": cell.trained.seed, "length": cell.length}
        head |= {"pretraining": cell.trained.root}
        results.append(head | {"protocol": plan.protocol.name} | saved["result"])
        timings.append({"key": cell.key} | saved["timing"])
    folder = out / plan.name
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (("results.jsonl", results), ("timings.jsonl", timings)):
        with write_atomically(folder / name) as partial:
            partial.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    manifest, trainings = corpus.manifest, describe_trainings(trained)
    run = {**results[-1]["run"], "date": collect_provenance()["date"]}
    write_json(folder / "plan.json", {
        "name": plan.name, "title": plan.title, "label": plan.label, "lengths": plan.lengths,
        "train_length": plan.train_length, "protocol": plan.protocol.name, "positions": plan.protocol.positions,
        "seeds": plan.seeds, "metrics": ["ppl", "acc"], "layout": "methods", "rows": [asdict(row) for row in plan.rows],
        "claims": plan.claims, "notes": plan.notes,
        "data": {
            "name": _corpus_name(manifest["source"]), "fingerprint": manifest["source"]["fingerprint"],
            "partition": hash_partition(corpus), "documents": len(manifest["documents"]),
            "statistics": manifest["statistics"],
        },
        "checkpoints": trainings, "run": run,
    })  # fmt: skip


def _corpus_name(source: dict[str, Any]) -> str:
    """Return a corpus' name; for files without their folder."""
    return Path(source["name"]).name if source["kind"] == "files" else str(source["name"])


def _peak_bytes(device: torch.device) -> int | None:
    """Return the peak memory: of this cell on a GPU, of the whole process so far elsewhere, None on Windows."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes there, kibibytes elsewhere
