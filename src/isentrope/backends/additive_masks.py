"""Masks that PyTorch's kernels add to scores, and which calls of a pass share them."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import torch
from torch import Tensor

from isentrope.backends.tile_kernels import expand_mask
from isentrope.core.call import FoldedBranch
from isentrope.core.dtypes import accumulation_dtype

MAX_MASK_ELEMENTS = 1 << 23
MAX_CHUNK_ROWS = 512  # of a band: larger chunks leave more pairs to mask
MAX_SHARED_MASK_QUERIES = 16  # masks of so few are kept with a layout
WHOLE_MASK = "whole mask"  # kept with a traced branch


class WholeMask(NamedTuple):
    """The mask of a branch that is one tile, and its queries without keys: (batch or 1, 1, queries), then (…, 1)."""

    bias: Tensor
    empty: Tensor
    empty_rows: Tensor


def count_chunk_rows(branch: FoldedBranch) -> int:
    """Return how many rows a mask may have."""
    copies = branch.bounds[0].shape[0] * (1 if branch.slopes is None else branch.q.shape[1])
    rows = max(1, MAX_MASK_ELEMENTS // max(1, copies * branch.k.shape[2]))
    return min(MAX_CHUNK_ROWS, rows) if branch.layout.banded else rows


def is_one_tile(branch: FoldedBranch) -> bool:
    """Return whether a branch is one tile, without numbers in slices, so that a traced length may stay a variable."""
    return not branch.layout.banded and branch.q.shape[2] <= count_chunk_rows(branch)


def find_whole_mask(branch: FoldedBranch) -> WholeMask | None:
    """Return the mask that an earlier layer of a graph made for a branch, None where there is none."""
    mask: WholeMask | None = None if branch.traced is None else branch.traced.find(WHOLE_MASK)
    return mask


def get_whole_mask(branch: FoldedBranch) -> WholeMask:
    """Return the mask of a branch, once for the layers of a graph."""
    if branch.biased or branch.chosen is not None:
        return _make_whole_mask(branch)
    return branch.cached_in_graph(WHOLE_MASK, lambda: _make_whole_mask(branch))


def _make_whole_mask(branch: FoldedBranch) -> WholeMask:
    empty, bias = branch.visible_counts == 0, get_additive_mask(branch)
    return WholeMask(expand_mask(bias, branch.q, branch.k), empty, empty[..., None])


def get_additive_mask(branch: FoldedBranch, rows: slice | None = None, columns: slice | None = None) -> Tensor:
    """Return `_make_additive_mask`, once for the layers of a pass where it is small."""
    traced = torch.compiler.is_compiling()
    if branch.biased or branch.chosen is not None or traced or branch.layout.queries > MAX_SHARED_MASK_QUERIES:
        return _make_additive_mask(branch, rows, columns)
    part = tuple(None if x is None else (x.start, x.stop) for x in (rows, columns))
    layout, key = branch.layout, (branch.region, branch.q.dtype, part)
    # one of the layout's values, so that masks of many regions do not take the place of its angles
    masks = layout.cached("additive masks", _make_mask_dict)
    if key not in masks:
        with torch.inference_mode(False):  # or a later call could not save it for its backward
            masks[key] = _make_additive_mask(branch, rows, columns)
    return masks[key]


def _make_mask_dict() -> dict[Hashable, Tensor]:
    return {}


def _make_additive_mask(branch: FoldedBranch, rows: slice | None, columns: slice | None) -> Tensor:
    """Return 0, or the distance bias, where a pair is visible, and -inf elsewhere."""
    visible = branch.mask(rows, columns)
    bias = branch.bias(rows, columns)
    width = visible.shape[-1]
    # GPU kernels read the mask in aligned vectors: give rows a padded stride
    stride = -(-width // 16) * 16
    # the first call of torch.broadcast_shapes imports half of torch, for seconds
    shape = visible.shape if bias is None else torch.broadcast_tensors(visible, bias)[0].shape
    # a distance bias has more digits than half precision; the CPU kernel takes it as it is
    dtype = branch.q.dtype if bias is None else accumulation_dtype(branch.q)
    # not of q, whose wrappers (vmap) would stay with a mask that is shared
    mask = torch.zeros(*shape[:-1], stride, dtype=dtype, device=visible.device)[..., :width]
    if bias is not None:
        mask.copy_(bias)
    return mask.masked_fill_(~visible, -torch.inf)
