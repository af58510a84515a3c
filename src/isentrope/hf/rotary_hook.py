"""The hook on a rotary module of an extended model, whose queries and keys may stay unrotated."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from isentrope.core.compile import values_are_readable
from isentrope.hf.layout_cache import LayoutCache
from isentrope.hf.rope import bind_arguments, list_arguments
from isentrope.hf.unrotated import PlainAngles


class SkipRotation:
    """A hook on a rotary module: queries and keys of these types of layers stay unrotated.

    layer_types: whether layers of each type read pages of rotated keys, so that the module rotates in a paged step.
    consecutive: the model does not hand positions on to attention, so that they must not jump.
    layouts: of the model, which knows whether a pass is over pages.
    angles: of the model, in place of those of the module.
    """

    def __init__(
        self,
        module: nn.Module,
        layer_types: dict[str | None, bool],
        consecutive: bool,
        layouts: LayoutCache,
        angles: PlainAngles,
    ) -> None:
        self.names, self.consecutive, self.layouts = list_arguments(module), consecutive, layouts
        self.angles = angles
        self.skipped = set(layer_types)
        self.skipped_in_pages = {kind for kind, rotated in layer_types.items() if not rotated}

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        arguments = bind_arguments(self.names, args, kwargs)
        skipped = self.skipped_in_pages if self.layouts.paged else self.skipped
        if None not in skipped and arguments.get("layer_type") not in skipped:
            return output
        positions = arguments["position_ids"]
        if positions.dim() > 2:
            positions = _get_text_positions(positions)
        if self.consecutive and values_are_readable(positions) and bool((positions.diff(dim=-1) > 1).any()):
            raise ValueError("position_ids: expected consecutive positions, this model does not show attention others")
        return self.angles.make(module, args, kwargs, output, positions.shape[-1] == 1)


def _get_text_positions(positions: Tensor) -> Tensor:
    """Reduce positions (axes, batch, tokens) of a model that also reads images; in text the axes are equal."""
    text = (positions == positions[:1]).all()
    if not values_are_readable(text):
        torch._assert_async(
            text, "position_ids that differ by axis (images) are not supported where keys are cached raw"
        )
    elif not bool(text):
        raise ValueError(
            "position_ids: expected those of text where keys are cached raw, got some that differ by axis (images); "
            "take a recipe without a position method, 'pi', 'ntk' or 'yarn'"
        )
    return positions[0]
