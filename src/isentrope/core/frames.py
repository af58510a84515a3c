"""Frames: where the tokens that belong together begin and end in a row, from padding masks and document ids."""

from __future__ import annotations

import torch
from torch import Tensor

from isentrope.core.compile import values_are_readable

Frames = tuple[Tensor, Tensor, Tensor]  # of each query: the first slot, the end, and the slot it is aligned with


def find_token_span(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first and last token of each row, (batch, 1) each, of a mask (batch, slots) with 0 at padding.

    Raises:
        ValueError: there is padding between tokens.
    """
    tokens = mask.to(torch.int64)
    first = tokens.argmax(1, keepdim=True)
    last = mask.shape[1] - 1 - tokens.flip(1).argmax(1, keepdim=True)
    count = tokens.sum(1, keepdim=True)
    last = torch.where(count == 0, first - 1, last)
    if values_are_readable(mask) and bool((count != last - first + 1).any()):
        raise ValueError(
            "attention_mask: expected padding on the left or right of each row, got it between tokens; to generate, "
            "pad prompts with padding_side='left', and pass their mask: without one, every pad token counts as padding"
        )
    return first, last


def find_token_frames(mask: Tensor) -> Frames | None:
    """Return the frames of rows padded by a mask (batch, slots); None if it is known to pad nothing."""
    if values_are_readable(mask) and bool(mask.all()):
        return None
    first, last = find_token_span(mask)
    slots = torch.arange(mask.shape[1], device=mask.device)[None].expand_as(mask)
    return first.expand_as(slots), (last + 1).expand_as(slots), slots


def find_runs(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bounds [low, high) of the run of equal ids that each slot is in."""
    slots = torch.arange(ids.shape[1], device=ids.device)
    starts = torch.ones_like(ids, dtype=torch.bool)
    starts[:, 1:] = ids[:, 1:] != ids[:, :-1]
    ends = torch.ones_like(starts)
    ends[:, :-1] = starts[:, 1:]
    low = torch.where(starts, slots, 0).cummax(1).values
    high = torch.where(ends, slots + 1, ids.shape[1]).flip(1).cummin(1).values.flip(1)
    return low, high
