"""Adapters of PEFT over an extended model: adapter_config.json keeps the recipe, and `load` applies it.

PEFT saves adapters alone. It knows no other keys in adapter_config.json, and warns of ours by name where it reads them.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from torch import nn
from transformers.utils.hub import cached_file

from isentrope.hf.layer import NAME

FILE = "adapter_config.json"


class MarkedAdapter:
    """A mixin for the config of an adapter whose base model is extended."""

    isentrope: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {NAME: self.isentrope}  # type: ignore[misc]


def _marked(base: Any) -> Any:
    return _marked_class(base)


@cache
def _marked_class(base: Any) -> Any:
    return type(base.__name__, (MarkedAdapter, base), {"__module__": base.__module__})


def mark_adapters(model: nn.Module, prefix: str, keep_vars: bool) -> None:
    """A hook before a model's state is collected, as PEFT does before it writes the configs of adapters."""
    for config in _adapters(model):
        if not isinstance(config, MarkedAdapter):
            config.__class__ = _marked(type(config))
        config.isentrope = getattr(model.config, NAME) | {"architecture": type(model).__name__}


def unmark_adapters(model: nn.Module) -> None:
    for config in _adapters(model):
        if isinstance(config, MarkedAdapter):
            config.__class__ = type(config).__mro__[2]


def _adapters(model: nn.Module) -> list[Any]:
    found = getattr(model, "peft_config", None)
    return list(found.values()) if isinstance(found, dict) else []


def read_adapter(folder: str | Path, hub: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    """An adapter's config and its base model's recipe, or None where there is no adapter with one."""
    path = cached_file(folder, FILE, _raise_exceptions_for_missing_entries=False, **hub)
    if path is None:
        return None
    given = json.loads(Path(path).read_text(encoding="utf-8"))
    saved = given.pop(NAME, None)
    if saved is None:
        return None
    try:
        from peft import PeftConfig
    except ImportError:
        raise ValueError(f"{folder}: an adapter needs PEFT; install it with pip install peft") from None
    return PeftConfig.from_peft_type(**given), saved
