"""What all parts of a recipe share: a name, options that survive JSON, and checks that speak plainly."""

from __future__ import annotations

import inspect
from math import isfinite
from numbers import Real
from typing import Any

REQUIRED: Any = object()  # the default of an option that must be given


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
        return {"name": self.name()} | {k: v for k, v, default in given if self._shown(k, v, default)}

    def _shown(self, key: str, value: Any, default: Any) -> bool:
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


def whole(part: object, key: str, least: int) -> None:
    """Check that a part's option is an integer ≥ least."""
    value = getattr(part, key)
    if value is REQUIRED:
        raise ValueError(f"{type(part).__name__}({key}=…): expected an integer ≥ {least}, got nothing")
    is_number = isinstance(value, Real) and isfinite(value)
    if not is_number or type(value) is bool or value != int(value) or value < least:
        raise ValueError(f"{type(part).__name__}({key}=…): expected an integer ≥ {least}, got {value!r}")
    object.__setattr__(part, key, int(value))


def number(part: object, key: str, above: float | None = None, least: float | None = None) -> None:
    """Check that a part's option is a finite number > above, ≥ least."""
    value = getattr(part, key)
    bound = f" > {above:g}" if above is not None else f" ≥ {least:g}" if least is not None else ""
    if type(value) is bool or not isinstance(value, Real) or not isfinite(value):
        raise ValueError(f"{type(part).__name__}({key}=…): expected a number{bound}, got {value!r}")
    if (above is not None and value <= above) or (least is not None and value < least):
        raise ValueError(f"{type(part).__name__}({key}=…): expected a number{bound}, got {value!r}")
    object.__setattr__(part, key, float(value))


def choice(part: object, key: str, allowed: tuple[str, ...]) -> None:
    """Check that a part's option is one of the allowed words."""
    value = getattr(part, key)
    if value not in allowed:
        raise ValueError(f"{type(part).__name__}({key}=…): expected one of {', '.join(allowed)}, got {value!r}")


def flag(part: object, key: str) -> None:
    """Check that a part's option is a truth value."""
    value = getattr(part, key)
    if not isinstance(value, bool):
        raise ValueError(f"{type(part).__name__}({key}=…): expected True or False, got {value!r}")
