"""Recipes that are almost right: texts and data mutated at random, each refused in one line or computed right.

`mutants(seed, count)` yields them, `check(mutant)` judges one.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product
from typing import Any

import torch

import isentrope as ise
from tests.contract.matrix import CPU_BACKENDS, FAR_LAWS, FAR_POSITIONS, MASKS, POSITIONS, SCORES, TEMPERATURES, takes

Mutant = str | dict[Any, Any]

LONGEST_MESSAGE = 700  # the longest that is meant lists every part there is
HEADS, HEAD_DIM = 4, 16
LENGTHS = (1, 7, 20)
LETTERS = "abcxyz0123456789.,:=+-&|()[]{}'\"\\_ \t\n\x00éλ１٣∞\U0001f600\ud800"
NUMBERS = (
    "0", "-0", "-1", "1", "2", "3", "4", "5", "16", "64", "100", "1000", "4096", "0.1", "0.5", "1.001", "1.5",
    "1e-300", "5e-324", "1e-16", "0.9999999", "1.0000000000000002", "1e3", "1e16",
    "1e38", "1e300", "-1e300", "1e308", "1e400", "-1e400", "nan", "inf", "2147483648", "9007199254740993",
    "18446744073709551616", "9" * 400, "-" + "9" * 400, "9" * 5000, "0." + "0" * 400 + "1", "0x10", "1_000", "1j",
    "007", "1e", "1e5.5", "٣", "１",
)  # fmt: skip
WORDS = (
    "True", "False", "None", "none", "''", "'4'", "b'4'", "()", "(1,)", "(1,(2,))", "[1]", "{}", "{[]: 1}", "{1}",
    "...", "lambda: 1", "__import__('os')", "(" * 200 + ")" * 200, "[" * 5000 + "]" * 5000, "-" * 5000 + "1",
    "x" * 100_000,
)  # fmt: skip


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def values() -> tuple[Any, ...]:
    """Values that an option of a recipe, read from JSON, may have by mistake."""
    return (
        None, True, False, 0, -1, 1, 2, 4, 1.5, 0.5, 1e-300, 1e16, 1e38, 1e300, -1e300, float("nan"), float("inf"),
        2**31, 2**53 + 1, 2**64, 10**400, -(10**400), 10**5000, "", "4", "half", "x" * 100_000, "\ud800", [], [1], {},
        {"name": "rope"}, {"name": "window", "size": 4}, [1, [2]], [[1.0, 2.0], [3.0]], ["a"], [None, 1], [True, 1],
        [1e300, -1e300], [10**400, 1], [1j], 1j, b"4", nested(50), nested(5000), (1, 2), {1, 2}, object,
        torch.ones(2, 2),
    )  # fmt: skip


def seeds_of_recipes(random_: random.Random) -> ise.Recipe:
    """A valid recipe, of every part with every other."""
    parts = [random_.choice(kind) for kind in (POSITIONS, TEMPERATURES, SCORES, MASKS)]
    if parts[0] in FAR_POSITIONS:
        parts[1] = random_.choice(FAR_LAWS)
    text = "+".join(part for part in parts if part) or "plain"
    factors = tuple(1 + 0.5 * pair for pair in range(HEAD_DIM // 2))
    return ise.Recipe.parse(text.format(d=HEAD_DIM, heads=HEADS, table=(0.5, -1.0, 0.25, 2.0), factors=factors))


def mutants(seed: int, count: int) -> Iterator[Mutant]:
    """`count` mutants, the same for the same seed."""
    for index in range(count):
        random_ = random.Random(f"{seed} {index}")
        recipe = seeds_of_recipes(random_)
        mutant: Mutant = str(recipe) if index % 2 else recipe.to_dict()
        for _ in range(random_.choice((1, 1, 1, 2, 3))):
            mutant = mutated_text(mutant, random_) if isinstance(mutant, str) else mutated_data(mutant, random_)
        yield mutant


def mutated_text(text: str, random_: random.Random) -> str:
    a, b = sorted(random_.randint(0, len(text)) for _ in range(2))
    match random_.randrange(13):
        case 0:  # swap two characters
            return text[:a] + text[b : b + 1] + text[a + 1 : b] + text[a : a + 1] + text[b + 1 :] if a < b else text
        case 1:
            return text[:a] + text[b:]
        case 2:
            return text[:b] + text[a:b] + text[b:]
        case 3:
            return text[:a] + random_.choice(LETTERS) + text[a:]
        case 4:
            return text[:a] + random_.choice(LETTERS) + text[a + 1 :]
        case 5:
            deep = random_.choice((1, 2, 40, 5000))
            return "(" * deep + text + ")" * deep
        case 6:
            part = random_.choice(text.split("+"))
            return text + "+" + part
        case 7:  # many masks
            joined = random_.choice("&|").join(
                f"sink:sinks={random_.randint(0, 20)},size={random_.randint(1, 20)}"
                for _ in range(random_.choice((2, 5, 30, 300)))
            )
            return f"{text}{random_.choice('+&|')}{joined}"
        case 8:
            return text.upper() if random_.random() < 0.5 else text.replace(":", " : ").replace("=", " = ")
        case _:
            return with_value(text, random_)


def with_value(text: str, random_: random.Random) -> str:
    """The text with another value for one of its options."""
    pieces = text.split("=")
    if len(pieces) < 2:
        return text + ":" + random_.choice(("base", "factor", "alpha", "size", "table")) + "=" + random_.choice(NUMBERS)
    at = random_.randrange(1, len(pieces))
    ends = [end for sign in ",+&|" if (end := pieces[at].find(sign)) >= 0]
    rest = pieces[at][min(ends) :] if ends else ""
    pieces[at] = random_.choice(NUMBERS if random_.random() < 0.8 else WORDS) + rest
    return "=".join(pieces)


def mutated_data(data: dict[Any, Any], random_: random.Random) -> dict[Any, Any]:
    """The data itself, changed in one place."""
    nodes = [node for node in containers(data) if node]
    if not nodes:
        return {random_.choice(("position", "mask", "", 3)): random_.choice(values())}
    node = random_.choice(nodes)
    key = random_.choice(list(node) if isinstance(node, dict) else range(len(node)))
    match random_.randrange(8):
        case 0:
            del node[key]
        case 1 if isinstance(node, dict):
            node[random_.choice(("name", "base", "alpha", "mask", "masks", 3, None, "x" * 1000))] = node.pop(key)
        case 2 if isinstance(node, dict):
            node[random_.choice(("base", "factor", "clamp", "count", "masks", "name"))] = random_.choice(values())
        case 3:
            mask: dict[str, Any] = {"name": "window", "size": 5}
            for _ in range(random_.choice((1, 3, 50, 5000))):
                mask = {"name": random_.choice(("and", "or")), "masks": [mask, {"name": "causal"}]}
            data["mask"] = mask
        case 4:
            many = random_.choice((2, 30, 300))
            masks = [{"name": "sink", "sinks": i % 17, "size": 1 + i % 13} for i in range(many)]
            data["mask"] = {"name": random_.choice(("and", "or")), "masks": masks}
        case _:
            node[key] = random_.choice(values())
    return data


def containers(value: Any) -> Iterator[Any]:
    """The dictionaries and lists inside a value, itself among them."""
    pending = [value]
    while pending:
        value = pending.pop()
        if isinstance(value, (dict, list)):
            yield value
            pending += value.values() if isinstance(value, dict) else value


def check(mutant: Mutant) -> str:
    """ "refused" or "right"; an AssertionError says what else a mutant did."""
    try:
        recipe = ise.Recipe.parse(mutant) if isinstance(mutant, str) else ise.Recipe.from_dict(mutant)
        text = str(recipe)
        back = ise.Recipe.parse(text)
        outcomes = {attend(recipe, n, causal) for n, causal in product(LENGTHS, (False, True))}
    except ValueError as error:
        return judged(error, mutant)
    except Exception as error:
        raise AssertionError(f"{shown(mutant)}: {type(error).__name__}: {str(error)[:200]}") from error
    assert str(back) == text, f"{shown(mutant)}: became {shown(str(back))}"
    assert not (wrong := outcomes - {""}), f"{shown(mutant)}: {wrong}"
    return "right"


def judged(error: ValueError, mutant: Mutant) -> str:
    message = str(error)
    assert "\n" not in message, f"{shown(mutant)}: refused in several lines: {message[:200]!r}"
    assert 0 < len(message) <= LONGEST_MESSAGE, f"{shown(mutant)}: refused in {len(message)} characters"
    return "refused"


def attend(recipe: ise.Recipe, n: int, causal: bool) -> str:
    """What is wrong with attention over n tokens; "" where nothing is."""
    make = torch.Generator().manual_seed(n)
    shapes = ((1, HEADS, n, HEAD_DIM), (1, 2, n, HEAD_DIM), (1, 2, n, 5))
    tensors = [torch.randn(shape, generator=make, dtype=torch.float64) for shape in shapes]
    with torch.no_grad():
        truth, exact = ise.attention(*tensors, recipe, causal=causal, backend="reference", return_lse=True)
        if not truth.isfinite().all():
            return f"the reference is not finite at {n} tokens"
        backends = [name for name in CPU_BACKENDS if takes(name, recipe)]
        backend = backends[n % len(backends)]
        ours, aux = ise.attention(*tensors, recipe, causal=causal, backend=backend, return_lse=True)
        low = ise.attention(*(x.float() for x in tensors), recipe, causal=causal)
    # a score's rounding is relative to its size, and multiplies a weight: e^{s (1 + eps)}
    size = 1 + exact.lse[exact.lse.isfinite()].abs().max().item() if exact.lse.isfinite().any() else 1.0
    if not (ours - truth).abs().max() <= 1e-12 * size:
        return f"{backend} is {(ours - truth).abs().max():g} from the reference at {n} tokens"
    same = (aux.lse == exact.lse) | ((aux.lse - exact.lse).abs() <= 1e-12 * size)
    if not same.all():
        return f"the log-sum-exp of {backend} is not the reference's at {n} tokens"
    return "" if low.isfinite().all() else f"not finite in fp32 at {n} tokens"


def shown(mutant: Mutant) -> str:
    try:
        text = repr(mutant)
    except (RecursionError, ValueError):
        return f"a {type(mutant).__name__} that cannot be printed"
    return text if len(text) <= 300 else f"{text[:300]}… ({len(text)} characters)"
