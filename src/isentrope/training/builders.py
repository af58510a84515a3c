"""Build what a training run needs: the model, the tokenizer and the batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from isentrope.data.batches import CropBatches, MaskedBatches, NextTokenBatches
from isentrope.data.prepared import PreparedCorpus
from isentrope.models import GAUAlphaConfig, GAUAlphaForMaskedLM
from isentrope.models.gau.config import LEARNED_WEIGHTS, build_gau_recipe
from isentrope.models.tokenizer import make_causal_tokenizer
from isentrope.pretrained import (
    check_same_tokens,
    load_pretrained,
    read_config_as,
    read_tokenizer,
    resolve_model_name,
)
from isentrope.training.config import LLAMA_SIZES, TrainingConfig


def build_tokenizer(corpus: PreparedCorpus, objective: str) -> Any:
    """Load a corpus' tokenizer, without the special tokens around a text for causal models."""
    tokenizer: Any = read_tokenizer(corpus.tokenizer_path)
    keep = objective == "masked" or tokenizer.cls_token is None
    return tokenizer if keep else make_causal_tokenizer(tokenizer)


def build_model(config: TrainingConfig, tokenizer: Any) -> PreTrainedModel:
    """Build the initial model under the recipe that it is trained with.

    Raises:
        ValueError: The model to start from has too few layers or other tokens.
    """
    return _build_llama(config, tokenizer) if config.objective == "causal" else _build_gau(config, tokenizer)


def _build_gau(config: TrainingConfig, tokenizer: Any) -> PreTrainedModel:
    options: dict[str, Any] = {"recipe": config.recipe, "max_position_embeddings": config.length}
    if config.dropout is not None:
        options |= {"hidden_dropout_prob": config.dropout, "attention_probs_dropout_prob": config.dropout}
    if config.model is None:
        options |= {"num_hidden_layers": config.layers, "vocab_size": len(tokenizer)} | (config.sizes or {})
        return GAUAlphaForMaskedLM(GAUAlphaConfig(pad_token_id=tokenizer.pad_token_id, **options))
    saved: Any = read_config_as(GAUAlphaConfig, config.model)
    options["recipe"] = build_gau_recipe(config.recipe, config.length, saved.attention_key_size).to_dict()
    return _load_first_layers(GAUAlphaForMaskedLM, saved.num_hidden_layers, config, tokenizer, options)


def _build_llama(config: TrainingConfig, tokenizer: Any) -> PreTrainedModel:
    options: dict[str, Any] = {"max_position_embeddings": config.length, "use_cache": False}
    if config.dropout is not None:
        options["attention_dropout"] = config.dropout
    if config.model is not None:
        layers = read_config_as(LlamaConfig, config.model).num_hidden_layers
        return _load_first_layers(LlamaForCausalLM, layers, config, tokenizer, options)
    options |= {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    options |= {"num_hidden_layers": config.layers, "vocab_size": len(tokenizer), "tie_word_embeddings": True}
    options |= {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    return LlamaForCausalLM(LlamaConfig(**(options | LLAMA_SIZES | (config.sizes or {}))))


def _load_first_layers(
    model_class: Any, saved_layers: int, config: TrainingConfig, tokenizer: Any, options: dict[str, Any]
) -> PreTrainedModel:
    if saved_layers < config.layers:
        raise ValueError(f"layers: expected at most the model's {saved_layers}, got {config.layers}")
    check_same_tokens(Path(str(config.model)), tokenizer)
    options |= {"num_hidden_layers": config.layers, "dtype": torch.float32}
    name = resolve_model_name(str(config.model))
    model: PreTrainedModel = load_pretrained(model_class, name, unused=LEARNED_WEIGHTS, **options)
    if model.config.vocab_size != len(tokenizer):
        sizes = f"{model.config.vocab_size} and {len(tokenizer)} tokens"
        raise ValueError(f"model: expected the corpus' tokenizer, got {sizes}; prepare the corpus with the model's own")
    return model


def build_batches(corpus: PreparedCorpus, config: TrainingConfig, tokenizer: Any) -> tuple[CropBatches, CropBatches]:
    """Build the training batches and those of the validation loss."""
    batch_class: type[CropBatches] = NextTokenBatches
    options: dict[str, Any] = {"length": config.length, "size": config.batch, "crop": config.crop}
    if config.objective == "masked":
        if tokenizer.mask_token_id is None:
            raise ValueError("tokenizer: expected one with a mask token, got none")
        ordinary = np.setdiff1d(np.arange(len(tokenizer)), tokenizer.all_special_ids)
        options |= {"mask_token": tokenizer.mask_token_id, "replacement_tokens": ordinary}
        batch_class, options = MaskedBatches, options | {"share": config.share, "pose": config.pose}
    train = batch_class(corpus.documents("train"), seed=config.batch_seed, **options)
    return train, batch_class(corpus.documents("validation"), seed=(1 << 62) + 1, **options)
