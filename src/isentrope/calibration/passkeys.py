"""Passkeys hidden in the texts of a calibration, so that a law is judged by what it finds as well."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from isentrope.calibration.config import CalibrationConfig
from isentrope.calibration.select import LABELS, carries_interval
from isentrope.data.tasks import Haystack, draft_example, fill_to_length
from isentrope.evaluation.answers import score_answer
from isentrope.evaluation.loading import load_tokenizer
from isentrope.evaluation.metrics import Array, mean_interval
from isentrope.evaluation.prompts import Prompt, PromptFormat
from isentrope.evaluation.recipe_texts import under_recipe
from isentrope.evaluation.texts import Text
from isentrope.recipe import Recipe

RETRIEVAL_WEIGHT = 0.1  # of -ln p for a token of the answer, against the loss for a token of text
MIN_RISE = 0.05  # of -ln p for a token of the answer, which is worth a warning


def load_prompt_format(
    name: str, gguf_file: str | None = None, *, required: bool, notify: Callable[[str], None] = lambda line: None
) -> PromptFormat | None:
    """Load the prompt format of a model; None, with a message, for one without a tokenizer unless it is required."""
    try:
        return PromptFormat.from_tokenizer(load_tokenizer(name, gguf_file))
    except (ValueError, OSError) as error:
        if required:
            raise
        notify(f"passkeys are not counted: {error}")
        return None


def hide_passkeys(texts: Sequence[Text], prompts: PromptFormat, length: int, seed: int) -> dict[str, Prompt]:
    """Hide one passkey in each text, at a random depth; return prompts of up to `length` tokens by the text's hash."""
    hidden = {}
    for text in texts:
        filler = prompts.tokenizer.decode(text.tokens[:length], skip_special_tokens=True)
        depth = 100 * Random(f"{seed} {text.sha256}").random()
        draft = draft_example("passkey", length, depth, seed, 0, Haystack.from_texts([filler]))
        hidden[text.sha256] = prompts.build_prompt(fill_to_length(draft, length, prompts.count_tokens))
    return hidden


def compute_answer_losses(scores: Sequence[Mapping[str, Any]]) -> Array:
    """Compute -ln p for a token of each answer, from what `score_answer` gives."""
    return np.array([-score["logprob"] / score["answer"] for score in scores])


def summarize_answers(scores: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Average -ln p for a token over answers, and count those all of whose tokens are the likeliest."""
    hits = sum(score["likeliest"] == score["answer"] for score in scores)
    return {"loss": float(compute_answer_losses(scores).mean()), "hits": hits, "count": len(scores)}


def compare_passkeys(
    model: PreTrainedModel,
    laws: Mapping[str, Recipe],
    texts: Sequence[Text],
    prompts: PromptFormat,
    config: CalibrationConfig,
    notify: Callable[[str], None],
) -> dict[str, Any] | None:
    """Compare answers to passkeys hidden in held-out texts under two laws.

    Args:
        model: a causal model.
        laws: two recipes by name: that of the default law, and that of the law selected.
        texts: those held out.
        prompts: how passkeys are put to the model.
        config: the tokens of each text, and the seed.
        notify: called with a message where no passkey can be hidden.

    Returns:
        `laws`: of each, -ln p for a token and how many were found. `change`: that of -ln p, with a 95 % interval where
        there are texts enough. `warning`: a sentence where the law selected answers clearly worse, else None. Nothing
        where no passkey can be hidden.
    """
    try:
        hidden = hide_passkeys(texts, prompts, config.length, config.seed)
    except ValueError as error:
        notify(f"passkeys are not counted: {error}")
        return None
    scores = {}
    for name, recipe in laws.items():
        with under_recipe(model, recipe), torch.no_grad():
            scores[name] = [score_answer(model, prompt) for prompt in hidden.values()]
    summaries = {name: summarize_answers(answers) for name, answers in scores.items()}
    default, selected = map(compute_answer_losses, scores.values())
    name = next(iter(laws))
    return {"laws": summaries} | judge_answers(selected - default, summaries[name]["hits"], name, config.seed)


def judge_answers(rises: Array, hits: int, default: str, seed: int = 0) -> dict[str, Any]:
    """Say by how much -ln p for a token of each answer rises against the default law, and warn where that is clear.

    Args:
        rises: of each answer.
        hits: answers found under the default law: a law cannot lose what the model does not find.
        default: the name of that law.
        seed: of the bootstrap.
    """
    mean, low, high = map(float, mean_interval(rises, seed))
    if not carries_interval(len(rises)):
        return {"change": {"loss": mean, "low": None, "high": None}, "warning": None}
    change = {"loss": mean, "low": low, "high": high}
    if not hits or low <= 0 or mean <= MIN_RISE:
        return {"change": change, "warning": None}
    warning = (
        f"Answers are clearly worse than under {LABELS[default]}, by {mean:.2g} nats a token (95 %: {low:.2g} to "
        f"{high:.2g}): fit with --with-retrieval."
    )
    return {"change": change, "warning": warning}
