"""The checkpoints of a plan: found on disk, or trained where they are missing."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from isentrope.data.prepared import PreparedCorpus
from isentrope.experiments.masked_plan import Checkpoint, MaskedPlan
from isentrope.models import GAUAlphaConfig
from isentrope.pretrained import check_same_tokens, check_tensors, read_config_as, read_tokenizer
from isentrope.training.checkpoint import read_log
from isentrope.training.config import build_config
from isentrope.training.trainer import Diverged, train
from isentrope.utils.files import BrokenFileError, lock_file, read_fields
from isentrope.utils.shipped import SHIPPED_MODELS as SHIPPED_MODELS
from isentrope.utils.shipped import find_shipped_model

POLL_SECONDS = 0.5  # between looks at what other processes hold


class TrainingMemoryError(MemoryError):
    """A training needs more memory than there is."""


@dataclass(frozen=True)
class TrainedCheckpoint:
    """A checkpoint on disk.

    Args:
        name: In the plan.
        seed: Of its training.
        folder: Of the model, or of the training that failed.
        identity: A hash of its weights, or of how they are trained.
        root: The identity of the model that its training starts from in the end, its own where it starts from none:
            checkpoints with one root share a pre-training.
        failure: Why there is no model.
    """

    name: str
    seed: int
    folder: Path
    identity: str
    root: str
    failure: str | None = None


Trained = dict[tuple[str, int], TrainedCheckpoint]  # by name and seed


def identify_checkpoints(plan: MaskedPlan, corpus: PreparedCorpus, out: Path) -> Trained:
    """Return every checkpoint of the plan for every seed as it is once trained, and train none.

    Args:
        plan: The plan.
        corpus: What to train on.
        out: The folder that plans share.
    """
    every = {(name, seed) for name in plan.checkpoints for seed in plan.seeds}
    return prepare_checkpoints(plan, corpus, out, lambda line: None, skip=every)


def prepare_checkpoints(
    plan: MaskedPlan,
    corpus: PreparedCorpus,
    out: Path,
    notify: Callable[[str], None],
    compile: bool | None = None,
    skip: Collection[tuple[str, int]] = (),
) -> Trained:
    """Return every checkpoint of the plan for every seed, training those that are missing.

    A checkpoint that another process trains is left to it; the last ones are waited for. Arguments as in
    `train_checkpoints`.
    """
    trained: Trained = {}
    for ready in train_checkpoints(plan, corpus, out, notify, compile, skip):
        trained |= ready
        if not ready:
            time.sleep(POLL_SECONDS)
    return trained


def train_checkpoints(
    plan: MaskedPlan,
    corpus: PreparedCorpus,
    out: Path,
    notify: Callable[[str], None],
    compile: bool | None = None,
    skip: Collection[tuple[str, int]] = (),
) -> Iterator[Trained]:
    """Yield every checkpoint of the plan for every seed, training those that are missing, one after another.

    While other processes train all that are left, nothing is trained and an empty dictionary is yielded.

    Args:
        plan: The plan.
        corpus: What to train on.
        out: The folder that plans share.
        notify: Receives a message for each training.
        compile: Whether trainings are compiled; None compiles long ones on a GPU.
        skip: Names and seeds of checkpoints that are not trained.
    """
    builder = _CheckpointBuilder(corpus, out, notify, compile)
    trained: Trained = {}
    remaining = [(spec, seed) for spec in plan.required_checkpoints() for seed in plan.seeds_of(spec.name)]
    alone = PartialState().num_processes == 1  # processes that train together must not lock each other out
    while remaining:
        before = len(remaining)
        for spec, seed in list(remaining):
            start = (spec.train or {}).get("model")
            if start in plan.checkpoints and (start, seed) not in trained:
                continue
            # named by the seed it is trained with, as plans of other seeds may share it
            name, trains = f"{spec.name}-{seed if spec.seeded else 0}", (spec.name, seed) not in skip
            with lock_file(out / "locks" / name) if alone and trains else nullcontext(True) as locked:
                if not locked:
                    continue
                model = builder.build(spec, seed, trained.get((str(start), seed)), trains)
            remaining.remove((spec, seed))
            seeds = plan.seeds if len(plan.seeds_of(spec.name)) == 1 else (seed,)
            ready = {(spec.name, each): model for each in (seed, *seeds)}
            trained |= ready
            yield ready
        if len(remaining) == before:
            yield {}


@dataclass(frozen=True)
class _CheckpointBuilder:
    corpus: PreparedCorpus
    out: Path
    notify: Callable[[str], None]
    compile: bool | None

    def build(self, spec: Checkpoint, seed: int, start: TrainedCheckpoint | None, trains: bool) -> TrainedCheckpoint:
        return self._find(spec, seed) if spec.train is None else self._train(spec, seed, start, trains)

    def _find(self, spec: Checkpoint, seed: int) -> TrainedCheckpoint:
        folder = find_shipped_model(spec.shipped) if spec.shipped else Path(str(spec.path))
        content = hashlib.sha256()
        for file in (folder / "config.json", folder / "model.safetensors"):
            if not file.is_file():
                raise ValueError(f"checkpoint {spec.name}: expected {file}, got no such file")
            content.update(file.read_bytes())
        check_tensors(folder / "model.safetensors")
        read_config_as(GAUAlphaConfig, folder)
        check_same_tokens(folder, read_tokenizer(self.corpus.tokenizer_path))
        identity = content.hexdigest()[:16]
        return TrainedCheckpoint(spec.name, seed, folder, identity, identity)

    def _train(self, spec: Checkpoint, seed: int, start: TrainedCheckpoint | None, trains: bool) -> TrainedCheckpoint:
        options = dict(spec.train or {})
        if start is not None:
            if start.failure:
                identity = f"without {start.identity}"
                return TrainedCheckpoint(spec.name, seed, self.out, identity, start.root, start.failure)
            options["model"] = str(start.folder)
        options |= {"seed": seed if spec.seeded else 0, "compile": self.compile}
        config = build_config(options.pop("preset", "train"), **options)
        # the start is identified by its content, not by its location
        fields = config.identity() | {"model": start.identity if start else config.model}
        content = json.dumps([fields, hash_partition(self.corpus)])
        identity = hashlib.sha256(content.encode()).hexdigest()[:16]
        root = start.root if start else identity
        folder = self.out / "checkpoints" / f"{spec.name}-{identity}"
        if not trains:
            return TrainedCheckpoint(spec.name, seed, folder / "best", identity, root)
        if not (folder / "final" / "model.safetensors").exists():
            self.notify(f"training {spec.name}, seed {seed}")
        self._remove_broken(folder / "train.json")
        try:
            train(self.corpus.folder, config, folder)
        except Diverged as error:
            return TrainedCheckpoint(spec.name, seed, folder, identity, root, f"checkpoint {spec.name}: {error}")
        except RuntimeError as error:
            if not _is_out_of_memory(error):
                raise
            remedy = "use fewer --jobs, or end other programs on this device"
            raise TrainingMemoryError(f"training {spec.name}, seed {seed}: out of memory; {remedy}") from error
        torch.cuda.empty_cache()  # what follows takes far less memory; other processes may need it
        return TrainedCheckpoint(spec.name, seed, folder / "best", identity, root)

    def _remove_broken(self, path: Path) -> None:
        """Remove a broken train.json, whose folder's name already identifies the run."""
        state = PartialState()
        if state.is_main_process and path.exists():
            try:
                read_fields(path, "training resumes from the last state saved, or starts again", "identity", "config")
            except BrokenFileError as error:
                self.notify(str(error))
                path.unlink()
        state.wait_for_everyone()


def _is_out_of_memory(error: RuntimeError) -> bool:
    """Return whether memory was short: PyTorch's allocators say so, and CUDA, its libraries and Triton themselves."""
    words = "out of memory|not enough memory|allocate memory|ALLOC_FAILED"
    return isinstance(error, torch.OutOfMemoryError) or re.search(words, str(error)) is not None


def hash_partition(corpus: PreparedCorpus) -> str:
    """Return a hash of which documents are in which set, and of their tokens."""
    rows = [(row["sha256"], row["set"]) for row in corpus.manifest["documents"]]
    return hashlib.sha256(json.dumps([rows, corpus.manifest["tokens"]]).encode()).hexdigest()[:16]


def describe_trainings(trained: Trained) -> dict[str, Any]:
    """Return how each checkpoint was trained, with its log; shipped and given ones have no entry."""
    described: dict[str, Any] = {}
    for (name, seed), model in trained.items():
        if seed != model.seed:
            continue
        label = name if seed == 0 else f"{name}, seed {seed}"
        path = (model.folder if model.failure else model.folder.parent) / "train.json"
        row: dict[str, Any] = {"identity": model.identity, "failed": model.failure}
        if path.exists():
            summary = read_fields(path, "run the plan again", "config", "best", "seconds")
            row |= {key: summary[key] for key in ("config", "best", "seconds")} | {"run": summary.get("run")}
            if (start := Path(summary["config"]["model"] or "")).is_absolute():  # absolute paths are not portable
                row["config"]["model"] = start.parent.name
            row["log"] = read_log(path.with_name("log.jsonl"))
            described[label] = row
    return described
