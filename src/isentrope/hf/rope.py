"""The rotary embedding of a transformers model: its frequencies, and position methods fitted to them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from isentrope.core.region import EVERYTHING, band
from isentrope.core.rotation import rotate
from isentrope.hf.names import SHARED_POSITION
from isentrope.masks import Mask, Sink
from isentrope.positions import Branch, Lengths, LongRoPE, ModelRotary, Position
from isentrope.positions.rope import Rotary

FREQUENCY_BUFFER = "inv_freq"
# transformers' own kinds of scaling whose frequencies change with the length of the input
LENGTH_DEPENDENT_ROPE_TYPES = ("dynamic", "longrope")
# (rounds_angles, multiplies_in_fp32) of a `ModelRope`, as models do it
ROUNDING_MODES = ((True, False), (False, True), (True, True))
T = TypeVar("T")


class HasCache(Protocol):
    """What keeps values for several layers, such as a `Layout`."""

    def cached(self, key: Hashable, make: Callable[[], T]) -> T: ...


@dataclass(frozen=True, eq=False)
class _IdentityKey:
    """A tensor as a dictionary key, compared by identity; kept alive, so that no other tensor gets its id."""

    tensor: Tensor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _IdentityKey) and self.tensor is other.tensor

    def __hash__(self) -> int:
        return id(self.tensor)


@dataclass(frozen=True, eq=False)
class ModelRope:
    """One set of frequencies of a model's rotary module, which may hold several, one for each type of layer.

    Attributes:
        roll: by how many entries a head is rolled so that its first rotate, and forwards: latent attention rotates the
            last ones, nanochat backwards, which is forwards with the halves of each pair exchanged.
        rounds_angles: cos and sin are in the model's dtype, not in fp32.
        multiplies_in_fp32: queries and keys are widened before they are rotated.
        angle_order: how the module repeats the angles of the pairs before it takes cosines: "half", "interleaved" or
            "once"; "complex" where it makes complex numbers of them, which multiply the pairs in fp32.
        reads_buffer: the module rotates by the frequencies in its buffer, and does not compute others.
    """

    module: nn.Module
    layer_type: str | None = None
    interleaved: bool = False
    roll: int = 0
    rounds_angles: bool = True
    multiplies_in_fp32: bool = False
    angle_order: str = "half"
    reads_buffer: bool = True

    def _attribute(self, name: str) -> str:
        return name if self.layer_type is None else f"{self.layer_type}_{name}"

    @property
    def theta(self) -> Tensor:
        """The frequencies as they are now."""
        return getattr(self.module, self._attribute(FREQUENCY_BUFFER))

    def cache_key(self) -> Hashable:
        """Return a key that changes when the frequencies do."""
        theta = self.theta
        return _IdentityKey(theta), 0 if theta.is_inference() else theta._version

    @property
    def scaling(self) -> float:
        """The factor that transformers multiplies onto cos and sin."""
        return float(getattr(self.module, self._attribute("attention_scaling"), 1.0))

    @property
    def parameters(self) -> dict[str, Any]:
        """`rope_parameters` of the model's config."""
        parameters = getattr(getattr(self.module, "config", None), "rope_parameters", None) or {}
        return parameters.get(self.layer_type) or {} if self.layer_type is not None else parameters

    @property
    def kind(self) -> str:
        """`rope_type` of the model's config."""
        return self.parameters.get("rope_type", "default")

    def as_model(self, model_type: str = "model", length: Tensor | int = 1) -> ModelRotary:
        """Describe the model's rotation, in rows of this length, to a position method."""
        parameters = self.parameters  # a config answers slowly
        layout, base = "interleaved" if self.interleaved else "half", parameters.get("rope_theta")
        base, kind = None if base is None else float(base), parameters.get("rope_type", "default")
        model = ModelRotary(model_type, self.theta.float(), layout, kind, base, parameters)
        if kind != "longrope":
            return model
        # by the config: the buffer has those of the last pass
        device = length.device if isinstance(length, Tensor) else self.theta.device
        theta = LongRoPE().fit(model).frequencies(model.dim, length, torch.float32, device)
        return replace(model, theta=theta)

    @staticmethod
    def describe_unknown(raw: Tensor, rotated: Tensor) -> str:
        """Say what is unusual about a rotation that no `ModelRope` makes."""
        if torch.equal(raw[..., 0], rotated[..., 0]):
            return "of other entries of a head than the first or the last, which no recipe can change yet"
        return "in none of the known layouts, or not at its frequencies"

    def same(self, other: ModelRope | None) -> bool:
        """Return whether both are the same frequencies of the same module."""
        return other is not None and (self.module, self.layer_type) == (other.module, other.layer_type)

    def write(self, theta: Tensor, scaling: float) -> None:
        """Replace the module's frequencies and its scaling of cos and sin."""
        setattr(self.module, self._attribute(FREQUENCY_BUFFER), theta.to(self.theta.device))
        setattr(self.module, self._attribute("attention_scaling"), scaling)

    def cos_and_sin(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """Compute cos and sin of every pair at positions (batch or 1, length): (…, length, pairs), fp32, scaled.

        Vectorised cosines on a CPU may differ in the last bit by their neighbours, so angles are laid out as in the
        model's module.
        """
        angle = position.to(torch.float32)[..., None] * self.theta.to(position.device, torch.float32)
        if self.angle_order == "interleaved":
            both = angle.repeat_interleave(2, -1)
            return both.cos()[..., ::2] * self.scaling, both.sin()[..., ::2] * self.scaling
        if self.angle_order == "complex":
            turn = torch.polar(torch.ones_like(angle), angle) * self.scaling
            return turn.real, turn.imag
        both = angle if self.angle_order == "once" else torch.cat((angle, angle), -1)
        pairs = angle.shape[-1]
        return both.cos()[..., :pairs] * self.scaling, both.sin()[..., :pairs] * self.scaling

    def rotate(self, x: Tensor, position: Tensor, layout: HasCache | None = None) -> Tensor:
        """Rotate x (batch, heads, length, d) to positions (batch or 1, length), rounded as the model's own code rounds.

        layout: what `position` belongs to; calls that share it share the angles.
        """

        def compute() -> tuple[Tensor, Tensor]:
            cos, sin = self.cos_and_sin(position.to(x.device))
            dtype = x.dtype if self.rounds_angles and self.angle_order != "complex" else torch.float32
            return cos[:, None].to(dtype), sin[:, None].to(dtype)

        if layout is None or torch.compiler.is_compiling():
            cos, sin = compute()
        else:
            cos, sin = layout.cached((self.cache_key(), self.rounds_angles, _IdentityKey(position), x.dtype), compute)
        rolled = x.roll(self.roll, -1) if self.roll else x
        if self.angle_order == "complex" and self.interleaved:
            head, rest = rolled.tensor_split((2 * cos.shape[-1],), -1)
            pairs = torch.view_as_complex(head.float().unflatten(-1, (-1, 2))) * torch.complex(cos, sin)
            out = torch.cat((torch.view_as_real(pairs).flatten(-2).to(x.dtype), rest), -1)
        else:
            out = rotate(rolled.float() if self.multiplies_in_fp32 else rolled, cos, sin, self.interleaved).to(x.dtype)
        return out.roll(-self.roll, -1) if self.roll else out


def detect_angle_order(rope: ModelRope, position: Tensor, angles: tuple[Tensor, Tensor]) -> str:
    """Find the `ModelRope.angle_order` that gives a module's own cos and sin, `angles`, to the bit."""
    pairs = rope.theta.shape[-1]
    interleaved = angles[0].shape[-1] > pairs and torch.equal(angles[0][..., 0::2], angles[0][..., 1::2])
    own = [x[..., ::2] if interleaved else x[..., :pairs] for x in angles]
    orders = ("interleaved", "half", "once") if interleaved else ("half", "once", "interleaved")
    for order in orders:
        ours = replace(rope, angle_order=order).cos_and_sin(position)
        if all(torch.equal(x.to(y.dtype).expand_as(y), y) for x, y in zip(ours, own, strict=True)):
            return order
    return orders[0]


def split_angles(output: Any) -> tuple[Tensor, Tensor] | None:
    """Return cos and sin of what a rotary module returned: a pair, or complex numbers; None for anything else."""
    if isinstance(output, Tensor):
        return (output.real, output.imag) if output.is_complex() else None
    return output if isinstance(output, tuple) and len(output) == 2 else None


def find_ropes(model: nn.Module) -> Iterator[ModelRope]:
    """Yield every set of rotary frequencies in a model."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            original = name.endswith("original_" + FREQUENCY_BUFFER)
            if buffer is not None and name.endswith(FREQUENCY_BUFFER) and not original:
                yield ModelRope(module, name.removesuffix(FREQUENCY_BUFFER).rstrip("_") or None)


def list_arguments(module: nn.Module) -> tuple[str, ...]:
    """List the names of the arguments of a rotary module."""
    return tuple(inspect.signature(type(module).forward).parameters)[1:]


def bind_arguments(names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name."""
    return dict(zip(names, args, strict=False)) | kwargs


@dataclass(frozen=True, eq=False)
class FittedPosition(Position):
    """A position method at the frequencies of the model itself.

    Attributes:
        inner: the recipe's method.
        rope: the model's frequencies.
        sinks, size: measure distances as in a cache of the `sinks` first tokens and a window of `size`, as StreamingLLM
            does: a sink that has left the window stays at the distance where it left it.
        owner: where a learned `inner` is registered, and may have been wrapped since.
        keeps_frequencies: the model's frequencies stay as they are.
    """

    inner: Position
    rope: ModelRope
    sinks: int = 0
    size: int | None = None
    owner: nn.Module | None = None
    keeps_frequencies: bool = False
    rotates = True
    keys_cacheable = False

    def __str__(self) -> str:
        return str(self.inner)  # error messages show the recipe as it was written

    @property
    def learns(self) -> bool:  # type: ignore[override]
        return self.inner.learns

    @property
    def longest(self) -> int | None:  # type: ignore[override]
        return self.inner.longest

    @property
    def near_window(self) -> int | None:
        return self.inner.near_window if self.size is None else None

    @property
    def depends_on_row_length(self) -> bool:
        return self.inner.depends_on_row_length

    @property
    def depends_on_place(self) -> bool:  # type: ignore[override]
        return self.inner.depends_on_place

    @cached_property
    def _is_longrope(self) -> bool:
        return self.rope.kind == "longrope"  # a config answers slowly, and every layer of every token needs it

    def cache_key(self) -> Hashable:
        if self._is_longrope:  # its buffer changes with every pass, and is not read
            return self.inner.cache_key()
        return self.rope.cache_key(), self.inner.cache_key()

    @property
    def layout(self) -> str:
        return "interleaved" if self.rope.interleaved else "half"

    def idle(self, length: int) -> bool:
        inside = is_plain_rotation(self.inner) if self.size is None else length <= self.sinks + self.size
        return self.keeps_frequencies and (inside or self.inner.idle(length))

    def branches(self, query: Tensor, key: Tensor, heads: int, lengths: Lengths) -> tuple[Branch, ...]:
        if self.size is None:
            return self.inner.branches(query, key, heads, lengths)
        edge = 1 - self.size
        return (
            Branch(band(edge, inf), query, key),
            Branch(band(-inf, edge), query.clamp(max=self.sinks + self.size - 1), key),
        )

    def frequencies(self, head_dim: int, length: Tensor | int, dtype: torch.dtype, device: torch.device) -> Tensor:
        inner = self.inner if self.owner is None else getattr(self.owner, SHARED_POSITION)
        if inner.keys_cacheable:  # in the precision of the model's own module
            return rescale_frequencies(inner, self.rope, length).to(device, dtype)
        return inner.rescale(self.rope.as_model(length=length), length, dtype, device)

    def for_rotated(self) -> RotatedPosition | None:
        """Return the method for queries and keys that the model has rotated, None where its frequencies are others."""
        if not self.keeps_frequencies:
            return None
        return RotatedPosition(self.inner, self.rope, self.sinks, self.size, self.owner, self.keeps_frequencies)


class RotatedPosition(FittedPosition):
    """A method for queries and keys that the model has rotated to their own positions: what is left to rotate by."""

    def branches(self, query: Tensor, key: Tensor, heads: int, lengths: Lengths) -> tuple[Branch, ...]:
        branches = super().branches(query, key, heads, lengths)
        keys = {id(branch.key): _subtract(branch.key, key) for branch in branches}  # shared where they were
        return tuple(
            replace(branch, query=_subtract(branch.query, query), key=keys[id(branch.key)]) for branch in branches
        )


def _subtract(position: Tensor | float | None, own: Tensor) -> Tensor | None:
    """Return how far a position is from a token's own; None where it is that."""
    if position is own:
        return None
    if position is None:
        return -own
    return position - (own[..., None] if isinstance(position, Tensor) and position.dim() > own.dim() else own)


def fit_position(
    position: Position, rope: ModelRope, stream: tuple[int, int] | None, model_type: str, owner: nn.Module
) -> tuple[Position, Tensor | None]:
    """Fit a recipe's position method to the frequencies of a model.

    Args:
        position: the recipe's method.
        rope: the model's frequencies.
        stream: sinks and window of StreamingLLM's distances, or None.
        model_type: names the model in errors.
        owner: see `FittedPosition`.

    Returns:
        The fitted method, and frequencies that the model's own rotary module can rotate by to the same effect, so that
        its cache holds rotated keys; None where it cannot.

    Raises:
        ValueError: the method and the model's frequencies exclude each other.
    """
    model = rope.as_model(model_type)
    if rope.kind == "dynamic" or (rope.kind == "longrope" and stream is not None):
        what = f"leave {position.name()!r} out" if stream is None else "leave the sinks out"
        advice = model.unscaled_advice
        raise ValueError(
            f"{model_type}: its rope_type {rope.kind!r} changes angles with the length of the input, which "
            f"{'no other position method' if stream is None else 'distances inside a cache'} can be joined to; {what}"
            f"{'' if advice is None else f', or {advice}'}"
        )
    fitted = position.fit(model)
    if not fitted.rotates:
        return fitted, None
    _check_rescale(fitted)
    sinks, size = stream or (0, None)
    if fitted.learns:
        return FittedPosition(fitted, rope, sinks, size, owner), None
    short, long = (rescale_frequencies(fitted, rope, length) for length in (1, 1 << 20))
    constant = torch.equal(short, long)
    keeps_frequencies = constant and torch.equal(short, rope.theta.float())
    writable = constant and size is None and rope.reads_buffer and is_plain_rotation(fitted)
    return FittedPosition(fitted, rope, sinks, size, None, keeps_frequencies), short if writable else None


def rescale_frequencies(position: Position, rope: ModelRope, length: Tensor | int) -> Tensor:
    """Compute what a method makes of a model's frequencies, in fp32 as models hold them."""
    model = rope.as_model(length=length)
    return position.rescale(model, length, torch.float32, model.theta.device)


def is_plain_rotation(position: Position) -> bool:
    """Return whether a method rotates every query and key to its own position, at any distance, and nothing else."""
    if not (position.rotates and position.keys_cacheable):
        return False
    query, key = torch.arange(2)[None], torch.arange(2)[None]
    first, *others = position.branches(query, key, 1, (2, 2))
    everywhere = not others and first.region == EVERYTHING and first.slopes is None
    return everywhere and first.query is query and first.key is key


def _check_rescale(position: Position) -> None:
    """Refuse a method with frequencies of its own that inherits the `rescale` of a method without."""
    kind = type(position)
    owner = next(part for part in kind.__mro__ if {"frequencies", "rescale"} & vars(part).keys())
    if "rescale" not in vars(owner) and kind.rescale not in (Rotary.rescale, Position.rescale):
        raise ValueError(
            f"{position.name()}: has frequencies of its own, and its rescale is that of a method without; implement "
            f"{kind.__name__}.rescale(model, length, dtype, device) to extend a model with it"
        )


def get_streaming_window(mask: Mask | None, position: Position | None) -> tuple[int, int] | None:
    """Return sinks and window of a recipe whose distances are measured as in StreamingLLM's cache, or None."""
    sinks_and_window = isinstance(mask, Sink) and mask.region(True) == Sink(mask.sinks, mask.size).region(True)
    if not sinks_and_window or not (position is None or is_plain_rotation(position)):
        return None
    return mask.sinks, mask.size  # type: ignore[union-attr]
