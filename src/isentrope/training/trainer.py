"""Training on a prepared corpus, GAU-α on masked tokens or a Llama on the next: resumable, on one process or many."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import math
import shutil
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from copy import copy
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState

from isentrope.data.prepared import PreparedCorpus
from isentrope.positions import CLEX
from isentrope.pretrained import check_tensors
from isentrope.training.builders import build_batches, build_model, build_tokenizer
from isentrope.training.checkpoint import (
    TrainingLog,
    hash_tensors,
    load_state,
    remove_states,
    save_state,
    save_tensors,
    write_tensors,
)
from isentrope.training.config import NON_IDENTITY_FIELDS, TrainingConfig
from isentrope.training.determinism import use_deterministic_algorithms
from isentrope.training.step import Batch, Stepper, prefetch
from isentrope.utils.files import lock_file, read_fields, write_atomically, write_json
from isentrope.utils.progress import ProgressBar
from isentrope.utils.provenance import collect_provenance

logger = logging.getLogger("isentrope")
MAX_LOSS_RISE_NATS = 3.0  # above the lowest loss so far; more is divergence
SAVE_INTERVAL_SECONDS = 60.0
PROGRESS_INTERVAL_SECONDS = 15.0
MIN_TOKENS_TO_COMPILE = 1 << 25  # of a run that repays half a minute of compiling
VALIDATIONS, MIN_VALIDATIONS, MIN_INTERVAL = 20, 4, 50  # of a run; of a short one; steps between them
WEIGHTS = "model.safetensors"
INITIAL_PROGRESS: dict[str, Any] = {
    "step": 0, "best": None, "best_step": None, "lowest": None, "window": [], "seconds": 0.0,
}  # fmt: skip


class Interrupted(Exception):  # noqa: N818
    """A signal ended the run; its state is saved."""

    def __init__(self, number: int, step: int, out: Path) -> None:
        self.number = number
        super().__init__(f"{signal.Signals(number).name} at step {step}: saved; the same command resumes from {out}")


class Diverged(Exception):  # noqa: N818
    """The loss is no longer finite, or rose too far."""


def train(
    data: str | Path, config: TrainingConfig, out: Path, track: tuple[str, ...] = ("tensorboard",)
) -> dict[str, Any]:
    """Train a model in a folder, resuming a run that was interrupted there.

    `best/` gets the model of the lowest validation loss and `final/` the last one, both for `from_pretrained`, with the
    tokenizer; `log.jsonl` the losses; `state-*.safetensors` what an interrupted run resumes from.

    Args:
        data: A folder that `isentrope data prepare` wrote.
        config: The settings of the run.
        out: The folder of the run.
        track: "tensorboard" and "wandb", where losses are also logged.

    Returns:
        The content of `out/train.json`.

    Raises:
        Interrupted: A signal ended the run.
        Diverged: The loss became useless.
        ValueError: The folder holds another run, another process trains in it, or the settings do not fit the corpus.
    """
    corpus = PreparedCorpus.open(data)
    accelerator = Accelerator(mixed_precision="no", log_with=_select_trackers(track) or None, project_dir=str(out))
    trainer = Trainer(corpus, config, out, accelerator)
    if (summary := trainer.read_finished()) is not None:
        return summary
    with lock_file(out / ".lock", optional=True) if trainer.is_main else nullcontext(True) as locked:
        if not locked:
            raise ValueError(f"{out}: another process trains in this folder; wait for it, or choose another --out")
        with use_deterministic_algorithms(config.deterministic):
            return trainer.read_finished() or trainer.run()


class Trainer:
    """One training run, from its first step or the last one saved."""

    def __init__(self, corpus: PreparedCorpus, config: TrainingConfig, out: Path, accelerator: Accelerator) -> None:
        self.config, self.out, self.accelerator = config, out, accelerator
        self.is_main, self.processes = accelerator.is_main_process, accelerator.num_processes
        self.tokenizer = build_tokenizer(corpus, config.objective)
        self.batches, self.validation_batches = build_batches(corpus, config, self.tokenizer)
        self.steps = config.steps or max(1, round(config.epochs * self.batches.steps_per_epoch))
        self.identity = compute_identity(corpus, config, self.steps)
        self.evaluate_every = config.evaluate_every or choose_interval(self.steps)
        self.best: dict[str, torch.Tensor] = {}  # weights that are not on disk yet

    def read_finished(self) -> dict[str, Any] | None:
        """Return the summary of the same run if it has finished; another run in the folder is an error."""
        path = self.out / "train.json"
        if not path.exists():
            return None
        remedy = "delete it, and the same command resumes from the last state saved, or starts again"
        summary = read_fields(path, remedy, "identity", "config", "finished")
        if summary["identity"] != self.identity:
            differing = [
                name for name, value in json.loads(json.dumps(asdict(self.config))).items()
                if summary["config"].get(name, value) != value and name not in NON_IDENTITY_FIELDS
            ] or ["the corpus"]  # fmt: skip
            raise ValueError(f"{self.out}: holds another run ({', '.join(differing)} differ); choose another folder")
        for name in ("best", "final") if summary["finished"] else ():
            check_tensors(self.out / name / WEIGHTS, f"delete {self.out} to train it again")
        return summary if summary["finished"] else None

    def run(self) -> dict[str, Any]:
        """Train to the end and return the summary."""
        config, cuda = self.config, self.accelerator.device.type == "cuda"
        if config.batch % (self.processes * config.accumulate):
            parts = f"{self.processes} processes × {config.accumulate} parts"
            raise ValueError(f"batch: expected a multiple of {parts}, got {config.batch}")
        torch.manual_seed(config.seed)
        model = build_model(config, self.tokenizer)
        self.stepper = Stepper(
            model.train(), self.accelerator, decay=config.decay, clip=config.clip, accumulate=config.accumulate,
            bf16=config.precision == "bf16" or (config.precision == "auto" and cuda),
            compile=self._should_compile(model, cuda),
        )  # fmt: skip
        progress = load_state(self.out, self.stepper.plain, self.stepper.optimizer)
        self.progress: dict[str, Any] = progress or dict(INITIAL_PROGRESS)
        first = self.saved_step = int(self.progress["step"])
        if self.is_main:
            self._prepare_folder()
        self.accelerator.wait_for_everyone()
        self.accelerator.init_trackers("isentrope", init_kwargs={"tensorboard": {"purge_step": first + 1}})
        log = TrainingLog(self.out / "log.jsonl", first) if self.is_main else None
        try:
            with (
                _catch_signals() as signals,
                ProgressBar(self.steps, first, "training", PROGRESS_INTERVAL_SECONDS, self.is_main) as bar,
                prefetch(lambda step: self._local_rows(self.batches[step]), first, self.steps, cuda) as batches,
            ):
                self._loop(enumerate(batches, first), log, bar, signals)
        except Diverged:
            self._write_best()
            raise
        finally:
            if log is not None:
                log.close()
            for tracker in self.accelerator.trackers:  # `end_training` would also end communication
                tracker.finish()
        if self.is_main:
            self._write_best()
            self._save_model("final", dict(self.stepper.plain.named_parameters()))
            self._write_summary(finished=True)
            remove_states(self.out)
        self.accelerator.wait_for_everyone()
        summary: dict[str, Any] = json.loads((self.out / "train.json").read_text(encoding="utf-8"))
        return summary

    def _loop(
        self, batches: Iterable[tuple[int, Batch]], log: TrainingLog | None, bar: ProgressBar, signals: list[int]
    ) -> None:
        model: Any = self.stepper.plain
        clex = [module for module in model.modules() if isinstance(module, CLEX)]
        has_dropout = getattr(model.config, "attention_dropout", 0.0)  # a Llama's, by torch's own generator
        losses: list[torch.Tensor] = []
        start = last_saved = time.perf_counter()
        for step, batch in batches:
            step_seed = (self.config.seed * 1_000_003 + step) % (1 << 63)
            for module in clex:  # one t for all layers
                module.sample(torch.Generator().manual_seed(step_seed))
            if has_dropout:  # a resumed run starts with another generator state
                torch.manual_seed(step_seed)
            losses.append(self.stepper(batch, self.config.learning_rate(step, self.steps)))
            done = step + 1
            bar.update(done)
            hashes = self.config.hash_every > 0 and done % self.config.hash_every == 0
            logs = hashes or done % self.config.log_every == 0 or done == self.steps
            evaluates = done % self.evaluate_every == 0 or done == self.steps
            every = self.config.save_every
            overdue = time.perf_counter() - last_saved > SAVE_INTERVAL_SECONDS
            saves = done % every == 0 if every else (logs or evaluates) and self._any_process(overdue)
            stops = bool(signals) if self.processes == 1 else logs and self._any_process(bool(signals))
            if not (logs or evaluates or saves or stops):
                continue
            self._record_losses(losses, done)
            losses = []
            if logs or evaluates:
                self._report(done, evaluates, hashes, log, bar)
            self.progress |= {"step": done, "seconds": self.progress["seconds"] + time.perf_counter() - start}
            start = time.perf_counter()
            last, saves = done == self.steps, (saves or stops) and done < self.steps
            if (saves or last) and not all(bool(x.isfinite().all()) for x in self.stepper.parameters):
                raise self._diverged(step, "a weight is not finite")
            if saves:
                self.saved_step, last_saved = done, time.perf_counter()
            if self.is_main and saves:
                self._write_best()
                save_state(self.out, self.stepper.plain, self.stepper.optimizer, self.progress)
            if stops and done < self.steps:
                raise Interrupted(signals[0] if signals else signal.SIGTERM, done, self.out)

    def _report(self, done: int, evaluates: bool, hashes: bool, log: TrainingLog | None, bar: ProgressBar) -> None:
        """Log the losses since the last row and, where they are due, a hash of the weights and the validation loss."""
        row = self._build_row(done)
        if hashes and self.is_main:
            row["weights"] = hash_tensors(dict(self.stepper.plain.named_parameters()))
        if evaluates:
            row["validation"] = self.validate()
            if not math.isfinite(row["validation"]):
                raise self._diverged(done - 1, f"the validation loss is {row['validation']}")
            self._keep_best(row["validation"], done)
        if log is not None:
            log.add(**row)
        bar.report(done, {key: row[key] for key in ("loss", "validation") if key in row}, evaluates)
        numbers = {key: value for key, value in row.items() if key not in ("step", "weights")}
        self.accelerator.log(numbers, step=done)

    def validate(self) -> float:
        """Return the mean loss of the validation crops, the same ones each time, split over the processes."""
        total = torch.zeros((), device=self.accelerator.device)
        count = -(-self.config.validation // self.config.batch)
        for step in range(count):
            total += self.stepper.evaluate(self._local_rows(self.validation_batches[step]))
        return float(self.accelerator.reduce(total / count, "mean"))

    def _local_rows(self, batch: Batch) -> Batch:
        """Return this process' rows: its share of each part that gradients are accumulated over."""
        if self.processes == 1:
            return batch
        rows = self.config.batch // (self.processes * self.config.accumulate)
        parts = (x.unflatten(0, (self.config.accumulate, self.processes, rows)) for x in batch.values())
        index = self.accelerator.process_index
        return {name: x[:, index].flatten(0, 1).contiguous() for name, x in zip(batch, parts, strict=True)}

    def _record_losses(self, losses: list[torch.Tensor], done: int) -> None:
        """Add the losses of the last steps to the window, which waits for the device; they must be finite."""
        values = self.accelerator.reduce(torch.stack(losses), "mean").tolist()
        for step, value in enumerate(values, done - len(values)):
            if not math.isfinite(value):
                raise self._diverged(step, f"the loss is {value}")
        self.progress["window"] = self.progress["window"] + values

    def _build_row(self, done: int) -> dict[str, Any]:
        """Return the row of the log for the steps since the last one."""
        window, lowest = self.progress["window"], self.progress["lowest"]
        mean = math.fsum(window) / len(window)
        if lowest is not None and mean > lowest + MAX_LOSS_RISE_NATS:
            raise self._diverged(done - 1, f"the loss rose to {mean:.3g} from {lowest:.3g}")
        self.progress |= {"window": [], "lowest": mean if lowest is None else min(lowest, mean)}
        epoch = round(done / self.batches.steps_per_epoch, 4)
        return {"step": done, "epoch": epoch, "loss": mean, "rate": self.config.learning_rate(done - 1, self.steps)}

    def _diverged(self, step: int, reason: str) -> Diverged:
        names = [self.batches.documents.names[i] for i in self.batches.document_indices(step)]
        documents = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        saved = f"the last good state is of step {self.saved_step}" if self.saved_step else "no state was saved"
        return Diverged(
            f"step {step + 1}: {reason}, in a batch of {documents}; {saved} in {self.out}; try a lower rate"
        )

    def _keep_best(self, loss: float, done: int) -> None:
        if self.progress["best"] is None or loss < self.progress["best"]:
            self.progress |= {"best": loss, "best_step": done}
            self.best = {name: x.detach().clone() for name, x in self.stepper.plain.named_parameters()}

    def _any_process(self, condition: bool) -> bool:
        """Return whether the condition holds in any process, so that all save or stop at the same step."""
        if self.processes == 1:
            return condition
        flag = torch.tensor(float(condition), device=self.accelerator.device)
        return bool(self.accelerator.reduce(flag, "sum") > 0)

    def _prepare_folder(self) -> None:
        """Remove what a killed process left incomplete."""
        self.out.mkdir(parents=True, exist_ok=True)
        models = [self.out / name for name in ("best", "final")]
        for partial in [path for folder in (self.out, *models) for path in folder.glob(".*.partial")]:
            if partial.is_dir():
                shutil.rmtree(partial)
            else:
                partial.unlink()
        for folder in models:
            if not folder.exists() or (folder / WEIGHTS).exists():
                continue
            if not (self.out / "train.json").exists():  # not of a run
                raise ValueError(f"{folder}: expected a model or no such folder, got other files; choose another --out")
            shutil.rmtree(folder)  # the previous release wrote it before it had weights
        self._write_summary(finished=False)

    def _write_best(self) -> None:
        if self.is_main and self.best:
            self._save_model("best", self.best)
            self.best = {}

    def _save_model(self, name: str, weights: dict[str, torch.Tensor]) -> None:
        """Write a model's weights; a new folder appears with all of its files or not at all."""
        folder = self.out / name
        if folder.exists():
            save_tensors(weights, folder / WEIGHTS, {"format": "pt"})
            return
        model: Any = self.stepper.plain
        config = copy(model.config)
        config.architectures = [type(model).__name__]
        if self.config.objective == "causal":
            config.use_cache = True  # disabled for training
        with write_atomically(folder) as partial:
            partial.mkdir()
            config.save_pretrained(partial)
            self.tokenizer.save_pretrained(partial)
            write_tensors(weights, partial / WEIGHTS, {"format": "pt"})

    def _should_compile(self, model: torch.nn.Module, cuda: bool) -> bool:
        if any(isinstance(module, CLEX) for module in model.modules()):
            return False  # its integration unrolls into thousands of operations: minutes
        if self.config.compile is not None:
            return self.config.compile
        return cuda and self.steps * self.config.batch * self.config.length >= MIN_TOKENS_TO_COMPILE

    def _write_summary(self, finished: bool) -> None:
        summary = {
            "identity": self.identity,
            "finished": finished,
            "steps": self.steps,
            "best": {"step": self.progress["best_step"], "validation": self.progress["best"]},
            "seconds": self.progress["seconds"],
            "config": asdict(self.config),
            "processes": self.processes,
            "run": collect_provenance(),
        }
        write_json(self.out / "train.json", summary)


def choose_interval(steps: int) -> int:
    """Choose the steps between validation losses: a twentieth of the run, or 50 but no more than a quarter."""
    return max(1, steps // VALIDATIONS, min(MIN_INTERVAL, steps // MIN_VALIDATIONS))


def compute_identity(corpus: PreparedCorpus, config: TrainingConfig, steps: int) -> str:
    """Return a hash of all that the weights depend on."""
    fields = config.identity()
    weights = Path(config.model or "") / "model.safetensors"
    if weights.is_file():  # the content of the model to start from, not its location
        fields["model"] = hashlib.sha256(weights.read_bytes()).hexdigest()
    documents = [(row["sha256"], row["set"]) for row in corpus.manifest["documents"]]
    content = json.dumps([fields, steps, documents, corpus.manifest["tokens"]], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def _select_trackers(track: tuple[str, ...]) -> list[str]:
    for name in track:
        if name not in ("tensorboard", "wandb"):
            raise ValueError(f"track: expected tensorboard or wandb, got {name!r}")
    missing = [name for name in track if importlib.util.find_spec(name) is None]
    if missing == ["tensorboard"]:
        logger.warning("tensorboard is not installed: losses go to log.jsonl alone")
    elif missing:
        raise ValueError(f"track: expected {', '.join(missing)} to be installed; pip install {' '.join(missing)}")
    return [name for name in track if name not in missing]


def is_main_process() -> bool:
    """Return whether this is the one of several processes that writes and prints."""
    return bool(PartialState().is_main_process)


@contextmanager
def _catch_signals() -> Iterator[list[int]]:
    """Collect SIGTERM and SIGINT instead of ending the process at once."""
    caught: list[int] = []
    numbers = (signal.SIGTERM, signal.SIGINT)
    handlers = {
        number: signal.signal(number, lambda caught_number, _: caught.append(caught_number)) for number in numbers
    }
    try:
        yield caught
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
