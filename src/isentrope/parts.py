"""What all parts of a recipe share: a name, options that survive JSON, and checks that speak plainly."""

from __future__ import annotations

import inspect
from numbers import Real
from typing import Any

from isentrope.utils.text import format_value

REQUIRED: Any = object()  # the default of an option that must be given
# What options may be. Lengths are counted in floating point, which above 2^53 does not count by ones.
MAX_LENGTH = 1 << 53
MAX_HEADS = MAX_HEAD_DIM = 1 << 16
MAX_FACTOR = 1e9  # by which a context is stretched
MAX_BASE = 1e12  # of rotary frequencies: one position in a billion is still told apart
MAX_TEMPERATURE = 1e3  # a query times τ must stay within fp16


class Part:
    """One choice in a recipe. Its name is the class name in lower case, its options the constructor's arguments."""

    # whether a model that was trained without the part does not work with it
    needs_training = False
    # whether the part has parameters, so that what it says may change from call to call
    learns = False

    def idle(self, length: int) -> bool:
        """Whether rows of up to `length` keys come out exactly as without the part, in a model with plain RoPE."""
        return False

    @classmethod
    def name(cls) -> str:
        return cls.__name__.lower()

    @classmethod
    def options(cls) -> dict[str, Any]:
        """Option names and their defaults, `REQUIRED` where there is none."""
        defaults = {key: option.default for key, option in inspect.signature(cls).parameters.items()}
        return {key: REQUIRED if value is inspect.Parameter.empty else value for key, value in defaults.items()}

    def to_dict(self) -> dict[str, Any]:
        """The name and every option that differs from its default."""
        given = ((key, getattr(self, key), default) for key, default in self.options().items())
        return {"name": self.name()} | {k: v for k, v, default in given if self._writes_option(k, v, default)}

    def _writes_option(self, key: str, value: Any, default: Any) -> bool:
        return default is REQUIRED or value != default

    def __str__(self) -> str:
        given = self.to_dict()
        name = given.pop("name")
        return name + (":" + ",".join(f"{k}={_text(v)}" for k, v in given.items()) if given else "")


def _text(value: Any) -> str:
    if isinstance(value, float):
        # "1e+16" would read as two parts of a recipe
        return str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value).replace("e+", "e")
    if isinstance(value, (tuple, list)):
        return "(" + "".join(_text(v) + "," for v in value) + ")"
    return str(value)


def check_integer(part: object, key: str, least: int, most: int = MAX_LENGTH) -> None:
    """Check that a part's option is an integer from `least` to `most`."""
    value = getattr(part, key)
    largest = "2^53" if most == MAX_LENGTH else str(most)
    expected = f"{type(part).__name__}({key}=…): expected an integer ≥ {least} and ≤ {largest}"
    if value is REQUIRED:
        raise ValueError(f"{expected}, got nothing")
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or not least <= value <= most or value != int(value):
        raise ValueError(f"{expected}, got {format_value(value)}")
    object.__setattr__(part, key, int(value))


def check_number(
    part: object, key: str, most: float, *, above: float | None = None, least: float | None = None
) -> None:
    """Check that a part's option is a number > above or ≥ least, and ≤ most."""
    value = getattr(part, key)
    low = f"> {above:g}" if above is not None else f"≥ {least:g}"
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    inside = is_number and value <= most and (value > above if above is not None else value >= least)
    if not inside:
        raise ValueError(
            f"{type(part).__name__}({key}=…): expected a number {low} and ≤ {most:g}, got {format_value(value)}"
        )
    object.__setattr__(part, key, float(value))


def check_choice(part: object, key: str, allowed: tuple[str, ...]) -> None:
    """Check that a part's option is one of the allowed words."""
    value = getattr(part, key)
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(
            f"{type(part).__name__}({key}=…): expected one of {', '.join(allowed)}, got {format_value(value)}"
        )


def check_bool(part: object, key: str) -> None:
    """Check that a part's option is a truth value."""
    value = getattr(part, key)
    if not isinstance(value, bool):
        raise ValueError(f"{type(part).__name__}({key}=…): expected True or False, got {format_value(value)}")
