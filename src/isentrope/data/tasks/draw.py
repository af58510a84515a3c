"""Draw names, numbers and words for examples, and hide sentences in a text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from random import Random
from string import ascii_lowercase, ascii_uppercase
from typing import TypeVar

from isentrope.data.tasks.example import Fill
from isentrope.data.tasks.haystack import Haystack
from isentrope.data.tasks.vocabulary import ADJECTIVES, NOUNS

T = TypeVar("T")
MAX_DRAWS = 10_000  # of one string that the text does not contain

# Only Random.random() is guaranteed to draw the same numbers in every version of Python.


@dataclass(frozen=True)
class Draw:
    """What an example is drawn from.

    Args:
        random: Source of random numbers.
        haystack: The text around the facts.
        depth: Share of the text before the answer, for tasks that have one depth; 0 for the others.
    """

    random: Random
    haystack: Haystack
    depth: float = 0.0

    def numbers(self, digits: int, count: int = 1) -> list[str]:
        """Draw different numbers that the text does not contain.

        Args:
            digits: Digits of each.
            count: How many.
        """
        first = 10 ** (digits - 1)
        return self.unused(lambda: str(first + int(self.random.random() * 9 * first)), count)

    def names(self, count: int) -> list[str]:
        """Draw different things such as "silver anchor"."""
        return self.unused(lambda: f"{pick(self.random, ADJECTIVES)} {pick(self.random, NOUNS)}", count)

    def long_names(self, count: int) -> list[str]:
        """Draw different things of three words, of which there are enough for a text of them."""
        return self.unused(lambda: draw_long_name(self.random), count)

    def uuids(self, count: int) -> list[str]:
        """Draw different identifiers of 32 hexadecimal digits."""
        return self.unused(lambda: draw_uuid(self.random), count)

    def variables(self, count: int) -> list[str]:
        """Draw different names of five capital letters."""
        return self.unused(lambda: "".join(pick(self.random, ascii_uppercase) for _ in range(5)), count)

    def coded_words(self, count: int) -> list[str]:
        """Draw different words of six random letters."""
        drawn: dict[str, None] = {}
        while len(drawn) < count:
            drawn["".join(pick(self.random, ascii_lowercase) for _ in range(6))] = None
        return list(drawn)

    def unused(self, draw: Callable[[], str], count: int) -> list[str]:
        """Draw different strings that the text does not contain.

        Args:
            draw: Draws one.
            count: How many.

        Raises:
            ValueError: The text contains nearly all there are.
        """
        drawn: list[str] = []
        for _ in range(MAX_DRAWS):
            if (new := draw()) not in drawn and new not in self.haystack.text:
                drawn.append(new)
            if len(drawn) == count:
                return drawn
        raise ValueError(f"filler: contains nearly everything that could be hidden, such as {new!r}; use another text")

    def hide(self, needles: Sequence[tuple[float, str]], at_depth: bool) -> Fill:
        """Return a function that writes filler around needles.

        Args:
            needles: The share of the text before each, and its sentence. Those of the same depth stay in order.
            at_depth: Whether the first one is the answer, whose real depth is returned with the text.
        """
        end, haystack = pick(self.random, self.haystack.ends), self.haystack

        def fill(amount: int) -> tuple[str, float | None]:
            cut = haystack.cut(end, amount)
            at = [cut.nearest_gap(depth) for depth, _ in needles]
            parts, last = [], cut.start
            for i in sorted(range(len(needles)), key=at.__getitem__):
                parts += [cut.text(last, at[i]), f" {needles[i][1]}"]
                last = at[i]
            text = "".join((*parts, cut.text(last, cut.stop))).strip()
            return text, cut.share_before(at[0]) if at_depth else None

        return fill


def pick(random: Random, items: Sequence[T]) -> T:
    """Pick one of the items."""
    return items[int(random.random() * len(items))]


def shuffle(random: Random, items: Iterable[T]) -> list[T]:
    """Return the items in random order."""
    return [item for _, _, item in sorted((random.random(), i, item) for i, item in enumerate(items))]


def spread_depths(random: Random, count: int) -> list[float]:
    """Draw increasing depths, one in each of `count` equal parts of the text."""
    return [(i + random.random()) / count for i in range(count)]


def draw_long_name(random: Random) -> str:
    """Draw a thing such as "calm silver anchor"."""
    return f"{pick(random, ADJECTIVES)} {pick(random, ADJECTIVES)} {pick(random, NOUNS)}"


def draw_uuid(random: Random) -> str:
    """Draw 32 hexadecimal digits in five groups."""
    digits = "".join(f"{int(random.random() * 2**32):08x}" for _ in range(4))
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))
