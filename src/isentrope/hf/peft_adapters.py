"""Adapters of PEFT over an extended model: adapter_config.json keeps the recipe of the base model.

PEFT saves adapters without their base model. It warns of keys in adapter_config.json that are unknown to it, ours among
them. `loading` and `isentrope.peft_methods` apply the recipe.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from torch import nn
from transformers.utils.hub import cached_file

from isentrope.hf.names import CONFIG_KEY

ADAPTER_CONFIG = "adapter_config.json"


class MarkedAdapter:
    """A mixin for the config of an adapter whose base model is extended."""

    isentrope: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {CONFIG_KEY: self.isentrope}  # type: ignore[misc]


@cache  # not for speed: a class is the same object every time
def _make_marked_class(base: Any) -> Any:
    return type(base.__name__, (MarkedAdapter, base), {"__module__": base.__module__})


def mark_adapters(model: nn.Module, prefix: str, keep_vars: bool) -> None:
    """A hook on `state_dict`, which transformers calls before it saves adapters."""
    mark_configs(model, model)


def mark_configs(model: nn.Module, extended: nn.Module) -> None:
    """Add the recipe of an extended model to the configs of adapters on it, or on PEFT's wrapper around it."""
    for config in get_adapters(model).values():
        if not isinstance(config, MarkedAdapter):
            base: Any = type(config)
            config.__class__ = _make_marked_class(base)
        config.isentrope = getattr(extended.config, CONFIG_KEY) | {"architecture": type(extended).__name__}


def unmark_configs(model: nn.Module) -> None:
    """Undo `mark_configs`."""
    for config in get_adapters(model).values():
        if isinstance(config, MarkedAdapter):
            config.__class__ = type(config).__mro__[2]


def get_adapters(model: nn.Module) -> dict[str, Any]:
    """Return the configs of the adapters on a model, by name."""
    configs = getattr(model, "peft_config", None)
    return configs if isinstance(configs, dict) else {}


def read_adapter(folder: str | Path, hub: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Read adapter_config.json and the recipe in it; None where there is no such file or no recipe."""
    path = cached_file(folder, ADAPTER_CONFIG, _raise_exceptions_for_missing_entries=False, **hub)
    if path is None:
        return None
    config = json.loads(Path(path).read_text(encoding="utf-8"))
    saved = config.pop(CONFIG_KEY, None)
    return None if saved is None else (config, saved)
