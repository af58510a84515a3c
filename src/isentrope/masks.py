"""Masks: which keys a query may see. `&` keeps the keys that both allow, `|` those that either allows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Any

from torch import Tensor

from isentrope.core.region import CAUSAL, EVERYTHING, Region, band, first_keys
from isentrope.parts import REQUIRED, Part, check_choice, check_integer
from isentrope.utils.messages import format_value

MAX_MASKS = 32  # in one compound: each may split the regions of the others


class Mask(Part):
    """A rule on the positions i of a query and j of a key, with Δ = i - j."""

    causal = False  # whether the mask alone makes attention causal

    def region(self, causal: bool) -> Region:
        """Return the allowed pairs as a region, in causal or in bidirectional attention."""
        raise NotImplementedError

    def __and__(self, other: Mask) -> Mask:
        return And((self, other))

    def __or__(self, other: Mask) -> Mask:
        return Or((self, other))


@dataclass(frozen=True)
class Full(Mask):
    """Every key; in causal attention, every j ≤ i (Vaswani et al., 2017)."""

    def idle(self, length: int) -> bool:
        return True

    def region(self, causal: bool) -> Region:
        return CAUSAL if causal else EVERYTHING


@dataclass(frozen=True)
class Causal(Mask):
    """j ≤ i (Vaswani et al., 2017)."""

    causal = True

    def region(self, causal: bool) -> Region:
        return CAUSAL


@dataclass(frozen=True)
class Window(Mask):
    """0 ≤ Δ < size in causal attention (`size` keys, the query's own included), |Δ| ≤ size in bidirectional.

    Source: Beltagy et al., 2020.

    Attributes:
        size: number of keys.
    """

    size: int

    def __post_init__(self) -> None:
        check_integer(self, "size", 1)

    def idle(self, length: int) -> bool:
        return length <= self.size

    def region(self, causal: bool) -> Region:
        return window_region(self.size, causal)


@dataclass(frozen=True)
class Sink(Mask):
    """j < sinks, or a window of `size`: StreamingLLM (Xiao et al., 2023).

    Attributes:
        sinks: number of first keys that stay visible.
        size: number of last keys, the query's own included.
    """

    sinks: int = 4
    size: int = REQUIRED

    def __post_init__(self) -> None:
        check_integer(self, "sinks", 0)
        check_integer(self, "size", 1)

    def idle(self, length: int) -> bool:
        return length <= self.sinks + self.size

    def region(self, causal: bool) -> Region:
        return Full().region(causal) & (window_region(self.size, causal) | first_keys(self.sinks))


@dataclass(frozen=True)
class Lambda(Mask):
    """j < sinks, or a window of `window`: the Λ-shaped mask of LM-Infinite (Han et al., 2024).

    LM-Infinite also caps distances at the window: combine it with `ReRoPE(window)`. The paper keeps 5 sinks.

    Attributes:
        sinks: number of first keys that stay visible.
        window: number of last keys, the query's own included.
    """

    sinks: int = 5
    window: int = REQUIRED

    def __post_init__(self) -> None:
        check_integer(self, "sinks", 0)
        check_integer(self, "window", 1)

    def idle(self, length: int) -> bool:
        return length <= self.sinks + self.window

    def region(self, causal: bool) -> Region:
        return Sink(self.sinks, self.window).region(causal)


@dataclass(frozen=True, eq=False)
class Padding(Mask):
    """Hide padding on one `side`, "right" or "left"; `lengths` (batch,) are the unpadded keys of each row."""

    lengths: Tensor
    side: str = "right"

    def __post_init__(self) -> None:
        check_choice(self, "side", ("right", "left"))

    def region(self, causal: bool) -> Region:
        return EVERYTHING

    def to_dict(self) -> dict[str, Any]:
        raise ValueError("Padding holds a batch's data and cannot be stored in a recipe; pass it to attention(mask=…)")


@dataclass(frozen=True, eq=False)
class Document(Mask):
    """Hide packed documents from each other.

    `ids` (batch, keys) or (keys,): a document is a run of equal ids; its positions count from its first key.
    """

    ids: Tensor

    def region(self, causal: bool) -> Region:
        return EVERYTHING

    def to_dict(self) -> dict[str, Any]:
        raise ValueError("Document holds a batch's data and cannot be stored in a recipe; pass it to attention(mask=…)")


@dataclass(frozen=True)
class Compound(Mask):
    """Several masks combined by an operator.

    Attributes:
        masks: the masks.
    """

    masks: tuple[Mask, ...]
    operator = ""

    def __post_init__(self) -> None:
        if not isinstance(self.masks, tuple) or not self.masks or not all(isinstance(m, Mask) for m in self.masks):
            raise ValueError(
                f"{type(self).__name__}(masks=…): expected a tuple of masks, got {format_value(self.masks)}"
            )
        # a & (b & c) equals (a & b) & c and has the same text; so does a compound of one mask
        unwrapped = (m.masks[0] if isinstance(m, Compound) and len(m.masks) == 1 else m for m in self.masks)
        flat = tuple(m for mask in unwrapped for m in (mask.masks if type(mask) is type(self) else (mask,)))
        object.__setattr__(self, "masks", flat)
        if (count := self.mask_count) > MAX_MASKS:
            raise ValueError(f"{type(self).__name__}(masks=…): expected at most {MAX_MASKS} masks, got {count}")

    @property
    def mask_count(self) -> int:
        """Number of masks, nested ones included."""
        return sum(mask.mask_count if isinstance(mask, Compound) else 1 for mask in self.masks)

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name(), "masks": [mask.to_dict() for mask in self.masks]}

    def __str__(self) -> str:
        if len(self.masks) == 1:
            return str(self.masks[0])
        inner = (f"({mask})" if isinstance(mask, Compound) else str(mask) for mask in self.masks)
        return self.operator.join(inner)


@dataclass(frozen=True)
class And(Compound):
    """Keys that every mask allows."""

    operator = "&"

    def idle(self, length: int) -> bool:
        return all(mask.idle(length) for mask in self.masks)

    @property
    def causal(self) -> bool:  # type: ignore[override]
        return any(mask.causal for mask in self.masks)

    def region(self, causal: bool) -> Region:
        causal = causal or self.causal  # a window combined with Causal() is causal
        return reduce(Region.__and__, (mask.region(causal) for mask in self.masks))


@dataclass(frozen=True)
class Or(Compound):
    """Keys that any mask allows."""

    operator = "|"

    def idle(self, length: int) -> bool:
        return any(mask.idle(length) for mask in self.masks)

    @property
    def causal(self) -> bool:  # type: ignore[override]
        return all(mask.causal for mask in self.masks)

    def region(self, causal: bool) -> Region:
        return reduce(Region.__or__, (mask.region(causal) for mask in self.masks))


def window_region(size: int, causal: bool) -> Region:
    """Return the region of a window: causal, `size` keys; bidirectional, |Δ| ≤ size."""
    return band(1 - size, 1) if causal else band(-size, size + 1)


def find_data_masks(mask: Mask | None) -> Iterator[Padding | Document]:
    """Yield the padding and document masks inside `mask`.

    Raises:
        ValueError: one of them is under `|`, where it has no meaning.
    """
    if isinstance(mask, (Padding, Document)):
        yield mask
    elif isinstance(mask, And):
        for part in mask.masks:
            yield from find_data_masks(part)
    elif isinstance(mask, Or):
        for part in mask.masks:
            for data in find_data_masks(part):
                raise ValueError(f"mask: {type(data).__name__} has no meaning under |; it must be joined with &")
