"""Switches of GPU kernels: those that gain on the GPU they were timed on are on, the others off.

The environment variable ISENTROPE_KERNELS changes the defaults, from left to right: `-band-rows` turns a kernel off,
`band-backward` one on, `none` all off and `all` all on, as in `ISENTROPE_KERNELS=-band-rows,band-backward`.
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
BAND_SLOPES = "band-slopes"
BAND_SPANS = "band-spans"
BAND_SPANS_BACKWARD = "band-spans-backward"
ONE_QUERY = "retrieve-one-query"
PACKED_PADDING = "packed-padding"
SWITCHES = {
    ALIBI_COLUMNS: "ALiBi that the band kernel does not take: positions as further columns of q and k",
    BAND_ROWS: "padded and packed rows, and both directions, on the band kernel",
    BAND_ENTROPY: "entropy in the band kernel's own pass",
    BAND_BACKWARD: "the backward of the band kernel in Triton, where that for Hopper does not run",
    BAND_POINTERS: "the band kernel on cards without copy engine",
    BAND_CHUNKED_PREFILL: "a chunk of queries against a longer cache: far keys as a rectangle and a triangle",
    BAND_SLOPES: "ALiBi on the band kernel, without keys too far to count",
    BAND_SPANS: "near and far keys in one pass, on Hopper: the band's kernel in Gluon",
    BAND_SPANS_BACKWARD: "the backward of windows, padded and packed rows, and both directions in Gluon, on Hopper",
    ONE_QUERY: "one query that chooses far keys in two launches",
    PACKED_PADDING: "padded rows as one packed row, where FlexAttention would compute much padding",
}
# by files of benchmarks/results: the backward in Triton was slower than PyTorch's; pointers are not timed
DEFAULTS = frozenset(SWITCHES) - {BAND_BACKWARD, BAND_POINTERS}


def parse_switches(text: str) -> frozenset[str]:
    """Return the switches that are on after the changes to the defaults that a text names.

    Raises:
        ValueError: there is no such switch.
    """
    on = DEFAULTS
    for name in filter(None, (part.strip() for part in text.split(","))):
        if name in ("all", "none"):
            on = frozenset(SWITCHES if name == "all" else ())
        elif name.removeprefix("-") not in SWITCHES:
            known = ", ".join(SWITCHES)
            raise ValueError(f"{VARIABLE}: expected all, none, or some of {known}, with - to turn off, got {name!r}")
        else:
            on = on - {name[1:]} if name.startswith("-") else on | {name}
    return on


_on: frozenset[str] = parse_switches(environ.get(VARIABLE, ""))


def is_on(name: str) -> bool:
    """Return whether a switch is on."""
    return name in _on


def list_switches() -> frozenset[str]:
    """Return the switches that are on."""
    return _on


def set_switches(names: Iterable[str]) -> frozenset[str]:
    """Turn exactly these switches on and all others off; return those that were on before."""
    global _on
    before, _on = _on, parse_switches(",".join(("none", *names)))
    return before
