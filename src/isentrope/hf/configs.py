"""The configs of a model, and what is changed in a model for a moment."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel


def list_configs(model: nn.Module) -> list[PreTrainedConfig]:
    """List every config object in a model, the inner ones last."""
    configs: dict[int, PreTrainedConfig] = {}

    def add(config: Any) -> None:
        if isinstance(config, PreTrainedConfig) and id(config) not in configs:
            configs[id(config)] = config
            for name in config.sub_configs:
                add(getattr(config, name, None))

    for module in model.modules():
        add(getattr(module, "config", None))
    return list(configs.values())


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def with_implementation(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Run a block with another attention implementation."""
    before = [(config, config._attn_implementation) for config in list_configs(model)]
    try:
        for config, _ in before:
            config._attn_implementation = name
        yield
    finally:
        for config, implementation in before:
            config._attn_implementation = implementation
