"""Rotary distances between a query and keys behind it, and the length of text up to which a model knows them all."""

from __future__ import annotations

from bisect import bisect_left

import torch
from transformers import PreTrainedConfig

from isentrope.core.region import Region
from isentrope.hf.extension import Extension
from isentrope.hf.introspection import LayerInfo
from isentrope.hf.layer import Layer, get_layer
from isentrope.hf.train_length import read_scaled_length
from isentrope.positions.rope import PositionMap

DEPTH = 1 << 20  # the position of a query deep in a text

Distances = tuple[float | tuple[float, ...] | None, ...]


def find_visible(layer: Layer) -> Region:
    """Return which keys a layer's queries see, by the model's mask and the recipe's."""
    region = layer.native_mask.visible
    return region if layer.recipe.mask is None else region & layer.recipe.mask.region(layer.causal)


def changes_rotation(extension: Extension, info: LayerInfo, layer: Layer) -> bool:
    """Return whether a layer rotates otherwise than in the plain model."""
    return layer.recipe.position is not None or any(rope.same(info.rope) for rope, _, _ in extension.frequencies)


def find_layer_reach(
    extension: Extension, info: LayerInfo, layer: Layer, region: Region, trained: int | None
) -> int | None:
    """Find the longest text in which no distance is longer than in training; None where all are such, or unknown.

    Args:
        extension: how the model was extended, or of one that was not.
        info: the layer's.
        layer: as it runs.
        region: which keys its queries see.
        trained: the length up to which the plain model knows all distances; None where it is not known.
    """
    if trained is None or info.rope is None:
        return None
    bounds = [-span.low for span in region.spans]  # how far behind a query keys are seen
    position, method = layer.recipe.position, extension.recipe.for_layer(info.index).position
    if position is None:  # frequencies alone, the model's or a method's
        factor = getattr(method, "factor", None) if changes_rotation(extension, info, layer) else 1.0
        longest = None if factor is None else int(factor * trained)
        return longest if longest is not None and max(bounds, default=0) >= longest else None
    if not isinstance(method, PositionMap) or position.depends_on_row_length:
        return None

    def is_new(length: int) -> bool:
        # near keys keep their distances, far ones have the longest
        farthest = {int(min(length - 1, bound)) for bound in (length - 1, trained, *bounds)}
        distances = [_compute_distance(layer, region, behind, info, length - 1) for behind in farthest]
        return any(isinstance(distance, float) and distance >= trained for distance in distances)

    longest = bisect_left(range(1, DEPTH + 1), True, key=is_new)
    return longest if longest < DEPTH else None


def find_reach(extension: Extension, config: PreTrainedConfig) -> int | None:
    """Find the longest text in which no layer has a distance that is new to it; None where all are such, or unknown."""
    trained, layers = read_scaled_length(config), [get_layer(info.module) for info in extension.layers]
    known: dict[tuple[object, ...], int | None] = {}  # layers alike have the same
    for info, layer in zip(extension.layers, layers, strict=True):
        region = find_visible(layer)
        key = id(layer.recipe), region, info.rope is None, changes_rotation(extension, info, layer)
        if key not in known:
            known[key] = find_layer_reach(extension, info, layer, region, trained)
    return min((reach for reach in known.values() if reach is not None), default=None)


def compute_distances(layer: Layer, region: Region, info: LayerInfo, at: int, behind: tuple[int, ...]) -> Distances:
    """Return the rotary distances of keys so far behind the last query of a row, which is at position `at`."""
    return tuple(_compute_distance(layer, region, n, info, at) for n in behind)


def _compute_distance(
    layer: Layer, region: Region, behind: int, info: LayerInfo, at: int
) -> float | tuple[float, ...] | None:
    """Return the rotary distance of a key `behind` a query; None if there is none, or it is not visible."""
    if behind > at or not any(span.contains(at, at - behind) for span in region.spans):
        return None
    position = layer.recipe.position
    if position is None or not position.rotates:
        return float(behind)
    query, key = torch.tensor([[at]]), torch.tensor([[at - behind]])
    for branch in position.branches(query, key, info.heads, (at + 1, at + 1)):
        if any(span.contains(at, at - behind) for span in branch.region.spans):
            q, k = (torch.as_tensor(0.0 if x is None else x, dtype=torch.float64) for x in (branch.query, branch.key))
            distances = tuple((q - k).flatten().tolist())
            return distances[0] if len(set(distances)) == 1 else distances
    return float(behind)
