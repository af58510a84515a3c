"""From tensors and a recipe to what is asked of a backend: where tokens sit, what is seen, how q and k are turned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import NoneType
from typing import Any, TypeVar

import torch
from torch import Tensor

from isentrope.core.call import AttentionCall, FoldedBranch, RotatedBranch
from isentrope.core.dtypes import accumulation_dtype
from isentrope.core.layout import Layout, get_layout
from isentrope.core.layout_checks import PositionIds
from isentrope.core.region import Region
from isentrope.core.rotation import Angles, compute_angles
from isentrope.masks import Document, Full, Mask, Padding, find_data_masks
from isentrope.positions import Branch, NoPE, Position
from isentrope.recipe import Recipe
from isentrope.scores import Dot
from isentrope.temperatures import Temperature
from isentrope.utils.text import format_value

T = TypeVar("T")
# recipes of one position method that are kept with a layout, as many as a model has layers, and entries of τ of each
MOST_ASKED = 256
LARGEST_TAU = 1 << 20
MIN_SCALE, MAX_SCALE = 1e-6, 1e6  # of a score


def build_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    recipe: Recipe,
    call_mask: Mask | None,
    causal: bool,
    lengths: Tensor | Sequence[int] | None,
    position_ids: PositionIds | None,
    layout: Layout | None,
    scale: float | None,
    rotated_keys: bool,
) -> AttentionCall:
    """What is asked of a backend. All but q, k and v is kept with its layout: a model's layers ask the same again."""
    lasting = lengths is None and position_ids is None and recipe.cacheable and _lasting(call_mask)
    if not lasting or not isinstance(scale, (float, int, NoneType)) or torch.compiler.is_compiling():
        layout, region = geometry(q, k, recipe.mask, call_mask, causal, lengths, position_ids, layout)
        return unfolded(q, k, v, recipe, layout, region, scale, rotated_keys)
    if layout is None or (layout.queries, layout.keys) != (q.shape[2], k.shape[2]):
        layout, _ = geometry(q, k, recipe.mask, call_mask, causal, None, None, layout)

    # recipes with one position method are kept, and let go of, together: the angles, which are large, are the same
    position = recipe.position
    token = None if position is None else position.cache_key()
    group: dict[Any, tuple[Recipe, tuple[Any, ...]]]
    group = layout.cached(("asked", position, token, q.shape[1], q.shape[3], q.dtype), dict)
    key = (id(recipe), call_mask, causal, scale, rotated_keys)
    if (known := group.get(key)) is not None:
        return AttentionCall(q, k, v, layout, *known[1])
    with torch.inference_mode(False):  # as in `remember`
        _, region = geometry(q, k, recipe.mask, call_mask, causal, None, None, layout)
        asked = unfolded(q, k, v, recipe, layout, region, scale, rotated_keys)
    if len(group) < MOST_ASKED and (asked.tau is None or asked.tau.numel() <= LARGEST_TAU):
        told = asked.branches, asked.tau, asked.scale, asked.normalise, asked.interleaved
        group[key] = recipe, told  # the recipe, so that no other can have its place in memory
    return asked


def _lasting(mask: Mask | None) -> bool:
    return mask is None or (isinstance(mask, Mask) and not any(find_data_masks(mask)))


def geometry(
    q: Tensor,
    k: Tensor,
    recipe_mask: Mask | None,
    call_mask: Mask | None,
    causal: bool,
    lengths: Tensor | Sequence[int] | None,
    position_ids: PositionIds | None,
    layout: Layout | None = None,
) -> tuple[Layout, Region]:
    """Where tokens sit, and what each query may see."""
    if call_mask is not None and not isinstance(call_mask, Mask):
        raise ValueError(f"mask: expected a mask such as Document(ids), got {format_value(call_mask)}")
    masks = [mask for mask in (recipe_mask, call_mask) if mask is not None]
    data = [d for mask in masks for d in find_data_masks(mask)]
    paddings = [d for d in data if isinstance(d, Padding)]
    documents = [d for d in data if isinstance(d, Document)]
    if len(paddings) + (lengths is not None) > 1:
        raise ValueError("lengths: expected lengths or one Padding mask, got more than one")
    if len(documents) > 1:
        raise ValueError(f"mask: expected one Document mask, got {len(documents)}")
    padding = paddings[0] if paddings else None
    if layout is not None:
        if data or lengths is not None or position_ids is not None:
            raise ValueError("layout: expected it alone, got lengths, position_ids, Padding or Document beside it")
        if (layout.queries, layout.keys) != (q.shape[2], k.shape[2]):
            raise ValueError(
                f"layout: expected {q.shape[2]} queries and {k.shape[2]} keys, got {layout.queries} and {layout.keys}"
            )
    layout = layout or get_layout(
        q.shape[0],
        q.shape[2],
        k.shape[2],
        q.device,
        lengths=lengths if padding is None else padding.lengths,
        left_padded=padding is not None and padding.side == "left",
        documents=documents[0].ids if documents else None,
        position_ids=position_ids,
    )
    if data or torch.compiler.is_compiling():
        return layout, layout.simplify(_region(masks, causal))
    region = layout.cached(("region", *masks, causal), lambda: layout.simplify(_region(masks, causal)))
    return layout, region


def _region(masks: list[Mask], causal: bool) -> Region:
    causal = causal or any(mask.causal for mask in masks)
    region = Full().region(causal)
    for mask in masks:
        region = region & mask.region(causal)
    return region


def calls_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    recipe: Recipe,
    layout: Layout,
    region: Region,
    scale: float | None,
    rotated_keys: bool,
) -> list[FoldedBranch]:
    """One call for each branch of the position method that is reached, with everything folded into q and k."""
    return unfolded(q, k, v, recipe, layout, region, scale, rotated_keys).folded()


def unfolded(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    recipe: Recipe,
    layout: Layout,
    region: Region,
    scale: float | None,
    rotated_keys: bool,
) -> AttentionCall:
    """Temperatures, and the branches that are reached with their angles."""
    score, position = recipe.score or Dot(), recipe.position or NoPE()
    if rotated_keys and not position.keys_cacheable:
        raise ValueError(
            f"rotated_keys: {position.name()} needs raw keys, since a key's angle depends on the query or the length; "
            "cache the keys before rotation"
        )
    if rotated_keys and score.normalises:
        raise ValueError("rotated_keys: cosine scores normalise the keys; cache them before rotation")
    known = isinstance(scale, (int, float)) and not isinstance(scale, bool)
    if scale is not None and not (known and MIN_SCALE <= scale <= MAX_SCALE):
        # kernels mask before they multiply: -inf times 0 or less is no mask
        raise ValueError(
            f"scale: expected None or a number from {MIN_SCALE:g} to {MAX_SCALE:g}, got {format_value(scale)}"
        )
    factor = score.factor(q.shape[-1]) if scale is None else float(scale)
    interleaved = getattr(position, "layout", "half") == "interleaved"
    heads, head_dim = q.shape[1], q.shape[-1]
    dtype = accumulation_dtype(q)
    sizes = (region, heads, head_dim, dtype)

    # what does not depend on the values of q, k and v is worked out once for all calls that share the layout
    tau = _shared(layout, recipe.temperature, sizes, lambda: _temperature(recipe.temperature, layout, *sizes))
    turns = _shared(layout, position, (*sizes, rotated_keys), lambda: _turns(position, layout, *sizes, rotated_keys))
    branches = [RotatedBranch(branch.region, query, key, branch.slopes) for branch, query, key in turns]
    return AttentionCall(q, k, v, layout, branches, tau, factor, score.normalises, interleaved)


def _shared(layout: Layout, part: Any, sizes: tuple[Any, ...], make: Callable[[], T]) -> T:
    """What a part says about a layout; a part that learns, or may change otherwise, is asked every time."""
    frozen = isinstance(part, (Temperature, Position)) and not part.learns
    if not frozen or torch.compiler.is_compiling():
        return make()
    token = part.cache_key() if isinstance(part, Position) else None
    return layout.cached((part, token, *sizes), make)


def _temperature(
    law: Any, layout: Layout, region: Region, heads: int, head_dim: int, dtype: torch.dtype
) -> Tensor | None:
    """τ of each query, (batch or 1, heads or 1, queries)."""
    if law is None:
        return None
    n = layout.count_keys(getattr(law, "count", "visible"), region).clamp_min(1)
    # over one key, or none, the softmax is the same at any temperature: no law need be defined there
    n = torch.where(layout.count_keys("visible", region) > 1, n, n.clamp_min(2))[:, None].to(dtype)
    tau: Tensor = law.scale(n, head_dim)
    if tau.dim() != 3 or tau.shape[1] not in (1, heads):
        raise ValueError(f"temperature: expected τ for 1 or {heads} heads, got shape {tuple(tau.shape)}")
    return tau


def _turns(
    position: Position,
    layout: Layout,
    region: Region,
    heads: int,
    head_dim: int,
    dtype: torch.dtype,
    rotated_keys: bool,
) -> list[tuple[Branch, Angles | None, Angles | None]]:
    """The branches that some visible pair falls into at this length, with the angles of their queries and keys."""
    branches = position.branches(layout.query, layout.key, heads)
    cut = [replace(branch, region=layout.simplify(branch.region & region)) for branch in branches]
    reached = [branch for branch in cut if branch.region.spans] or cut[:1]
    if not position.rotates:
        return [(branch, None, None) for branch in reached]
    # frequencies of queries and keys differ only where rows or documents have lengths of their own
    theta_q, theta_k = (position.frequencies(head_dim, n, dtype, layout.device) for n in layout.row_lengths)
    turns = []
    for branch in reached:
        query_turn = compute_angles(branch.query, theta_q, dtype)
        key_turn = query_turn if branch.key is branch.query else compute_angles(branch.key, theta_k, dtype)
        turns.append((branch, query_turn, None if rotated_keys else key_turn))
    return turns
