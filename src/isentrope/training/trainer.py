"""Training on a prepared corpus, GAU-α on masked tokens or a Llama on the next: resumable, on one process or many."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator, PartialState
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from isentrope.data.batches import CropBatches, MaskedBatches, NextTokenBatches
from isentrope.data.prepared import PreparedCorpus
from isentrope.models import GAUAlphaConfig, GAUAlphaForMaskedLM
from isentrope.models.gau.config import LEARNED_WEIGHTS, build_gau_recipe
from isentrope.models.tokenizer import make_causal_tokenizer
from isentrope.positions import CLEX
from isentrope.pretrained import (
    check_same_tokens,
    check_tensors,
    load_pretrained,
    read_config_as,
    read_tokenizer,
    resolve_model_name,
)
from isentrope.training.checkpoint import Log, load_state, remove_states, save_state, save_tensors
from isentrope.training.config import HOW, LLAMA, Config
from isentrope.training.step import Batch, Stepper, ahead
from isentrope.utils.files import read_fields, write_json
from isentrope.utils.progress import ProgressBar
from isentrope.utils.provenance import collect_provenance

logger = logging.getLogger("isentrope")
DIVERGED = 3.0  # nats above the lowest loss so far
LINE_INTERVAL = 15.0  # seconds between lines of progress
SAVE = 60.0  # seconds between states
COMPILES = 1 << 25  # tokens of a run that is worth half a minute of compiling
START: dict[str, Any] = {"step": 0, "best": None, "best_step": None, "lowest": None, "window": [], "seconds": 0.0}


class Interrupted(Exception):  # noqa: N818
    """A signal ended the run; its state is saved."""

    def __init__(self, number: int, step: int, out: Path) -> None:
        self.number = number
        super().__init__(f"{signal.Signals(number).name} at step {step}: saved; the same command goes on from {out}")


class Diverged(Exception):  # noqa: N818
    """The loss became useless."""


def train(data: str | Path, config: Config, out: Path, track: tuple[str, ...] = ("tensorboard",)) -> dict[str, Any]:
    """Train, or go on training, in the folder `out`; returns what `out/train.json` says.

    `best/` holds the model with the lowest validation loss and `final/` the last one, both for `from_pretrained`, with
    the tokenizer; `log.jsonl` the losses; `state-*.safetensors` what an interrupted run goes on from.
    """
    prepared = PreparedCorpus.open(data)
    accelerator = Accelerator(mixed_precision="no", log_with=_trackers(track) or None, project_dir=str(out))
    run = Run(prepared, config, out, accelerator)
    if (finished := run.finished()) is not None:
        return finished
    return run.go()


class Run:
    """One training run, from its first step or the last one saved."""

    def __init__(self, prepared: PreparedCorpus, config: Config, out: Path, accelerator: Accelerator) -> None:
        self.config, self.out, self.accelerator = config, out, accelerator
        self.main, self.shares = accelerator.is_main_process, accelerator.num_processes
        tokenizer: Any = read_tokenizer(prepared.tokenizer_path)
        self.batches, self.held_out = _batches(prepared, config, tokenizer)
        self.steps = config.steps or max(1, round(config.epochs * self.batches.steps_per_epoch))
        self.identity = _identity(prepared, config, self.steps)
        marks = config.objective == "masked" or tokenizer.cls_token is None
        self.tokenizer = tokenizer if marks else make_causal_tokenizer(tokenizer)
        self.evaluate_every = config.evaluate_every or max(1, self.steps // 20)
        self.best: dict[str, torch.Tensor] = {}  # weights that are not on disk yet

    def finished(self) -> dict[str, Any] | None:
        """What an earlier run of the same configuration said at its end; another configuration is an error."""
        path = self.out / "train.json"
        if not path.exists():
            return None
        again = "delete it, and the same command goes on from the last state saved, or begins again"
        told = read_fields(path, again, "identity", "config", "finished")
        if told["identity"] != self.identity:
            differing = [
                name for name, value in json.loads(json.dumps(asdict(self.config))).items()
                if told["config"].get(name) != value and name not in HOW
            ] or ["the corpus"]  # fmt: skip
            raise ValueError(f"{self.out}: holds another run ({', '.join(differing)} differ); choose another folder")
        for name in ("best", "final") if told["finished"] else ():
            check_tensors(self.out / name / "model.safetensors", f"delete {self.out} to train it again")
        return told if told["finished"] else None

    def go(self) -> dict[str, Any]:
        config, cuda = self.config, self.accelerator.device.type == "cuda"
        if config.batch % (self.shares * config.accumulate):
            parts = f"{self.shares} processes × {config.accumulate} parts"
            raise ValueError(f"batch: expected a multiple of {parts}, got {config.batch}")
        torch.manual_seed(config.seed)
        model = build(config, self.tokenizer)
        self.stepper = Stepper(
            model.train(), self.accelerator, decay=config.decay, clip=config.clip, accumulate=config.accumulate,
            bf16=config.precision == "bf16" or (config.precision == "auto" and cuda),
            compile=self._compiles(model, cuda),
        )  # fmt: skip
        progress = load_state(self.out, self.stepper.plain, self.stepper.optimizer)
        self.progress: dict[str, Any] = progress or dict(START)
        self.saved: int = self.progress["step"]
        first = self.progress["step"]
        if self.main:
            self.out.mkdir(parents=True, exist_ok=True)
            for left in self.out.rglob(".*.partial"):  # of a process that was killed while it wrote
                left.unlink()
            for name in ("best", "final"):
                self._describe_model(self.out / name)
            self._tell(finished=False)
        self.accelerator.wait_for_everyone()
        self.accelerator.init_trackers("isentrope", init_kwargs={"tensorboard": {"purge_step": first + 1}})
        log = Log(self.out / "log.jsonl", first) if self.main else None
        pin = self.accelerator.device.type == "cuda"
        try:
            with (
                _signals() as caught,
                ProgressBar(self.steps, first, "training", LINE_INTERVAL, self.main) as bar,
                ahead(self._share, first, self.steps, pin) as batches,
            ):
                self._loop(enumerate(batches, first), log, bar, caught)
        except Diverged:
            self._write_best()
            raise
        finally:
            if log is not None:
                log.close()
            for tracker in self.accelerator.trackers:  # not `end_training`: processes have more to say to each other
                tracker.finish()
        if self.main:
            self._write_best()
            self._save_model("final", dict(self.stepper.plain.named_parameters()))
            self._tell(finished=True)
            remove_states(self.out)
        self.accelerator.wait_for_everyone()
        told: dict[str, Any] = json.loads((self.out / "train.json").read_text(encoding="utf-8"))
        return told

    def _loop(self, batches: Iterable[tuple[int, Batch]], log: Log | None, bar: ProgressBar, caught: list[int]) -> None:
        model: Any = self.stepper.plain
        clex = [module for module in model.modules() if isinstance(module, CLEX)]
        drops = getattr(model.config, "attention_dropout", 0.0)  # of a Llama, by torch's own generator
        losses: list[torch.Tensor] = []
        begun = last_saved = time.perf_counter()
        for step, batch in batches:
            drawn = (self.config.seed * 1_000_003 + step) % (1 << 63)
            for module in clex:  # one t for all layers
                module.sample(torch.Generator().manual_seed(drawn))
            if drops:  # the same after a resumption, which begins with another state of it
                torch.manual_seed(drawn)
            losses.append(self.stepper(batch, self.config.learning_rate(step, self.steps)))
            done = step + 1
            bar.update(done)
            logs = done % self.config.log_every == 0 or done == self.steps
            evaluates = done % self.evaluate_every == 0 or done == self.steps
            every = self.config.save_every
            late = time.perf_counter() - last_saved > SAVE
            saves = done % every == 0 if every else (logs or evaluates) and self._agree(late)
            stops = bool(caught) if self.shares == 1 else logs and self._agree(bool(caught))
            if not (logs or evaluates or saves or stops):
                continue
            self._check(losses, done)
            losses = []
            if logs or evaluates:
                row = self._row(done)
                if evaluates:
                    row["validation"] = self.validate()
                    if not math.isfinite(row["validation"]):
                        raise self._diverged(step, f"the validation loss is {row['validation']}")
                    self._keep_best(row["validation"], done)
                if log is not None:
                    log.add(**row)
                metrics: dict[str, float] = {name: row[name] for name in ("loss", "validation") if name in row}
                bar.report(done, metrics, always="validation" in row)
                self.accelerator.log({key: value for key, value in row.items() if key != "step"}, step=done)
            self.progress |= {"step": done, "seconds": self.progress["seconds"] + time.perf_counter() - begun}
            begun = time.perf_counter()
            last, saves = done == self.steps, (saves or stops) and done < self.steps
            if (saves or last) and not all(bool(x.isfinite().all()) for x in self.stepper.parameters):
                raise self._diverged(step, "a weight is no number")
            if saves:
                self.saved, last_saved = done, time.perf_counter()
            if self.main and saves:
                self._write_best()
                save_state(self.out, self.stepper.plain, self.stepper.optimizer, self.progress)
            if stops and done < self.steps:
                raise Interrupted(caught[0] if caught else signal.SIGTERM, done, self.out)

    def validate(self) -> float:
        """Mean loss of the validation crops, the same each time, shared among the processes."""
        total = torch.zeros((), device=self.accelerator.device)
        count = -(-self.config.validation // self.config.batch)
        for step in range(count):
            total += self.stepper.evaluate(self._mine(self.held_out[step]))
        return float(self.accelerator.reduce(total / count, "mean"))

    def _share(self, step: int) -> Batch:
        return self._mine(self.batches[step])

    def _mine(self, batch: Batch) -> Batch:
        """This process' rows: of each part that gradients are gathered over, its share."""
        if self.shares == 1:
            return batch
        rows = self.config.batch // (self.shares * self.config.accumulate)
        parts = (x.unflatten(0, (self.config.accumulate, self.shares, rows)) for x in batch.values())
        index = self.accelerator.process_index
        return {name: x[:, index].flatten(0, 1).contiguous() for name, x in zip(batch, parts, strict=True)}

    def _check(self, losses: list[torch.Tensor], done: int) -> None:
        """Take in the losses of these steps, which waits for the device, once they are known to be numbers."""
        values = self.accelerator.reduce(torch.stack(losses), "mean").tolist()
        for step, value in enumerate(values, done - len(values)):
            if not math.isfinite(value):
                raise self._diverged(step, f"the loss is {value}")
        self.progress["window"] = self.progress["window"] + values

    def _row(self, done: int) -> dict[str, Any]:
        """The row of the log for the steps since the last one."""
        window, lowest = self.progress["window"], self.progress["lowest"]
        mean = math.fsum(window) / len(window)
        if lowest is not None and mean > lowest + DIVERGED:
            raise self._diverged(done - 1, f"the loss rose to {mean:.3g} from {lowest:.3g}")
        self.progress |= {"window": [], "lowest": mean if lowest is None else min(lowest, mean)}
        epoch = round(done / self.batches.steps_per_epoch, 4)
        return {"step": done, "epoch": epoch, "loss": mean, "rate": self.config.learning_rate(done - 1, self.steps)}

    def _diverged(self, step: int, why: str) -> Diverged:
        names = [self.batches.documents.names[i] for i in self.batches.document_indices(step)]
        shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        kept = f"the last good state is of step {self.saved}" if self.saved else "no state was saved"
        return Diverged(f"step {step + 1}: {why}, in a batch of {shown}; {kept} in {self.out}; try a lower rate")

    def _keep_best(self, loss: float, done: int) -> None:
        if self.progress["best"] is None or loss < self.progress["best"]:
            self.progress |= {"best": loss, "best_step": done}
            self.best = {name: x.detach().clone() for name, x in self.stepper.plain.named_parameters()}

    def _agree(self, here: bool) -> bool:
        """Whether any process is to save or was told to stop: all must, at the same step."""
        if self.shares == 1:
            return here
        flag = torch.tensor(float(here), device=self.accelerator.device)
        return bool(self.accelerator.reduce(flag, "sum") > 0)

    def _describe_model(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        model: Any = self.stepper.plain
        config = copy(model.config)
        config.architectures = [type(model).__name__]
        if self.config.objective == "causal":
            config.use_cache = True  # again
        config.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)

    def _write_best(self) -> None:
        if self.main and self.best:
            self._save_model("best", self.best)
            self.best = {}

    def _save_model(self, name: str, weights: dict[str, torch.Tensor]) -> None:
        save_tensors(weights, self.out / name / "model.safetensors", {"format": "pt"})

    def _compiles(self, model: torch.nn.Module, cuda: bool) -> bool:
        if any(isinstance(module, CLEX) for module in model.modules()):
            return False  # its integration unrolls into thousands of operations: minutes
        tokens = self.steps * self.config.batch * self.config.length
        return cuda and tokens >= COMPILES if self.config.compile is None else self.config.compile

    def _tell(self, finished: bool) -> None:
        told = {
            "identity": self.identity,
            "finished": finished,
            "steps": self.steps,
            "best": {"step": self.progress["best_step"], "validation": self.progress["best"]},
            "seconds": self.progress["seconds"],
            "config": asdict(self.config),
            "processes": self.shares,
            "run": collect_provenance(),
        }
        write_json(self.out / "train.json", told)


def build(config: Config, tokenizer: Any) -> PreTrainedModel:
    """The model to begin with, under the recipe it is to be trained with."""
    return _llama(config, tokenizer) if config.objective == "causal" else _gau(config, tokenizer)


def _gau(config: Config, tokenizer: Any) -> PreTrainedModel:
    options: dict[str, Any] = {"recipe": config.recipe, "max_position_embeddings": config.length}
    if config.dropout is not None:
        options |= {"hidden_dropout_prob": config.dropout, "attention_probs_dropout_prob": config.dropout}
    if config.model is None:
        options |= {"num_hidden_layers": config.layers, "vocab_size": len(tokenizer)} | (config.sizes or {})
        return GAUAlphaForMaskedLM(GAUAlphaConfig(pad_token_id=tokenizer.pad_token_id, **options))
    found: Any = read_config_as(GAUAlphaConfig, config.model)
    options["recipe"] = build_gau_recipe(config.recipe, config.length, found.attention_key_size).to_dict()
    return _loaded(GAUAlphaForMaskedLM, found, config, tokenizer, options)


def _llama(config: Config, tokenizer: Any) -> PreTrainedModel:
    options: dict[str, Any] = {"max_position_embeddings": config.length, "use_cache": False}
    if config.dropout is not None:
        options["attention_dropout"] = config.dropout
    if config.model is not None:
        return _loaded(LlamaForCausalLM, read_config_as(LlamaConfig, config.model), config, tokenizer, options)
    options |= {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    options |= {"num_hidden_layers": config.layers, "vocab_size": len(tokenizer), "tie_word_embeddings": True}
    options |= {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    return LlamaForCausalLM(LlamaConfig(**(options | LLAMA | (config.sizes or {}))))


def _loaded(kind: Any, found: Any, config: Config, tokenizer: Any, options: dict[str, Any]) -> PreTrainedModel:
    """The first layers of the model that a run starts from."""
    if found.num_hidden_layers < config.layers:
        raise ValueError(f"layers: expected at most the model's {found.num_hidden_layers}, got {config.layers}")
    check_same_tokens(Path(str(config.model)), tokenizer)
    options |= {"num_hidden_layers": config.layers, "dtype": torch.float32}
    model: PreTrainedModel = load_pretrained(
        kind, resolve_model_name(str(config.model)), unused=LEARNED_WEIGHTS, **options
    )
    if model.config.vocab_size != len(tokenizer):
        sizes = f"{model.config.vocab_size} and {len(tokenizer)} tokens"
        raise ValueError(f"model: expected the corpus' tokenizer, got {sizes}; prepare the corpus with the model's own")
    return model


def _batches(prepared: PreparedCorpus, config: Config, tokenizer: Any) -> tuple[CropBatches, CropBatches]:
    """Training batches, and those of the validation loss."""
    kind: type[CropBatches] = NextTokenBatches
    common: dict[str, Any] = {"length": config.length, "size": config.batch, "crop": config.crop}
    if config.objective == "masked":
        if tokenizer.mask_token_id is None:
            raise ValueError("tokenizer: expected one with a mask token, got none")
        ordinary = np.setdiff1d(np.arange(len(tokenizer)), tokenizer.all_special_ids)
        common |= {"mask_token": tokenizer.mask_token_id, "replacement_tokens": ordinary}
        kind, common = MaskedBatches, common | {"share": config.share, "pose": config.pose}
    train = kind(prepared.documents("train"), seed=config.batch_seed, **common)
    return train, kind(prepared.documents("validation"), seed=(1 << 62) + 1, **common)


def _identity(prepared: PreparedCorpus, config: Config, steps: int) -> str:
    """A hash of all that the weights depend on."""
    told = {key: value for key, value in asdict(config).items() if key not in HOW}
    weights = Path(config.model or "") / "model.safetensors"
    if weights.is_file():  # what it starts from, not where that lies
        told["model"] = hashlib.sha256(weights.read_bytes()).hexdigest()
    documents = [(row["sha256"], row["set"]) for row in prepared.manifest["documents"]]
    content = json.dumps([told, steps, documents, prepared.manifest["tokens"]], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def _trackers(track: tuple[str, ...]) -> list[str]:
    from importlib.util import find_spec

    for name in track:
        if name not in ("tensorboard", "wandb"):
            raise ValueError(f"track: expected tensorboard or wandb, got {name!r}")
    missing = [name for name in track if find_spec(name) is None]
    if missing == ["tensorboard"]:
        logger.warning("tensorboard is not installed: losses go to log.jsonl alone")
    elif missing:
        raise ValueError(f"track: expected {', '.join(missing)} to be installed; pip install {' '.join(missing)}")
    return [name for name in track if name not in missing]


def is_main() -> bool:
    """Whether this is the one process of several that writes and speaks."""
    return bool(PartialState().is_main_process)


@contextmanager
def _signals() -> Iterator[list[int]]:
    """SIGTERM and SIGINT, noted in place of ending the process at once."""
    caught: list[int] = []
    names = (signal.SIGTERM, signal.SIGINT)
    before = {name: signal.signal(name, lambda number, _: caught.append(number)) for name in names}
    try:
        yield caught
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)
