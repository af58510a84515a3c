"""transformers' attention masks as frames: the interval of key slots that each query may see."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from isentrope.core.caching import register_clear
from isentrope.core.compile import values_are_readable
from isentrope.core.frames import Frames, find_runs, find_token_span
from isentrope.core.layout import Layout, get_layout
from isentrope.core.region import Region
from isentrope.parallel.rows import ShardedOffset

# by mask, which is the same for all layers of a forward pass, also where checkpointing runs them again; without this
# and the `LayoutCache` a decoding step of padded rows takes 112 ms in place of 32
_layouts: Any = WeakTensorKeyDictionary()
register_clear(_layouts.clear)
UNPACKED = (causal_mask_function, bidirectional_mask_function)  # mask functions without documents


class EvictingOffset(int):
    """The kv_offset of a cache that evicts tokens from the middle of a row, and counts slots instead of tokens."""


def make_frames_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **unused: Any,
) -> Tensor | None:
    """Make (origin, end, own slot, tokens dropped before slot 0) of each query, (batch, 1, queries, 4).

    None stands for whole rows that end together. A query sees slots from its origin, its position 0, to the end, as far
    as its layer lets it. Four numbers a query describe padding, packing and the state of a cache, so nothing here grows
    with queries × keys. The signature is that of transformers' `AttentionMaskInterface`.

    Raises:
        ValueError: the mask is neither causal nor bidirectional, or has padding where a cache evicts tokens.
    """
    if use_vmap:
        raise ValueError(_unsupported("a mask function was joined to the model's own"))
    static = isinstance(q_offset, int) and isinstance(kv_offset, int)
    whole_rows = static and kv_offset == 0 and bool(q_offset + q_length == kv_length)
    padding = attention_mask if _has_padding(attention_mask) else None
    if padding is not None and isinstance(kv_offset, EvictingOffset):
        raise ValueError("StreamingCache: expected rows without padding, it would take the place of the first tokens")
    ids = _find_documents(mask_function, batch_size, q_length, device) if q_length == kv_length else None
    if whole_rows and padding is None and ids is None and not isinstance(kv_offset, ShardedOffset):
        return None

    slot = (torch.arange(q_length, device=device) + (q_offset - kv_offset))[None].expand(batch_size, -1)
    origin, end = torch.zeros_like(slot) - kv_offset, torch.zeros_like(slot) + (q_offset - kv_offset + q_length)
    if padding is not None:
        first, last = find_token_span(padding)
        origin, end = (first - kv_offset).expand_as(slot), torch.minimum(end, last + 1 - kv_offset)
    if ids is not None:
        low, high = find_runs(ids)
        origin, end = torch.maximum(origin, low), torch.minimum(end, high)
    # int32 distinguishes these frames from masks that callers pass themselves
    dropped = torch.zeros_like(slot) + kv_offset
    frames = torch.stack((origin, end, slot, dropped), -1)[:, None].to(torch.int32)
    if isinstance(kv_offset, ShardedOffset):
        return kv_offset.make_mask(frames[..., :3], kv_length, framed=padding is not None)
    return frames


def make_layout(mask: Tensor | None, query: Tensor, key: Tensor) -> Layout:
    """Make the layout of a call whose mask comes from `make_frames_mask`; the layers of a forward pass share it."""
    batch, queries, keys = query.shape[0], query.shape[2], key.shape[2]
    if mask is None:
        return get_layout(batch, queries, keys, query.device)
    if not isinstance(mask, Tensor) or mask.dtype != torch.int32 or mask.shape[1:] != (1, queries, 4):
        got = f"{mask.dtype} {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"attention_mask: expected None or 0 and 1 of shape (batch, tokens), got {got}")
    if torch.compiler.is_compiling():
        return Layout(batch, queries, keys, query.device, frames=_read_frames(mask))
    cached = _layouts.get(mask)
    if cached is not None and cached.keys == keys and cached.device == query.device:
        return cached
    with torch.inference_mode(False):  # autograd cannot save inference tensors for a later backward
        layout = Layout(batch, queries, keys, query.device, frames=_read_frames(mask.to(query.device, copy=True)))
    layout.padded_queries_matter = False  # later layers hide their keys too
    _layouts[mask] = layout
    return layout


def apply_position_ids(
    layout: Layout, position_ids: Tensor, mask: Tensor | None, region: Region, evicts: bool
) -> Layout:
    """Return the layout with its queries at these positions.

    Args:
        layout: of the tokens, counted from the first of each row.
        position_ids: as transformers passes them to the layer.
        mask: of `make_frames_mask`.
        region: the keys that the layer sees by itself.
        evicts: whether positions are counted in a cache that drops keys from the middle.

    Raises:
        ValueError: the positions do not continue those of the keys in a cache, do not go up, or jump where a window
            counts tokens.
    """
    position_ids = position_ids.to(layout.device)
    one = layout.plain and layout.queries == 1 and values_are_readable(position_ids)
    if one and bool((position_ids == layout.query).all()):  # a decoding step, in few operations
        return layout
    shift = position_ids - layout.query
    inside = layout.query >= 0  # not padding on the left
    if layout.framed:
        inside = inside & (layout.query < layout.frame_high - layout.origin)
    frame = layout.origin.expand_as(layout.query)
    # within a frame, positions may start anywhere; they must only go up by one
    steady = (shift[:, 1:] == shift[:, :-1]) | (frame[:, 1:] != frame[:, :-1]) | ~(inside[:, 1:] & inside[:, :-1])
    if not values_are_readable(steady):
        torch._assert_async(
            steady.all(), "position_ids that jump are not supported in a compiled model whose keys are cached raw"
        )
        return layout
    if bool(steady.all()):
        # cached keys are counted from the first token, or from the first slot of a padded row
        slots = layout.origin if mask is None else layout.origin + mask[:, 0, :, 3].to(shift.device, torch.int64)
        counted = (shift == 0) | (shift == layout.origin) | (shift == slots) | ~inside
        if layout.queries != layout.keys and not evicts and not bool(counted.all()):
            raise ValueError("position_ids: expected positions that continue those of the cached keys, got others")
        return layout
    if layout.queries != layout.keys:
        raise ValueError("position_ids: expected consecutive positions where keys come from a cache, got a jump")
    causal, whole = all(span.high <= 1 for span in region.spans), all(span.low == -inf for span in region.spans)
    if causal and not bool((steady | (position_ids.diff() > 0)).all()):  # tokens at one position would see each other
        raise ValueError(
            "position_ids: expected positions that go up from token to token, got one that repeats or goes back; for "
            "several texts packed in a row pass use_cache=False and no attention_mask, so that transformers finds them"
        )
    if not whole:
        raise ValueError(
            "position_ids: expected consecutive positions in a layer with a window, which counts tokens, got a jump; "
            "choose a recipe that changes frequencies alone, such as yarn"
        )
    frames = (layout.origin, layout.frame_high, layout.query + layout.origin) if layout.framed else None
    return Layout(
        layout.batch, layout.queries, layout.keys, layout.device, frames=frames, position_ids=position_ids.clone()
    )


def _read_frames(mask: Tensor) -> Frames:
    origin, end, slot, _ = mask[:, 0].to(torch.int64).unbind(-1)
    return origin, end, slot


def _unsupported(reason: str) -> str:
    return f"attention mask: {reason}; isentrope supports causal, bidirectional, windowed, padded and packed attention"


def _has_padding(mask: Tensor | None) -> bool:
    """Return whether a mask hides any token; True where its values cannot be read."""
    return mask is not None and not (values_are_readable(mask) and bool(mask.all()))


def _find_documents(function: Callable[..., Any], batch: int, length: int, device: torch.device | str) -> Tensor | None:
    """Number the packed documents and return each token's; None where every row is one document.

    Neighbours suffice to find them: two tokens side by side see each other within a document, and a token sees the next
    one in every document or in none.
    """
    if function in UNPACKED or length == 1:
        return None
    rows = torch.arange(batch, device=device)[:, None]
    head = torch.zeros((), dtype=torch.int64, device=device)
    later = torch.arange(1, length, device=device)[None]
    joined = torch.as_tensor(function(rows, head, later, later - 1)).expand(batch, length - 1)
    if values_are_readable(joined):
        ahead = torch.as_tensor(function(rows, head, later - 1, later)).expand(batch, length - 1)
        if bool(ahead.any()) and not torch.equal(ahead, joined):
            raise ValueError(_unsupported("some tokens see ahead and others do not"))
        if bool(joined.all()):
            return None
    return torch.nn.functional.pad((~joined).to(torch.int64).cumsum(1), (1, 0))
