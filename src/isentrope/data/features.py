"""What a document is like: the mean of a model's hidden states over it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModel, AutoTokenizer

import isentrope.models  # noqa: F401  AutoModel then knows GAU-α
from isentrope.core.dtypes import choose_load_dtype
from isentrope.pretrained import load_pretrained, saved_dtype

CHUNK, LONGEST = 512, 4096  # tokens read at a time, and of a document


def hidden_states(
    name: str, documents: Iterable[NDArray[np.int32]], tokenizer: Any, device: str = "auto"
) -> Iterator[NDArray[np.float64]]:
    """For each document the mean of the last hidden states over its first 4096 tokens, read 512 at a time, (size,).

    name: a model's folder, or its name on the hub. Where it comes with a tokenizer other than the one that made the
    documents, they are turned into text and into its tokens.
    """
    device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    config = AutoConfig.from_pretrained(name)
    dtype = choose_load_dtype(saved_dtype(name, config.dtype), None, device)
    # hidden states do not go through the pooler, which models for masked tokens lack
    model: Any = load_pretrained(AutoModel, name, unused=("pooler",), dtype=dtype).to(device).eval()
    own = _own_tokenizer(name)
    translate = own is not None and own.get_vocab() != tokenizer.get_vocab()
    known = model.get_input_embeddings().weight.shape[0]
    if not translate and known < len(tokenizer):
        raise ValueError(f"features: expected a model of {len(tokenizer)} tokens or more, got {known} in {name}")
    for document in documents:
        ids = document[:LONGEST].tolist()
        if translate:
            text = tokenizer.decode(ids)
            ids = own(text, add_special_tokens=False, truncation=True, max_length=LONGEST)["input_ids"]
        yield _mean(model, torch.tensor(ids, device=device))


def _mean(model: Any, ids: torch.Tensor) -> NDArray[np.float64]:
    whole = len(ids) // CHUNK * CHUNK
    parts = [part for part in (ids[:whole].reshape(-1, CHUNK), ids[whole:][None]) if part.numel()]
    with torch.inference_mode():
        states = [model(input_ids=part, attention_mask=torch.ones_like(part)).last_hidden_state for part in parts]
    return (sum(state.double().sum((0, 1)) for state in states) / len(ids)).cpu().numpy()


def _own_tokenizer(name: str) -> Any:
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError):  # a model without one
        return None
