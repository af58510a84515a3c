"""What was done to an extended model, and how to find it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedConfig, PreTrainedModel

from isentrope.hf.introspection import LayerInfo
from isentrope.hf.names import EXTENSION
from isentrope.hf.rope import ModelRope
from isentrope.recipe import Recipe


@dataclass
class Extension:
    """What was done to a model, and what it takes to undo it.

    Attributes:
        layers: the model's layers as they were.
        notes: for config.json: the model's name before ("base"), why the recipe was chosen where it was `auto`
            ("reasons"), what was measured.
        configs: of each config its original, the model's own copy, and the values of that copy when it was made.
        handles: of the hooks.
        frequencies: of each rotary module that was written to, its frequencies and scaling before.
        quantizer: attributes of the model that said its weights were those of a GGUF file.
        reach: the longest text that it knows all distances of, once that was looked up.
    """

    recipe: Recipe
    model_type: str
    layers: list[LayerInfo]
    notes: dict[str, Any] = field(default_factory=dict)
    configs: list[tuple[PreTrainedConfig, PreTrainedConfig, dict[str, Any]]] = field(default_factory=list)
    handles: list[RemovableHandle] = field(default_factory=list)
    frequencies: list[tuple[ModelRope, Tensor, float]] = field(default_factory=list)
    quantizer: dict[str, Any] = field(default_factory=dict)
    reach: tuple[int | None] | None = None


def get_extension(model: nn.Module) -> Extension:
    """Return how a model was extended; raise ValueError where it was not."""
    extension = find_extension(model)
    if extension is None:
        raise ValueError("model: expected a model that isentrope.extend was called on, got one that is not extended")
    return extension


def find_extension(model: nn.Module) -> Extension | None:
    """Return how a model was extended, or None."""
    inner = find_model(model)
    return None if inner is None else inner.__dict__.get(EXTENSION)


def find_model(model: Any) -> Any:
    """Return the transformers model in a wrapper such as PEFT's, or None."""
    modules = model.modules() if isinstance(model, nn.Module) else ()
    return next((module for module in modules if isinstance(module, PreTrainedModel)), None)


def get_model(model: Any) -> Any:
    """Return the transformers model in a wrapper such as PEFT's; raise ValueError where there is none."""
    inner = find_model(model)
    if inner is None:
        raise ValueError(f"model: expected a transformers model, got {type(model).__name__}; load one and pass that")
    return inner
