"""Masks: which keys a query may see. `&` keeps what both allow, `|` what either allows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Any

from torch import Tensor

from isentrope.core.region import CAUSAL, EVERYTHING, Region, band, first_keys
from isentrope.parts import REQUIRED, Part, check_choice, check_integer
from isentrope.utils.text import format_value

MAX_JOINED = 32  # each may cut the regions of the others


class Mask(Part):
    """A rule on positions. `region(causal)` is the rule as a region; Δ = i - j."""

    causal = False  # whether the mask by itself makes attention causal

    def region(self, causal: bool) -> Region:
        raise NotImplementedError

    def __and__(self, other: Mask) -> Mask:
        return And((self, other))

    def __or__(self, other: Mask) -> Mask:
        return Or((self, other))


@dataclass(frozen=True)
class Full(Mask):
    """Every key (every key up to the query itself when attention is causal)."""

    def idle(self, length: int) -> bool:
        return True

    def region(self, causal: bool) -> Region:
        return CAUSAL if causal else EVERYTHING


@dataclass(frozen=True)
class Causal(Mask):
    """j ≤ i."""

    causal = True

    def region(self, causal: bool) -> Region:
        return CAUSAL


@dataclass(frozen=True)
class Window(Mask):
    """Causal: 0 ≤ Δ < size (`size` keys, the query's own included). Bidirectional: |Δ| ≤ size."""

    size: int

    def __post_init__(self) -> None:
        check_integer(self, "size", 1)

    def idle(self, length: int) -> bool:
        return length <= self.size

    def region(self, causal: bool) -> Region:
        return window_region(self.size, causal)


@dataclass(frozen=True)
class Sink(Mask):
    """The first `sinks` keys and a window of `size`: StreamingLLM (Xiao et al., 2023)."""

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
    """The first `sinks` keys and a window: the Λ-shaped mask of LM-Infinite (Han et al., 2024).

    LM-Infinite also caps distances at the window: join it with `ReRoPE(window)`. The paper keeps 5 sinks.
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
    """Unpadded keys per row: `lengths` (batch,). Padding sits on the right, or with `side="left"` on the left."""

    lengths: Tensor
    side: str = "right"

    def __post_init__(self) -> None:
        check_choice(self, "side", ("right", "left"))

    def region(self, causal: bool) -> Region:
        return EVERYTHING

    def to_dict(self) -> dict[str, Any]:
        raise ValueError(
            "Padding holds a batch's data; pass it to attention(mask=…) rather than storing it in a recipe"
        )


@dataclass(frozen=True, eq=False)
class Document(Mask):
    """Packed documents do not see each other.

    `ids` (batch, keys) or (keys,): a document is a run of equal ids, and its positions count from its first key.
    """

    ids: Tensor

    def region(self, causal: bool) -> Region:
        return EVERYTHING

    def to_dict(self) -> dict[str, Any]:
        raise ValueError(
            "Document holds a batch's data; pass it to attention(mask=…) rather than storing it in a recipe"
        )


@dataclass(frozen=True)
class Compound(Mask):
    """Several masks joined."""

    masks: tuple[Mask, ...]
    sign = ""

    def __post_init__(self) -> None:
        if not isinstance(self.masks, tuple) or not self.masks or not all(isinstance(m, Mask) for m in self.masks):
            raise ValueError(
                f"{type(self).__name__}(masks=…): expected a tuple of masks, got {format_value(self.masks)}"
            )
        # a & (b & c) is the same mask as (a & b) & c, and reads the same; so does a mask joined with none
        alone = (m.masks[0] if isinstance(m, Compound) and len(m.masks) == 1 else m for m in self.masks)
        flat = tuple(m for mask in alone for m in (mask.masks if type(mask) is type(self) else (mask,)))
        object.__setattr__(self, "masks", flat)
        if (count := self.mask_count) > MAX_JOINED:
            raise ValueError(f"{type(self).__name__}(masks=…): expected at most {MAX_JOINED} masks, got {count}")

    @property
    def mask_count(self) -> int:
        """How many masks are joined, those inside others included."""
        return sum(mask.mask_count if isinstance(mask, Compound) else 1 for mask in self.masks)

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name(), "masks": [mask.to_dict() for mask in self.masks]}

    def __str__(self) -> str:
        if len(self.masks) == 1:
            return str(self.masks[0])
        inner = (f"({mask})" if isinstance(mask, Compound) else str(mask) for mask in self.masks)
        return self.sign.join(inner)


@dataclass(frozen=True)
class And(Compound):
    """Keys that every mask allows."""

    sign = "&"

    def idle(self, length: int) -> bool:
        return all(mask.idle(length) for mask in self.masks)

    @property
    def causal(self) -> bool:  # type: ignore[override]
        return any(mask.causal for mask in self.masks)

    def region(self, causal: bool) -> Region:
        causal = causal or self.causal  # so that a window beside Causal() takes its causal form
        return reduce(Region.__and__, (mask.region(causal) for mask in self.masks))


@dataclass(frozen=True)
class Or(Compound):
    """Keys that any mask allows."""

    sign = "|"

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
    """The padding and document masks inside `mask`; under `|` they have no meaning."""
    if isinstance(mask, (Padding, Document)):
        yield mask
    elif isinstance(mask, And):
        for part in mask.masks:
            yield from find_data_masks(part)
    elif isinstance(mask, Or):
        for part in mask.masks:
            for data in find_data_masks(part):
                raise ValueError(f"mask: {type(data).__name__} must be joined with &, got it under |")
