"""The base class of a recipe's parts, and checks of their options."""

from __future__ import annotations

import inspect
from functools import cache
from numbers import Real
from typing import Any

from isentrope.utils.messages import format_value

REQUIRED: Any = object()  # the default of an option without one
# Limits of options. Lengths are computed in floating point, which is exact for integers up to 2^53.
MAX_LENGTH = 1 << 53
MAX_HEADS = MAX_HEAD_DIM = 1 << 16
MAX_FACTOR = 1e9  # of context extension
MAX_BASE = 1e12  # of rotary frequencies: positions up to a billion stay distinct
MAX_TEMPERATURE = 1e3  # τ times a query must fit fp16
MAX_EXPONENT = 4.0  # of a length in training lengths, in a temperature or a share: at five, τ is 600


class Part:
    """One part of a recipe: its name is the class name in lower case, its options are the constructor's arguments."""

    needs_training = False  # whether it breaks a model that was trained without it
    learns = False  # whether it has parameters, so that its values may change from call to call

    def idle(self, length: int) -> bool:
        """Return whether the part has no effect on rows of up to `length` keys, in a model with plain RoPE."""
        return False

    @classmethod
    def name(cls) -> str:
        return cls.__name__.lower()

    @classmethod
    def options(cls) -> dict[str, Any]:
        """Return option names and their defaults, `REQUIRED` where there is none."""
        return dict(_list_options(cls))  # type: ignore[arg-type]  # a class is hashable, whatever its instances are

    def to_dict(self) -> dict[str, Any]:
        """Return the name and every option that differs from its default."""
        options = ((key, getattr(self, key), default) for key, default in self.options().items())
        return {"name": self.name()} | {k: v for k, v, default in options if self._writes_option(k, v, default)}

    def _writes_option(self, key: str, value: Any, default: Any) -> bool:
        return default is REQUIRED or value != default

    def __str__(self) -> str:
        options = self.to_dict()
        name = options.pop("name")
        return name + (":" + ",".join(f"{k}={_format_option(v)}" for k, v in options.items()) if options else "")


@cache
def _list_options(part: type[Part]) -> dict[str, Any]:
    defaults = {key: option.default for key, option in inspect.signature(part).parameters.items()}
    return {key: REQUIRED if value is inspect.Parameter.empty else value for key, value in defaults.items()}


def _format_option(value: Any) -> str:
    if isinstance(value, float):
        # "+" separates the parts of a recipe
        return str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value).replace("e+", "e")
    if isinstance(value, (tuple, list)):
        return "(" + "".join(_format_option(v) + "," for v in value) + ")"
    return str(value)


def check_integer(part: object, key: str, minimum: int, maximum: int = MAX_LENGTH) -> None:
    """Check that a part's option is an integer from `minimum` to `maximum`, and store it as an int."""
    value = getattr(part, key)
    limit = "2^53" if maximum == MAX_LENGTH else str(maximum)
    expected = f"{type(part).__name__}({key}=…): expected an integer ≥ {minimum} and ≤ {limit}"
    if value is REQUIRED:
        raise ValueError(f"{expected}, got nothing")
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or not minimum <= value <= maximum or value != int(value):
        raise ValueError(f"{expected}, got {format_value(value)}")
    object.__setattr__(part, key, int(value))


def check_number(
    part: object, key: str, maximum: float, *, above: float | None = None, minimum: float | None = None
) -> None:
    """Check that a part's option is a number > `above` or ≥ `minimum`, and ≤ `maximum`, and store it as a float."""
    value = getattr(part, key)
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    valid = is_number and value <= maximum and (value > above if above is not None else value >= minimum)
    if not valid:
        lower = f"> {above:g}" if above is not None else f"≥ {minimum:g}"
        raise ValueError(
            f"{type(part).__name__}({key}=…): expected a number {lower} and ≤ {maximum:g}, got {format_value(value)}"
        )
    object.__setattr__(part, key, float(value))


def check_numbers(part: object, key: str, minimum: float, maximum: float) -> None:
    """Check that a part's option is a list of numbers from `minimum` to `maximum`, and store them as floats."""
    values = _check_list(part, key, minimum, maximum, "numbers")
    object.__setattr__(part, key, tuple(float(value) for value in values))


def check_integers(part: object, key: str, minimum: int, maximum: int) -> None:
    """Check that a part's option is a list of integers from `minimum` to `maximum`, and store them as ints."""
    values = _check_list(part, key, minimum, maximum, "integers")
    object.__setattr__(part, key, tuple(int(value) for value in values))


def _check_list(part: object, key: str, minimum: float, maximum: float, kind: str) -> list[Any] | tuple[Any, ...]:
    def is_valid(number: Any) -> bool:
        is_number = isinstance(number, (int, float)) and not isinstance(number, bool)
        return is_number and minimum <= number <= maximum and (kind == "numbers" or number == int(number))

    value = getattr(part, key)
    values: Any = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(values, (list, tuple)) and 0 < len(values) <= MAX_HEAD_DIM and all(map(is_valid, values)):
        return values
    raise ValueError(
        f"{type(part).__name__}({key}=…): expected a list of {kind} from {minimum:g} to {maximum:g}, "
        f"got {format_value(value)}"
    )


def check_choice(part: object, key: str, allowed: tuple[str, ...]) -> None:
    """Check that a part's option is one of the allowed strings."""
    value = getattr(part, key)
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(
            f"{type(part).__name__}({key}=…): expected one of {', '.join(allowed)}, got {format_value(value)}"
        )


def check_bool(part: object, key: str) -> None:
    """Check that a part's option is a bool."""
    value = getattr(part, key)
    if not isinstance(value, bool):
        raise ValueError(f"{type(part).__name__}({key}=…): expected True or False, got {format_value(value)}")
