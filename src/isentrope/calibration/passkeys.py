"""Passkeys hidden in the texts of a calibration, so that a law is judged by what it finds as well."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from isentrope.data.tasks import Haystack, draft_example, fill_to_length
from isentrope.evaluation.prompts import Prompt, PromptFormat
from isentrope.evaluation.texts import Text

RETRIEVAL_WEIGHT = 0.1  # of -ln p for a token of the answer, against the loss for a token of text


def hide_passkeys(texts: Sequence[Text], prompts: PromptFormat, length: int, seed: int) -> dict[str, Prompt]:
    """Hide one passkey in each text, at a random depth; return prompts of up to `length` tokens by the text's hash."""
    hidden = {}
    for text in texts:
        filler = prompts.tokenizer.decode(text.tokens[:length], skip_special_tokens=True)
        depth = 100 * Random(f"{seed} {text.sha256}").random()
        draft = draft_example("passkey", length, depth, seed, 0, Haystack.from_texts([filler]))
        hidden[text.sha256] = prompts.build_prompt(fill_to_length(draft, length, prompts.count_tokens))
    return hidden
