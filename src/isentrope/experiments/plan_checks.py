"""Checks that plans of both kinds share: keys, lists and numbers of a YAML file."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from isentrope.utils.messages import suggest

KIND_NAMES = {int: "whole numbers", float: "numbers", str: "strings", dict: "mappings"}


def check_keys(where: str, data: Any, known: Collection[str], required: Collection[str] = ()) -> None:
    """Check that a mapping has no unknown key and all required ones.

    Raises:
        ValueError: With `where` before it and, for an unknown key, the closest known one.
    """
    if not isinstance(data, dict):
        raise ValueError(f"{where}: expected keys and values, got {data!r}")
    for key in data:
        if key not in known:
            raise ValueError(f"{where}: unknown key {key!r}{suggest(str(key), known)}")
    if missing := [key for key in required if not data.get(key)]:
        raise ValueError(f"{where}: missing {', '.join(missing)}")


def check_list(where: str, data: dict[str, Any], key: str, kind: type) -> tuple[Any, ...]:
    """Return a list of items of one type as a tuple; `float` also takes whole numbers."""
    items, kinds = data[key], (int, float) if kind is float else kind
    if not isinstance(items, list) or not all(isinstance(x, kinds) and not isinstance(x, bool) for x in items):
        raise ValueError(f"{where}: {key}: expected a list of {KIND_NAMES[kind]}, got {items!r}")
    return tuple(items)


def check_whole(where: str, data: dict[str, Any], key: str) -> int:
    """Return a whole number."""
    if type(value := data[key]) is not int:
        raise ValueError(f"{where}: {key}: expected a whole number, got {value!r}")
    return value
