"""Sizes of a decoder that decide what its prefill costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ModelShape:
    """A decoder with gated feed-forward layers and heads that share keys, such as Llama, Mistral, Qwen or SmolLM.

    Attributes:
        name: of the model.
        layers: L.
        hidden: h.
        heads: H, of queries.
        kv_heads: K, of keys and values.
        head_dim: d.
        feed_forward: f, the inner size of a feed-forward layer.
        vocabulary: tokens.
        tied: whether the output embedding is the input's.
        dtype_bytes: of a weight or an activation.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    feed_forward: int
    vocabulary: int
    tied: bool = False
    dtype_bytes: int = 2

    @property
    def layer_weights(self) -> int:
        """Weights of the products of one layer: h d (2 H + 2 K) + 3 h f."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        return attention + 3 * self.hidden * self.feed_forward

    @property
    def weights(self) -> int:
        """All weights, without the few of norms."""
        return self.layers * self.layer_weights + self.vocabulary * self.hidden * (1 if self.tied else 2)

    @property
    def kv_bytes(self) -> int:
        """Bytes of the keys and values of one token in one layer: 2 K d."""
        return 2 * self.kv_heads * self.head_dim * self.dtype_bytes


# from the models' config.json: meta-llama/Llama-3.2-1B, -3.2-3B, -3.1-8B, -3.1-70B (also arXiv:2407.21783, table 3)
SHAPES = {
    "1b": ModelShape("1b", 16, 2048, 32, 8, 64, 8192, 128256, tied=True),
    "3b": ModelShape("3b", 28, 3072, 24, 8, 128, 8192, 128256, tied=True),
    "8b": ModelShape("8b", 32, 4096, 32, 8, 128, 14336, 128256),
    "70b": ModelShape("70b", 80, 8192, 64, 8, 128, 28672, 128256),
}


def read_shape(model: str, gguf_file: str | None = None) -> ModelShape:
    """Return the shape of a named size, or read it from the config of a model.

    Args:
        model: "1b", "3b", "8b", "70b" (Llama 3's shapes), a folder, or a name on the hub.
        gguf_file: a GGUF file in that folder.

    Raises:
        ValueError: there is no such model, or it has experts, or its config lacks a size.
    """
    if model.lower() in SHAPES:
        return SHAPES[model.lower()]
    from isentrope.evaluation.loading import read_causal_config

    config = read_causal_config(model, gguf_file)
    if config is None:
        raise ValueError(f"model: expected a decoder, got GAU-α in {model}")
    return shape_from_config(model, config.get_text_config())


def shape_from_config(name: str, config: Any) -> ModelShape:
    """Read the shape from a transformers config.

    Raises:
        ValueError: the model has experts, or a size is missing.
    """
    if (experts := max(getattr(config, key, None) or 0 for key in ("num_experts", "num_local_experts"))) > 1:
        raise ValueError(f"model: the cost model has no mixture of experts, got {experts} in {name}")
    keys = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
    missing = [key for key in keys if getattr(config, key, None) is None]
    if missing:
        raise ValueError(
            f"model: expected {', '.join(missing)} in the config of {name}; name a size such as 8b instead"
        )
    layers, hidden, heads, feed_forward, vocabulary = (getattr(config, key) for key in keys)
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    tied = bool(getattr(config, "tie_word_embeddings", False))
    return ModelShape(name, layers, hidden, heads, kv_heads, head_dim, feed_forward, vocabulary, tied)
