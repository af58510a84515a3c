"""The rotary embedding of a transformers model: its frequencies, and what a recipe makes of them."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import torch
from torch import Tensor, nn

from isentrope.fold import angles, rotate
from isentrope.layout import Layout
from isentrope.masks import Mask, Sink
from isentrope.positions import CLEX, NTK, PI, Branch, Position, RoPE, YaRN
from isentrope.positions.regions import NearAndFar
from isentrope.positions.rope import Rotary
from isentrope.region import band

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
    """

    module: nn.Module
    layer_type: str | None = None
    interleaved: bool = False
    rounded: bool = True
    widened: bool = False

    def _named(self, name: str) -> str:
        return name if self.layer_type is None else f"{self.layer_type}_{name}"

    @property
    def theta(self) -> Tensor:
        """The frequencies as they are now."""
        return getattr(self.module, self._named(FREQUENCIES))

    def token(self) -> Hashable:
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
        given = getattr(self.module.config, "rope_parameters", None) or {}
        return given.get(self.layer_type) or {} if self.layer_type is not None else given

    @property
    def kind(self) -> str:
        return self.parameters.get("rope_type", "default")

    def same(self, other: Rope | None) -> bool:
        """Whether both are the same frequencies of the same module."""
        return other is not None and (self.module, self.layer_type) == (other.module, other.layer_type)

    def write(self, theta: Tensor, scaling: float) -> None:
        """Let the module turn at other frequencies."""
        setattr(self.module, self._named(FREQUENCIES), theta.to(self.theta.device))
        setattr(self.module, self._named("attention_scaling"), scaling)

    def rotated(self, x: Tensor, position: Tensor, layout: Layout | None = None) -> Tensor:
        """x (batch, heads, length, d) at positions (batch or 1, length), rounded as the model's own code rounds.

        layout: where `position` comes from; calls that share it share the angles.
        """

        def make() -> tuple[Tensor, Tensor]:
            found = angles(position, self.theta.to(x.device, torch.float32), torch.float32)
            assert found is not None
            dtype = x.dtype if self.rounded else torch.float32
            return (found[0] * self.scaling).to(dtype), (found[1] * self.scaling).to(dtype)

        if layout is None or torch.compiler.is_compiling():
            cos, sin = make()
        else:
            cos, sin = layout.remember((self.token(), self.rounded, _Same(position), x.dtype), make)
        return rotate(x.float() if self.widened else x, cos, sin, self.interleaved).to(x.dtype)


def ropes(model: nn.Module) -> Iterator[Rope]:
    """Every set of rotary frequencies in a model."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer is not None and name.endswith(FREQUENCIES) and not name.endswith("original_" + FREQUENCIES):
                yield Rope(module, name.removesuffix(FREQUENCIES).rstrip("_") or None)


@dataclass(frozen=True, eq=False)
class Native(Position):
    """A position method at the frequencies of the model itself.

    sinks, size: distances as in a cache that keeps `sinks` first tokens and a window of `size`, which is how
    StreamingLLM measures them: a sink that has left the window stays at the distance where it left it.
    owner: where a learned `inner` is registered, and may have been wrapped since.
    """

    inner: Position
    rope: Rope
    sinks: int = 0
    size: int | None = None
    owner: nn.Module | None = None
    rotates = True
    keys_cacheable = False

    @property
    def learns(self) -> bool:  # type: ignore[override]
        return self.inner.learns

    def token(self) -> Hashable:
        return self.rope.token()

    @property
    def layout(self) -> str:
        return "interleaved" if self.rope.interleaved else "half"

    def idle(self, length: int) -> bool:
        plain = type(self.inner) is RoPE and self.inner.base == RoPE.base
        return self.inner.idle(length) or (plain and self.size is not None and length <= self.sinks + self.size)

    def branches(self, query: Tensor, key: Tensor, heads: int) -> tuple[Branch, ...]:
        if self.size is None:
            return self.inner.branches(query, key, heads)
        edge = 1 - self.size
        return (
            Branch(band(edge, inf), query, key),
            Branch(band(-inf, edge), query.clamp(max=self.sinks + self.size - 1), key),
        )

    def frequencies(self, head_dim: int, length: Tensor | int, dtype: torch.dtype, device: torch.device) -> Tensor:
        if self.owner is not None:
            return getattr(self.owner, SHARED).frequencies(head_dim, length, dtype, device)
        if isinstance(self.inner, NTK) and self.inner.dynamic:
            return self.inner.frequencies(head_dim, length, dtype, device)
        return scaled(self.inner, self.rope, head_dim).to(device, dtype)


def scaled(position: Position, rope: Rope, head_dim: int) -> Tensor:
    """The frequencies that a method makes of a model's own."""
    if isinstance(position, PI):
        return rope.theta.float() / position.factor
    if isinstance(position, (NTK, YaRN)) or (isinstance(position, RoPE) and position.base != RoPE.base):
        return position.frequencies(head_dim, 0, torch.float32, rope.theta.device)
    return rope.theta.float()


def fitted(position: Position, rope: Rope, model_type: str) -> Position:
    """A recipe's position method with what it leaves open taken from the model, or an error."""
    turning = 2 * rope.theta.shape[-1]
    if rope.kind in BY_LENGTH:
        raise ValueError(
            f"{model_type}: its rope_type {rope.kind!r} changes angles with the length of the input, which no other "
            f"position method can be joined to; leave {position.name()!r} out, or load it with rope_type 'default'"
        )
    if isinstance(position, (NTK, YaRN, CLEX)) and rope.kind != "default":
        raise ValueError(
            f"{model_type}: its frequencies are already scaled (rope_type {rope.kind!r}), and {position.name()} would "
            "replace them; load it with rope_type 'default', or take 'rerope', 'leakyrerope', 'selfextend' or 'pi'"
        )
    if isinstance(position, CLEX):
        if position.dim != turning:
            raise ValueError(f"{model_type}: CLEX(dim=…) must be {turning}, the entries it rotates, got {position.dim}")
        if position.base == Rotary.base:
            position.base = float(rope.parameters.get("rope_theta", position.base))
        return position
    if not isinstance(position, Rotary):
        return position
    if isinstance(position, YaRN) or (isinstance(position, NTK) and position.dynamic):
        position.trained()  # or an error that says what is missing
    layout = "interleaved" if rope.interleaved else "half"
    if position.rotary_dim not in (None, turning):
        raise ValueError(f"{model_type}: rotates {turning} entries of a head, the recipe {position.rotary_dim}")
    base = position.base
    if base == Rotary.base and "rope_theta" in rope.parameters and not isinstance(position, (RoPE, NearAndFar)):
        base = float(rope.parameters["rope_theta"])
    if isinstance(position, NearAndFar) and base != Rotary.base:
        raise ValueError(f"{model_type}: {position.name()} keeps the model's frequencies; leave base out")
    return replace(position, base=base, layout=layout, rotary_dim=turning)


def streaming(mask: Mask | None, position: Position | None) -> tuple[int, int] | None:
    """Sinks and window of a recipe whose distances are measured as in StreamingLLM's cache, or None."""
    one_angle = position is None or (type(position) in (RoPE, PI, NTK, YaRN) and position.keys_cacheable)
    return (mask.sinks, mask.size) if isinstance(mask, Sink) and one_angle else None
