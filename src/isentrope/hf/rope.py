"""The rotary embedding of a transformers model: its frequencies, and what a recipe makes of them."""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import torch
from torch import Tensor, nn

from isentrope.core.layout import Layout
from isentrope.core.region import EVERYTHING, band
from isentrope.core.rotation import rotate
from isentrope.masks import Mask, Sink
from isentrope.positions import Branch, ModelRotary, Position
from isentrope.positions.rope import Rotary

FREQUENCIES = "inv_freq"
SHARED = "isentrope_position"  # on an extended model: a learned position method, shared by all layers
# kinds of transformers' own scaling whose frequencies change with the length of the input
BY_LENGTH = ("dynamic", "longrope")
# (rounded, widened) of a `Rope`, as models do it
ROUNDINGS = ((True, False), (False, True), (True, True))


@dataclass(frozen=True, eq=False)
class _Same:
    """A tensor as a key: that very tensor, which cannot be freed and another take its place meanwhile."""

    tensor: Tensor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.tensor is other.tensor

    def __hash__(self) -> int:
        return id(self.tensor)


@dataclass(frozen=True, eq=False)
class Rope:
    """One set of frequencies of a model's rotary module. A module may hold several, one for each type of layer.

    rounded: cos and sin are in the dtype of the model, not in fp32; widened: they are multiplied in fp32.
    doubled: how the module works out the angles of the pairs, each twice: "half", "interleaved", or "once" if not.
    follows: whether the module turns at the frequencies that it holds, and not at some that it works out anew.
    """

    module: nn.Module
    layer_type: str | None = None
    interleaved: bool = False
    rounded: bool = True
    widened: bool = False
    doubled: str = "half"
    follows: bool = True

    def _named(self, name: str) -> str:
        return name if self.layer_type is None else f"{self.layer_type}_{name}"

    @property
    def theta(self) -> Tensor:
        """The frequencies as they are now."""
        return getattr(self.module, self._named(FREQUENCIES))

    def cache_key(self) -> Hashable:
        """Changes when the frequencies do."""
        theta = self.theta
        return _Same(theta), 0 if theta.is_inference() else theta._version

    @property
    def scaling(self) -> float:
        """What transformers multiplies onto cos and sin."""
        return float(getattr(self.module, self._named("attention_scaling"), 1.0))

    @property
    def parameters(self) -> dict[str, Any]:
        """`rope_parameters` of the model's config."""
        given = getattr(getattr(self.module, "config", None), "rope_parameters", None) or {}
        return given.get(self.layer_type) or {} if self.layer_type is not None else given

    @property
    def kind(self) -> str:
        return self.parameters.get("rope_type", "default")

    def as_model(self, model_type: str = "model") -> ModelRotary:
        """What a position method is told of the model."""
        layout, base = "interleaved" if self.interleaved else "half", self.parameters.get("rope_theta")
        return ModelRotary(model_type, self.theta.float(), layout, self.kind, None if base is None else float(base))

    def same(self, other: Rope | None) -> bool:
        """Whether both are the same frequencies of the same module."""
        return other is not None and (self.module, self.layer_type) == (other.module, other.layer_type)

    def write(self, theta: Tensor, scaling: float) -> None:
        """Let the module turn at other frequencies."""
        setattr(self.module, self._named(FREQUENCIES), theta.to(self.theta.device))
        setattr(self.module, self._named("attention_scaling"), scaling)

    def cos_and_sin(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """Of every pair at positions (batch or 1, length), in fp32 with the model's scaling: (…, length, pairs).

        A CPU works out several cosines at a time, and the last bit of one may depend on its neighbours: they stand side
        by side as in the model's module.
        """
        turn = position.to(torch.float32)[..., None] * self.theta.to(position.device, torch.float32)
        if self.doubled == "interleaved":
            both = turn.repeat_interleave(2, -1)
            return both.cos()[..., ::2] * self.scaling, both.sin()[..., ::2] * self.scaling
        both = turn if self.doubled == "once" else torch.cat((turn, turn), -1)
        pairs = turn.shape[-1]
        return both.cos()[..., :pairs] * self.scaling, both.sin()[..., :pairs] * self.scaling

    def rotated(self, x: Tensor, position: Tensor, layout: Layout | None = None) -> Tensor:
        """x (batch, heads, length, d) at positions (batch or 1, length), rounded as the model's own code rounds.

        layout: where `position` comes from; calls that share it share the angles.
        """

        def make() -> tuple[Tensor, Tensor]:
            cos, sin = self.cos_and_sin(position.to(x.device))
            dtype = x.dtype if self.rounded else torch.float32
            return cos[:, None].to(dtype), sin[:, None].to(dtype)

        if layout is None or torch.compiler.is_compiling():
            cos, sin = make()
        else:
            cos, sin = layout.cached((self.cache_key(), self.rounded, _Same(position), x.dtype), make)
        return rotate(x.float() if self.widened else x, cos, sin, self.interleaved).to(x.dtype)


def doubling(rope: Rope, position: Tensor, angles: tuple[Tensor, Tensor]) -> str:
    """How a module works out the angles of its pairs, each twice or once, from its cos and sin: `Rope.doubled`."""
    pairs = rope.theta.shape[-1]
    interleaved = angles[0].shape[-1] > pairs and torch.equal(angles[0][..., 0::2], angles[0][..., 1::2])
    own = [x[..., ::2] if interleaved else x[..., :pairs] for x in angles]
    kinds = ("interleaved", "half", "once") if interleaved else ("half", "once", "interleaved")
    for kind in kinds:
        known = replace(rope, doubled=kind).cos_and_sin(position)
        if all(torch.equal(x.to(y.dtype).expand_as(y), y) for x, y in zip(known, own, strict=True)):
            return kind
    return kinds[0]


def ropes(model: nn.Module) -> Iterator[Rope]:
    """Every set of rotary frequencies in a model."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer is not None and name.endswith(FREQUENCIES) and not name.endswith("original_" + FREQUENCIES):
                yield Rope(module, name.removesuffix(FREQUENCIES).rstrip("_") or None)


def argument_names(module: nn.Module) -> tuple[str, ...]:
    """What a rotary module calls its arguments."""
    return tuple(inspect.signature(type(module).forward).parameters)[1:]


def named_arguments(names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by their names."""
    return dict(zip(names, args, strict=False)) | kwargs


@dataclass(frozen=True, eq=False)
class Native(Position):
    """A position method at the frequencies of the model itself.

    sinks, size: distances as in a cache that keeps `sinks` first tokens and a window of `size`, which is how
    StreamingLLM measures them: a sink that has left the window stays at the distance where it left it.
    owner: where a learned `inner` is registered, and may have been wrapped since.
    keeps: the model's frequencies stay as they are. writable: they can be written into the model's own rotary module,
    which then does all that the method asks for, so that a cache holds rotated keys.
    """

    inner: Position
    rope: Rope
    sinks: int = 0
    size: int | None = None
    owner: nn.Module | None = None
    keeps: bool = False
    writable: bool = False
    rotates = True
    keys_cacheable = False

    @property
    def learns(self) -> bool:  # type: ignore[override]
        return self.inner.learns

    @property
    def longest(self) -> int | None:  # type: ignore[override]
        return self.inner.longest

    def cache_key(self) -> Hashable:
        return self.rope.cache_key(), self.inner.cache_key()

    @property
    def layout(self) -> str:
        return "interleaved" if self.rope.interleaved else "half"

    def idle(self, length: int) -> bool:
        streams = self.size is not None and length <= self.sinks + self.size
        return self.keeps and (streams or self.inner.idle(length))

    def branches(self, query: Tensor, key: Tensor, heads: int) -> tuple[Branch, ...]:
        if self.size is None:
            return self.inner.branches(query, key, heads)
        edge = 1 - self.size
        return (
            Branch(band(edge, inf), query, key),
            Branch(band(-inf, edge), query.clamp(max=self.sinks + self.size - 1), key),
        )

    def frequencies(self, head_dim: int, length: Tensor | int, dtype: torch.dtype, device: torch.device) -> Tensor:
        inner = self.inner if self.owner is None else getattr(self.owner, SHARED)
        if inner.keys_cacheable:  # as the model's own module would hold them
            return rescaled(inner, self.rope, length).to(device, dtype)
        return inner.rescale(self.rope.as_model(), length, dtype, device)


def apply_to(
    position: Position, rope: Rope, stream: tuple[int, int] | None, model_type: str, owner: nn.Module
) -> Position:
    """A recipe's position method at the frequencies of a model, or an error.

    stream: sinks and window of StreamingLLM's distances, or None. owner: see `Native`.
    """
    fitted = fit(position, rope, model_type)
    if not fitted.rotates:
        return fitted
    _check_answers(fitted)
    sinks, size = stream or (0, None)
    if fitted.learns:
        return Native(fitted, rope, sinks, size, owner)
    short, long = (rescaled(fitted, rope, length) for length in (1, 1 << 20))
    lasting = torch.equal(short, long)
    keeps = lasting and torch.equal(short, rope.theta.float())
    writable = lasting and size is None and rope.follows and turns_once(fitted)
    return Native(fitted, rope, sinks, size, None, keeps, writable)


def rescaled(position: Position, rope: Rope, length: Tensor | int) -> Tensor:
    """The frequencies that a method makes of a model's own, in fp32 as models hold them."""
    return position.rescale(rope.as_model(), length, torch.float32, rope.theta.device)


def turns_once(position: Position) -> bool:
    """Whether a method turns every query and key to its own position, at any distance, and does nothing else."""
    if not (position.rotates and position.keys_cacheable):
        return False
    query, key = torch.arange(2)[None], torch.arange(2)[None]
    first, *others = position.branches(query, key, 1)
    whole = not others and first.region == EVERYTHING and first.slopes is None
    return whole and first.query is query and first.key is key


def _check_answers(position: Position) -> None:
    """Refuse a method with frequencies of its own that inherits an answer which does not know of them."""
    kind = type(position)
    owner = next(part for part in kind.__mro__ if {"frequencies", "rescale"} & vars(part).keys())
    if "rescale" not in vars(owner) and kind.rescale not in (Rotary.rescale, Position.rescale):
        raise ValueError(
            f"{position.name()}: has frequencies of its own, and its rescale is that of a method without; implement "
            f"{kind.__name__}.rescale(model, length, dtype, device) to extend a model with it"
        )


def fit(position: Position, rope: Rope, model_type: str) -> Position:
    """A recipe's position method with what it leaves open taken from the model, or an error."""
    if rope.kind in BY_LENGTH:
        raise ValueError(
            f"{model_type}: its rope_type {rope.kind!r} changes angles with the length of the input, which no other "
            f"position method can be joined to; leave {position.name()!r} out, or load it with rope_type 'default'"
        )
    return position.fit(rope.as_model(model_type))


def streaming(mask: Mask | None, position: Position | None) -> tuple[int, int] | None:
    """Sinks and window of a recipe whose distances are measured as in StreamingLLM's cache, or None."""
    sinks_and_window = isinstance(mask, Sink) and mask.region(True) == Sink(mask.sinks, mask.size).region(True)
    if not sinks_and_window or not (position is None or turns_once(position)):
        return None
    return mask.sinks, mask.size  # type: ignore[union-attr]
