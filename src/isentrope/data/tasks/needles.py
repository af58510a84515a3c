"""Needles: sentences that give a thing its code, hidden in a text; some of the codes are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from random import Random

from isentrope.data.tasks.draw import Draw, draw_long_name, draw_uuid, spread_depths
from isentrope.data.tasks.example import ExampleDraft
from isentrope.data.tasks.haystack import Haystack

MULTIKEY_NEEDLES = MULTIVALUE_NEEDLES = 4  # one of the first, all of the second are the answer
CODES = "The text below gives codes, numbers of seven digits. Keep them in mind."
NEEDLE_SENTENCES = 20_000  # of a haystack of needles, more than 250,000 tokens before it repeats
UUID_SENTENCES = 5_000  # the same, each several times as long


def draft_passkey(draw: Draw) -> ExampleDraft:
    """Hide one number of five digits."""
    answers = tuple(draw.numbers(5))
    fill = draw.hide([(draw.depth, f"The pass key is the number {answers[0]}.")], True)
    intro = "The text below gives a pass key, a number of five digits. Keep it in mind."
    return ExampleDraft(intro, "What is the pass key?", "The pass key is the number", answers, (), fill)


def draft_needle(draw: Draw) -> ExampleDraft:
    """Hide the code of one thing."""
    return _draft_codes(draw, 1)


def draft_multikey(draw: Draw) -> ExampleDraft:
    """Hide codes of four things and ask for one."""
    return _draft_codes(draw, MULTIKEY_NEEDLES)


def _draft_codes(draw: Draw, count: int) -> ExampleDraft:
    names, values = draw.names(count), draw.numbers(7, count)
    depths = [draw.depth, *(draw.random.random() for _ in range(count - 1))]
    needles = [
        (d, f"The code for the {name} is the number {value}.")
        for d, name, value in zip(depths, names, values, strict=True)
    ]
    return ExampleDraft(
        CODES if count > 1 else "The text below gives a code, a number of seven digits. Keep it in mind.",
        f"What is the code for the {names[0]}?",
        f"The code for the {names[0]} is the number",
        (values[0],),
        tuple(values[1:]),
        draw.hide(needles, True),
    )


def draft_multivalue(draw: Draw) -> ExampleDraft:
    """Hide four codes of one thing and ask for all."""
    name, values = draw.names(1)[0], draw.numbers(7, MULTIVALUE_NEEDLES)
    needles = [
        (d, f"A code for the {name} is the number {x}.")
        for d, x in zip(spread_depths(draw.random, MULTIVALUE_NEEDLES), values, strict=True)
    ]
    return ExampleDraft(
        CODES,
        f"What are all {MULTIVALUE_NEEDLES} codes for the {name}?",
        f"The codes for the {name} are the numbers",
        tuple(values),
        (),
        draw.hide(needles, False),
    )


@dataclass(frozen=True)
class Niah:
    """Needles in a haystack as RULER varies them (Hsieh et al., 2024): how many, of which kind, how many asked for.

    Args:
        keys: Things that have codes.
        values: Codes of each.
        queries: Things asked for; all their codes are the answer.
        uuid_keys: Whether things are identifiers of 32 hexadecimal digits in place of words.
        uuid_values: Whether codes are, in place of numbers of seven digits.
        long_keys: Whether things have three words in place of two, as in a haystack of needles.
        at_depth: Whether the one answer lies at the depth given; otherwise answers lie all over the text.
        anywhere: Whether answers count wherever a reply has them.
    """

    keys: int = 1
    values: int = 1
    queries: int = 1
    uuid_keys: bool = False
    uuid_values: bool = False
    long_keys: bool = False
    at_depth: bool = True
    anywhere: bool = True

    def __call__(self, draw: Draw) -> ExampleDraft:
        """Draw the needles and the question of an example."""
        draw_keys = draw.uuids if self.uuid_keys else draw.long_names if self.long_keys else draw.names
        count = self.keys * self.values
        keys, values = draw_keys(self.keys), draw.uuids(count) if self.uuid_values else draw.numbers(7, count)
        owners = [key for key in keys for _ in range(self.values)]
        if self.at_depth:
            depths = [draw.depth, *(draw.random.random() for _ in range(count - 1))]
        else:
            depths = spread_depths(draw.random, count)
        needles = [
            (d, _write_needle(key, x, self.uuid_keys, self.uuid_values))
            for d, key, x in zip(depths, owners, values, strict=True)
        ]
        queried, answers = keys[: self.queries], tuple(values[: self.queries * self.values])
        codes = "code" if len(answers) == 1 else "codes"
        things = _join_names([f"{'' if self.uuid_keys else 'the '}{key}" for key in queried])
        kind = "identifiers of 32 hexadecimal digits" if self.uuid_values else "numbers of seven digits"
        lead = f"The {codes} for {things} {'is' if len(answers) == 1 else 'are'}"
        noun = "" if self.uuid_values else " the number" if len(answers) == 1 else " the numbers"
        return ExampleDraft(
            f"The text below gives codes of things, {kind}. Keep them in mind.",
            f"What {'is' if len(answers) == 1 else 'are'} {_count_codes(len(answers), self.queries)} for {things}?",
            lead + noun,
            answers,
            tuple(values[len(answers) :]),
            draw.hide(needles, self.at_depth),
            anywhere=self.anywhere,
        )


def _count_codes(answers: int, queries: int) -> str:
    if answers == 1:
        return "the code"
    return f"all {answers} codes" if queries == 1 else "the codes"


def _join_names(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _write_needle(key: str, value: str, uuid_key: bool, uuid_value: bool) -> str:
    return f"The code for {'' if uuid_key else 'the '}{key} is {'' if uuid_value else 'the number '}{value}."


@cache
def needle_haystack() -> Haystack:
    """Build a text of nothing but needles: codes of things of three words."""
    random = Random("needles")
    names = dict.fromkeys(draw_long_name(random) for _ in range(NEEDLE_SENTENCES))
    numbers = (str(10**6 + int(random.random() * 9 * 10**6)) for _ in names)
    needles = (_write_needle(name, x, False, False) for name, x in zip(names, numbers, strict=True))
    return Haystack.from_texts([" ".join(needles)])


@cache
def uuid_haystack() -> Haystack:
    """Build a text of nothing but needles whose things and codes are identifiers of 32 hexadecimal digits."""
    random = Random("identifiers")
    pairs = ((draw_uuid(random), draw_uuid(random)) for _ in range(UUID_SENTENCES))
    return Haystack.from_texts([" ".join(_write_needle(key, value, True, True) for key, value in pairs)])
