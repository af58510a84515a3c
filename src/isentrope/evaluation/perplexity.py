"""Perplexity of a causal model by position in the text, under one recipe after another."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
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
from transformers import PreTrainedModel

from isentrope.core.dtypes import accumulation_dtype
from isentrope.data.corpus import read_documents
from isentrope.evaluation.loading import causal_model
from isentrope.evaluation.metrics import bits_per_byte, finite_perplexities, mean_interval, percent_change
from isentrope.hf.extend import extended
from isentrope.hf.layer_plan import read_train_length
from isentrope.pretrained import (
    check_finite,
    read_tokenizer,
    resolve_device,
    resolve_model_device,
    resolve_model_name,
)
from isentrope.recipe import Recipe
from isentrope.utils.files import BrokenFileError, read_fields, write_atomically
from isentrope.utils.progress import progress
from isentrope.utils.provenance import provenance

logger = logging.getLogger("isentrope")
PLAIN = "plain"
AGAIN = "run the same command again, which measures anew"
LOGITS_AT_ONCE = 1 << 26  # entries of the logits held at a time
OPEN = {"train_length": 2, "heads": 1, "dim": 4}  # in place of what a recipe leaves to the model


def check_recipes(recipes: Sequence[str]) -> None:
    """Before anything is measured."""
    if not recipes or len(set(recipes)) != len(recipes):
        raise ValueError(f"recipes: expected one or more, each once, got {list(recipes)}")
    for recipe in recipes:
        Recipe.parse(recipe, **OPEN)


@dataclass(frozen=True)
class Config:
    """edges: the buckets of positions, the first at 0 and the last the number of tokens read of each document."""

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
    def read(cls, recipes: Sequence[str], edges: str) -> Config:
        """From words of a command line: edges as numbers with commas between."""
        try:
            numbers = tuple(int(edge) for edge in edges.split(","))
        except ValueError:
            raise ValueError(f"edges: expected positions such as 0,4096,8192, got {edges!r}") from None
        return cls(tuple(recipes), numbers)

    @property
    def length(self) -> int:
        return self.edges[-1]


@dataclass(frozen=True)
class Text:
    """A document in tokens. ends: bytes of the text up to the end of each token, where that is known."""

    name: str
    sha256: str
    tokens: tuple[int, ...]
    ends: tuple[int, ...] | None = None


def load(name: str, device: str, dtype: str, gguf_file: str | None = None) -> PreTrainedModel:
    """A causal model from a folder or the hub, where it is to be and in the dtype it is to have."""
    device, narrow = resolve_device(device, dtype) if gguf_file else resolve_model_device(name, device, dtype)
    model: Any = causal_model(name, narrow, gguf_file)
    return model.to(device)


def load_tokenizer(name: str, gguf_file: str | None = None) -> Any:
    options = {"gguf_file": gguf_file} if gguf_file else {}
    return read_tokenizer(resolve_model_name(name), **options)


def described(model: PreTrainedModel, name: str) -> dict[str, str]:
    """What results say of a model. weights: a hash of some of each tensor's, for folders of one name hold many."""
    content = hashlib.sha256()
    for key, x in model.named_parameters():
        content.update(f"{key} {tuple(x.shape)}".encode())
        if not x.is_meta:
            content.update(x.detach().reshape(-1)[:: 1 + x.numel() // 256].float().cpu().numpy().tobytes())
    told = {"name": name, "type": model.config.model_type, "dtype": str(model.dtype).removeprefix("torch.")}
    return told | {"weights": content.hexdigest()[:16]}


def same_model(held: dict[str, str], asked: dict[str, str]) -> bool:
    """Whether results are of the model asked for; those of before weights were told have none."""
    return asked | held == asked


def under(model: PreTrainedModel, recipe: Recipe | str) -> AbstractContextManager[object]:
    """A model under a recipe, or as it is."""
    return nullcontext() if recipe in (PLAIN, Recipe()) else extended(model, recipe)


def read(paths: Sequence[Path], name: str, gguf_file: str | None, length: int, most: int) -> list[Text]:
    """The first documents that are long enough, in tokens of the model's own tokenizer."""
    if most < 1:
        raise ValueError(f"documents: expected 1 or more, got {most}")
    tokenizer: Any = None
    texts: list[Text] = []
    sizes: list[tuple[int, str]] = []
    for document in read_documents(paths):
        whole = document.text if document.tokens is None else document.tokens
        sizes.append((len(whole or ()), "characters" if document.tokens is None else "tokens"))
        tokens, ends = document.tokens, None
        if tokens is None:
            if document.text is None or 4 * len(document.text) < length:  # a token has a byte or more
                continue
            if tokenizer is None:
                tokenizer = load_tokenizer(name, gguf_file)
            read = tokenizer(document.text, return_offsets_mapping=tokenizer.is_fast)
            tokens = tuple(read["input_ids"])
            ends = _ends(document.text, read["offset_mapping"][:length]) if tokenizer.is_fast else None
        if len(tokens) >= length:
            texts.append(Text(document.name, document.sha256, tokens[:length], ends))
        if len(texts) == most:
            break
    if not texts:
        size, unit = max(sizes, default=(0, "characters"))
        got = f"none: the longest of {len(sizes)} has {size} {unit}"
        raise ValueError(f"texts: expected documents of {length} tokens or more, got {got}")
    return texts


def check_texts(texts: Sequence[Text], length: int) -> None:
    short = [text.name for text in texts if len(text.tokens) < length]
    if short or not texts:
        raise ValueError(f"texts: expected documents of {length} tokens or more, got {short or 'none'}")


def _ends(text: str, offsets: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """Where tokens end in the text's UTF-8, from where they end in its characters."""
    code = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    sizes = 1 + (code >= 0x80).astype(np.int64) + (code >= 0x800) + (code >= 0x10000)
    found = np.concatenate(([0], np.cumsum(sizes)))[[end for _, end in offsets]]
    return tuple(np.maximum.accumulate(found).tolist())  # a mark put after the text says that it ends at 0


def run(model: PreTrainedModel, name: str, texts: Sequence[Text], config: Config, out: Path) -> Path:
    """Measure every recipe on every text and write `perplexity.json` into the folder `out`.

    A cell (recipe × text) that the file already holds is not measured again, and stays there; means are over the texts
    asked for now. One that fails is told in `failed` there, the others go on, and another run tries it again.
    """
    check_texts(texts, config.length)
    results = out / "perplexity.json"
    out.mkdir(parents=True, exist_ok=True)
    head = {
        "model": described(model, name),
        "train_length": read_train_length(model.config.get_text_config()),
        "config": asdict(config),
        "texts": [{"name": text.name, "sha256": text.sha256} for text in texts],
    }
    head = json.loads(json.dumps(head))
    cells = _held(results, head)
    todo = [(recipe, text) for recipe in config.recipes for text in texts if (recipe, text.sha256) not in cells]
    model.eval()
    if todo:
        audit(model, torch.tensor(texts[0].tokens[:32]))
    failed: list[dict[str, str]] = []
    for recipe, text in progress(todo, lambda cell: cell[0]):
        found = {"recipe": recipe, "text": text.sha256}
        try:
            cells[recipe, text.sha256] = found | cell(model, recipe, text, config.edges)
        except RuntimeError as error:
            failed.append(found | {"failed": reason(error)})
            if model.device.type == "cuda":
                torch.cuda.empty_cache()
        head |= {"run": provenance() | {"transformers": transformers.__version__}, "failed": failed}
        _save(results, summary(head | {"cells": list(cells.values())}))
    if not cells:
        raise ValueError(f"{results}: expected results, but every cell failed: {failed[0]['failed']}")
    return results


def failures(results: Path, recipes: Sequence[str]) -> list[str]:
    """Why cells of these recipes failed in the last run, each in a line."""
    data = read_fields(results, AGAIN, "cells")
    done = {(cell["recipe"], cell["text"]) for cell in data["cells"]}
    lost = [row for row in data.get("failed", []) if (row["recipe"], row["text"]) not in done]
    return [f"{row['recipe']}: {row['failed']}" for row in lost if row["recipe"] in recipes]


def reason(error: Exception) -> str:
    """Why a cell failed, in a line."""
    kind = "out of memory: " if isinstance(error, torch.OutOfMemoryError) else ""
    return kind + str(error).strip().partition("\n")[0]


def token_losses(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """-ln p of every token but the first, (tokens - 1,) in fp32; the whole table of logits is never held."""
    with torch.inference_mode():
        return differentiable_losses(model, tokens)


def differentiable_losses(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """The same, with gradients where they are enabled; a backward makes the logits anew."""
    ids = tokens.to(model.device)[None]
    hidden = _body(model)(input_ids=ids, use_cache=False).last_hidden_state[0]
    head = model.get_output_embeddings()
    step = max(1, LOGITS_AT_ONCE // head.weight.shape[0])

    def loss(part: Tensor, targets: Tensor) -> Tensor:
        logits = head(part)
        return F.cross_entropy(logits.to(accumulation_dtype(logits)), targets, reduction="none")

    run = partial(checkpoint, loss, use_reentrant=False) if torch.is_grad_enabled() else loss
    losses = [
        run(hidden[at : at + step][: len(tokens) - 1 - at], ids[0, at + 1 : at + 1 + step])
        for at in range(0, len(tokens) - 1, step)
    ]
    return torch.cat(losses)


def _body(model: PreTrainedModel) -> Any:
    """The part of a causal model that gives hidden states; Llama 4 does not say which of its parts that is."""
    if model.base_model is not model:
        return model.base_model
    parts = [part for part in model.children() if isinstance(part, PreTrainedModel)]
    if len(parts) != 1:
        raise ValueError(f"{model.config.model_type}: expected one part that gives hidden states, got {len(parts)}")
    return parts[0]


def audit(model: PreTrainedModel, tokens: Tensor) -> None:
    """Make sure that a model's logits are its output embedding on its last hidden state, and nothing more."""
    with torch.inference_mode():
        logits = model(input_ids=tokens.to(model.device)[None], use_cache=False).logits[0, :-1].float()
    if not logits.isfinite().all():
        check_finite(model, model.config.model_type)
        dtype = str(model.dtype).removeprefix("torch.")
        raise ValueError(f"{model.config.model_type}: its logits are NaN or infinite in {dtype}; try --dtype float32")
    expected = F.cross_entropy(logits, tokens[1:].to(model.device), reduction="none")
    if not torch.allclose(token_losses(model, tokens), expected, atol=2e-2, rtol=1e-2):
        raise ValueError(f"{model.config.model_type}: its logits are not its output embedding alone; not supported")


def cell(model: PreTrainedModel, recipe: Recipe | str, text: Text, edges: Sequence[int]) -> dict[str, Any]:
    """Losses of a text under a recipe, summed over each bucket of positions."""
    tokens = torch.tensor(text.tokens[: edges[-1]])
    if model.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with under(model, recipe):
        start = time.perf_counter()
        losses = token_losses(model, tokens).double().cpu()
        seconds = time.perf_counter() - start
    # the token at position i is predicted from i tokens before it
    sums = [losses[max(a, 1) - 1 : b - 1].sum().item() for a, b in pairwise(edges)]
    ends = text.ends
    sizes = None if ends is None else [ends[b - 1] - ends[max(a, 1) - 1] for a, b in pairwise(edges)]
    peak = torch.cuda.max_memory_allocated() if model.device.type == "cuda" else None
    return {"loss": sums, "bytes": sizes, "seconds": seconds, "peak_bytes": peak}


def summary(data: dict[str, Any]) -> dict[str, Any]:
    """Results with `rows`, perplexity and bits a byte per recipe and bucket; `paired`, what each temperature changes;
    and `inside`, what each recipe changes for the plain model inside its training length.

    Intervals are 95 %, by bootstrap over texts. Texts differ more than recipes do: these are compared text by text.
    """
    edges, seed = data["config"]["edges"], data["config"]["seed"]
    counts = np.array([b - max(a, 1) for a, b in pairwise(edges)])
    losses: dict[str, dict[str, Any]] = {}
    cells = asked(data)
    for cell in cells:
        losses.setdefault(cell["recipe"], {})[cell["text"]] = np.array(cell["loss"]) / counts
    rows = []
    for recipe, found in losses.items():
        ends = map(finite_perplexities, mean_interval(np.array(list(found.values())), seed))
        ppl = dict(zip(("perplexity", "low", "high"), ends, strict=True))
        bits = _bits_per_byte([cell for cell in cells if cell["recipe"] == recipe])
        rows.append({"recipe": recipe, "texts": len(found), **ppl, "bits_per_byte": bits})
    paired = [_change(losses, *pair, seed) for pair in _without_temperature(list(losses))]
    short = counts * [b <= (data.get("train_length") or 0) for b in edges[1:]]
    others = [recipe for recipe in losses if recipe != PLAIN] if short.any() and PLAIN in losses else []
    inside = [_change(losses, recipe, PLAIN, seed, short / short.sum()) for recipe in others]
    return data | {"rows": rows, "paired": [*filter(None, paired)], "inside": [*filter(None, inside)]}


def asked(data: dict[str, Any]) -> list[dict[str, Any]]:
    """Cells of the texts that the results are about: a folder may hold others from before."""
    texts = {text["sha256"] for text in data["texts"]}
    return [cell for cell in data["cells"] if cell["text"] in texts]


def _change(
    losses: dict[str, dict[str, Any]], recipe: str, against: str, seed: int, weights: Any = None
) -> dict[str, Any] | None:
    """Perplexity of one recipe against another in per cent: in each bucket, or in all, weighed."""
    both = [text for text in losses[recipe] if text in losses[against]]
    if not both:
        return None
    change = np.array([losses[recipe][text] - losses[against][text] for text in both])
    percent = [percent_change(x) for x in mean_interval(change if weights is None else change @ weights, seed)]
    return {"recipe": recipe, "against": against} | dict(zip(("percent", "low", "high"), percent, strict=True))


def _bits_per_byte(cells: list[dict[str, Any]]) -> list[float] | None:
    if any(cell.get("bytes") is None for cell in cells):
        return None
    losses, sizes = (np.sum([cell[key] for cell in cells], 0) for key in ("loss", "bytes"))
    return bits_per_byte(losses, sizes)


def _without_temperature(recipes: list[str]) -> Iterator[tuple[str, str]]:
    """Recipes with a temperature, each with the one among them that is the same without."""
    parsed = {text: Recipe.parse(text, **OPEN) for text in recipes}
    for text, recipe in parsed.items():
        bare = replace(recipe, temperature=None)
        for other, candidate in parsed.items():
            if recipe.temperature is not None and candidate == bare:
                yield text, other


def read_held(results: Path, *needed: str) -> dict[str, Any] | None:
    """What an earlier run has left in a file; None where there is none, or after a warning where it is broken."""
    if not results.exists():
        return None
    try:
        return read_fields(results, "all is measured again", *needed)
    except BrokenFileError as error:
        logger.warning("%s", error)
        return None


def _held(results: Path, head: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    """Cells of an earlier run of the same model, buckets and seed, whose recipes are taken into `head`."""
    data = read_held(results, "model", "config", "cells")
    if data is None:
        return {}
    same = same_model(data["model"], head["model"]) and all(
        data["config"][key] == head["config"][key] for key in ("edges", "seed")
    )
    if not same:
        raise ValueError(f"{results}: holds another model or other buckets; choose another folder")
    head["config"]["recipes"] = list(dict.fromkeys((*data["config"]["recipes"], *head["config"]["recipes"])))
    return {(cell["recipe"], cell["text"]): cell for cell in data["cells"]}


def _save(path: Path, data: dict[str, Any]) -> None:
    with write_atomically(path) as partial:
        partial.write_text(json.dumps(data, indent=1), encoding="utf-8")
