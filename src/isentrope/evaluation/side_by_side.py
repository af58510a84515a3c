"""A text far beyond the training length, scored and continued under one recipe after another."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from isentrope.evaluation.loading import identify_model
from isentrope.evaluation.perplexity import get_decoder, losses_from_hidden
from isentrope.evaluation.recipe_texts import check_recipes, under_recipe
from isentrope.evaluation.texts import Text, check_texts, check_vocabulary
from isentrope.hf.train_length import read_train_length
from isentrope.utils.files import write_json
from isentrope.utils.provenance import collect_provenance

SIDE_BY_SIDE = "side_by_side.json"
CURVE_POINTS = 64  # of the losses over a text
PROMPT_CHARACTERS = 160  # of the text's end, beside what a model writes after it


@dataclass(frozen=True)
class SideBySideConfig:
    """What is compared.

    Args:
        recipes: texts of recipes; `plain` is the model as it is.
        length: tokens of the text that are read.
        new_tokens: tokens that are written after them, each the likeliest.
    """

    recipes: tuple[str, ...]
    length: int
    new_tokens: int = 60

    def __post_init__(self) -> None:
        check_recipes(self.recipes)
        if self.length < 2 * CURVE_POINTS:
            raise ValueError(f"length: expected {2 * CURVE_POINTS} tokens or more, got {self.length}")
        if self.new_tokens < 1:
            raise ValueError(f"new tokens: expected 1 or more, got {self.new_tokens}")


def compare_side_by_side(
    model: PreTrainedModel,
    tokenizer: Any,
    text: Text,
    config: SideBySideConfig,
    out: Path,
    notify: Callable[[str], None] = lambda message: None,
) -> Path:
    """Score and continue a text under each recipe, and write `side_by_side.json`.

    Args:
        model: a causal model.
        tokenizer: the model's.
        text: of `config.length` tokens or more; what comes after those is what the author wrote.
        config: recipes and lengths.
        out: the folder for the file.
        notify: called with a line as each recipe begins.

    Returns:
        The path of the file.

    Raises:
        ValueError: the text is too short.
    """
    check_texts([text], config.length)
    check_vocabulary([text], model)
    train_length = read_train_length(model.config.get_text_config())
    tokens = torch.tensor(text.tokens[: config.length])
    after = text.tokens[config.length : config.length + config.new_tokens]
    edges = bucket_edges(train_length, config.length)
    rows = []
    for recipe in config.recipes:
        notify(f"reading {config.length} tokens: {recipe}")
        with under_recipe(model, recipe):
            rows.append({"recipe": recipe} | _read_and_continue(model, tokenizer, tokens, config.new_tokens, edges))
    out.mkdir(parents=True, exist_ok=True)
    results = {
        "model": identify_model(model, Path(str(model.name_or_path)).name),
        "train_length": train_length,
        "length": config.length,
        "text": {"name": text.name, "sha256": text.sha256},
        "edges": edges,
        "prompt_end": tokenizer.decode(tokens.tolist())[-PROMPT_CHARACTERS:],
        "written_by_author": tokenizer.decode(after),
        "rows": rows,
        "run": collect_provenance() | {"transformers": transformers.__version__},
    }
    write_json(out / SIDE_BY_SIDE, results)
    return out / SIDE_BY_SIDE


def bucket_edges(train_length: int | None, length: int) -> list[int]:
    """Return edges of buckets of positions that double from the training length to the length of the text."""
    first = min(train_length or length, length)
    edges = [0]
    while first < length:
        edges.append(first)
        first *= 2
    return [*edges, length]


def _read_and_continue(
    model: PreTrainedModel, tokenizer: Any, tokens: Tensor, new_tokens: int, edges: Sequence[int]
) -> dict[str, Any]:
    """Score a text and write on from it, in one pass over the text."""
    ids = tokens.to(model.device)[None]
    start = time.perf_counter()
    with torch.inference_mode(), _no_length_warning():
        # generation resumes from a cache of all tokens but the last, which are those that predict something
        state = get_decoder(model)(input_ids=ids[:, :-1], use_cache=True)
        losses = losses_from_hidden(model, state.last_hidden_state[0], ids[0, 1:]).double().cpu()
        read = time.perf_counter() - start
        options: dict[str, Any] = {"max_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0}
        generate: Any = model.generate
        written = generate(ids, attention_mask=torch.ones_like(ids), past_key_values=state.past_key_values, **options)
    cuts = torch.linspace(0, len(tokens), CURVE_POINTS + 1).long().tolist()

    def mean_loss(low: int, high: int) -> float:
        # the token at position i is predicted from i tokens before it
        return losses[max(low, 1) - 1 : high - 1].mean().item()

    return {
        "loss": [mean_loss(low, high) for low, high in pairwise(edges)],
        "curve": {"edges": cuts, "loss": [mean_loss(low, high) for low, high in pairwise(cuts)]},
        "continuation": tokenizer.decode(written[0, len(tokens) :].tolist(), skip_special_tokens=True),
        "seconds": {"read": read, "write": time.perf_counter() - start - read},
    }


@contextmanager
def _no_length_warning() -> Iterator[None]:
    """Drop the warning of transformers that a text exceeds the training length, which is what is measured here."""
    logger = logging.getLogger("transformers.generation.stopping_criteria")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
