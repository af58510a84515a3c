"""The parts that recipes are made of, by kind and by name."""

from __future__ import annotations

import hashlib
import inspect
import re
import sys
from pathlib import Path
from types import CodeType
from typing import Any, TypeVar

from isentrope import masks, positions, scores, temperatures
from isentrope.core.caching import clear_caches
from isentrope.parts import Part
from isentrope.retrieve import Retrieve
from isentrope.share import Share
from isentrope.utils.files import PARTS_MODULE
from isentrope.utils.messages import format_value

P = TypeVar("P", bound=type[Part])
# the parts that a recipe's text may name; add a new method here
KINDS: dict[str, tuple[type[Part], ...]] = {
    "position": (
        positions.RoPE, positions.PI, positions.NTK, positions.YaRN, positions.ReRoPE, positions.LeakyReRoPE,
        positions.SelfExtend, positions.JetLong, positions.LaMPE, positions.DualChunk, positions.STRING,
        positions.ALiBi, positions.CLEX, positions.NoPE,
        positions.DPE, positions.LongRoPE, positions.CoPE, positions.Resonance,
    ),
    "temperature": (
        temperatures.Constant, temperatures.LogLength, temperatures.SoftmaxPlus, temperatures.LogN,
        temperatures.Power, temperatures.YaRNTemperature, temperatures.InfoScale, temperatures.InfoScaleExact,
        temperatures.Llama4, temperatures.SSMax, temperatures.Fitted, temperatures.Adaptive,
        temperatures.ScaleInvariant,
    ),
    "score": (scores.Dot, scores.Cosine),
    "mask": (masks.Full, masks.Causal, masks.Window, masks.Sink, masks.Lambda, masks.And, masks.Or),
    "share": (Share,),
    "retrieve": (Retrieve,),
}  # fmt: skip
PARTS = {part.name(): (kind, part) for kind, parts in KINDS.items() for part in parts}
PLAIN = "plain"
LAYERS = "layers"  # begins the text of a recipe per layer
RESERVED = (PLAIN, LAYERS, "auto", "name")
OWN_PARTS: dict[str, str] = {}  # of each part of a user's own its name, and a hash of what defines it


def register_part(part: P) -> P:
    """Make a part of your own known by its name, so that commands, saved models and texts of recipes take it.

    Decorate the class with it, in a file that is imported before the name is read; commands run one with `--parts`.

    Args:
        part: a dataclass: a `Position`, `Temperature`, `Mask`, `Score` or `Share`. Its name is the class name in lower
            case.

    Returns:
        The class.

    Raises:
        ValueError: it is none of these, or another part has its name.
    """
    kind = _find_kind(part)
    if kind is None:
        raise ValueError(f"register_part: expected the class of a part, such as a position, got {format_value(part)}")
    if "__dataclass_fields__" not in vars(part) and vars(part).get("__annotations__"):
        raise ValueError(f"register_part: expected a dataclass, got {part.__qualname__}; put @dataclass below it")
    name = part.name()
    known = PARTS.get(name, (kind, part))[1]
    if name in RESERVED or (known.__module__, known.__qualname__) != (part.__module__, part.__qualname__):
        raise ValueError(f"register_part: expected a name that no other part has, got {name!r}; rename the class")
    for each, parts in KINDS.items():
        KINDS[each] = tuple(one for one in parts if one.name() != name)
    KINDS[kind] = (*KINDS[kind], part)
    PARTS[name] = kind, part
    OWN_PARTS[name] = _hash_source(part)
    clear_caches()  # texts that were parsed to an earlier version of the class
    return part


def hash_own_parts(text: str) -> dict[str, str]:
    """Return a hash of the file that defines it for each part of a user's own that a text names."""
    words = set(re.findall(r"\w+", text)) if OWN_PARTS else ()
    return {name: source for name, source in OWN_PARTS.items() if name in words}


def _find_kind(part: object) -> str | None:
    """Return the kind of a part's class; None where it is not one."""
    if not isinstance(part, type) or not issubclass(part, Part):
        return None
    bases: dict[str, type[Part]] = {
        "position": positions.Position,
        "temperature": temperatures.Temperature,
        "mask": masks.Mask,
        "score": scores.Score,
        "share": Share,
    }
    return next((kind for kind, base in bases.items() if issubclass(part, base)), None)


def _hash_source(part: type) -> str:
    """Return a hash of the files that define a class; of its code where there is none, as in a notebook."""
    try:
        content = b"".join(
            path.read_bytes() for path in _list_sources(Path(str(inspect.getsourcefile(part))).resolve())
        )
    except (TypeError, OSError):
        own = [each for each in part.__mro__ if each.__module__ == part.__module__]
        content = repr([_describe_code(value) for each in own for value in vars(each).values()]).encode()
    return hashlib.sha256(content).hexdigest()[:16]


def _list_sources(path: Path) -> list[Path]:
    """Return a file, and those beside it that a file of --parts there has imported."""
    modules = {name: Path(file).resolve() for name, each in sys.modules.items() if (file := vars(each).get("__file__"))}
    own = {file for name, file in modules.items() if name.startswith(PARTS_MODULE)}
    if path.parent not in {file.parent for file in own}:
        return [path]
    return [path, *sorted({file for file in modules.values() if file.parent == path.parent} - own - {path})]


def _describe_code(value: Any) -> Any:
    """Return what an attribute of a class computes: the code of functions, and values of options."""
    if isinstance(value, property | staticmethod | classmethod):
        value = getattr(value, "fget", None) or getattr(value, "__func__", None)
    code = value if isinstance(value, CodeType) else getattr(value, "__code__", None)
    if code is not None:
        return code.co_code, code.co_names, [_describe_code(each) for each in code.co_consts]
    return value if isinstance(value, int | float | str | tuple) else None
