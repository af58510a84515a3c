"""Switches of GPU kernels that have been proven, but not timed on a GPU: all are off until they are.

The environment variable ISENTROPE_KERNELS turns some on, as in `ISENTROPE_KERNELS=alibi-columns,band-rows`, or "all".
"""

from __future__ import annotations

from collections.abc import Iterable
from os import environ

VARIABLE = "ISENTROPE_KERNELS"
ALIBI_COLUMNS = "alibi-columns"
BAND_ROWS = "band-rows"
BAND_ENTROPY = "band-entropy"
BAND_BACKWARD = "band-backward"
BAND_POINTERS = "band-pointers"
BAND_CHUNKED_PREFILL = "band-chunked-prefill"
ONE_QUERY = "retrieve-one-query"
SWITCHES = {
    ALIBI_COLUMNS: "ALiBi on a GPU as plain causal attention, positions being further columns of q and k",
    BAND_ROWS: "padded and packed rows, and both directions, on the band kernel",
    BAND_ENTROPY: "entropy in the band kernel's own pass",
    BAND_BACKWARD: "the backward of the band kernel in Triton",
    BAND_POINTERS: "the band kernel on cards without copy engine",
    BAND_CHUNKED_PREFILL: "a chunk of queries against a longer cache: far keys as a rectangle and a triangle",
    ONE_QUERY: "one query that chooses far keys in two launches",
}


def parse_switches(text: str) -> frozenset[str]:
    """Return the switches that a text names, separated by commas; "all" names every one.

    Raises:
        ValueError: there is no such switch.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in SWITCHES and name != "all"]
    if unknown:
        raise ValueError(f"{VARIABLE}: expected some of all, {', '.join(SWITCHES)}, got {unknown[0]!r}")
    return frozenset(SWITCHES) if "all" in names else frozenset(names)


_on: frozenset[str] = parse_switches(environ.get(VARIABLE, ""))


def is_on(name: str) -> bool:
    """Return whether a switch is on."""
    return name in _on


def list_switches() -> frozenset[str]:
    """Return the switches that are on."""
    return _on


def set_switches(names: Iterable[str]) -> frozenset[str]:
    """Turn these switches on and all others off; return those that were on before."""
    global _on
    before, _on = _on, parse_switches(",".join(names))
    return before
