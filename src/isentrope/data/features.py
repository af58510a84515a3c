"""Document features: a model's mean hidden state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModel, AutoTokenizer

import isentrope.models  # noqa: F401  registers GAU-α with AutoModel
from isentrope.core.dtypes import choose_load_dtype
from isentrope.pretrained import load_pretrained, saved_dtype

CHUNK_TOKENS, MAX_DOCUMENT_TOKENS = 512, 4096


def mean_hidden_states(
    name: str, documents: Iterable[NDArray[np.int32]], tokenizer: Any, device: str = "auto"
) -> Iterator[NDArray[np.float64]]:
    """Yield each document's mean last hidden state over its first 4096 tokens, read 512 at a time, (hidden size,).

    Args:
        name: A model's folder or its name on the hub. Documents are decoded and tokenized again if the model has
            another tokenizer.
        documents: Token ids of each document.
        tokenizer: The tokenizer that the documents were made with.
        device: "auto" for a GPU if there is one.
    """
    device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    config = AutoConfig.from_pretrained(name)
    dtype = choose_load_dtype(saved_dtype(name, config.dtype), None, device)
    # Masked models have no pooler weights, and hidden states do not need them.
    model: Any = load_pretrained(AutoModel, name, unused=("pooler",), dtype=dtype).to(device).eval()
    own = _load_tokenizer(name)
    translate = own is not None and own.get_vocab() != tokenizer.get_vocab()
    vocabulary = model.get_input_embeddings().weight.shape[0]
    if not translate and vocabulary < len(tokenizer):
        raise ValueError(f"features: expected a model of {len(tokenizer)} tokens or more, got {vocabulary} in {name}")
    for document in documents:
        ids = document[:MAX_DOCUMENT_TOKENS].tolist()
        if translate:
            text = tokenizer.decode(ids)
            ids = own(text, add_special_tokens=False, truncation=True, max_length=MAX_DOCUMENT_TOKENS)["input_ids"]
        yield _mean(model, torch.tensor(ids, device=device))


def _mean(model: Any, ids: torch.Tensor) -> NDArray[np.float64]:
    whole = len(ids) // CHUNK_TOKENS * CHUNK_TOKENS
    parts = [part for part in (ids[:whole].reshape(-1, CHUNK_TOKENS), ids[whole:][None]) if part.numel()]
    with torch.inference_mode():
        states = [model(input_ids=part, attention_mask=torch.ones_like(part)).last_hidden_state for part in parts]
    return (sum(state.double().sum((0, 1)) for state in states) / len(ids)).cpu().numpy()


def _load_tokenizer(name: str) -> Any:
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError):  # the model has none
        return None
