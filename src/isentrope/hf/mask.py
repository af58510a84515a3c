"""Where the tokens of a transformers model stand: its masks, read as frames over the key slots."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from isentrope.core.compile import values_are_readable
from isentrope.core.layout import Frames, Layout, find_runs, find_token_span, get_layout

_layouts: Any = WeakTensorKeyDictionary()  # by mask: the layers of a forward pass are handed the same
PLAIN = (causal_mask_function, bidirectional_mask_function)


class Evicting(int):
    """The kv_offset of a cache that lets go of tokens in the middle of a row, and counts slots instead of tokens."""


def frames_mask(
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
    """For `AttentionMaskInterface`: (origin, end, own slot) of each query, (batch, 1, queries, 3), or None.

    A query sees slots from its origin, its position 0, to the end, as far as its layer lets it. None stands for whole
    rows whose last query is at the last key. Three numbers a query say all of padding, packing and the state of a
    cache, so nothing here grows with queries × keys.
    """
    if use_vmap:
        raise ValueError(_refused("a mask function was joined to the model's own"))
    known = isinstance(q_offset, int) and isinstance(kv_offset, int)
    whole_rows = known and kv_offset == 0 and bool(q_offset + q_length == kv_length)
    padding = attention_mask if _any_padding(attention_mask) else None
    if padding is not None and isinstance(kv_offset, Evicting):
        raise ValueError("StreamingCache: expected rows without padding, it would take the place of the first tokens")
    ids = _documents(mask_function, batch_size, q_length, device) if q_length == kv_length else None
    if whole_rows and padding is None and ids is None:
        return None

    slot = (torch.arange(q_length, device=device) + (q_offset - kv_offset))[None].expand(batch_size, -1)
    origin, end = torch.zeros_like(slot) - kv_offset, torch.zeros_like(slot) + (q_offset - kv_offset + q_length)
    if padding is not None:
        first, last = find_token_span(padding)
        origin, end = (first - kv_offset).expand_as(slot), torch.minimum(end, last + 1 - kv_offset)
    if ids is not None:
        low, high = find_runs(ids)
        origin, end = torch.maximum(origin, low), torch.minimum(end, high)
    # 32 bits: no caller hands over a mask of his own in them
    return torch.stack((origin, end, slot), -1)[:, None].to(torch.int32)


def layout_for(mask: Tensor | None, query: Tensor, key: Tensor) -> Layout:
    """The layout of a call whose attention mask `frames_mask` made; the layers of a forward pass share it."""
    batch, queries, keys = query.shape[0], query.shape[2], key.shape[2]
    if mask is None:
        return get_layout(batch, queries, keys, query.device)
    if not isinstance(mask, Tensor) or mask.dtype != torch.int32 or mask.shape[1:] != (1, queries, 3):
        got = f"{mask.dtype} {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"attention_mask: expected None or 0 and 1 of shape (batch, tokens), got {got}")
    if torch.compiler.is_compiling():
        return Layout(batch, queries, keys, query.device, frames=_frames(mask))
    known = _layouts.get(mask)
    if known is not None and known.keys == keys and known.device == query.device:
        return known
    with torch.inference_mode(False):  # or a later call could not save it for its backward
        layout = Layout(batch, queries, keys, query.device, frames=_frames(mask.to(query.device, copy=True)))
    _layouts[mask] = layout
    return layout


def _frames(mask: Tensor) -> Frames:
    origin, end, slot = mask[:, 0].to(torch.int64).unbind(-1)
    return origin, end, slot


def _refused(why: str) -> str:
    return f"attention mask: {why}; isentrope knows causal, bidirectional, windowed, padded and packed attention"


def _any_padding(mask: Tensor | None) -> bool:
    """Whether a mask leaves anything out; yes when it may not be looked at."""
    return mask is not None and not (values_are_readable(mask) and bool(mask.all()))


def _documents(function: Callable[..., Any], batch: int, length: int, device: torch.device | str) -> Tensor | None:
    """Which packed document each token is in; None where a row is one.

    A mask function is asked about neighbours alone: two tokens side by side see each other within a document, and a
    token sees the next one in every document or in none.
    """
    if function in PLAIN or length == 1:
        return None
    rows = torch.arange(batch, device=device)[:, None]
    head = torch.zeros((), dtype=torch.int64, device=device)
    later = torch.arange(1, length, device=device)[None]
    joined = torch.as_tensor(function(rows, head, later, later - 1)).expand(batch, length - 1)
    if values_are_readable(joined):
        ahead = torch.as_tensor(function(rows, head, later - 1, later)).expand(batch, length - 1)
        if bool(ahead.any()) and not torch.equal(ahead, joined):
            raise ValueError(_refused("some tokens see ahead and others do not"))
        if bool(joined.all()):
            return None
    return torch.nn.functional.pad((~joined).to(torch.int64).cumsum(1), (1, 0))
