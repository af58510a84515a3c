"""Answers of models that would build a mask of all pairs."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from isentrope.data.tasks.vocabulary import FILLER
from isentrope.evaluation import answers, perplexity
from isentrope.evaluation.answers import generate_answer, score_answer
from isentrope.evaluation.prompts import Prompt, PromptFormat
from isentrope.models.tokenizer import build_character_tokenizer, make_causal_tokenizer
from tests.fixtures.generation import gemma, mistral
from tests.fixtures.needles import made


@pytest.mark.parametrize("make", [gemma, mistral])
@torch.no_grad()
def test_a_plain_model_with_windows_answers_long_prompts_without_a_mask_of_all_pairs(make, monkeypatch):
    letters = make_causal_tokenizer(build_character_tokenizer([FILLER + "".join(map(chr, range(32, 127)))]))
    model, prompt = make(), PromptFormat.from_tokenizer(letters).build_prompt(made("passkey", length=400))
    ids = tuple(token % 60 for token in prompt.tokens)
    prompt = Prompt(prompt.example, prompt.text, ids, tuple(token % 60 for token in prompt.answer))
    expected, reply = score_answer(model, prompt), generate_answer(model, letters, prompt)
    monkeypatch.setattr(perplexity, "MAX_MASK", 50 * len(ids))
    with patch.object(answers, "read_in_chunks", wraps=perplexity.read_in_chunks) as read:
        assert score_answer(model, prompt) == pytest.approx(expected, rel=1e-4)
        assert generate_answer(model, letters, prompt) == reply
    assert [call.args[1].shape[1] for call in read.call_args_list] == [len(ids) - 1, len(ids) - 1]
