"""Build the call passed to a backend, from tensors and a recipe: geometry, visible keys, temperatures and angles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import NoneType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from isentrope.core.caching import MAX_BUILT_CALLS, MAX_TAU_ELEMENTS
from isentrope.core.call import AttentionCall, RotatedBranch
from isentrope.core.choice import BlockChoice
from isentrope.core.dtypes import accumulation_dtype
from isentrope.core.law_tables import fits_heads, look_up_law
from isentrope.core.layout import MAX_SPANS, Layout, Rows, find_layout, get_layout
from isentrope.core.layout_checks import PositionIds
from isentrope.core.region import Region, Span, first_keys
from isentrope.core.rotation import compute_angles
from isentrope.core.tracing import GraphCache
from isentrope.masks import Document, Full, Mask, Padding, find_data_masks
from isentrope.positions import NoPE, Position
from isentrope.recipe import Recipe
from isentrope.scores import Dot
from isentrope.share import Share
from isentrope.temperatures import Temperature
from isentrope.utils.messages import format_value, truncate

T = TypeVar("T")
MIN_SCALE, MAX_SCALE = 1e-6, 1e6  # of a score


class Inputs(NamedTuple):
    """The arguments of `attention` that define what is attended to; its docstring explains them."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Mask | None = None
    causal: bool = False
    lengths: Tensor | Sequence[int] | None = None
    position_ids: PositionIds | None = None
    layout: Layout | None = None
    scale: float | None = None
    rotated_keys: bool = False
    dropout: Callable[[Tensor], Tensor] | None = None


class _Sizes(NamedTuple):
    """What temperatures and angles depend on besides their part and the layout."""

    region: Region
    heads: int
    head_dim: int
    dtype: torch.dtype
    rotated_keys: bool
    choice: BlockChoice | None = None
    window: int = 0
    branches: tuple[Region, ...] = ()
    far: tuple[int, ...] = ()  # of the branches


def build_call(inputs: Inputs, recipe: Recipe) -> AttentionCall:
    """Build the call passed to a backend.

    All but q, k and v is cached with the layout: the layers of a model need the same.
    """
    if not _is_cacheable(inputs, recipe):
        return _build(inputs, recipe, *compute_geometry(inputs, recipe.mask))
    layout, q, keys = inputs.layout, inputs.q, inputs.k.shape[2]
    if layout is None:
        layout = find_layout(q, keys)
    if layout is None or (layout.queries, layout.keys) != (q.shape[2], keys):
        layout = _compute_layout(inputs, recipe.mask)
    if torch.compiler.is_compiling():
        return _build_in_graph(inputs, recipe, layout)
    # recipes with one position method are cached, and dropped, together: they share the angles, which are large
    position = recipe.position
    position_key = None if position is None else position.cache_key()
    calls: dict[Any, tuple[Recipe, tuple[Any, ...]]]
    calls = layout.cached(("calls", position, position_key, q.shape[1], q.shape[3], q.dtype), dict)
    key = (id(recipe), inputs.mask, inputs.causal, inputs.scale, inputs.rotated_keys)
    if (cached := calls.get(key)) is not None:
        branches, scale, normalise, interleaved, choice, shared = cached[1]
        dropout = inputs.dropout
        call = AttentionCall(q, inputs.k, inputs.v, layout, branches, scale, normalise, interleaved, dropout, choice)
        vars(call)["shared"] = shared
        return call
    with torch.inference_mode(False):  # or a later call could not save it for its backward
        call = _build(inputs, recipe, layout, _compute_region(layout, inputs, recipe.mask))
    factors = [x for branch in call.branches for x in (branch.tau, branch.offset) if x is not None]
    if len(calls) < MAX_BUILT_CALLS and all(x.numel() <= MAX_TAU_ELEMENTS for x in factors):
        # with the recipe, so that no other can have its id
        calls[key] = recipe, (call.branches, call.scale, call.normalise, call.interleaved, call.choice, {})
    return call


def _build_in_graph(inputs: Inputs, recipe: Recipe, layout: Layout) -> AttentionCall:
    """Build the call in a graph that is being traced, where layers that share the layout share all but q, k and v."""
    q = inputs.q
    key = (recipe, inputs.mask, inputs.causal, inputs.rotated_keys, q.shape[1], q.shape[3], q.dtype)

    def build() -> AttentionCall:
        call = _build(inputs, recipe, layout, _compute_region(layout, inputs, recipe.mask))
        call = replace(call, branches=[replace(branch, traced=GraphCache()) for branch in call.branches])
        vars(call)["shared"] = {}
        return call

    first = layout.cached(("call", *key), build)
    scale = first.scale if inputs.scale is None else _check_scale(inputs.scale)
    parts = first.branches, scale, first.normalise, first.interleaved, inputs.dropout, first.choice
    call = AttentionCall(q, inputs.k, inputs.v, layout, *parts)
    vars(call)["shared"] = first.shared
    return call


def _is_cacheable(inputs: Inputs, recipe: Recipe) -> bool:
    if inputs.lengths is not None or inputs.position_ids is not None:
        return False
    if not recipe.cacheable or not isinstance(inputs.scale, (float, int, NoneType)):
        return False
    return inputs.mask is None or (isinstance(inputs.mask, Mask) and not any(find_data_masks(inputs.mask)))


def compute_geometry(inputs: Inputs, recipe_mask: Mask | None) -> tuple[Layout, Region]:
    """Return the positions of tokens, and which keys each query may see."""
    layout = _compute_layout(inputs, recipe_mask)
    return layout, _compute_region(layout, inputs, recipe_mask)


def _compute_layout(inputs: Inputs, recipe_mask: Mask | None) -> Layout:
    queries, keys, layout = inputs.q.shape[2], inputs.k.shape[2], inputs.layout
    if inputs.mask is not None and not isinstance(inputs.mask, Mask):
        raise ValueError(f"mask: expected a mask such as Document(ids), got {format_value(inputs.mask)}")
    data = [d for mask in (recipe_mask, inputs.mask) if mask is not None for d in find_data_masks(mask)]
    paddings = [d for d in data if isinstance(d, Padding)]
    documents = [d for d in data if isinstance(d, Document)]
    if len(paddings) + (inputs.lengths is not None) > 1:
        raise ValueError("lengths: expected lengths or one Padding mask, got more than one")
    if len(documents) > 1:
        raise ValueError(f"mask: expected one Document mask, got {len(documents)}")
    if layout is not None:
        if data or inputs.lengths is not None or inputs.position_ids is not None:
            raise ValueError("layout: expected it alone, got lengths, position_ids, Padding or Document beside it")
        if (layout.queries, layout.keys) != (queries, keys):
            raise ValueError(
                f"layout: expected {queries} queries and {keys} keys, got {layout.queries} and {layout.keys}"
            )
        return layout
    rows = None
    if data or inputs.lengths is not None:
        padding = paddings[0] if paddings else None
        rows = Rows(
            lengths=inputs.lengths if padding is None else padding.lengths,
            left_padded=padding is not None and padding.side == "left",
            documents=documents[0].ids if documents else None,
        )
    return get_layout(inputs.q.shape[0], queries, keys, inputs.q.device, rows, position_ids=inputs.position_ids)


def _compute_region(layout: Layout, inputs: Inputs, recipe_mask: Mask | None) -> Region:
    masks = [mask for mask in (recipe_mask, inputs.mask) if mask is not None]

    def compute() -> Region:
        causal = inputs.causal or any(mask.causal for mask in masks)
        region = Full().region(causal)
        for mask in masks:
            region = region & mask.region(causal)
        return layout.simplify(region)

    if torch.compiler.is_compiling() or any(any(find_data_masks(mask)) for mask in masks):
        return compute()
    return layout.cached(("region", *masks, inputs.causal), compute)


def _build(inputs: Inputs, recipe: Recipe, layout: Layout, region: Region) -> AttentionCall:
    q, score, position = inputs.q, recipe.score or Dot(), recipe.position or NoPE()
    if inputs.rotated_keys and not position.keys_cacheable:
        raise ValueError(
            f"rotated_keys: {position.name()} needs raw keys, since a key's angle depends on the query or the length; "
            "cache the keys before rotation"
        )
    if inputs.rotated_keys and score.normalises:
        raise ValueError("rotated_keys: cosine scores normalise the keys; cache them before rotation")
    scale = score.factor(q.shape[-1]) if inputs.scale is None else _check_scale(inputs.scale)
    sizes = _Sizes(region, q.shape[1], q.shape[-1], accumulation_dtype(q), inputs.rotated_keys)
    branches = _reuse(layout, position, sizes, lambda: _compute_branches(position, layout, sizes))
    if _spares_sinks(recipe, layout):
        branches = split_sinks(branches, recipe.share.sinks, layout)
    regions, far = tuple(b.region for b in branches), tuple(n for n, b in enumerate(branches) if b.far)
    sizes = sizes._replace(branches=regions, far=far)
    if recipe.retrieve is not None:
        sizes = _set_choice(branches, inputs, recipe, layout, sizes)
    for temperature in recipe.temperatures:
        branches = _set_tau(branches, temperature, layout, sizes)
    if recipe.share is not None:
        branches = _set_offset(branches, recipe.share, layout, sizes)
    interleaved = getattr(position, "layout", "half") == "interleaved"
    return AttentionCall(
        q, inputs.k, inputs.v, layout, branches, scale, score.normalises, interleaved, inputs.dropout, sizes.choice
    )


def _set_choice(branches: list[RotatedBranch], inputs: Inputs, recipe: Recipe, layout: Layout, sizes: _Sizes) -> _Sizes:
    """Return the sizes with the choice of far keys, if queries see less than all of them.

    Raises:
        ValueError: far keys cannot be chosen in such a call.
    """
    choice, masks = recipe.retrieve, (recipe.mask, inputs.mask)
    if not inputs.causal and not any(mask is not None and mask.causal for mask in masks):
        raise ValueError("retrieve: expected causal attention, got both directions; pass causal=True, or leave it out")
    far = [branch for branch in branches if branch.far]
    if not far:
        return sizes
    spans = [span for branch in far for span in branch.region.spans]
    if len(spans) != 1 or spans[0] != Span(high=spans[0].high):
        raise ValueError(
            "retrieve: expected a position method and masks that leave every key beyond one window to choose from, "
            f"got {truncate(str(recipe))}; use it with rerope:window=… and no mask"
        )
    window = 1 - int(spans[0].high)
    if not choice.hides_keys(layout.keys, window):
        return sizes
    if not layout.implicit:
        raise ValueError("retrieve: expected positions that count from 0, got position_ids; leave them out")
    if torch.compiler.is_compiling():
        # torch quotes it under fullgraph; otherwise it runs this function uncompiled
        raise ValueError("retrieve: keys cannot be chosen in a compiled graph; compile without fullgraph=True")
    return sizes._replace(choice=choice, window=window)


def _check_scale(scale: Any) -> float:
    number = isinstance(scale, (int, float)) and not isinstance(scale, bool)
    if not (number and MIN_SCALE <= scale <= MAX_SCALE):
        # kernels mask before they multiply: -inf times 0 or less is no mask
        raise ValueError(
            f"scale: expected None or a number from {MIN_SCALE:g} to {MAX_SCALE:g}, got {format_value(scale)}"
        )
    return float(scale)


def _reuse(layout: Layout, part: Any, sizes: _Sizes, make: Callable[[], T]) -> T:
    """Return `make()`, once for all calls that share the layout, unless the part learns or may change otherwise."""
    frozen = isinstance(part, (Temperature, Position, Share)) and not part.learns
    if not frozen or torch.compiler.is_compiling():
        return make()
    part_key = part.cache_key() if isinstance(part, Position) else None
    return layout.cached((part, part_key, sizes), make)


def _set_tau(branches: list[RotatedBranch], temperature: Any, layout: Layout, sizes: _Sizes) -> list[RotatedBranch]:
    """Return the branches with the temperature in those whose keys it is for."""
    keys = getattr(temperature, "keys", "all")
    chosen = [keys == "all" or branch.far == (keys == "far") for branch in branches]
    if not any(chosen):  # no key of that branch is visible
        return branches
    for name, method in (("entropy_law", "by_entropy"), ("distance_law", "by_distance")):
        if hasattr(temperature, method):
            law: dict[str, Any] = {name: temperature}
            return [replace(b, **law) if is_chosen else b for b, is_chosen in zip(branches, chosen, strict=True)]
    tau = _reuse(layout, temperature, sizes, lambda: _compute_tau(temperature, layout, sizes))
    return [replace(b, tau=tau) if is_chosen else b for b, is_chosen in zip(branches, chosen, strict=True)]


def _spares_sinks(recipe: Recipe, layout: Layout) -> bool:
    """Return whether a law treats attention sinks, the first keys of a text, unlike far keys."""
    if not getattr(share := recipe.share, "sinks", 0):
        return False
    by_distance = any(getattr(law, "keys", "all") != "all" for law in recipe.temperatures)
    # the number of keys bounds that of far ones where all of them are here, at consecutive positions
    if by_distance or not (layout.implicit and layout.complete_rows and type(share) is Share):
        return True
    return share.changes(layout.keys, recipe.position.near_window or 0)


def split_sinks(branches: list[RotatedBranch], sinks: int, layout: Layout) -> list[RotatedBranch]:
    """Return the branches with the attention sinks of far ones in branches of their own, which are not far."""
    region = first_keys(sinks)
    split: list[RotatedBranch] = []
    for branch in branches:
        if not branch.far:
            split.append(branch)
            continue
        parts = (branch.region & region, False), (branch.region - region, True)
        split += [replace(branch, region=layout.simplify(part), far=far) for part, far in parts]
    return [branch for branch in split if branch.region.spans]


def _set_offset(branches: list[RotatedBranch], share: Any, layout: Layout, sizes: _Sizes) -> list[RotatedBranch]:
    """Return the branches with the bias of a share law on far ones."""
    spans = tuple(span for branch in branches if branch.far for span in branch.region.spans)
    if not spans or _is_without_effect(share, sizes.choice):
        return branches
    if getattr(share, "count", "far") == "far":
        sizes = sizes._replace(region=Region(spans))
    offset = _reuse(layout, share, sizes, lambda: _compute_offset(share, layout, sizes))
    return [replace(branch, offset=offset) if branch.far else branch for branch in branches]


def _is_without_effect(share: Any, choice: BlockChoice | None) -> bool:
    """Return whether queries that choose their far keys never see so many that a share law has a bias."""
    if choice is None or type(share) is not Share or share.count != "far" or share.reference is None:
        return False  # a law of another class may have a bias for any number of far keys
    return choice.count_most_far() <= share.reference


def _compute_offset(share: Any, layout: Layout, sizes: _Sizes) -> Tensor:
    """Return the bias of far keys for each query, (batch or 1, heads or 1, queries)."""
    if _takes_table(share, layout, sizes):
        counted = sizes.far if getattr(share, "count", "far") == "far" else None
        entry = _look_up(lambda n: share.bias(n.clamp_min(1)), share, counted, layout, sizes)
        if entry is not None:
            return entry
    n = _count_keys("visible", layout, sizes).clamp_min(1)[:, None].to(sizes.dtype)
    offset: Tensor = share.bias(n)
    if offset.dim() != 3 or not fits_heads(offset, sizes.heads):
        raise ValueError(f"share: expected β for 1 or {sizes.heads} heads, got shape {tuple(offset.shape)}")
    return offset


def _compute_tau(temperature: Any, layout: Layout, sizes: _Sizes) -> Tensor:
    """Return τ of each query, (batch or 1, heads or 1, queries)."""
    if _takes_table(temperature, layout, sizes):
        entry = _look_up(lambda n: temperature.scale(n.clamp_min(2), sizes.head_dim), temperature, None, layout, sizes)
        if entry is not None:
            return entry
    # over one key, or none, the softmax is the same at any temperature, which need not be defined there
    count = getattr(temperature, "count", "visible")
    n = _count_keys(count, layout, sizes).clamp_min(2 if count == "visible" else 1)
    n = torch.where(layout.count_keys("visible", sizes.region) > 1, n, n.clamp_min(2))[:, None].to(sizes.dtype)
    tau: Tensor = temperature.scale(n, sizes.head_dim)
    if tau.dim() != 3 or not fits_heads(tau, sizes.heads):
        raise ValueError(f"temperature: expected τ for 1 or {sizes.heads} heads, got shape {tuple(tau.shape)}")
    return tau


def _takes_table(law: Any, layout: Layout, sizes: _Sizes) -> bool:
    """Return whether a law of one query a row is read from a table of its values at every n."""
    if layout.queries != 1 or not layout.implicit or torch.compiler.is_compiling() or not layout.complete_rows:
        return False
    if not isinstance(law, (Temperature, Share)) or law.learns or not getattr(law, "clamp", True):
        return False  # an unclamped law may be undefined at lengths that do not occur
    if layout.plain:
        return layout.keys > 1
    fits = all(len(region.spans) <= MAX_SPANS for region in sizes.branches)
    return fits and sizes.choice is None and law.count in ("visible", "far")


def _look_up(
    values: Callable[[Tensor], Tensor], law: Any, counted: tuple[int, ...] | None, layout: Layout, sizes: _Sizes
) -> Tensor | None:
    """Return the values of a law for one query a row, (batch or 1, heads or 1, 1); None where there is no table."""
    if law.count in ("position", "sequence"):
        n: int | Tensor = layout.keys
    else:
        n = layout.count_for_one_query(sizes.branches, counted)
        if sizes.choice is not None and isinstance(n, int):
            n -= sizes.choice.count_hidden_at(layout.keys - 1, sizes.window)
    key = (law, sizes.head_dim)
    entry = look_up_law(values, key, n, layout.keys, torch.empty(0, dtype=sizes.dtype, device=layout.device))
    # a table for other heads is refused where values are computed
    return entry if entry is not None and fits_heads(entry, sizes.heads) else None


def _count_keys(kind: str, layout: Layout, sizes: _Sizes) -> Tensor:
    """Return n for each query, (batch or 1, queries); far keys that are not chosen are not visible."""
    n = layout.count_keys(kind, sizes.region)
    if sizes.choice is None or kind != "visible":
        return n
    return n - sizes.choice.count_hidden(layout.query, sizes.window)


def _compute_branches(position: Position, layout: Layout, sizes: _Sizes) -> list[RotatedBranch]:
    """Return the branches that some visible pair falls into at this length, with the angles of queries and keys."""
    lengths = layout.row_lengths
    branches = position.branches(layout.query, layout.key, sizes.heads, lengths)
    regions = [layout.simplify(branch.region & sizes.region) for branch in branches]
    reached = [pair for pair in zip(branches, regions, strict=True) if pair[1].spans] or [(branches[0], regions[0])]
    if not position.rotates:
        return [RotatedBranch(region, slopes=branch.slopes, far=branch.far) for branch, region in reached]
    theta_q = theta_k = position.frequencies(sizes.head_dim, lengths[0], sizes.dtype, layout.device)
    if isinstance(lengths[1], Tensor):  # rows or documents have lengths of their own
        theta_k = position.frequencies(sizes.head_dim, lengths[1], sizes.dtype, layout.device)
    rotated: list[RotatedBranch] = []
    for branch, region in reached:
        query_angles = compute_angles(branch.query, theta_q, sizes.dtype)
        # branches that rotate keys alike share their angles, and so the rotated keys
        same = next((n for n, (other, _) in enumerate(reached[: len(rotated)]) if other.key is branch.key), None)
        if sizes.rotated_keys:
            key_angles = None
        elif same is not None:
            key_angles = rotated[same].key_angles
        else:
            shared = branch.key is branch.query
            key_angles = query_angles if shared else compute_angles(branch.key, theta_k, sizes.dtype)
        rotated.append(RotatedBranch(region, query_angles, key_angles, branch.slopes, branch.far))
    return rotated
