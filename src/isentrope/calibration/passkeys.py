"""Passkeys hidden in the texts of a calibration, so that a law is judged by what it finds as well."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from random import Random

import torch
from transformers import PreTrainedModel

from isentrope.data.tasks import Haystack, draft_example, fill_to_length
from isentrope.evaluation.answers import score_answer
from isentrope.evaluation.loading import load_tokenizer
from isentrope.evaluation.prompts import Prompt, PromptFormat
from isentrope.evaluation.recipe_texts import under_recipe
from isentrope.evaluation.texts import Text
from isentrope.recipe import Recipe

RETRIEVAL_WEIGHT = 0.1  # of -ln p for a token of the answer, against the loss for a token of text


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


def count_hits(model: PreTrainedModel, laws: Mapping[str, Recipe], prompts: Iterable[Prompt]) -> dict[str, int]:
    """Count the prompts that a model answers under each recipe: every token of the answer is the likeliest."""
    hits = {}
    for name, recipe in laws.items():
        with under_recipe(model, recipe), torch.no_grad():
            scores = [score_answer(model, prompt) for prompt in prompts]
        hits[name] = sum(score["likeliest"] == score["answer"] for score in scores)
    return hits
