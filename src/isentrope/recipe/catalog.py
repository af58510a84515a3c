"""What recipes can be made of, read from the classes: formula, paper, options and their defaults."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from typing import Any

from isentrope.parts import REQUIRED, Part
from isentrope.recipe.kinds import KINDS, PARTS
from isentrope.recipe.suggestions import suggest_part

CITATION = re.compile(r"\s*\(([^()]*\b(?:19|20)\d\d)\)")
OWN_SOURCE = "this library"
SOURCE = re.compile(r"\bSource: (.+?)\.(?=\s*(?:\n\n|$))", re.DOTALL)
FILLED_BY_MODEL = ("train_length", "heads", "dim")  # `extend` reads them from the model
FILLED_MEANING = "by default the model's own."


@dataclass(frozen=True)
class OptionDescription:
    """An option of a part.

    Args:
        name: as recipes write it.
        required: whether it has no default, and is not the model's own either.
        default: its default; None where it has none, or one that depends on the rest.
        meaning: from the class's documentation; empty where the formula says it.
    """

    name: str
    required: bool
    default: Any
    meaning: str

    @property
    def text(self) -> str:
        """The option as in a recipe: window=…, group=8; its name alone where the default is None."""
        if self.required:
            return f"{self.name}=…"
        value = f"{self.default:g}" if isinstance(self.default, float) else str(self.default)
        return self.name if self.default is None else f"{self.name}={value}"


@dataclass(frozen=True)
class PartDescription:
    """A part of recipes.

    Args:
        name: as recipes write it.
        kind: position, temperature, score, mask, share or retrieve.
        class_name: of the class in `isentrope`.
        formula: the first line of its documentation.
        source: the paper, as authors and year; empty where there is none.
        options: in the order of the constructor.
        details: the rest of the documentation.
        needs_training: whether a model must be trained with it.
    """

    name: str
    kind: str
    class_name: str
    formula: str
    source: str
    options: tuple[OptionDescription, ...]
    details: str
    needs_training: bool


def list_parts() -> list[PartDescription]:
    """Describe every part, by kind."""
    return [describe_part(kind, part) for kind, parts in KINDS.items() for part in parts]


def find_part(name: str) -> PartDescription:
    """Describe the part of a name.

    Raises:
        ValueError: no part has that name; the message suggests one.
    """
    if name.lower() not in PARTS:
        raise ValueError(f"recipes: no part is called {name!r}{suggest_part(name, PARTS)}")
    return describe_part(*PARTS[name.lower()])


def describe_part(kind: str, part: type[Part]) -> PartDescription:
    """Describe a part from its class: the docstring opens with the formula, and its constructor has the options."""
    first, _, rest = (inspect.getdoc(part) or "").partition("\n")
    details, _, _ = rest.partition("Attributes:\n")
    meanings = _read_meanings(part)
    options = tuple(
        OptionDescription(
            name,
            required=default is REQUIRED and name not in FILLED_BY_MODEL,
            default=None if default is REQUIRED else default,
            meaning=meanings.get(name, FILLED_MEANING if name in FILLED_BY_MODEL else ""),
        )
        for name, default in part.options().items()
    )
    return PartDescription(
        name=part.name(),
        kind=kind,
        class_name=part.__name__,
        formula=CITATION.sub("", first).strip(),
        source=_find_source(first, details) or (OWN_SOURCE if part.__module__.startswith("isentrope.") else ""),
        options=options,
        details=_unwrap(details.strip()),
        needs_training=part.needs_training,
    )


def _unwrap(text: str) -> str:
    """Join the lines of each paragraph; formulas, which are indented, stay as they are."""
    paragraphs = text.split("\n\n")
    return "\n\n".join(each if each.startswith(" ") else " ".join(each.split()) for each in paragraphs)


def _find_source(first: str, details: str) -> str:
    """Find the citation: of the first line, else after "Source:", else the first one in the text."""
    match = CITATION.search(first) or SOURCE.search(details) or CITATION.search(details)
    return " ".join(match[1].split()) if match else ""


def _read_meanings(part: type[Part]) -> dict[str, str]:
    """Read what options mean from the "Attributes" of a class and of those that it inherits from."""
    meanings: dict[str, str] = {}
    for base in part.__mro__:
        _, _, section = inspect.cleandoc(base.__doc__ or "").partition("Attributes:\n")
        for names, text in re.findall(r"^    (\w+(?:, \w+)*): (.+(?:\n {8,}.+)*)", section, re.MULTILINE):
            for name in names.split(", "):
                meanings.setdefault(name, " ".join(text.split()))
    return meanings
