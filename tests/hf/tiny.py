"""Small models with random weights."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 97
TRAINED = 64


def llama(seed: int = 0, **overrides) -> LlamaForCausalLM:
    """A causal model "trained" at 64, with weights large enough for attention to be sharp."""
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": TRAINED,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
        "initializer_range": 0.3,
    }
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**(sizes | overrides))).eval()


def tokens(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))
