"""Kernels behind switches (`isentrope/core/switches.py`): each on, against the same call with all of them off."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from measure import Call, Job, Row, Sizes, compared

import isentrope as ise
from isentrope.core import switches

TWO_BRANCHES = "rerope:window=1024"
LENGTHS = (8, 7, 6, 5, 4, 3, 2, 1)  # of padded rows, in eighths of the longest
BACKWARD_FLOPS = 3.5  # of forward and backward together, in forwards


def switched(size: Sizes) -> Iterator[Job]:
    """One row for each switch and case."""
    near, rows = size.windows[0], max(64, size.short // 2)
    two = TWO_BRANCHES.replace("1024", str(near))
    padded = {"lengths": [max(1, rows * n // 8) for n in LENGTHS]}
    entropy: dict[str, Any] = {"return_entropy": True}
    cases: list[tuple[str, str, str, tuple[int, int, int], dict[str, Any], bool]] = [
        (switches.ALIBI_COLUMNS, "ALiBi", "alibi", (1, size.middle, size.middle), {}, False),
        (switches.ALIBI_COLUMNS, "ALiBi", "alibi", (1, size.long, size.long), {}, False),
        (switches.BAND_CHUNKED_PREFILL, "chunk of queries", two, (1, size.short // 4, size.middle), {}, False),
        (switches.BAND_ROWS, "padded rows", two, (8, rows, rows), padded, False),
        (switches.BAND_ROWS, "padded rows, window", f"rope+window:size={near}", (8, rows, rows), padded, False),
        (switches.BAND_ROWS, "both directions", two, (1, size.short, size.short), {"causal": False}, False),
        (switches.BAND_BACKWARD, "padded rows, backward", two, (8, rows, rows), padded, True),
        (switches.BAND_BACKWARD, "backward", two, (1, size.short, size.short), {}, True),
        (
            switches.BAND_ENTROPY,
            "entropy",
            f"rope+infoscale:train_length={size.train_length}",
            (1, size.middle, size.middle),
            entropy,
            False,
        ),
        (switches.BAND_ENTROPY, "entropy, two branches", two, (1, size.middle, size.middle), entropy, False),
        (switches.RETRIEVE_ONE_CHUNK, "retrieve", f"{two}+retrieve", (1, size.middle, size.middle), {}, False),
        (switches.ONE_QUERY, "retrieve, one query", f"{two}+retrieve", (1, 1, size.middle), {}, False),
    ]
    for switch, name, recipe, shape, options, grad in cases:
        work = partial(_measure, size, switch, recipe, shape, options, grad)
        yield Job("switched", f"{switch}: {name}", shape[2], work)


def _measure(
    size: Sizes, switch: str, recipe: str, shape: tuple[int, int, int], options: dict[str, Any], grad: bool
) -> Row:
    batch, queries, keys = shape
    make = torch.Generator(size.device).manual_seed(0)
    q, k, v = (
        torch.randn(batch, size.heads, n, size.size, device=size.device, dtype=size.dtype, generator=make)
        for n in (queries, keys, keys)
    )
    for x in (q, k, v):
        x.requires_grad_(grad)
    options = {"causal": True, **options}

    def attend() -> object:
        if not grad:
            with torch.no_grad():
                return ise.attention(q, k, v, recipe, **options)
        return torch.autograd.grad(ise.attention(q, k, v, recipe, **options).sum(), (q, k, v))

    # the backward by intervals is for calls that the forward takes by intervals
    names = {switch, switches.BAND_ROWS} if switch == switches.BAND_BACKWARD else {switch}
    pairs = batch * (queries * keys - queries * (queries - 1) // 2)  # of whole causal rows
    flops = (BACKWARD_FLOPS if grad else 1) * 4.0 * pairs * size.size * size.heads
    return compared(size, _with(names, attend), _with(set(), attend), "the same, switched off", None, flops)


def _with(names: set[str], call: Call) -> Call:
    def run() -> object:
        before = switches.set_switches(names)
        try:
            return call()
        finally:
            switches.set_switches(before)

    return run
