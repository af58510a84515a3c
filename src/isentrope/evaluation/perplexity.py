"""Perplexity of a causal model by position in the text, under one recipe after another."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import Cache, DynamicCache, PreTrainedModel

from isentrope.core.dtypes import accumulation_dtype
from isentrope.evaluation.loading import identify_model
from isentrope.evaluation.metrics import bits_per_byte, finite_perplexities, mean_interval, percent_change
from isentrope.evaluation.recipe_texts import PLAIN, check_recipes, pair_with_untempered, under_recipe
from isentrope.evaluation.results import PERPLEXITY, ResultsStore
from isentrope.evaluation.texts import Text, check_texts, check_vocabulary
from isentrope.hf.extension import find_extension
from isentrope.hf.introspection import introspect_once
from isentrope.hf.train_length import read_train_length
from isentrope.pretrained import check_finite
from isentrope.recipe import Recipe
from isentrope.utils.parsing import parse_numbers
from isentrope.utils.progress import track_progress
from isentrope.utils.provenance import collect_provenance

MAX_LOGITS = 1 << 26  # entries of the logits in memory at a time
MAX_MASK = 1 << 32  # entries of the mask of a model that is not extended, likewise


@dataclass(frozen=True)
class PerplexityConfig:
    """What is measured.

    Args:
        recipes: texts of recipes; `plain` is the model as it is.
        edges: of the buckets of positions, the first 0 and the last the number of tokens read of each document.
        seed: of the bootstrap.
    """

    recipes: tuple[str, ...]
    edges: tuple[int, ...]
    seed: int = 0

    def __post_init__(self) -> None:
        check_recipes(self.recipes)
        whole = all(type(edge) is int for edge in self.edges)
        if not whole or len(self.edges) < 2 or self.edges[0] != 0 or any(a >= b for a, b in pairwise(self.edges)):
            raise ValueError(f"edges: expected increasing positions from 0 on, got {list(self.edges)}")
        if self.edges[1] < 2:
            raise ValueError(f"edges: expected two tokens or more in the first bucket, got {self.edges[1]}")

    @classmethod
    def parse(cls, recipes: Sequence[str], edges: str) -> PerplexityConfig:
        """Build from command-line values: edges as numbers separated by commas."""
        return cls(tuple(recipes), parse_numbers("edges", edges, example="0,4096,8192"))

    @property
    def length(self) -> int:
        return self.edges[-1]


@introspect_once()
def measure_perplexity(
    model: PreTrainedModel, name: str, texts: Sequence[Text], config: PerplexityConfig, out: Path
) -> Path:
    """Measure every recipe on every text and write `perplexity.json`.

    A cell (recipe × text) that the file already has is kept and not measured again; means are over the texts of this
    call. One that fails is listed under `failed`, the others continue, and another run tries it again.

    Args:
        model: a causal model.
        name: what the results call it.
        texts: documents of `config.length` tokens or more.
        config: recipes and buckets.
        out: the folder for the file.

    Returns:
        The path of the file.

    Raises:
        ValueError: the folder holds results of another model or other buckets, or every cell failed.
    """
    check_texts(texts, config.length)
    out.mkdir(parents=True, exist_ok=True)
    head = {
        "model": identify_model(model, name),
        "train_length": read_train_length(model.config.get_text_config()),
        "config": asdict(config),
        "texts": [{"name": text.name, "sha256": text.sha256} for text in texts],
    }
    store = ResultsStore(out, PERPLEXITY, head)
    todo = [(recipe, text) for recipe in config.recipes for text in texts if (recipe, text.sha256) not in store.cells]
    model.eval()
    if todo:
        check_model(model, texts)
    failed: list[dict[str, str]] = []
    for recipe, text in track_progress(todo, lambda cell: cell[0]):
        key = {"recipe": recipe, "text": text.sha256}
        try:
            store.cells[recipe, text.sha256] = key | measure_text(model, recipe, text, config.edges)
        except RuntimeError as error:
            failed.append(key | {"failed": summarize_error(error)})
            if model.device.type == "cuda":
                torch.cuda.empty_cache()
        store.head |= {"run": collect_provenance() | {"transformers": transformers.__version__}, "failed": failed}
        store.write(summarize_perplexity(store.results()))
    path = out / PERPLEXITY.file
    if not store.cells:
        raise ValueError(f"{path}: expected results, but every cell failed: {failed[0]['failed']}")
    return path


def summarize_error(error: Exception) -> str:
    """Say why a cell failed, in one line."""
    kind = "out of memory: " if isinstance(error, torch.OutOfMemoryError) else ""
    return kind + str(error).strip().partition("\n")[0]


def token_losses(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Compute -ln p of every token but the first, (tokens - 1,) in fp32, without a table of all logits."""
    with torch.inference_mode():
        if not builds_mask(model, len(tokens)):
            return differentiable_losses(model, tokens)
        ids = tokens.to(model.device)[None]
        hidden = read_in_chunks(model, ids)[0]
        return losses_from_hidden(model, hidden[:-1], ids[0, 1:])


def builds_mask(model: PreTrainedModel, length: int) -> bool:
    """Return whether transformers' own attention would build a mask of length × length that takes gigabytes.

    It does where some layers have a window. Extended models have none.
    """
    if length * length <= MAX_MASK or find_extension(model) is not None:
        return False
    return any(DynamicCache(config=model.config).is_sliding)  # not all configs list the kinds of their layers


def read_in_chunks(model: PreTrainedModel, ids: Tensor, cache: Cache | None = None) -> Tensor:
    """Compute the hidden states (batch, tokens, size) chunk after chunk with a cache: the same up to rounding."""
    decoder, cache = get_decoder(model), DynamicCache(config=model.config) if cache is None else cache
    chunks = ids.split(_chunk_size(ids.shape[1]), dim=1)
    return torch.cat(
        [decoder(input_ids=chunk, past_key_values=cache, use_cache=True).last_hidden_state for chunk in chunks], dim=1
    )


def count_chunks(model: PreTrainedModel, length: int) -> int:
    """Return in how many chunks `token_losses` reads a text."""
    return -(-length // _chunk_size(length)) if builds_mask(model, length) else 1


def _chunk_size(length: int) -> int:
    return max(1, MAX_MASK // length)


def differentiable_losses(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Compute the same with gradients where they are enabled; a backward computes the logits anew."""
    ids = tokens.to(model.device)[None]
    hidden = get_decoder(model)(input_ids=ids, use_cache=False).last_hidden_state[0]
    return losses_from_hidden(model, hidden[:-1], ids[0, 1:])


def losses_from_hidden(model: PreTrainedModel, hidden: Tensor, targets: Tensor) -> Tensor:
    """Compute -ln p of each target (tokens,) from the hidden state (tokens, size) before it, in fp32."""
    head = model.get_output_embeddings()
    step = max(1, MAX_LOGITS // head.weight.shape[0])

    def compute(part: Tensor, part_targets: Tensor) -> Tensor:
        logits = head(part)
        return F.cross_entropy(logits.to(accumulation_dtype(logits)), part_targets, reduction="none")

    compute_part = partial(checkpoint, compute, use_reentrant=False) if torch.is_grad_enabled() else compute
    parts = zip(hidden.split(step), targets.split(step), strict=True)
    return torch.cat([compute_part(part, part_targets) for part, part_targets in parts])


def get_decoder(model: PreTrainedModel) -> Any:
    """Return the part of a causal model that gives hidden states; Llama 4 does not declare which one that is."""
    if model.base_model is not model:
        return model.base_model
    parts = [part for part in model.children() if isinstance(part, PreTrainedModel)]
    if len(parts) != 1:
        raise ValueError(f"{model.config.model_type}: expected one part that gives hidden states, got {len(parts)}")
    return parts[0]


def check_model(model: PreTrainedModel, texts: Sequence[Text]) -> None:
    """Check that a model reads all tokens, and that its logits are finite and its output embedding's alone."""
    check_vocabulary(texts, model)
    tokens = torch.tensor(texts[0].tokens[:32])
    with torch.inference_mode():
        logits = model(input_ids=tokens.to(model.device)[None], use_cache=False).logits[0, :-1].float()
    if not logits.isfinite().all():
        check_finite(model, model.config.model_type)
        dtype = str(model.dtype).removeprefix("torch.")
        raise ValueError(f"{model.config.model_type}: its logits are NaN or infinite in {dtype}; try --dtype float32")
    expected = F.cross_entropy(logits, tokens[1:].to(model.device), reduction="none")
    if not torch.allclose(token_losses(model, tokens), expected, atol=2e-2, rtol=1e-2):
        raise ValueError(f"{model.config.model_type}: its logits are not its output embedding alone; not supported")


def measure_text(model: PreTrainedModel, recipe: Recipe | str, text: Text, edges: Sequence[int]) -> dict[str, Any]:
    """Sum the losses of a text under a recipe over each bucket of positions; the fields of a `PerplexityCell`."""
    tokens = torch.tensor(text.tokens[: edges[-1]])
    if model.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with under_recipe(model, recipe):
        start = time.perf_counter()
        losses = token_losses(model, tokens).double().cpu()
        seconds = time.perf_counter() - start
    # the token at position i is predicted from i tokens before it
    sums = [losses[max(a, 1) - 1 : b - 1].sum().item() for a, b in pairwise(edges)]
    ends = text.ends
    sizes = None if ends is None else [ends[b - 1] - ends[max(a, 1) - 1] for a, b in pairwise(edges)]
    peak = torch.cuda.max_memory_allocated() if model.device.type == "cuda" else None
    return {"loss": sums, "bytes": sizes, "seconds": seconds, "peak_bytes": peak}


def summarize_perplexity(results: dict[str, Any]) -> dict[str, Any]:
    """Add the numbers that are derived from the cells.

    `rows`: perplexity and bits per byte of each recipe and bucket. `paired`: what each temperature changes. `inside`:
    what each recipe changes for the plain model inside its training length. Intervals are 95 %, by bootstrap over
    texts. Texts differ more than recipes do, so recipes are compared text by text.
    """
    edges, seed = results["config"]["edges"], results["config"]["seed"]
    counts = np.array([b - max(a, 1) for a, b in pairwise(edges)])
    losses: dict[str, dict[str, Any]] = {}
    cells = select_cells(results)
    for cell in cells:
        losses.setdefault(cell["recipe"], {})[cell["text"]] = np.array(cell["loss"]) / counts
    rows = []
    for recipe, by_text in losses.items():
        ends = map(finite_perplexities, mean_interval(np.array(list(by_text.values())), seed))
        perplexity = dict(zip(("perplexity", "low", "high"), ends, strict=True))
        bits = _bits_per_byte([cell for cell in cells if cell["recipe"] == recipe])
        rows.append({"recipe": recipe, "texts": len(by_text), **perplexity, "bits_per_byte": bits})
    paired = [_change(losses, *pair, seed) for pair in pair_with_untempered(list(losses))]
    short = counts * [b <= (results.get("train_length") or 0) for b in edges[1:]]
    others = [recipe for recipe in losses if recipe != PLAIN] if short.any() and PLAIN in losses else []
    inside = [_change(losses, recipe, PLAIN, seed, short / short.sum()) for recipe in others]
    return results | {"rows": rows, "paired": [*filter(None, paired)], "inside": [*filter(None, inside)]}


def select_cells(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Select the cells of the texts that results are about: a file may hold others from before."""
    texts = {text["sha256"] for text in results["texts"]}
    return [cell for cell in results["cells"] if cell["text"] in texts]


def _change(
    losses: dict[str, dict[str, Any]], recipe: str, against: str, seed: int, weights: Any = None
) -> dict[str, Any] | None:
    """Perplexity of one recipe against another in per cent: in each bucket, or in all by `weights`."""
    shared = [text for text in losses[recipe] if text in losses[against]]
    if not shared:
        return None
    change = np.array([losses[recipe][text] - losses[against][text] for text in shared])
    percent = [percent_change(x) for x in mean_interval(change if weights is None else change @ weights, seed)]
    return {"recipe": recipe, "against": against} | dict(zip(("percent", "low", "high"), percent, strict=True))


def _bits_per_byte(cells: list[dict[str, Any]]) -> list[float] | None:
    if any(cell.get("bytes") is None for cell in cells):
        return None
    losses, sizes = (np.sum([cell[key] for cell in cells], 0) for key in ("loss", "bytes"))
    return bits_per_byte(losses, sizes)
