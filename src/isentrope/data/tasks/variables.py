"""Chains of variables: X = 12345, Y = X, …, hidden in a text; all variables of one value are asked for."""

from __future__ import annotations

from isentrope.data.tasks.draw import Draw, spread_depths
from isentrope.data.tasks.example import ExampleDraft

VARIABLE_CHAINS, CHAIN_LENGTH = 2, 4  # one of the chains is the answer
RULER_CHAIN_LENGTH = 5  # four hops


def draft_variables(draw: Draw) -> ExampleDraft:
    """Hide two chains of four variables and ask for those of one."""
    return _draft_chains(draw, VARIABLE_CHAINS, CHAIN_LENGTH, anywhere=False)


def draft_ruler_variables(draw: Draw) -> ExampleDraft:
    """Hide one chain of four hops and ask for its five variables: RULER's variable tracking (Hsieh et al., 2024)."""
    return _draft_chains(draw, 1, RULER_CHAIN_LENGTH, anywhere=True)


def _draft_chains(draw: Draw, count: int, length: int, anywhere: bool) -> ExampleDraft:
    names = draw.variables(count * length)
    chains = [names[i * length : (i + 1) * length] for i in range(count)]
    values = draw.numbers(5, count)
    needles = [
        (d, f"Let {name} = {before}.")
        for chain, value in zip(chains, values, strict=True)
        for d, name, before in zip(spread_depths(draw.random, length), chain, (value, *chain), strict=False)
    ]
    return ExampleDraft(
        "The text below gives values to variables. Keep track of them.",
        f"Which {length} variables have the value {values[0]}, directly or through others?",
        f"The variables with the value {values[0]} are",
        tuple(chains[0]),
        tuple(names[length:]),
        draw.hide(needles, False),
        anywhere=anywhere,
    )
