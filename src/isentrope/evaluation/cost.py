"""Estimate how long a comparison takes and how much memory it needs, before it starts."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from isentrope.evaluation.perplexity import MAX_LOGITS, PerplexityConfig, token_losses
from isentrope.evaluation.recipe_texts import PLAIN
from isentrope.evaluation.results import PERPLEXITY, RETRIEVAL, read_if_whole
from isentrope.evaluation.retrieval import RetrievalConfig
from isentrope.evaluation.texts import Text

PROBE_TOKENS = 512  # of the first pass whose time is measured
# a short pass on a GPU takes as long as launching its kernels: longer ones follow, until one takes so many seconds
MIN_GPU_PROBE_SECONDS = 0.25
PROBE_GROWTH = 4
HIDDEN_STATES = 8  # of a layer, in memory at once
RECIPE_COST = 1.15  # of a pass under a recipe, in plain ones: more for short texts, see benchmarks/results


class CostEstimate(NamedTuple):
    """Passes over the full length that are still to be made, their seconds, and bytes at the peak.

    compiles: whether kernels are compiled at the first pass of a recipe, in time that is not known before.
    """

    passes: int
    seconds: float
    peak_bytes: int
    compiles: bool = False

    def format(self, length: int) -> str:
        """Return the estimate as a line."""
        minutes = self.seconds / 60
        duration = f"{self.seconds:.0f} s" if minutes < 2 else f"{minutes:.0f} min"
        if minutes >= 120:
            duration = f"{minutes / 60:.1f} h"
        if self.compiles:
            duration += ", more where kernels are compiled first,"
        size = f"{self.peak_bytes / 2**30:.1f} GiB"
        if self.peak_bytes < 2**30:
            size = f"{self.peak_bytes / 2**20:.0f} MiB"
        return f"estimate: {self.passes} passes of {length} tokens, about {duration} and {size} for the model"


def estimate_cost(
    model: PreTrainedModel,
    texts: Sequence[Text],
    perplexity: PerplexityConfig,
    retrieval: RetrievalConfig | None,
    folder: Path,
) -> CostEstimate:
    """Estimate from short passes of the plain model, at their share of 2 P n + 2 L d n² operations.

    Compared with what was measured: docs/guides/evaluate.md.

    Args:
        model: a causal model.
        texts: what it reads.
        perplexity: recipes and length.
        retrieval: passkeys; None for none.
        folder: of the results; what it has is not measured again.
    """
    length, on_gpu = perplexity.length, model.device.type != "cpu"
    each = _estimate_pass(model, torch.tensor(texts[0].tokens[:length]), MIN_GPU_PROBE_SECONDS if on_gpu else 0.0)
    passes = _count_passes(texts, perplexity, retrieval, folder)
    costs = sum(count * (1.0 if recipe == PLAIN else RECIPE_COST) for recipe, count in passes.items())
    return CostEstimate(passes.total(), costs * each, _estimate_memory(model, length), compiles=on_gpu)


def _estimate_pass(model: PreTrainedModel, tokens: Tensor, min_seconds: float) -> float:
    """Return the seconds of a pass over all tokens, on a line through the two longest passes that were measured.

    Passes grow until one takes `min_seconds`; the line of a single one goes through 0.
    """
    seconds, operations, slope, count = 0.0, 0.0, 0.0, min(PROBE_TOKENS, len(tokens))
    while True:
        try:
            measured, counted = _time_pass(model, tokens[:count]), _count_operations(model, count)
        except torch.OutOfMemoryError:  # as some pass will, and say so
            if not seconds:
                raise
            break
        slope = max(0.0, measured - seconds) / (counted - operations)
        seconds, operations = measured, counted
        if seconds >= min_seconds or count == len(tokens):
            break
        count = min(PROBE_GROWTH * count, len(tokens))
    return seconds + slope * (_count_operations(model, len(tokens)) - operations)


def _time_pass(model: PreTrainedModel, tokens: Tensor) -> float:
    seconds = []
    for _ in range(2):  # the first warms up
        start = time.perf_counter()
        token_losses(model, tokens).cpu()  # which waits for a GPU
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def _count_passes(
    texts: Sequence[Text], perplexity: PerplexityConfig, retrieval: RetrievalConfig | None, folder: Path
) -> Counter[str]:
    """Count the passes under each recipe that the folder has no results of."""
    earlier = read_if_whole(folder / PERPLEXITY.file, "cells") or {"cells": []}
    measured = {PERPLEXITY.key(cell) for cell in earlier["cells"]}
    pairs = ((recipe, text.sha256) for recipe in perplexity.recipes for text in texts)
    passes = Counter(recipe for recipe, text in pairs if (recipe, text) not in measured)
    if retrieval is None:
        return passes
    earlier = read_if_whole(folder / RETRIEVAL.file, "cells", schema=RETRIEVAL) or {"cells": []}
    measured = {RETRIEVAL.key(cell) for cell in earlier["cells"] if cell["failed"] is None}
    for recipe in retrieval.recipes:
        passes[recipe] += retrieval.examples * sum((recipe, *cell) not in measured for cell in retrieval.cells)
    return passes


def _count_operations(model: PreTrainedModel, tokens: int) -> float:
    config = model.config.get_text_config()
    weights = sum(x.numel() for x in model.parameters())
    return 2.0 * weights * tokens + 2.0 * config.num_hidden_layers * config.hidden_size * tokens**2


def _estimate_memory(model: PreTrainedModel, tokens: int) -> int:
    """Add weights, hidden states of one layer, and the logits that are in memory at a time, also in fp32."""
    config, size = model.config.get_text_config(), model.dtype.itemsize
    widest = max(config.hidden_size, getattr(config, "intermediate_size", None) or 4 * config.hidden_size)
    states = tokens * (HIDDEN_STATES * config.hidden_size + 2 * widest) * size
    logits = min(MAX_LOGITS, tokens * config.vocab_size) * (size + 4)
    return sum(x.numel() * x.element_size() for x in model.parameters()) + states + logits
