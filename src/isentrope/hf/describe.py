"""Describe what each layer of a model does, extended or not, from the model itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from isentrope.core.layout import Layout
from isentrope.core.region import Region, first_keys
from isentrope.hf.card import shorten_recipe
from isentrope.hf.distances import (
    DEPTH,
    Distances,
    changes_rotation,
    compute_distances,
    find_layer_reach,
    find_visible,
)
from isentrope.hf.extension import Extension, find_extension, find_model
from isentrope.hf.introspection import LayerInfo, introspect
from isentrope.hf.layer import Layer, get_layer
from isentrope.hf.layer_plan import plan_layers
from isentrope.hf.layout_cache import LayoutCache
from isentrope.hf.train_length import read_scaled_length, read_train_length
from isentrope.positions import Position
from isentrope.recipe import Recipe
from isentrope.recipe.layer_sets import group_indices

LENGTHS = (1024, 4096, 16384, 65536, 262144)
DISTANCES = (1, 64, 1024, 4096, 16384, 65536)
ROW_FACTORS = (2, 4, 16)  # times the training length: rows that distances are given for, where they depend on that
DEFAULT_TRAIN_LENGTH = 8192  # where a config does not state one


@dataclass(frozen=True)
class LayerDescription:
    """One layer.

    Attributes:
        cache: "rotated keys", "raw keys", or "keys" where the model does not rotate them.
        tau: the temperature of the last query of n keys, for each of `LENGTHS` (one value, or one for each head); of
            near keys where far ones have another; None where it depends on more than n, see `other_laws`.
        far_tau: that of far keys; None where there are none.
        far_bias: what a share law adds to the scores of far keys; None where there are none.
        far_keys: which far keys a query sees, where they are chosen; None where it sees all.
        distances: the rotary distance between a query deep in a text and a key that is `DISTANCES` behind; one for
            each group of pairs where they differ, None where the key is not visible. Where they depend on the length of
            the row, those of the last of `rows`.
        rows: the keys of a few rows, by `ROW_FACTORS`, and how far keys are behind their last query with their
            rotary distances, where these depend on the length of the row; else nothing.
        fastest, slowest: the shortest and longest wavelength of the rotary pairs, in tokens; None without rotation.
        reach: the longest text in which no distance is longer than in training, by the position method or by the factor
            of its frequencies; None where all texts are such, or it is not known.
        other_laws: in words, temperatures that depend on more than n, and laws that the layer leaves out: rows of the
            page, each a name and a text.
    """

    index: int
    name: str
    position: str
    mask: str
    cache: str
    tau: tuple[tuple[float, ...], ...] | None
    distances: Distances
    fastest: float | None
    slowest: float | None
    far_tau: tuple[tuple[float, ...], ...] | None = None
    far_bias: tuple[tuple[float, ...], ...] | None = None
    other_laws: tuple[tuple[str, str], ...] = ()
    far_keys: str | None = None
    rows: tuple[tuple[int, tuple[int, ...], Distances], ...] = ()
    reach: int | None = None

    def __str__(self) -> str:
        waves = "no rotation"
        if self.fastest is not None and self.slowest is not None:
            waves = f"wavelengths {_format_wave(self.fastest)} … {_format_wave(self.slowest)} tokens"
        at = [f"{_format_distances(behind, distances)} in a row of {n} keys" for n, behind, distances in self.rows]
        laws = {"τ at n": self.tau}
        if self.far_bias is not None and self.far_tau != self.tau:
            laws = {"near τ": self.tau, "far τ": self.far_tau}
        if self.far_bias is not None and any(bias != (0.0,) for bias in self.far_bias):
            laws["far bias"] = self.far_bias
        return "\n".join(
            (
                f"  position  {self.position}; {waves}; {self.cache} in the cache",
                *(f"  distance  {line}" for line in at or [_format_distances(DISTANCES, self.distances)]),
                *(
                    []
                    if self.reach is None
                    else [f"  reach     {self.reach} tokens; beyond, distances are new to the model"]
                ),
                *(f"  {name:8}  {_format_by_length(values)}" for name, values in laws.items() if values is not None),
                *(f"  {name:8}  {text}" for name, text in self.other_laws),
                f"  mask      {self.mask}{'' if self.far_keys is None else ', of which retrieve chooses'}",
                *([] if self.far_keys is None else [f"  retrieve  {self.far_keys}"]),
            )
        )


@dataclass(frozen=True)
class Description:
    """A model: its recipe and its layers. `str()` gives a readable page.

    Attributes:
        recipe: its text; "plain" for a model that is not extended.
        reasons: why it was chosen, where it was `auto`.
        train_length: tokens that the model was trained at; None where its config does not say.
        is_extended: whether `isentrope.extend` was called on it.
    """

    recipe: str
    model_type: str
    layers: tuple[LayerDescription, ...]
    reasons: tuple[str, ...] = ()
    train_length: int | None = None
    is_extended: bool = True

    def __str__(self) -> str:
        state = f"under {shorten_recipe(self.recipe)}" if self.is_extended else "as it is, not extended"
        trained = "" if self.train_length is None else f"; trained at {self.train_length} tokens"
        lines = [f"{self.model_type} {state}{trained}", *(f"chosen    {reason}" for reason in self.reasons)]
        alike: dict[str, list[int]] = {}
        for layer in self.layers:
            alike.setdefault(str(layer), []).append(layer.index)
        for text, indices in alike.items():
            runs = [f"{a} … {b}" if b > a else f"{a}" for a, b in group_indices(indices)]
            lines.append(f"layer{'s' if len(indices) > 1 else ''} {', '.join(runs)}:")
            lines.append(text)
        return "\n".join(lines)


def describe(model: torch.nn.Module) -> Description:
    """Describe what each layer of a model does now: angles, τ, mask, cache; and why, where its recipe was `auto`.

    Args:
        model: a transformers model, extended or not.

    Returns:
        A description whose `str()` is a readable page.

    Raises:
        ValueError: it is no transformers model, or one that cannot be extended.
    """
    if (inner := find_model(model)) is None:
        raise ValueError(f"model: expected a transformers model, got {type(model).__name__}; load one and pass that")
    config, extension = inner.config.get_text_config(), find_extension(inner)
    is_extended, trained, scaled = extension is not None, read_train_length(config), read_scaled_length(config)
    if extension is None:
        extension = Extension(Recipe(), inner.config.model_type, introspect(inner))
        plans = plan_layers(extension.recipe, extension.layers, config, inner)
        layouts = LayoutCache(len(plans))
        layers = [Layer(info, plan, "auto", 0, layouts, ()) for info, plan in zip(extension.layers, plans, strict=True)]
    else:
        layers = [get_layer(info.module) for info in extension.layers]
    described = tuple(
        _describe_layer(extension, info, layer, trained, scaled)
        for info, layer in zip(extension.layers, layers, strict=True)
    )
    reasons = tuple(extension.notes.get("reasons", ()))
    return Description(str(extension.recipe), extension.model_type, described, reasons, trained, is_extended)


def _describe_layer(
    extension: Extension, info: LayerInfo, layer: Layer, trained: int | None, scaled: int | None
) -> LayerDescription:
    method = extension.recipe.for_layer(info.index).position
    region = find_visible(layer)
    theta = _get_frequencies(layer.recipe.position, info)
    raw = layer.recipe.position is not None
    has_far_keys = raw and layer.recipe.position.near_window is not None
    changed = changes_rotation(extension, info, layer)
    rows, depth = list[tuple[int, tuple[int, ...], Distances]](), DEPTH
    if raw and layer.recipe.position.depends_on_row_length:
        for factor in ROW_FACTORS:
            n = factor * (trained or DEFAULT_TRAIN_LENGTH)
            behind, depth = tuple(dict.fromkeys((1, n // 8, n // 4, n // 2, n - 1))), n - 1
            rows.append((n, behind, compute_distances(layer, region, info, depth, behind)))
    return LayerDescription(
        index=info.index,
        name=info.name,
        position=str(method) if changed and method is not None else "the model's own",
        mask=_format_region(region),
        cache="raw keys" if raw else "rotated keys" if info.rope is not None else "keys",
        tau=_tabulate_tau(layer, region, info, "near"),
        distances=compute_distances(layer, region, info, depth, DISTANCES),
        fastest=None if theta is None else float(2 * torch.pi / theta.max()),
        slowest=None if theta is None else float(2 * torch.pi / theta.min()),
        far_tau=_tabulate_tau(layer, region, info, "far") if has_far_keys else None,
        far_bias=tuple(_compute_far_bias(layer, region, n, info) for n in LENGTHS) if has_far_keys else None,
        other_laws=(*_describe_other_laws(layer), *_describe_left_out(extension, info, layer)),
        far_keys=_describe_choice(layer.recipe),
        rows=tuple(rows),
        reach=find_layer_reach(extension, info, layer, region, scaled),
    )


def _describe_other_laws(layer: Layer) -> Iterator[tuple[str, str]]:
    """Yield temperatures that depend on more than the number of keys."""
    for law in layer.recipe.temperatures:
        keys = getattr(law, "keys", "all")
        name = "τ" if keys == "all" else f"{keys} τ"
        if hasattr(law, "by_entropy"):
            yield name, f"from the entropy of each query's attention, so that it depends on the text: {law}"
        elif hasattr(law, "by_distance"):
            factors, biases = (x.tolist() for x in law.by_distance(torch.tensor(DISTANCES, dtype=torch.float64)))
            terms = zip(DISTANCES, factors, biases, strict=True)
            yield name, "by distance, with a bias: " + " ".join(f"{n}→{a:.3g} ({m:.3g})" for n, a, m in terms)


def _describe_left_out(extension: Extension, info: LayerInfo, layer: Layer) -> Iterator[tuple[str, str]]:
    """Yield the laws of near and far keys that a layer without such keys leaves out."""
    if layer.recipe.position is not None:
        return
    recipe = extension.recipe.for_layer(info.index)
    kept = ("all",) if info.rope is None else ("all", "near")
    laws = [law for law in recipe.temperatures if getattr(law, "keys", "all") not in kept]
    texts = [shorten_recipe(str(part)) for part in (*laws, recipe.share, recipe.retrieve) if part is not None]
    if texts:
        reason = "this layer does not rotate" if info.rope is None else "all keys of this layer are near"
        yield "left out", f"{' and '.join(texts)}, since {reason}"


def _tabulate_tau(layer: Layer, region: Region, info: LayerInfo, keys: str) -> tuple[tuple[float, ...], ...] | None:
    """Return τ of near or far keys for each of `LENGTHS`; None where it depends on more than the number of keys."""
    law = next((law for law in layer.recipe.temperatures if getattr(law, "keys", "all") in ("all", keys)), None)
    if law is not None and not hasattr(law, "scale"):
        return None
    return tuple(_compute_tau(layer, law, region, n, info.head_dim) for n in LENGTHS)


def _describe_choice(recipe: Recipe) -> str | None:
    return None if recipe.retrieve is None else recipe.retrieve.describe_budget(recipe.position.near_window)


def _count_hidden(layer: Layer, layout: Layout) -> Tensor | int:
    """Return how many far keys queries do not choose."""
    choice = layer.recipe.retrieve
    return 0 if choice is None else choice.count_hidden(layout.query, layer.recipe.position.near_window)


def _get_frequencies(position: Position | None, info: LayerInfo) -> Tensor | None:
    """Return the frequencies that a layer rotates by under its own position method, or the model's where it has none.

    A fitted method that rotates has frequencies; one that does not (NoPE, ALiBi) takes the model's rotation away.
    """
    if position is None:
        return None if info.rope is None else info.rope.theta.float().cpu()
    if not position.rotates:
        return None
    length = position.longest or max(LENGTHS)
    return position.frequencies(info.head_dim, length, torch.float32, torch.device("cpu")).detach()


def _compute_tau(layer: Layer, law: Any, region: Region, n: int, head_dim: int) -> tuple[float, ...]:
    if law is None:
        return (1.0,)
    layout = Layout(1, 1, n, torch.device("cpu"))
    kind = getattr(law, "count", "visible")
    count = layout.count_keys(kind, layout.simplify(region))
    if kind == "visible":
        count = count - _count_hidden(layer, layout)
    count = count[:, None].float()
    with torch.no_grad():
        return tuple(law.scale(count, head_dim).flatten().tolist())


def _compute_far_bias(layer: Layer, region: Region, n: int, info: LayerInfo) -> tuple[float, ...]:
    share = layer.recipe.share
    if share is None:
        return (0.0,)
    layout, positions = Layout(1, 1, n, torch.device("cpu")), torch.zeros(1, 1)
    branches = layer.recipe.position.branches(positions, positions, info.heads, (n, n))
    region = region - first_keys(getattr(share, "sinks", 0)) if getattr(share, "count", "far") == "far" else region
    spans = tuple(span for branch in branches if branch.far for span in (branch.region & region).spans)
    counted = Region(spans) if getattr(share, "count", "far") == "far" else region
    count = layout.count_keys("visible", layout.simplify(counted)) - _count_hidden(layer, layout)
    count = count[:, None].clamp_min(1)
    with torch.no_grad():
        return tuple(share.bias(count).flatten().tolist())


def _format_region(region: Region) -> str:
    def format_span(start: float, stop: float, low: float, high: float) -> str:
        parts = []
        if stop != float("inf"):
            parts.append(f"the first {stop:g} keys")
        if low != float("-inf"):
            parts.append(f"{1 - low:g} keys up to the query" if high == 1 else f"{-low:g} keys behind")
        if high not in (1, float("inf")):
            parts.append(f"{high - 1:g} keys ahead" if high > 1 else f"more than {-high:g} keys behind")
        return ", ".join(parts) or ("every key up to the query" if high == 1 else "every key")

    return " and ".join(format_span(span.start, span.stop, span.low, span.high) for span in region.spans)


def _format_wave(tokens: float) -> str:
    return f"{tokens:.3g}" if tokens < 1000 else f"{tokens:,.0f}"


def _format_distances(behind: tuple[int, ...], distances: Distances) -> str:
    return " ".join(f"{n}→{_format_distance(d)}" for n, d in zip(behind, distances, strict=True))


def _format_distance(distance: float | tuple[float, ...] | None) -> str:
    if isinstance(distance, tuple):
        return f"{min(distance):g}–{max(distance):g}"
    return "masked" if distance is None else f"{distance:g}"


def _format_by_length(values: tuple[tuple[float, ...], ...]) -> str:
    return " ".join(f"{n}→{_format_range(value)}" for n, value in zip(LENGTHS, values, strict=True))


def _format_range(tau: tuple[float, ...]) -> str:
    low, high = min(tau) + 0.0, max(tau) + 0.0  # no "-0"
    return f"{low:.4g}" if high - low < 1e-6 else f"{low:.3g}–{high:.3g}"
