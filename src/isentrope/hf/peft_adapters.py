"""Adapters of PEFT over an extended model: adapter_config.json keeps the recipe, and `load` applies it.

PEFT saves adapters without their base model. It warns of keys in adapter_config.json that are unknown to it, ours among
them.
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
    """Add the recipe to the configs of adapters; a hook on `state_dict`, which PEFT calls before it writes them."""
    for config in _list_adapters(model):
        if not isinstance(config, MarkedAdapter):
            base: Any = type(config)
            config.__class__ = _make_marked_class(base)
        config.isentrope = getattr(model.config, CONFIG_KEY) | {"architecture": type(model).__name__}


def unmark_adapters(model: nn.Module) -> None:
    """Undo `mark_adapters`."""
    for config in _list_adapters(model):
        if isinstance(config, MarkedAdapter):
            config.__class__ = type(config).__mro__[2]


def _list_adapters(model: nn.Module) -> list[Any]:
    configs = getattr(model, "peft_config", None)
    return list(configs.values()) if isinstance(configs, dict) else []


def read_adapter(folder: str | Path, hub: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    """Read an adapter's config and its base model's recipe; None where there is no adapter with one."""
    path = cached_file(folder, ADAPTER_CONFIG, _raise_exceptions_for_missing_entries=False, **hub)
    if path is None:
        return None
    config = json.loads(Path(path).read_text(encoding="utf-8"))
    saved = config.pop(CONFIG_KEY, None)
    if saved is None:
        return None
    try:
        from peft import PeftConfig
    except ImportError:
        raise ValueError(f"{folder}: an adapter needs PEFT; install it with pip install peft") from None
    return PeftConfig.from_peft_type(**config), saved
