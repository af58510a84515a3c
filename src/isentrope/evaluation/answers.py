"""Scores of one prompt: how likely the answer is, and what the model replies."""

from __future__ import annotations

from math import isfinite
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from isentrope.evaluation.masked_lm import UnmeasurableError
from isentrope.evaluation.perplexity import builds_mask, read_in_chunks
from isentrope.evaluation.prompts import Prompt


def score_answer(model: PreTrainedModel, prompt: Prompt) -> dict[str, Any]:
    """Compute ln p of the answer's tokens after the prompt and one another, and count those that are the likeliest.

    Greedy decoding gives the answer word for word where all are. `recalled`: the share of the answers, of those that a
    reply names one after another, all of whose tokens are.

    Args:
        model: A causal model.
        prompt: The prompt with its answer.
    """
    logits, answer = compute_answer_logits(model, prompt)
    logprob = float(logits.log_softmax(-1).gather(1, answer[:, None]).double().sum())
    if not isfinite(logprob):
        raise UnmeasurableError("no probability: the model's logits are not finite")
    right = (logits.argmax(-1) == answer).tolist()
    ends = prompt.part_ends if prompt.part_ends[-1:] == (len(right),) else (len(right),)
    parts = [all(right[start:end]) for start, end in zip((0, *ends), ends, strict=False)]
    recalled = sum(parts) / len(parts)
    return {"answer": len(right), "likeliest": sum(right), "recalled": recalled, "logprob": logprob}


def compute_answer_logits(model: PreTrainedModel, prompt: Prompt) -> tuple[Tensor, Tensor]:
    """Compute the logits of the answer's tokens in fp32, (tokens, vocabulary), and return them with these tokens.

    Args:
        model: A causal model.
        prompt: The prompt with its answer.
    """
    ids = torch.tensor([prompt.tokens + prompt.answer[:-1]], device=model.device)
    answer = torch.tensor(prompt.answer, device=model.device)
    cache = _read_before(model, ids, len(answer))
    rest = ids if cache is None else ids[:, -len(answer) :]
    output = model(input_ids=rest, past_key_values=cache, use_cache=cache is not None, logits_to_keep=len(answer))
    logits = output.logits[0].float()
    if len(logits) != len(answer):
        raise ValueError(f"logits: expected those of the last {len(answer)} tokens, got {len(logits)}")
    return logits, answer


def _read_before(model: PreTrainedModel, ids: Tensor, last: int) -> Cache | None:
    """Read all but the last tokens into a cache, in chunks; None where one pass over all of them will do."""
    if not builds_mask(model, ids.shape[1]):
        return None
    cache = DynamicCache(config=model.config)
    read_in_chunks(model, ids[:, :-last], cache)
    return cache


def generate_answer(model: PreTrainedModel, tokenizer: Any, prompt: Prompt) -> dict[str, Any]:
    """Decode greedily with a cache; return the reply, and the share of the answers in it.

    Args:
        model: A causal model.
        tokenizer: Its tokenizer.
        prompt: The prompt with its answer.
    """
    ids = torch.tensor([prompt.tokens], device=model.device)
    end = getattr(model.generation_config, "eos_token_id", None)
    pad = next((x for x in (tokenizer.pad_token_id, *(end if isinstance(end, list) else [end])) if x is not None), 0)
    out: Any = model.generate(  # type: ignore[operator]
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=prompt.max_new_tokens,
        pad_token_id=pad,
        use_cache=True,
        past_key_values=_read_before(model, ids, 1),
        # greedy, whatever the model's own settings are
        do_sample=False,
        num_beams=1,
        repetition_penalty=1.0,
        no_repeat_ngram_size=0,
    )
    if not torch.equal(out[0, : ids.shape[1]], ids[0]):
        raise ValueError("generate: expected the whole prompt before the reply, got another")
    reply = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    return {"reply": reply, "share": prompt.example.count_answers(reply) / len(prompt.example.answers)}
