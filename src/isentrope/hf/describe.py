"""What each layer of an extended model really does, read off the model itself."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

import torch

from isentrope.core.layout import Layout
from isentrope.core.region import Region
from isentrope.hf.extend import Extension, extension
from isentrope.hf.introspection import Attending
from isentrope.hf.layer import Layer, layer_of
from isentrope.hf.rope import Native

LENGTHS = (1024, 4096, 16384, 65536, 262144)
DISTANCES = (1, 64, 1024, 4096, 16384, 65536)


@dataclass(frozen=True)
class LayerDescription:
    """One layer.

    tau: the temperature of the last query of n keys, for each of `LENGTHS` (one value, or one for each head).
    distances: the distance at which a query deep in a text meets a key that is `DISTANCES` behind; None if unseen.
    slowest, fastest: the longest and shortest wavelength of the rotary pairs, in tokens; None without rotation.
    cache: "rotated keys", "raw keys", or "keys" where the model does not rotate them.
    """

    index: int
    name: str
    position: str
    mask: str
    cache: str
    tau: tuple[tuple[float, ...], ...]
    distances: tuple[float | None, ...]
    fastest: float | None
    slowest: float | None

    def __str__(self) -> str:
        waves = "no rotation" if self.fastest is None else f"wavelengths {self.fastest:.3g} … {self.slowest:.3g} tokens"
        at = " ".join(f"{n}→{_shown(d)}" for n, d in zip(DISTANCES, self.distances, strict=True))
        tau = " ".join(f"{n}→{_range(t)}" for n, t in zip(LENGTHS, self.tau, strict=True))
        return "\n".join(
            (
                f"  position  {self.position}; {waves}; {self.cache} in the cache",
                f"  distance  {at}",
                f"  τ at n    {tau}",
                f"  mask      {self.mask}",
            )
        )


@dataclass(frozen=True)
class Description:
    """An extended model: its recipe and its layers. `str()` gives a page to read."""

    recipe: str
    model_type: str
    layers: tuple[LayerDescription, ...]

    def __str__(self) -> str:
        lines = [f"{self.model_type} under {self.recipe}"]
        for text, group in groupby(self.layers, key=str):
            indices = [layer.index for layer in group]
            lines.append(f"layers {indices[0]} … {indices[-1]}:" if len(indices) > 1 else f"layer {indices[0]}:")
            lines.append(text)
        return "\n".join(lines)


def describe(model: torch.nn.Module) -> Description:
    """What each layer of an extended model does now: angles, τ, mask, cache."""
    state = extension(model)
    return Description(str(state.recipe), state.model_type, tuple(_layer(state, layer) for layer in state.layers))


def _layer(state: Extension, seen: Attending) -> LayerDescription:
    layer = layer_of(seen.module)
    position = layer.recipe.position
    region = layer.native.shown
    if layer.recipe.mask is not None:
        region = region & layer.recipe.mask.region(layer.causal)
    raw = position is not None
    theta = None
    if isinstance(position, Native):
        length = position.longest or max(LENGTHS)
        theta = position.frequencies(seen.head_dim, length, torch.float32, torch.device("cpu")).detach()
    elif seen.rope is not None and not raw:
        theta = seen.rope.theta.float().cpu()
    changed = raw or any(rope.same(seen.rope) for rope, _, _ in state.frequencies)
    return LayerDescription(
        index=seen.index,
        name=seen.name,
        position=str(state.recipe.position) if changed and state.recipe.position is not None else "the model's own",
        mask=_mask(region),
        cache="raw keys" if raw else "rotated keys" if seen.rope is not None else "keys",
        tau=tuple(_tau(layer, region, n, seen) for n in LENGTHS),
        distances=tuple(_distance(layer, region, d, seen) for d in DISTANCES),
        fastest=None if theta is None else float(2 * torch.pi / theta.max()),
        slowest=None if theta is None else float(2 * torch.pi / theta.min()),
    )


def _tau(layer: Layer, region: Region, n: int, seen: Attending) -> tuple[float, ...]:
    law = layer.recipe.temperature
    if law is None:
        return (1.0,)
    layout = Layout(1, 1, n, torch.device("cpu"))
    count = layout.count_keys(law.count, layout.simplify(region))[:, None].float()
    with torch.no_grad():
        return tuple(law.scale(count, seen.head_dim).flatten().tolist())


def _distance(layer: Layer, region: Region, behind: int, seen: Attending) -> float | None:
    """The distance at which a key `behind` the last query is met, far from the start of the text; None if unseen."""
    at = 1 << 20
    if not any(max(span.start, at + span.low) <= at - behind < min(span.stop, at + span.high) for span in region.spans):
        return None
    position = layer.recipe.position
    if not isinstance(position, Native):
        return float(behind)
    query, key = torch.tensor([[at]]), torch.tensor([[at - behind]])
    for branch in position.branches(query, key, seen.heads):
        if any(span.low <= -behind < span.high for span in branch.region.spans):
            q, k = (0.0 if x is None else float(x) for x in (branch.query, branch.key))
            return q - k
    return float(behind)


def _mask(region: Region) -> str:
    def one(start: float, stop: float, low: float, high: float) -> str:
        parts = []
        if stop != float("inf"):
            parts.append(f"the first {stop:g} keys")
        if low != float("-inf"):
            parts.append(f"{1 - low:g} keys up to the query" if high == 1 else f"{-low:g} keys behind")
        if high not in (1, float("inf")):
            parts.append(f"{high - 1:g} keys ahead" if high > 1 else f"more than {-high:g} keys behind")
        return ", ".join(parts) or ("every key up to the query" if high == 1 else "every key")

    return " and ".join(one(span.start, span.stop, span.low, span.high) for span in region.spans)


def _shown(distance: float | None) -> str:
    return "·" if distance is None else f"{distance:g}"


def _range(tau: tuple[float, ...]) -> str:
    low, high = min(tau), max(tau)
    return f"{low:.4g}" if high - low < 1e-6 else f"{low:.3g}–{high:.3g}"
