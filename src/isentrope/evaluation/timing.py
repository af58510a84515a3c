"""Time and peak memory of a forward pass, one recipe after another on one text."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from isentrope.core.caching import clear_caches
from isentrope.evaluation.loading import identify_model
from isentrope.evaluation.perplexity import count_chunks, summarize_error, token_losses
from isentrope.evaluation.recipe_texts import under_recipe
from isentrope.evaluation.results import TIMES, ResultsStore
from isentrope.evaluation.texts import Text, check_texts
from isentrope.utils.provenance import collect_provenance

PASSES = 3  # after one that warms up
SLOW_SECONDS = 2.0  # a pass that takes longer is not repeated


def open_times(model: PreTrainedModel, name: str, text: Text, length: int, out: Path) -> ResultsStore:
    """Open `times.json`; recipes that an earlier run has timed are kept.

    Args:
        model: a causal model.
        name: what the results call it.
        text: a document of `length` tokens or more.
        length: tokens of a pass.
        out: the folder of the file.

    Raises:
        ValueError: the file has times of another model, text, length or device.
    """
    check_texts([text], length)
    device = collect_provenance()["hardware"]
    head = {
        "model": identify_model(model, name),
        "note": f"Forward passes of one recipe after another on {device}; nothing else should run on it meanwhile.",
        "device": device,
        "config": {"length": length, "passes": PASSES, "slow_seconds": SLOW_SECONDS},
        "text": {"name": text.name, "sha256": text.sha256},
    }
    return ResultsStore(out, TIMES, head)


def measure_times(model: PreTrainedModel, text: Text, store: ResultsStore, recipes: Sequence[str]) -> None:
    """Time the pass of the perplexity measurement under each recipe, and write the file after each.

    Args:
        model: the model of the store.
        text: its text.
        store: of `open_times`.
        recipes: texts of recipes; one that fails is stored with the reason.
    """
    tokens = torch.tensor(text.tokens[: store.head["config"]["length"]])
    run = collect_provenance() | {"transformers": transformers.__version__}
    for recipe in recipes:
        cell: dict[str, Any] = {"recipe": recipe, "seconds": [], "peak_bytes": None, "failed": None, "run": run}
        clear_caches(keep_compiled=True)  # or the peak would have the tables of earlier recipes in it
        gc.collect()
        try:
            with under_recipe(model, recipe):
                cell |= {"chunks": count_chunks(model, len(tokens))} | time_passes(model, tokens)
        except Exception as error:  # whatever one recipe fails with, the others are timed
            cell["failed"] = summarize_error(error) or type(error).__name__
        if model.device.type == "cuda":
            torch.cuda.empty_cache()
        store.cells[(recipe,)] = cell
        store.write(store.results())


def time_passes(model: PreTrainedModel, tokens: Tensor) -> dict[str, Any]:
    """Return the seconds of each pass after one that warms up, and the largest peak of memory on a GPU."""
    on_gpu = model.device.type == "cuda"
    token_losses(model, tokens)
    seconds: list[float] = []
    while len(seconds) < PASSES and max(seconds, default=0.0) <= SLOW_SECONDS:
        if on_gpu:
            torch.cuda.synchronize()
            if not seconds:
                torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        token_losses(model, tokens)
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return {"seconds": seconds, "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else None}
